"""`elsa build`: compile the native library, or packs of GPU kernels, ahead of their first use."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from typing import Any

import click

from elsa_cli.console import Session
from elsa_cli.errors import PlaceError
from elsa_cli.options import Options, elsa_command, flag, path_option
from elsa_cli.probes import human
from elsa_cli.values import ARCHITECTURE, Listed


@elsa_command(
    "build",
    flag("--force", text="Compile even if the library is there."),
    flag("--cuda", text="Compile kernel packs for GPUs instead; needs no GPU."),
    click.option(
        "--arch", type=Listed(ARCHITECTURE, "sm_NN"), help="GPUs to compile for [this machine's]."
    ),
    path_option(
        "--output", "--out", "-o", metavar="DIR", text="Folder for the packs [the user's cache]."
    ),
    click.option(
        "--jobs", type=click.IntRange(1, 256), help="Compiling processes [one a core]."
    ),
    click.option("--only", metavar="GLOB", help="Only kernels of cases whose name matches."),
)  # fmt: skip
def command(session: Session, /, **values: Any) -> None:
    """Compile the native CPU library into the user's cache (ELSA_CACHE_DIR moves it).

    Without this, the first use compiles it. Needs a C++ compiler: CXX, or c++, g++, clang++. Where
    there is an NVIDIA GPU, the CUDA library too.

    With --cuda, compile packs of GPU kernels, so that the first call on a GPU compiles nothing.
    Takes minutes for each architecture; a second run compiles what has changed alone. Copy the
    folder to machines that compile none, and name it there: ELSA_PACK=DIR.
    """
    options = Options(**values)
    if options.cuda:
        if options.force:
            raise click.UsageError("--force is for the native library: leave it out with --cuda")
        _packs(session, options)
        return
    for name in ("arch", "output", "jobs", "only"):
        if values[name] is not None:
            raise click.UsageError(f"--{name} needs --cuda")
    _native(session, options.force)


def _native(session: Session, force: bool) -> None:
    import torch

    from elsa_core.backends import cuda, native

    steps: list[str] = []
    start = time.perf_counter()
    with session.stage("compiling the native library") as update:

        def step(text: str) -> None:
            steps.append(text)
            update(text)

        path = native.build(force=force, progress=step)
    seconds = time.perf_counter() - start
    session.written.append(path)
    compiled = "linking" in steps  # not so where another process did while this one waited
    size = path.stat().st_size
    answer = native.load()
    library = None
    if torch.cuda.is_available() and not torch.version.hip:  # what a first call would build too
        with session.stage("compiling the CUDA library"):
            status = cuda.status()
        library = {"serves": status.ok, "reason": status.reason}
    results = {
        "path": str(path), "bytes": size, "compiled": compiled, "seconds": seconds,
        "loads": answer.ok, "reason": answer.reason, "isa": native.isa() if answer.ok else None,
        "cuda_library": library,
    }  # fmt: skip
    session.document("build", results)
    what = f"compiled in {seconds:.1f} s" if compiled else "already built"
    runs = f"runs {native.isa()} kernels" if answer.ok else f"does not load: {answer.reason}"
    session.line(f"{path}")
    session.line(f"{what} · {size / 1000:.0f} kB · {runs}", even_quiet=True)
    if library is not None:
        session.line(f"CUDA library: {library['reason']}", even_quiet=True)
    if not answer.ok:
        raise PlaceError(f"the native library was built but cannot be used: {answer.reason}")


def _packs(session: Session, options: Options) -> None:
    """One pack for each architecture."""
    with session.stage("importing torch and triton", imports=True):
        import torch

        from elsa_core.backends.triton.pack import build, lookup
    archs = options.arch
    if not archs and (not torch.cuda.is_available() or torch.version.hip):
        raise click.UsageError("no NVIDIA GPU is here: name those to compile for, --arch sm_90")
    if not archs:
        major, minor = torch.cuda.get_device_capability()
        archs = (10 * major + minor,)
    out = options.output or lookup.own_folder()
    found = []
    for arch in archs:
        start = time.perf_counter()
        with session.stage(f"compiling sm_{arch}") as update:
            built = build.build(
                arch, out, jobs=options.jobs or 0, only=options.only or "*", progress=update
            )
        session.written.append(built.folder)
        for kernel, reason in built.left_out.items():
            session.warn(f"left out of sm_{arch}: {kernel}: {reason}")
        session.line(f"{built.folder}")
        compiled = built.kernels - built.reused
        said = f"{built.kernels} kernels ({compiled} compiled) · {human(built.bytes)}"
        session.line(f"{said} · serves {built.served:.0%} of {built.calls} calls", even_quiet=True)
        seconds = time.perf_counter() - start
        found.append({**asdict(built), "folder": str(built.folder), "seconds": seconds})
    session.document("build", {"packs": found})
    named = "" if options.output is None else f"ELSA_PACK={shlex.quote(str(options.output))} "
    session.line(f"Next: {named}elsa doctor")
