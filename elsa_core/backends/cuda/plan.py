"""A planned call as data: what it allocates, zeroes and launches, and its bytes; and what it takes
of a kernel that Triton has compiled.

`csrc/cuda/plan.h` reads what `write` writes: little endian, without gaps.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAGIC = 0x4E4C5045
VERSION = 1
LAUNCH, ZERO = 0, 1
# Of the types in a compiled kernel's signature that kernels of this package have.
_FORMATS = {"i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u8": "<B", "u16": "<H",
            "u32": "<I", "u64": "<Q", "fp32": "<f", "fp64": "<d"}  # fmt: skip
_WARP = 32
# Behind its arguments a kernel takes the addresses of two scratch buffers. In older versions it
# takes one: the driver reads as many as the kernel declares.
_SCRATCH = (bytes(8), bytes(8))


class PlanError(Exception):
    """Why a call cannot run without Python."""


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
        PlanError: a number does not fit its place.
    """
    try:
        parts = [struct.pack("<4I", MAGIC, VERSION, plan.inputs, len(plan.outputs))]
        for output in plan.outputs:
            layout = (*output.sizes, *output.strides)
            head = output.dtype, len(output.sizes)
            parts.append(struct.pack(f"<iI{len(layout)}q", *head, *layout))
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
    except struct.error as error:
        raise PlanError(f"a number does not fit its place: {error}") from None
    return b"".join(parts)


def kernel_of(compiled: Any) -> Kernel:
    """The kernel's record.

    compiled: what Triton's JIT returns, or `triton.compile`.

    Raises:
        PlanError: it needs scratch memory, or has no code.
    """
    facts = compiled.metadata
    for kind in ("global", "profile"):
        if getattr(facts, f"{kind}_scratch_size", 0):
            raise PlanError(f"kernel {facts.name} takes {kind} scratch memory")
    code = compiled.asm.get("cubin")
    if not isinstance(code, bytes):
        raise PlanError(f"kernel {facts.name} has no cubin")
    return Kernel(
        facts.name, code, _WARP * facts.num_warps, facts.shared, facts.num_ctas,
        bool(getattr(facts, "launch_pdl", False)),
        bool(getattr(facts, "launch_cooperative_grid", False)),
    )  # fmt: skip


def arguments_of(
    compiled: Any, values: Sequence[Any], pointers: Sequence[Pointer]
) -> tuple[bytes | Pointer, ...]:
    """The arguments of a launch, as Triton's own launcher passes them.

    values: of all the kernel's parameters behind its pointers, in order, constants too.

    Raises:
        PlanError: they are not what the kernel's signature says.
    """
    name, given = compiled.metadata.name, [*pointers, *values]
    signature = compiled.src.signature
    if len(given) != len(signature):
        raise PlanError(f"kernel {name} takes {len(signature)} values, not {len(given)}")
    arguments: list[bytes | Pointer] = []
    for (parameter, kind), value in zip(signature.items(), given, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("*") is not isinstance(value, Pointer):
            raise PlanError(f"kernel {name} takes a {kind} as {parameter}, not {value!r}")
        if isinstance(value, Pointer):
            arguments.append(value)
            continue
        try:
            arguments.append(struct.pack(_FORMATS[kind], value))
        except (KeyError, struct.error, OverflowError) as error:
            raise PlanError(f"kernel {name}: {parameter}={value!r}: {error}") from None
    return (*arguments, *_SCRATCH)
