"""What the tests of the CPU kernels share: data, errors, fenced memory and processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

ULPS = 4


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def guarded(t: Tensor) -> Tensor:
    """A copy whose last byte is followed by a page that must not be touched."""
    page = mmap.PAGESIZE
    size = t.numel() * t.element_size()
    length = -(-size // page) * page
    memory = mmap.mmap(-1, length + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + length), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=t.dtype, offset=length - size, count=t.numel())
    return copy.view_as(t).copy_(t)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with two threads; its `import` finds the tests of this folder."""
    places = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": places, **variables},
    )  # fmt: skip
