"""Builds packs: plans, compiles in several processes, writes. No GPU and no driver is needed."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elsa_core.backends import cache
from elsa_core.backends.triton.pack import sources, specialize, store
from elsa_core.backends.triton.pack.cases import architectures, expanded, gpus
from elsa_core.backends.triton.pack.plan import Plan, Planner
from elsa_core.backends.triton.pack.record import Code, Kernel
from elsa_core.backends.triton.pack.store import Entry, Pack
from elsa_core.base.files import scratch
from elsa_core.base.processes import running
from elsa_core.base.version import __version__
from elsa_core.errors import ArgumentError, UnavailableError

# The architecture whose pack holds PTX as well: newer GPUs without a pack of theirs can compile it.
PTX_ARCH = 80
Progress = Callable[[str, int, int], None]
_NOT_YET = Code(0, 0, "")


@dataclass(frozen=True)
class Built:
    """What a build did.

    Attributes:
        folder: of the pack. arch: 90 for sm_90.
        kernels: in the pack; of these `reused` were taken from the pack that was there before.
        bytes: of the data files; ptx_bytes: the part of them that is PTX.
        calls: of the case list that are routed to these kernels; served: the share of them all of
            whose launches are in the pack.
        left_out: kernels that the compiler refuses or the GPU cannot hold, with why.
    """

    folder: Path
    arch: int
    kernels: int
    reused: int
    bytes: int
    ptx_bytes: int
    calls: int
    served: float
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "folder": str(self.folder)}


class _Made(NamedTuple):
    entry: Entry
    cubin: bytes
    ptx: bytes | None


def build(
    arch: int, out: Path, *, jobs: int = 0, only: str = "*", progress: Progress | None = None
) -> Built:
    """Compile the kernels of the case list for one architecture into `out/sm_<arch>`.

    Equal sources, Triton and arguments give equal bytes. The pack appears in one step: an interrupt
    or a failure leaves the one that was there before. What that one holds unchanged is not compiled
    again.

    Args:
        arch: 90 for sm_90; one of `cases.architectures()`.
        out: the folder of packs.
        jobs: compiling processes; 0: as many as this process may use cores.
        only: a glob that case names must match.
        progress: called with (kernel, kernels done, in all).

    Raises:
        ArgumentError: an unknown architecture, or a glob that no case of it matches.
        UnavailableError: no Triton that packs are made for, settings that change what it compiles,
            every kernel fails, or the folder cannot be written.
    """
    require_compiler()
    if arch not in architectures():
        known = ", ".join(f"sm_{n}" for n in architectures())
        raise ArgumentError(f"arch sm_{arch} is unknown: choose of {known}")
    plan = Planner(arch).add(expanded(only))
    if not plan.jobs:
        raise ArgumentError(f"no case that matches {only!r} has kernels on sm_{arch}")
    folder = out / f"sm_{arch}"
    try:
        cache.make(out)
        made, left_out, reused = _made(plan, folder, jobs, only, progress or (lambda *_: None))
        if not made:
            raise UnavailableError(f"no kernel compiles: {next(iter(left_out.values()))}")
        return _write(plan, folder, made, left_out, reused)
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


def _made(
    plan: Plan, folder: Path, jobs: int, only: str, progress: Progress
) -> tuple[dict[str, _Made], dict[str, str], int]:
    """Every kernel of a plan, why others are left out, and how many were there before."""
    made = _unchanged(plan, folder)
    reused, missing = len(made), [key for key in plan.jobs if key not in made]
    left_out: dict[str, str] = {}
    with scratch(".elsa-pack-", folder=folder.parent) as place:
        for done, (key, answer) in enumerate(_compiled(missing, place, plan, jobs, only)):
            name = specialize.name_of(plan.jobs[key].kernel)
            progress(name, reused + done, len(plan.jobs))
            reason = answer or _too_large(plan.arch, place / f"{key}.json")
            if reason:
                left_out[f"{name} {key[:12]}"] = reason
            else:
                made[key] = _read(plan, key, place)
    return made, left_out, reused


def _unchanged(plan: Plan, folder: Path) -> dict[str, _Made]:
    """What the pack that is there has of a plan; nothing of one that is damaged or foreign."""
    try:
        pack = store.read(folder)
        return {
            key: _Made(entry, pack.cubin(entry.kernel), pack.ptx_of(entry.kernel))
            for key, entry in pack.entries.items()
            if key in plan.jobs and (entry.kernel.ptx is not None or plan.arch != PTX_ARCH)
        }
    except (FileNotFoundError, UnavailableError):
        return {}


@contextmanager
def _workers(count: int, place: Path, plan: Plan, only: str) -> Iterator[list[Any]]:
    command = [
        sys.executable, "-m", "elsa_core.backends.triton.pack.worker", str(place),
        str(plan.arch), only,
    ]  # fmt: skip
    root = str(Path(__file__).parents[4])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **_environment(), "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "",
        "TRITON_CACHE_DIR": str(place / "triton"), "TMPDIR": str(place),
    }  # fmt: skip
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environ}
    with ExitStack() as stack:
        errors = stack.enter_context((place / "stderr").open("w"))
        yield [
            stack.enter_context(running(command, bufsize=1, stderr=errors, **pipes))
            for _ in range(count)
        ]


def _compiled(
    keys: list[str], place: Path, plan: Plan, jobs: int, only: str
) -> Iterator[tuple[str, str]]:
    """Each key with why it cannot be compiled, empty where it was."""
    if not keys:
        return
    count = min(jobs or len(os.sched_getaffinity(0)), len(keys))
    waiting = list(reversed(keys))
    with _workers(count, place, plan, only) as workers, selectors.DefaultSelector() as selector:
        at_work: dict[int, str] = {}
        for worker in workers:
            _give(worker, waiting, at_work)
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
        while at_work:
            for event, _ in selector.select():
                worker = event.data
                # one answer to each key: nothing else can be in its buffer
                answer = worker.stdout.readline()
                if not answer:
                    raise UnavailableError(f"a compiling process ended: {_said(place)}")
                yield at_work.pop(worker.pid), answer.strip()
                _give(worker, waiting, at_work)


def _give(worker: Any, waiting: list[str], at_work: dict[int, str]) -> None:
    if waiting:
        at_work[worker.pid] = waiting.pop()
        worker.stdin.write(f"{at_work[worker.pid]}\n")
        worker.stdin.flush()


def _said(place: Path) -> str:
    lines = (place / "stderr").read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else "it said nothing"


def _too_large(arch: int, path: Path) -> str:
    """Why no GPU of the architecture can launch a kernel; empty where one can."""
    shared = json.loads(path.read_text(encoding="utf-8"))["kernel"]["shared"]
    most = max(gpu.shared_memory for gpu in gpus(arch))
    return f"takes {shared} bytes of shared memory, sm_{arch} has {most}" if shared > most else ""


def _read(plan: Plan, key: str, place: Path) -> _Made:
    found = json.loads((place / f"{key}.json").read_text(encoding="utf-8"))
    ptx = plan.arch == PTX_ARCH
    arguments = tuple((name, kind) for name, kind in found["kernel"].pop("arguments"))
    kernel = Kernel(**found["kernel"], arguments=arguments, cubin=_NOT_YET, ptx=None)
    job = plan.jobs[key]
    entry = Entry(kernel, specialize.facts_of(job.kernel, job.special), found["metadata"])
    return _Made(
        entry,
        (place / f"{key}.cubin").read_bytes(),
        (place / f"{key}.ptx").read_bytes() if ptx else None,
    )


def _write(
    plan: Plan, folder: Path, made: dict[str, _Made], left_out: dict[str, str], reused: int
) -> Built:
    import triton

    keys = {
        specialize.name_of(job.kernel): sources.source_key(job.kernel) for job in plan.jobs.values()
    }
    header = {
        "arch": plan.arch, "triton": triton.__version__, "elsa": __version__,
        "sources": sources.sources_digest(), "source_keys": keys,
    }  # fmt: skip
    ptx = None
    if plan.arch == PTX_ARCH:
        ptx = {key: each.ptx for key, each in made.items()}
    entries = {key: each.entry for key, each in made.items()}
    store.write(folder, header, entries, {key: each.cubin for key, each in made.items()}, ptx)
    pack: Pack = store.read(folder)
    return Built(
        folder, plan.arch, len(pack.entries), reused, pack.bytes,
        0 if pack.ptx is None else pack.ptx.size, len(plan.calls), plan.served(pack.entries),
        left_out,
    )  # fmt: skip
