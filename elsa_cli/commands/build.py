"""`elsa build`: compile the native library, or packs of GPU kernels, ahead of their first use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from elsa_cli.architectures import Architecture
from elsa_cli.console import Session
from elsa_cli.options import Command, FilePath, Listed, output_options, pass_session
from elsa_cli.probes import environment, human


@click.command("build", cls=Command)
@click.option("--force", is_flag=True, help="Compile even if the library is there.")
@click.option("--cuda", is_flag=True, help="Compile kernel packs for GPUs instead; needs no GPU.")
@click.option(
    "--arch", type=Listed(Architecture(), "sm_NN"), help="GPUs to compile for [this machine's]."
)
@click.option(
    "--output",
    "--out",
    "-o",
    type=FilePath(folder=True),
    metavar="DIR",
    help="Folder for the packs [the user's cache].",
)
@click.option("--jobs", type=click.IntRange(1, 256), help="Compiling processes [one a core].")
@click.option("--only", metavar="GLOB", help="Only kernels of cases whose name matches.")
@click.option(
    "--wheel",
    type=FilePath(folder=True),
    metavar="DIR",
    help="Build a wheel of elsa with the packs in it too; needs a checkout and hatchling.",
)
@output_options
@pass_session
def command(
    session: Session, /, force: bool, cuda: bool, arch: tuple[int, ...] | None,
    output: Path | None, jobs: int | None, only: str | None, wheel: Path | None,
) -> None:  # fmt: skip
    """Compile the native CPU library into the user's cache (ELSA_CACHE_DIR moves it).

    Without this, the first use compiles it. Needs a C++ compiler: CXX, or c++, g++, clang++. Where
    there is an NVIDIA GPU, the CUDA library too.

    With --cuda, compile packs of GPU kernels, so that the first call on a GPU compiles nothing.
    Takes minutes for each architecture; a second run compiles what has changed alone. With --wheel,
    the packs go into a wheel of this package as well, for machines that compile none.
    """
    given = {"--arch": arch, "--output": output, "--jobs": jobs, "--only": only,
             "--wheel": wheel}  # fmt: skip
    if cuda:
        if force:
            raise click.UsageError("--force is for the native library: leave it out with --cuda")
        _packs(session, arch, output, jobs or 0, only or "*", wheel)
        return
    named = [flag for flag, value in given.items() if value is not None]
    if named:
        raise click.UsageError(f"{named[0]} needs --cuda")
    _native(session, force)


def _native(session: Session, force: bool) -> None:
    from elsa_core.backends import native

    steps: list[str] = []
    start = time.perf_counter()
    with session.stage("compiling the native library") as update:

        def step(text: str) -> None:
            steps.append(text)
            update(text, 0, 0)

        path = native.build(force=force, progress=step)
    seconds = time.perf_counter() - start
    session.written.append(path)
    compiled = "linking" in steps  # not so where another process did while this one waited
    size = path.stat().st_size
    answer = native.load()
    library = _cuda_library(session)
    results = {
        "path": str(path), "bytes": size, "compiled": compiled, "seconds": seconds,
        "loads": answer.ok, "reason": answer.reason, "isa": native.isa() if answer.ok else None,
        "cuda_library": library,
    }  # fmt: skip
    session.document("build", environment(), results)
    what = f"compiled in {seconds:.1f} s" if compiled else "already built"
    runs = f"runs {native.isa()} kernels" if answer.ok else f"does not load: {answer.reason}"
    session.line(f"{path}")
    session.line(f"{what} · {size / 1000:.0f} kB · {runs}", even_quiet=True)
    if library is not None:
        session.line(f"CUDA library: {library['reason']}", even_quiet=True)
    if not answer.ok:
        from elsa_core.errors import UnavailableError

        raise UnavailableError(f"the native library was built but cannot be used: {answer.reason}")


def _cuda_library(session: Session) -> dict[str, Any] | None:
    """What a GPU's first call would build too; None where there is no NVIDIA GPU."""
    import torch

    if torch.version.hip or not torch.cuda.is_available():
        return None
    from elsa_core.backends import cuda

    with session.stage("compiling the CUDA library"):
        answer = cuda.status()
    return {"serves": answer.ok, "reason": answer.reason}


def _packs(
    session: Session, archs: tuple[int, ...] | None, output: Path | None, jobs: int, only: str,
    wheel: Path | None,
) -> None:  # fmt: skip
    """One pack for each architecture; with `wheel` a wheel of them, too."""
    with session.stage("importing torch and triton", imports=True):
        from elsa_core.backends.triton.pack import lookup
        from elsa_core.backends.triton.pack import wheel as wheels
    archs = archs or _here()
    if wheel is not None:
        wheels.require()  # before minutes of compiling
    out = output or lookup.own_folder()
    found = [_pack(session, arch, out, jobs, only) for arch in archs]
    results: dict[str, Any] = {"packs": found}
    if wheel is not None:
        with session.stage("building the wheel"):
            made = wheels.wheel([out / f"sm_{arch}" for arch in archs], wheel)
        session.written.append(made)
        results["wheel"] = {"path": str(made), "bytes": made.stat().st_size}
        session.line(f"{made}")
        session.line(f"a wheel with {len(found)} packs · {human(made.stat().st_size)}",
                     even_quiet=True)  # fmt: skip
    session.document("build", environment(), results)
    if wheel is not None:
        session.line(f"Next: pip install {results['wheel']['path']}, then elsa doctor")
    else:
        session.line(f"Next: {'' if output is None else f'ELSA_PACK={output} '}elsa doctor")


def _here() -> tuple[int, ...]:
    """The architecture of this machine's GPU."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        raise click.UsageError("no NVIDIA GPU is here: name those to compile for, --arch sm_90")
    major, minor = torch.cuda.get_device_capability()
    return (10 * major + minor,)


def _pack(session: Session, arch: int, out: Path, jobs: int, only: str) -> dict[str, Any]:
    """Build one pack and say what is in it."""
    from elsa_core.backends.triton.pack import build

    start = time.perf_counter()
    with session.stage(f"compiling sm_{arch}") as update:
        built = build.build(arch, out, jobs=jobs, only=only, progress=update)
    session.written.append(built.folder)
    for kernel, reason in built.left_out.items():
        session.warn(f"left out of sm_{arch}: {kernel}: {reason}")
    compiled = built.kernels - built.reused
    session.line(f"{built.folder}")
    session.line(
        f"{built.kernels} kernels ({compiled} compiled) · {human(built.bytes)} · serves "
        f"{built.served:.0%} of {built.calls} calls",
        even_quiet=True,
    )
    return {**built.to_dict(), "seconds": time.perf_counter() - start}
