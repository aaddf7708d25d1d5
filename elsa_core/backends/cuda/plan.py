"""A planned call as data: what it allocates, zeroes and launches, and its bytes.

`csrc/cuda/plan.h` reads what `write` writes: little endian, without gaps.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = 0x4E4C5045
VERSION = 1
LAUNCH, ZERO = 0, 1


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel and how it is launched.

    symbol: its name in `code`, a cubin. threads, shared: of a block; shared memory in bytes,
    dynamic. cluster: blocks of one. overlap: it may begin before the launch ahead of it ends
    (programmatic dependent launch). cooperative: all its blocks run at once.
    """

    symbol: str
    code: bytes
    threads: int
    shared: int = 0
    cluster: int = 1
    overlap: bool = False
    cooperative: bool = False

    @property
    def facts(self) -> tuple[int, int, int, int]:
        """What the library takes beside name and code; the last number is of flags."""
        return self.threads, self.shared, self.cluster, self.overlap + 2 * self.cooperative


@dataclass(frozen=True)
class Output:
    """A result: PyTorch's number of its dtype, sizes and strides in elements."""

    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Pointer:
    """An address: of the operator's tensors (absent ones too), then the outputs, then the
    workspace, and bytes from there."""

    slot: int
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    """One launch: the library's number of the kernel, blocks, and each argument as its bytes or as
    a pointer."""

    kernel: int
    grid: tuple[int, int, int]
    arguments: tuple[bytes | Pointer, ...]


@dataclass(frozen=True)
class Zero:
    """Memory of an output or of the workspace that is set to zero."""

    place: Pointer
    size: int


@dataclass(frozen=True)
class Plan:
    """A call: tensors that the operator takes, results, bytes of workspace, and steps in order."""

    inputs: int
    outputs: tuple[Output, ...]
    workspace: int
    steps: tuple[Launch | Zero, ...]


def write(plan: Plan) -> bytes:
    """The plan's bytes.

    Raises:
        struct.error: a number does not fit its place.
    """
    parts = [struct.pack("<4I", MAGIC, VERSION, plan.inputs, len(plan.outputs))]
    for output in plan.outputs:
        layout = (*output.sizes, *output.strides)
        parts.append(struct.pack(f"<iI{len(layout)}q", output.dtype, len(output.sizes), *layout))
    parts.append(struct.pack("<QI", plan.workspace, len(plan.steps)))
    for step in plan.steps:
        if isinstance(step, Zero):
            place = step.place
            parts.append(struct.pack("<IQIQ", ZERO, step.size, place.slot, place.offset))
            continue
        parts.append(struct.pack("<6I", LAUNCH, step.kernel, *step.grid, len(step.arguments)))
        for argument in step.arguments:
            if isinstance(argument, Pointer):
                parts.append(struct.pack("<IIQ", 0, argument.slot, argument.offset))
            else:
                parts.append(struct.pack("<I", len(argument)) + argument.ljust(8, b"\0"))
    return b"".join(parts)
