"""Builds packs: plans, compiles in several processes, writes. No GPU and no driver is needed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsa_core.backends import cache
from elsa_core.backends.triton.pack import specialize, store
from elsa_core.backends.triton.pack.cases import ARCHITECTURES, Planner, expanded, gpus
from elsa_core.backends.triton.pack.specialize import Job
from elsa_core.base.files import scratch
from elsa_core.base.messages import Progress, first_line
from elsa_core.base.processes import running
from elsa_core.base.version import __version__
from elsa_core.errors import ArgumentError, UnavailableError

_KEY = 65  # bytes of a line with a key


@dataclass(frozen=True)
class Built:
    """What a build did. arch: 90 for sm_90. kernels: in the pack, with `bytes` of code; `reused`
    were taken from the pack that was there before. calls: of the case list that are routed to these
    kernels; served: the share of them all of whose launches are in the pack. left_out: kernels that
    the compiler refuses or the GPU cannot hold, with why.
    """

    folder: Path
    arch: int
    kernels: int
    reused: int
    bytes: int
    calls: int
    served: float
    left_out: dict[str, str]


def build(
    arch: int, out: Path, *, jobs: int = 0, only: str = "*", progress: Progress | None = None
) -> Built:
    """Compile the kernels of the case list for one architecture into `out/sm_<arch>`.

    Equal sources, Triton and arguments give equal bytes. The pack appears in one step: an interrupt
    or a failure leaves the one that was there before. What that one holds unchanged is not compiled
    again.

    jobs: compiling processes; 0: as many as this process may use cores. only: a glob that case
    names must match. progress: called with (kernel, kernels done, in all).

    Raises:
        ArgumentError: an unknown architecture, or a glob that no case of it matches.
        UnavailableError: no Triton that packs are made for, settings that change what it compiles,
            every kernel fails, or the folder cannot be written.
    """
    require_compiler()
    if arch not in ARCHITECTURES:
        known = ", ".join(f"sm_{n}" for n in ARCHITECTURES)
        raise ArgumentError(f"arch sm_{arch} is unknown: choose of {known}")
    plan = Planner(arch).add(expanded(only))
    if not plan.jobs:
        raise ArgumentError(f"no case that matches {only!r} has kernels on sm_{arch}")
    folder = out / f"sm_{arch}"
    try:
        cache.make(out)
        kernels = _unchanged(plan, folder)
        reused, missing = len(kernels), [key for key in plan.jobs if key not in kernels]
        left_out: dict[str, str] = {}
        with scratch(".elsa-pack-", folder=out) as place:
            for done, (key, answer) in enumerate(_compiled(missing, place, arch, jobs, only)):
                name = plan.jobs[key].name
                if progress is not None:
                    progress(name, reused + done, len(plan.jobs))
                metadata = {} if answer else json.loads((place / f"{key}.json").read_text("utf-8"))
                reason = answer or _too_large(arch, metadata["shared"])
                if reason:
                    left_out[f"{name} {key[:12]}"] = reason
                else:
                    kernels[key] = metadata, (place / f"{key}.cubin").read_bytes()
        if not kernels:
            raise UnavailableError(f"no kernel compiles: {next(iter(left_out.values()))}")
        return _written(plan, folder, kernels, reused, left_out)
    except OSError as error:
        raise UnavailableError(
            f"the kernel pack cannot be written to {folder}: {error.strerror or error}"
        ) from None


def require_compiler() -> None:
    """Raise where this Triton, or how it is set up, would compile other kernels."""
    try:
        import triton
    except ImportError as error:
        raise UnavailableError(f"Triton cannot be imported ({error}); install triton") from None
    if not specialize.known():
        first, last = (".".join(map(str, version)) for version in specialize.TRITON)
        raise UnavailableError(
            f"packs are made with Triton {first} to {last}, this is {triton.__version__}"
        )
    reason = specialize.departs(_environment())
    if reason:
        raise UnavailableError(f"{reason} changes what Triton compiles: unset it, then build")


def _environment() -> dict[str, str]:
    """Of the compiling processes, which take Triton's own ptxas: torch.compile leaves another one
    named behind.
    """
    return {name: value for name, value in os.environ.items() if name != "TRITON_PTXAS_PATH"}


def _unchanged(plan: Planner, folder: Path) -> dict[str, tuple[dict[str, Any], bytes]]:
    """What the pack that is there has of a plan; nothing of one that is damaged or foreign."""
    try:
        pack = store.read(folder)
        return {
            key: (entry.metadata, pack.cubin(entry))
            for key, entry in pack.entries.items()
            if key in plan.jobs
        }
    except (FileNotFoundError, UnavailableError):
        return {}


def _compiled(
    keys: list[str], place: Path, arch: int, jobs: int, only: str
) -> Iterator[tuple[str, str]]:
    """Each key with why it cannot be compiled, empty where it was.

    The processes read one file of keys, from one offset that they share, and answer into one pipe.
    """
    if not keys:
        return
    command = [sys.executable, "-m", build.__module__, str(place), str(arch), only]
    paths = [str(Path(__file__).parents[4]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **_environment(), "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "",
        "TRITON_CACHE_DIR": str(place / "triton"), "TMPDIR": str(place),
    }  # fmt: skip
    (place / "keys").write_text("".join(f"{key}\n" for key in keys), encoding="ascii")
    left = set(keys)
    with ExitStack() as stack:
        given = stack.enter_context((place / "keys").open("rb", buffering=0))
        errors = stack.enter_context((place / "stderr").open("w"))
        reading, writing = os.pipe()
        answers = stack.enter_context(open(reading, encoding="utf-8"))  # noqa: PTH123
        pipes = {"stdin": given, "stdout": writing, "stderr": errors, "env": environ}
        try:
            for _ in range(min(jobs or len(os.sched_getaffinity(0)), len(keys))):
                stack.enter_context(running(command, **pipes))
        finally:
            os.close(writing)
        for line in answers:
            key, _, reason = line.rstrip("\n").partition(" ")
            left.discard(key)
            yield key, reason
    if left:
        said = (place / "stderr").read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        raise UnavailableError(f"a compiling process ended: {last[:300]}")


def _too_large(arch: int, shared: int) -> str:
    """Why no GPU of the architecture can launch a kernel; empty where one can."""
    most = max(gpu.shared_memory for gpu in gpus(arch))
    return f"takes {shared} bytes of shared memory, sm_{arch} has {most}" if shared > most else ""


def _written(
    plan: Planner, folder: Path, kernels: dict[str, tuple[dict[str, Any], bytes]], reused: int,
    left_out: dict[str, str],
) -> Built:  # fmt: skip
    import triton

    header = {
        "arch": plan.arch, "triton": triton.__version__, "elsa": __version__,
        "sources": specialize.sources_digest(),
    }  # fmt: skip
    store.write(folder, header, kernels)
    pack = store.read(folder)
    served = [pack.entries.keys() >= set(keys) for keys in plan.calls.values()]
    return Built(
        folder, plan.arch, len(pack.entries), reused, pack.bytes, len(plan.calls),
        sum(served) / len(served), left_out,
    )  # fmt: skip


def main() -> None:
    """One compiling process: `FOLDER ARCH ONLY`. It plans the same cases, then compiles each key
    that it reads to `<key>.cubin` and `<key>.json` in FOLDER, and answers with the key and why the
    kernel cannot be compiled.
    """
    folder, arch, only = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = os.dup(1)
    os.dup2(2, 1)  # what a compiler prints is no answer
    _leave_out_debug_sections()
    jobs = Planner(arch).add(expanded(only)).jobs
    while key := os.read(0, _KEY).decode().strip():
        reason = ""
        try:
            compiled = jobs[key].compile()
            (folder / f"{key}.cubin").write_bytes(compiled.asm["cubin"])
            metadata = json.dumps(_added(jobs[key], compiled.metadata))
            (folder / f"{key}.json").write_text(metadata, encoding="utf-8")
        except Exception as error:  # a compiler may raise anything
            reason = f"{type(error).__name__}: {first_line(error)}"[:1000]
        os.write(answers, f"{key} {reason}\n".encode())


def _leave_out_debug_sections() -> None:
    """Have cubins without lines of sources, which are most of their bytes.

    Lines are left in until the assembler has made the code of them: compiled without from the
    start, some kernels come out with other registers than the JIT's.
    """
    from triton import knobs

    def changed(*given: Any) -> tuple[str, str]:
        if given:  # else Triton asks what its cache is to be keyed by
            assemble = given[1]["cubin"]

            def suppressed(text: str, metadata: Any) -> Any:
                with knobs.compilation.scope():
                    knobs.compilation.disable_line_info = True  # -lineinfo -suppress-debug-info
                    return assemble(text, metadata)

            given[1]["cubin"] = suppressed
        return "", ""

    knobs.runtime.add_stages_inspection_hook = changed


def _added(job: Job, metadata: Any) -> dict[str, Any]:
    """What the compiler wrote beside its options, or changed of them."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    options = json.loads(json.dumps(job.options.__dict__, default=vars))  # as metadata went
    apart = {"hash", "target", "triton_version", *get_cache_invalidating_env_vars()}
    return {
        name: value
        for name, value in metadata._asdict().items()
        if name not in apart and (name not in options or options[name] != value)
    }


if __name__ == "__main__":
    main()
