"""Kernels from packs, found by the first call of a launch in place of Triton's JIT.

A kernel of a pack serves a call only where its key is the one of what the JIT would compile
(`specialize.Compiler.job`). Triton's own cache would be read too, and takes 400 ms more: its keys
hold digests of Triton's libraries, its launcher is compiled. What no pack has, and whatever is
wrong with one, leaves the call to the JIT; one warning says why.

Environment variables:
    ELSA_PACK: packs are read from the cache (`elsa build --cuda` writes there); a folder is looked
        into before it. "0": no pack is read.
    ELSA_CACHE_DIR: the cache (default: the user's cache directory).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from elsa_core.backends import cache
from elsa_core.backends.triton.pack import specialize, store
from elsa_core.backends.triton.pack.specialize import Job
from elsa_core.backends.triton.pack.store import Pack
from elsa_core.errors import UnavailableError

VARIABLE = "ELSA_PACK"
_LOG = logging.getLogger("elsa")
_LOCK = threading.Lock()
_FOUND: dict[tuple[str, int], Any] = {}
_compiler = functools.cache(specialize.Compiler)
COUNTS: Counter[str] = Counter()
"""Launches that a pack served ("hits") and those it lacked ("misses"), in this process."""


class Found(NamedTuple):
    """A pack as `elsa doctor` shows it; `reason` says why it is not used, empty where it is."""

    folder: Path
    arch: int
    kernels: int
    bytes: int
    triton: str
    reason: str


def wanted() -> bool:
    """Whether packs may serve."""
    return os.environ.get(VARIABLE, "") != "0"


def own_folder() -> Path:
    """Where `elsa build --cuda` writes packs.

    Raises:
        UnavailableError: no folder is this user's own.
    """
    return cache.directory().with_name("packs")


def places() -> list[Path]:
    """Folders with folders of packs, `sm_90` and so on; the first that has a kernel serves it."""
    given = os.environ.get(VARIABLE, "")
    found = []
    try:
        if given not in ("", "0", "1"):
            found.append(Path(given).expanduser())
    except RuntimeError:
        _warn(f"{VARIABLE}={given} names the home of no user")
    try:
        found.append(own_folder())
    except UnavailableError as error:
        _warn(str(error))
    return found


def shipped() -> Iterator[Found]:
    """Every pack that lies where packs are looked for. Never raises for what is wrong with one."""
    for place in places():
        for folder in sorted(place.glob("sm_*")):
            digits = folder.name.removeprefix("sm_")
            arch = int(digits) if digits.isdecimal() else 0
            try:
                pack = store.read(folder)
            except (UnavailableError, FileNotFoundError) as error:
                yield Found(folder, arch, 0, 0, "", " ".join(str(error).split()))
            else:
                reason = _unfit(pack, pack.arch)
                yield Found(folder, arch, len(pack.entries), pack.bytes, pack.triton, reason)


def summary(arch: int) -> str:
    """The packs of one architecture in a line for `explain`; empty where there are none."""
    found = [pack for pack in shipped() if pack.arch == arch and pack.kernels]
    if not found:
        asked = os.environ.get(VARIABLE, "") not in ("", "0")
        return "no kernel pack is here: Triton compiles" if asked else ""
    pack = next((pack for pack in found if not pack.reason), found[0])
    what = f"kernel pack sm_{arch} ({pack.kernels} kernels, Triton {pack.triton})"
    reason = pack.reason or ("" if wanted() else f"{VARIABLE} is 0")
    return f"{what} is not used: {reason}" if reason else what


def find(
    kernel: Any, tensors: tuple[Any, ...], tail: dict[str, Any], options: dict[str, Any]
) -> Any:
    """The compiled kernel of a launch on the current device, perhaps not loaded there yet (see
    `load`); None where the JIT is to serve. The arguments are those of `Compiler.job`.
    """
    import torch

    device = torch.cuda.current_device()
    packs = _packs(device)
    if not packs:
        return None
    reason = specialize.departs()
    if reason:
        _warn(f"kernel packs are not used: {reason} is set")
        return None
    job = _compiler(packs[0].arch).job(kernel, tensors, tail, options)
    pack = next((pack for pack in packs if job.key in pack.entries), None)
    found = None if pack is None else _found(job, pack, device)
    COUNTS["misses" if found is None else "hits"] += 1
    return found


def forget() -> None:
    """Read packs again, for example after one was built. Kernels that launches hold stay."""
    with _LOCK:
        _packs.cache_clear()
        _FOUND.clear()


@functools.lru_cache(maxsize=64)
def _packs(device: int) -> tuple[Pack, ...]:
    """The packs that serve a GPU."""
    import torch

    if torch.version.hip:
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    return packs_for(10 * major + minor)


def packs_for(arch: int) -> tuple[Pack, ...]:
    """The packs that serve an architecture, in the order in which they are asked. What is wrong
    with others is said.
    """
    found = []
    for place in places():
        try:
            pack = store.read(place / f"sm_{arch}")
        except FileNotFoundError:
            continue
        except UnavailableError as error:
            _warn(str(error))
            continue
        reason = _unfit(pack, arch)
        if reason:
            _warn(f"the kernel pack {pack.folder} is not used: {reason}")
        else:
            found.append(pack)
    return tuple(found)


def _unfit(pack: Pack, arch: int) -> str:
    """Why a pack serves nothing here; empty where it may."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    if pack.arch != arch or pack.folder.name != f"sm_{pack.arch}":
        return f"it is for sm_{pack.arch}"
    if pack.triton != triton.__version__:
        return f"it needs Triton {pack.triton}, this is {triton.__version__}"
    if not specialize.known():
        return f"packs are not made for Triton {triton.__version__}"
    if pack.sources != specialize.sources_digest():
        return "it is of another version of elsa: build it again"
    return ""


def _found(job: Job, pack: Pack, device: int) -> Any:
    """The kernel for its device, one for all launches; None where its code cannot be had."""
    with _LOCK:
        found = _FOUND.get((job.key, device))
        if found is None:
            try:
                found = _FOUND[job.key, device] = compiled(job, pack)
            # metadata of proper names may still not be a kernel's
            except (UnavailableError, OSError, ValueError, TypeError, AttributeError) as error:
                _warn(f"a kernel of the pack {pack.folder} is not used: {error}")
        return found


def compiled(job: Job, pack: Pack) -> Any:
    """What Triton's compiler would return, of the pack's code; not on a device yet.

    Raises:
        UnavailableError: the code is not what was written.
    """
    from triton.compiler.compiler import AsmDict, CompiledKernel

    entry = pack.entries[job.key]
    metadata = {
        **job.options.__dict__, **entry.metadata, "hash": job.key, "target": job.target,
        "triton_version": pack.triton,
    }  # fmt: skip
    kernel: Any = CompiledKernel.__new__(CompiledKernel)
    kernel.module = kernel._module_pid = kernel.function = kernel._run = None
    kernel.metadata = namedtuple("KernelMetadata", sorted(metadata))(**metadata)
    kernel.packed_metadata = _compiler(pack.arch).backend.pack_metadata(kernel.metadata)
    kernel.src, kernel.hash, kernel.name = job.source, job.key, kernel.metadata.name
    kernel.kernel = pack.cubin(entry)
    kernel.asm, kernel.metadata_group = AsmDict(cubin=kernel.kernel), {}
    kernel.folder = pack.folder
    return kernel


def load(found: Any) -> bool:
    """Load what `find` gave onto the current device, for Triton's launcher; whether it could be."""
    from triton.runtime.errors import TritonError

    try:
        run_of(found)
    except (OSError, RuntimeError, TritonError) as error:
        _warn(f"a kernel of the pack {found.folder} is not used: {error}")
        COUNTS["hits"] -= 1
        COUNTS["misses"] += 1
        return False
    return True


def run_of(compiled: Any) -> Any:
    """Triton's launcher of a kernel, which is loaded once however many threads ask."""
    with _LOCK:
        compiled._init_handles()
    return compiled.run


@functools.cache
def _warn(line: str) -> None:
    _LOG.warning("%s", line)
