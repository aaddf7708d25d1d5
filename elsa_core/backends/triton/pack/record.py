"""What a pack says of one kernel: all that a launch needs beside its own arguments.

A launch passes `arguments` in their order, then two pointers that every kernel of Triton ends
with: scratch memory of the kernel and of a profiler, null where their sizes are 0.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

# What no kernel exceeds: a file that says more is damaged or foreign.
LARGEST_CODE = 1 << 24
LARGEST_SHARED = 1 << 20
MOST_WARPS = 32
MOST_ARGUMENTS = 256
_SYMBOL = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]{0,255}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TYPE = re.compile(r"\*[a-z][a-z0-9]{0,15}")
# Bytes of a parameter by its type; a pointer's are 8.
_SIZES = {"i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4,
          "fp64": 8}  # fmt: skip


@dataclass(frozen=True)
class Code:
    """Bytes of a data file: where they begin, how many, and their SHA-256."""

    offset: int
    size: int
    sha256: str

    def checked(self, total: int) -> Code:
        """Itself.

        Raises:
            ValueError: it lies outside a file of `total` bytes, or is none.
        """
        sizes = (self.offset, self.size)
        if not all(type(n) is int and n >= 0 for n in sizes) or not 0 < self.size <= LARGEST_CODE:
            raise ValueError(f"code of {self.size!r} bytes at {self.offset!r}")
        if self.offset + self.size > total:
            raise ValueError(f"code ends at {self.offset + self.size}, the data file at {total}")
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError("code without a digest")
        return self


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        symbol: its name in the cubin.
        cubin: its code in the pack's data file.
        ptx: the same as deflated PTX (RFC 1950) for newer GPUs; None in packs without.
        shared: dynamic shared memory in bytes.
        warps: warps of a program, 32 threads each; those that copy included.
        cluster: programs of a cluster along x, y and z; (1, 1, 1) is no cluster.
        scratch: (bytes a program, alignment) of global scratch memory; (0, 1) is none.
        profile_scratch: the same for a profiler.
        overlaps: whether it is launched with programmatic stream serialization.
        cooperative: whether it is launched as a cooperative grid.
        arguments: (name, type) of what a launch passes, in order. Types are Triton's: i32, i64,
            fp32, or `*fp16` for a pointer.
    """

    symbol: str
    cubin: Code
    ptx: Code | None
    shared: int
    warps: int
    cluster: tuple[int, int, int]
    scratch: tuple[int, int]
    profile_scratch: tuple[int, int]
    overlaps: bool
    cooperative: bool
    arguments: tuple[tuple[str, str], ...]

    @property
    def parameters(self) -> tuple[int, ...]:
        """Bytes of each parameter of the code, those for scratch memory included."""
        return (*(_SIZES.get(kind, 8) for _, kind in self.arguments), 8, 8)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def from_dict(data: dict[str, Any], cubins: int, ptx: int) -> Kernel:
    """The kernel that JSON describes; `cubins` and `ptx` are the sizes of the data files in bytes.

    Raises:
        ValueError, TypeError, KeyError: it is none, or exceeds a limit.
    """
    text = data["ptx"]
    kernel = Kernel(
        symbol=data["symbol"],
        cubin=Code(**data["cubin"]).checked(cubins),
        ptx=None if text is None else Code(**text).checked(ptx),
        shared=data["shared"],
        warps=data["warps"],
        cluster=_numbers(data["cluster"], 3),
        scratch=_numbers(data["scratch"], 2),
        profile_scratch=_numbers(data["profile_scratch"], 2),
        overlaps=data["overlaps"],
        cooperative=data["cooperative"],
        arguments=tuple((name, kind) for name, kind in data["arguments"]),
    )
    _check(kernel)
    return kernel


def _numbers(values: Any, count: int) -> Any:
    numbers = tuple(values)
    if len(numbers) != count or not all(type(n) is int and 0 <= n < 1 << 31 for n in numbers):
        raise ValueError(f"{values!r} is not {count} counts")
    return numbers


def _check(kernel: Kernel) -> None:
    if not _SYMBOL.fullmatch(kernel.symbol):
        raise ValueError("a kernel without a proper name")
    if type(kernel.shared) is not int or not 0 <= kernel.shared <= LARGEST_SHARED:
        raise ValueError(f"shared memory of {kernel.shared!r} bytes")
    if type(kernel.warps) is not int or not 1 <= kernel.warps <= MOST_WARPS:
        raise ValueError(f"{kernel.warps!r} warps")
    if not isinstance(kernel.overlaps, bool) or not isinstance(kernel.cooperative, bool):
        raise ValueError("launch attributes that are no booleans")
    if len(kernel.arguments) > MOST_ARGUMENTS:
        raise ValueError(f"{len(kernel.arguments)} arguments")
    for name, kind in kernel.arguments:
        if not _SYMBOL.fullmatch(name) or not (kind in _SIZES or _TYPE.fullmatch(kind)):
            raise ValueError(f"argument {name!r} of type {kind!r}")
