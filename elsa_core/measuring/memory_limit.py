"""A limit on this process's memory, so that a model that does not fit is an error, not its end.

Without it Linux hands out more memory than there is, and later kills the process without a word.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

_SHARE: Final = 0.9  # of what is available: the system needs the rest


@contextlib.contextmanager
def limited(device: torch.device, available: int | None = None) -> Iterator[None]:
    """While it lasts, this process may grow by 90% of the memory that is available now.

    What goes beyond raises (MemoryError, or PyTorch's RuntimeError). On CUDA, and where the system
    has no such limit, nothing changes.
    """
    there = available_bytes("cpu") if available is None else available
    size = kernel_bytes("/proc/self/status", "VmSize")  # None where there is no `resource`
    if device.type != "cpu" or size is None:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + int(_SHARE * there)
    if before[0] != resource.RLIM_INFINITY:
        limit = min(limit, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def available_bytes(device: torch.device | str) -> int:
    """Memory that a measurement may take on the device."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return kernel_bytes("/proc/meminfo", "MemAvailable") or 4 * 2**30


def kernel_bytes(path: str, name: str) -> int | None:
    """A size that Linux tells in a file of lines like `VmRSS:  1024 kB`; None elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = ("DefaultCPUAllocator", "out of memory", "bad_alloc", "could not create a memory",
             "Storage size calculation overflowed")  # fmt: skip
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def release(device: torch.device) -> None:
    """Give memory that nothing refers to back to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
