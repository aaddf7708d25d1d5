"""Compiles a planned launch for a GPU that is not here: no driver is needed, only Triton's
compiler.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elsa_core.backends.triton.attention.planner import plan_call
from elsa_core.backends.triton.attention.schedules import Call
from elsa_core.backends.triton.shared.launch import Launch

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
POINTERS = {
    "W": "fp16", "LSE": "fp32", "PO": "fp32", "PL": "fp32", "Index": "i64",
    "Logit": "fp32", "Left": "fp16", "Right": "fp16", "InputHalves": "fp16", "WeightHalves": "fp16",
    "ValueHalves": "fp16", "Halves": "fp16", "Maxima": "i32", "Tickets": "i32", "StartsQ": "i32",
    "StartsK": "i32",
}  # fmt: skip


def compiled_as(
    launch: Launch, pointer: Callable[[str], tuple[str, bool]], target: tuple[Any, ...],
    **options: Any,
) -> Any:  # fmt: skip
    """The compiled kernel of one launch. pointer: by name what it is of, and whether it is aligned
    to 16 bytes; asked in the order of the arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if parameter.is_constexpr or (name in launch.tail and launch.tail[name] is None):
            signature[name] = "constexpr"
            constants[(position,)] = launch.tail[name]
        elif parameter.annotation_type:
            signature[name] = parameter.annotation_type
        else:
            kind, aligned = pointer(name)
            signature[name] = "*" + kind
            if aligned:
                attributes[(position,)] = [["tt.divisibility", 16]]
    written_in = ASTSource
    if launch.kernel.is_gluon():
        written_in = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    source = written_in(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*target), options={**launch.options, **options})


def compile_launch(
    launch: Launch, dtype: torch.dtype, backend: str, arch: int | str, lse: str = "",
    kinds: Mapping[str, str] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """The compiled kernel of one launch; `.asm` holds its code. lse: "fp64" for merged states;
    kinds: what pointers are of, beside `POINTERS`."""
    pointers = POINTERS | dict(kinds or {})

    def pointer(name: str) -> tuple[str, bool]:
        kind = "fp32" if name == "Out" and launch.tail.get("PARTIAL") else NAMES[dtype]
        if name == "Mask" and not launch.tail.get("MASK", True) and dtype == torch.float32:
            kind = "i32"  # flags, or not read
        kind = pointers.get(name, kind)
        return lse if lse and name in ("LSE", "PL") else kind, True

    return compiled_as(launch, pointer, (backend, arch, 64 if backend == "hip" else 32), **options)


def planned_call(
    shape: tuple[int, int, int, int], dtype: torch.dtype, precision: str, *, causal: bool = False,
    mask: torch.Tensor | None = None, keys: int | None = None,
) -> Call:  # fmt: skip
    """The launches of a self-attention of [B, H, N, D] on a machine without a GPU (the H200's
    table).
    """
    b, h, n, d = shape
    q = torch.empty(shape, dtype=dtype, device="meta")
    k = torch.empty((b, h, keys or n, d), dtype=dtype, device="meta")
    return plan_call(q, k, k, mask, causal, d**-0.5, precision)
