"""What the library needs of a kernel that Triton has compiled, and of the arguments of a launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from elsa_core.backends.cuda.plan import Kernel, Pointer

# Of the types in a compiled kernel's signature that kernels of this package have.
_FORMATS = {"i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u8": "<B", "u16": "<H",
            "u32": "<I", "u64": "<Q", "fp32": "<f", "fp64": "<d"}  # fmt: skip
_WARP = 32
# Behind its arguments a kernel takes the addresses of two scratch buffers. In older versions it
# takes one: the driver reads as many as the kernel declares.
_SCRATCH = (bytes(8), bytes(8))


class PlanError(Exception):
    """Why a call cannot run without Python."""


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
