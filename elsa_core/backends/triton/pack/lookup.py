"""Kernels from packs, found by the first call of a launch in place of Triton's JIT.

A kernel of a pack serves a call only where its key is the one of what the JIT would compile
(`specialize.key_of`). A GPU without a pack of its own takes, where ELSA_PACK asks for packs, PTX
of the newest older architecture, which the driver compiles when it is loaded: there the key is of
what the JIT would compile for that architecture, which may be slower than Triton's for this one.
What no pack has, and whatever is wrong with one, leaves the call to the JIT; one warning says why.

Environment variables:
    ELSA_PACK: packs are read from the cache (`elsa build --cuda` writes there) and from this
        package; a folder is looked into before these. "1" asks for packs: of older architectures
        too. "0": no pack is read.
    ELSA_CACHE_DIR: the cache (default: the user's cache directory).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from elsa_core.backends import cache
from elsa_core.backends.triton.pack import store
from elsa_core.backends.triton.pack.store import Entry, Pack
from elsa_core.errors import UnavailableError

VARIABLE = "ELSA_PACK"
_OVERLAPS = 90  # the first architecture on which launches overlap (`device.overlaps`)
_LOG = logging.getLogger("elsa")
_LOCK = threading.Lock()
_FOUND: dict[tuple[str, int], Any] = {}
_COMPILERS: dict[tuple[int, int], tuple[Any, ...]] = {}
COUNTS: Counter[str] = Counter()
"""Launches that a pack served ("hits") and those it lacked ("misses"), in this process."""


class Place(NamedTuple):
    """A folder that may hold packs, `sm_90` and so on; trusted: it is part of this package."""

    folder: Path
    trusted: bool


class Found(NamedTuple):
    """A pack as `elsa doctor` shows it; `reason` says why it is not used, empty where it is; ptx:
    it serves newer GPUs without a pack of theirs too.
    """

    folder: Path
    arch: int
    kernels: int
    bytes: int
    triton: str
    reason: str
    ptx: bool = False


def wanted() -> bool:
    """Whether packs may serve."""
    return os.environ.get(VARIABLE, "") != "0"


def asked() -> bool:
    """Whether packs are asked for."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def own_folder() -> Path:
    """Where `elsa build --cuda` writes packs.

    Raises:
        UnavailableError: no folder is this user's own.
    """
    return cache.directory().with_name("packs")


def places() -> list[Place]:
    """Where packs are looked for, the first that has a kernel serves it."""
    given = os.environ.get(VARIABLE, "")
    found = []
    try:
        if given not in ("", "0", "1"):
            found.append(Place(Path(given).expanduser(), False))
    except RuntimeError:
        _warn(f"{VARIABLE}={given} names the home of no user")
    try:
        found.append(Place(own_folder(), False))
    except UnavailableError as error:
        _warn(str(error))
    return [*found, Place(Path(__file__).parents[3] / "packs", True)]


def shipped() -> Iterator[Found]:
    """Every pack that lies where packs are looked for. Never raises for what is wrong with one."""
    for place in places():
        for folder in sorted(place.folder.glob("sm_*")):
            digits = folder.name.removeprefix("sm_")
            arch = int(digits) if digits.isdecimal() else 0
            try:
                pack = store.read(folder, trusted=place.trusted)
            except (UnavailableError, FileNotFoundError) as error:
                yield Found(folder, arch, 0, 0, "", " ".join(str(error).split()))
            else:
                count = len(pack.entries)
                reason, ptx = _unfit(pack, pack.arch), pack.ptx is not None
                yield Found(folder, arch, count, pack.bytes, pack.triton, reason, ptx)


def summary(arch: int) -> str:
    """The packs of one architecture in a line for `explain`; empty where there are none."""
    here = list(shipped())
    found = [pack for pack in here if pack.arch == arch]
    if not found:  # as `packs_for` has it
        older = [pack for pack in here if pack.ptx and pack.arch < arch and not pack.reason]
        newest = max((pack.arch for pack in older), default=0)
        found = [pack for pack in older if pack.arch == newest]
    found = [pack for pack in found if pack.kernels]
    if not found:
        return "no kernel pack is here: Triton compiles" if asked() else ""
    pack = next((pack for pack in found if not pack.reason), found[0])
    what = f"kernel pack sm_{pack.arch} ({pack.kernels} kernels, Triton {pack.triton})"
    if pack.arch != arch:
        what += f", as PTX that the driver compiles for sm_{arch}"
    if pack.reason:
        return f"{what} is not used: {pack.reason}"
    if not wanted():
        return f"{what} is not used: {VARIABLE} is 0"
    ahead = pack.arch == arch or asked()
    return what if ahead else f"{what}, is not used: {VARIABLE}=1 asks for it"


def find(
    kernel: Any, tensors: tuple[Any, ...], tail: dict[str, Any], options: dict[str, Any]
) -> Any:
    """The compiled kernel of a launch on the current device, perhaps not loaded there yet (see
    `load`); None where the JIT is to serve.

    kernel: a `triton.jit` function; tensors, tail, options: its pointers, its other arguments by
    name, and the compiler's options.
    """
    import torch

    device = torch.cuda.current_device()
    packs = _packs(device)
    if not packs:
        return None
    from elsa_core.backends.triton.pack import specialize

    reason = specialize.departs()
    if reason:
        _warn(f"kernel packs are not used: {reason} is set")
        return None
    major, minor = torch.cuda.get_device_capability(device)
    for pack in packs:
        ptx = pack.arch != 10 * major + minor
        special, target, backend = _specialized(kernel, tensors, tail, options, pack.arch, ptx)
        source = _source_key(kernel, pack)
        key = specialize.key_of(kernel, special, source, target.arch)
        entry = pack.entries.get(key)
        if entry is not None:
            found = _found(key, device, pack, entry, special, target, backend, ptx)
            COUNTS["hits" if found is not None else "misses"] += 1
            return found
    COUNTS["misses"] += 1
    return None


def _specialized(
    kernel: Any, tensors: tuple[Any, ...], tail: dict[str, Any], options: dict[str, Any],
    arch: int, older: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """A launch as Triton would compile it for an architecture, of its device or an `older` one;
    with the target and the backend of that. Triton's driver, which takes 20 ms to begin, is not
    asked.

    A GPU before sm_90 overlaps no launches. Its kernels are right in a chain of those that do: a
    launch without the attribute begins when all before it have ended.
    """
    from elsa_core.backends.triton.pack import specialize

    target, backend, binder = _compiler(kernel, arch)
    if older and arch < _OVERLAPS:
        tail = {**tail, "OVERLAP": False} if "OVERLAP" in tail else tail
        options = {name: value for name, value in options.items() if name != "launch_pdl"}
    special = specialize.specialize(kernel, tensors, tail, options, backend, binder)
    return special, target, backend


def _compiler(kernel: Any, arch: int) -> tuple[Any, Any, Any]:
    """Triton's target and backend, and what sorts a kernel's arguments. A kernel is kept by its
    identity: its hash is that of its source, which takes long.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    from elsa_core.backends.triton.pack import specialize

    found = _COMPILERS.get((id(kernel), arch))
    if found is None:
        target = GPUTarget("cuda", arch, 32)
        backend = make_backend(target)
        binder = specialize.binder_of(kernel, backend)
        found = _COMPILERS[id(kernel), arch] = (kernel, target, backend, binder)
    return found[1:]


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
    """The packs that serve an architecture, in the order in which they are asked.

    Those of its own; where there are none, not even damaged ones, those of the newest older
    architecture that hold PTX.
    """
    found = list(_read(arch))
    if found:
        return tuple(pack for pack in found if pack is not None)
    if not asked():
        return ()
    older = {int(name) for name in _names() if name.isdecimal() and int(name) < arch}
    for each in sorted(older, reverse=True):
        fit = tuple(pack for pack in _read(each) if pack is not None and pack.ptx is not None)
        if fit:
            _warn(
                f"no kernel pack is for sm_{arch}: the driver compiles the PTX of {fit[0].folder}, "
                "which does without newer instructions; `elsa build --cuda` makes one"
            )
            return fit
    return ()


def _names() -> Iterator[str]:
    for place in places():
        yield from (path.name.removeprefix("sm_") for path in place.folder.glob("sm_*"))


def _read(arch: int) -> Iterator[Pack | None]:
    """The packs named after an architecture; None for one that cannot be used, which is said."""
    for place in places():
        try:
            pack = store.read(place.folder / f"sm_{arch}", trusted=place.trusted)
        except FileNotFoundError:
            continue
        except UnavailableError as error:
            _warn(str(error))
            yield None
            continue
        reason = _unfit(pack, arch)
        if reason:
            _warn(f"the kernel pack {pack.folder} is not used: {reason}")
        yield None if reason else pack


def _unfit(pack: Pack, arch: int) -> str:
    """Why a pack serves nothing here; empty where it may."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    from elsa_core.backends.triton.pack import specialize

    if pack.arch != arch or pack.folder.name != f"sm_{pack.arch}":
        return f"it is for sm_{pack.arch}"
    if pack.triton != triton.__version__:
        return f"it needs Triton {pack.triton}, this is {triton.__version__}"
    return "" if specialize.known() else f"packs are not made for Triton {triton.__version__}"


def _source_key(kernel: Any, pack: Pack) -> str:
    """The digest of a kernel's source, taken from the pack where all sources are the same."""
    from elsa_core.backends.triton.pack import sources, specialize

    known = pack.source_keys.get(specialize.name_of(kernel))
    if known is not None and pack.sources == sources.sources_digest():
        return known
    try:
        return sources.source_key(kernel)
    except ValueError as error:
        _warn(f"kernel packs: {error}")
        return ""


def _found(
    key: str, device: int, pack: Pack, entry: Entry, special: Any, target: Any, backend: Any,
    ptx: bool,
) -> Any:  # fmt: skip
    """The kernel for its device, one for all launches; None where its code cannot be had."""
    with _LOCK:
        found = _FOUND.get((key, device))
        if found is None:
            try:
                found = compiled(key, pack, entry, special, target, backend, ptx=ptx)
            except (UnavailableError, OSError) as error:
                _warn_of(pack.folder, error)
                return None
            found.folder = pack.folder
            _FOUND[key, device] = found
        return found


def load(found: Any) -> bool:
    """Load what `find` gave onto the current device, for Triton's launcher; whether it could be."""
    from triton.runtime.errors import TritonError

    try:
        run_of(found)
    except (OSError, RuntimeError, TritonError) as error:
        _warn_of(found.folder, error)
        COUNTS["hits"] -= 1
        COUNTS["misses"] += 1
        return False
    return True


def run_of(compiled: Any) -> Any:
    """Triton's launcher of a kernel, which is loaded once however many threads ask."""
    with _LOCK:
        compiled._init_handles()
    return compiled.run


def _warn_of(folder: Path, error: Exception) -> None:
    _warn(f"a kernel of the pack {folder} is not used: {error}")


def compiled(
    key: str, pack: Pack, entry: Entry, special: Any, target: Any, backend: Any, *,
    ptx: bool = False,
) -> Any:  # fmt: skip
    """What Triton's compiler would return, of the pack's code; not on a device yet.

    ptx: take the PTX for the machine code. Both are loaded by the same function of the driver, PTX
    up to its first zero byte.

    Raises:
        UnavailableError: the code is not what was written, or there is no PTX.
    """
    from collections import namedtuple

    from triton.compiler.compiler import AsmDict, CompiledKernel

    metadata = {
        **special.options.__dict__, **entry.metadata, "hash": key, "target": target,
        "triton_version": pack.triton,
    }  # fmt: skip
    kernel: Any = CompiledKernel.__new__(CompiledKernel)
    kernel.module = kernel._module_pid = kernel.function = kernel._run = None
    kernel.metadata = namedtuple("KernelMetadata", sorted(metadata))(**metadata)
    kernel.packed_metadata = backend.pack_metadata(kernel.metadata)
    kernel.src, kernel.hash, kernel.name = special.source, key, kernel.metadata.name
    if ptx:
        text = pack.ptx_of(entry.kernel)
        if text is None:
            raise UnavailableError(f"{kernel.name} has no PTX")
        kernel.kernel = text + b"\0"
        kernel.asm = AsmDict(ptx=text.decode(errors="replace"))
    else:
        kernel.kernel = pack.cubin(entry.kernel)
        kernel.asm = AsmDict(cubin=kernel.kernel)
    kernel.metadata_group = {}
    kernel.parameters = entry.kernel.parameters  # for a launcher of another make
    return kernel


@functools.cache
def _warn(line: str) -> None:
    _LOG.warning("%s", line)
