"""What the library needs of a kernel that Triton has compiled, and of the arguments of a launch."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

from elsa_core.backends.cuda.plan import Kernel, Pointer

# Of the types in a compiled kernel's signature that kernels of this package have.
_FORMATS = {"i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u8": "<B", "u16": "<H",
            "u32": "<I", "u64": "<Q", "fp32": "<f", "fp64": "<d"}  # fmt: skip
_WARP = 32
# Behind its arguments a kernel takes the addresses of two scratch buffers, in older versions one.
_SCRATCH_POINTERS = 2
_ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)(?=[\s,])(?!.*\[\d+\])")


class PlanError(Exception):
    """Why a call cannot run without Python."""


def kernel_of(compiled: Any) -> Kernel:
    """The kernel's record.

    compiled: what Triton's JIT returns, or `triton.compile`.

    Raises:
        PlanError: it needs scratch memory, or its code cannot be read or says otherwise.
    """
    facts = compiled.metadata
    for kind in ("global", "profile"):
        if getattr(facts, f"{kind}_scratch_size", 0):
            raise PlanError(f"kernel {facts.name} takes {kind} scratch memory")
    code = compiled.asm.get("cubin")
    if not isinstance(code, bytes):
        raise PlanError(f"kernel {facts.name} has no cubin")
    threads = _WARP * facts.num_warps
    declared = _THREADS.search(compiled.asm.get("ptx") or "")
    if declared is not None and int(declared[1]) != threads:
        raise PlanError(f"kernel {facts.name} is for {declared[1]} threads, not {threads}")
    return Kernel(
        facts.name, code, threads, facts.shared, facts.num_ctas,
        bool(getattr(facts, "launch_pdl", False)),
        bool(getattr(facts, "launch_cooperative_grid", False)), _parameters(compiled),
    )  # fmt: skip


def _parameters(compiled: Any) -> tuple[int, ...]:
    """The bytes of the kernel's parameters as its PTX declares them; one from a pack has none, and
    what Triton compiled it from says them.
    """
    if hasattr(compiled, "folder"):
        kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
        sizes = [struct.calcsize(_FORMATS.get(kind, "<q")) for kind in kinds]
        return (*sizes, *(8,) * _SCRATCH_POINTERS)
    entry = _ENTRY.search(compiled.asm.get("ptx") or "")
    if entry is None:
        raise PlanError(f"kernel {compiled.metadata.name} has no PTX that can be read")
    lines = [line for line in entry[1].split(",") if line.strip()]
    found = [_PARAMETER.search(line) for line in lines]
    if not all(found):
        raise PlanError(f"kernel {compiled.metadata.name} takes parameters that are not numbers")
    return tuple(int(match[1]) // 8 for match in found if match)


def arguments_of(
    compiled: Any, kernel: Kernel, values: Sequence[Any], pointers: Sequence[Pointer]
) -> tuple[bytes | Pointer, ...]:
    """The arguments of a launch, as Triton's own launcher passes them.

    values: of all the kernel's parameters behind its pointers, in order, constants too.

    Raises:
        PlanError: they are not what the kernel's code declares.
    """
    given = [*pointers, *values]
    signature = compiled.src.signature
    if len(given) != len(signature):
        raise PlanError(f"kernel {kernel.symbol} takes {len(signature)} values, not {len(given)}")
    arguments: list[bytes | Pointer] = []
    for (name, kind), value in zip(signature.items(), given, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            if not isinstance(value, Pointer):
                raise PlanError(f"kernel {kernel.symbol} takes no tensor as {name}")
            arguments.append(value)
        elif isinstance(value, Pointer) or kind not in _FORMATS:
            raise PlanError(f"kernel {kernel.symbol} takes a {kind} as {name}")
        else:
            try:
                arguments.append(struct.pack(_FORMATS[kind], value))
            except (struct.error, OverflowError) as error:
                raise PlanError(f"kernel {kernel.symbol}: {name}={value!r}: {error}") from None
    scratch = len(kernel.parameters) - len(arguments)
    if 0 <= scratch <= _SCRATCH_POINTERS:
        arguments += [bytes(8)] * scratch
    sizes = tuple(8 if isinstance(a, Pointer) else len(a) for a in arguments)
    if sizes != kernel.parameters:
        raise PlanError(f"kernel {kernel.symbol} declares other parameters than it is given")
    return tuple(arguments)
