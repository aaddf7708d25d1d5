"""The calls of PyTorch's operators that a model.onnx makes where ONNX Runtime runs it on a GPU.

There `csrc/onnxruntime/gpu.h` serves a node by the plan of such a call. `of_nodes` gives calls of
the same layouts, so that their plans can be recorded, and `without_precision` what it finds them
by: a node does not say the precision, of which a model has one.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.cuda.planfile import Recorded
from elsa_core.errors import ExportError
from elsa_core.exporting.onnx import BATCH
from elsa_core.exporting.onnx_operator import DOMAIN, DTYPES, static_shape

_DTYPES = {number: dtype for dtype, number in DTYPES.items()}
_AXES = 4  # of a mask


def of_nodes(
    path: Path, rows: int, precision: str, device: torch.device
) -> Iterator[Callable[[], object]]:
    """The calls of a batch of model.onnx, on tensors of zeros that each call alone holds. Raises
    ExportError where the library has no kernel of a node on GPUs, or a shape is not known."""
    import onnx_ir as ir
    import sympy

    for node in ir.load(path).graph:
        make = _CALLS.get(node.op_type.partition("_")[0])
        if node.domain != DOMAIN or make is None:  # elsa::Linear runs its body
            continue
        given: list[Tensor | None] = []
        for value in node.inputs:
            if value is None:
                given.append(None)
                continue
            if value.dtype is None or value.dtype.value not in _DTYPES:
                raise ExportError(f"ONNX: the exporter lost the type of {value.name}")
            shape = []
            for size in static_shape(value):
                # a number, or a formula of the batch: "(4*batch)//2"
                formula = size if isinstance(size, int) else size.value
                found = sympy.sympify(formula).subs(BATCH, rows)
                if not found.is_Integer:
                    raise ExportError(f"ONNX on a GPU: the size {formula} is known for no batch")
                shape.append(int(found))
            given.append(torch.zeros(shape, dtype=_DTYPES[value.dtype.value], device=device))
        yield make({one.name: one.value for one in node.attributes.values()}, precision, *given)


def without_precision(found: Recorded, precision: str) -> Recorded:
    """Every layout that ends with the precision once more without it."""
    end = struct.pack("<QQ", len(precision), int.from_bytes(precision.encode(), "little"))
    more = tuple(
        (name, words.removesuffix(end), plan)
        for name, words, plan in found.layouts
        if words.endswith(end)
    )
    return dataclasses.replace(found, layouts=(*found.layouts, *more))


def _attention(
    terms: dict[str, Any], precision: str, q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> Callable[[], object]:
    """Every head is a batch entry of its own, so that the result is dense as ONNX has it."""
    batch, heads = q.shape[:2]
    if k.shape[1] != heads:
        raise ExportError(
            "ONNX on a GPU: grouped heads have no kernel; leave onnx out of --formats"
        )
    q, k, v = (t.reshape(batch * heads, 1, *t.shape[2:]) for t in (q, k, v))
    if mask is not None:
        mask = mask.reshape((1,) * (_AXES - mask.dim()) + tuple(mask.shape))
        if mask.shape[:2] not in ((1, 1), (batch, heads)):
            raise ExportError(
                "ONNX on a GPU: a mask must be one for all heads and images, or one for each; "
                "leave onnx out of --formats"
            )
        mask = mask.reshape(-1, 1, *mask.shape[2:])
    rest = (mask, bool(terms["is_causal"]), terms["scale"], precision)
    return partial(torch.ops.elsa.attention.default, q, k, v, *rest)


def _packed(
    terms: dict[str, Any], precision: str, qkv: Tensor, mask: Any = None
) -> Callable[[], object]:
    batch, tokens, width = qkv.shape
    heads, channels = terms["num_heads"], width // 3
    dim = channels // heads
    # As `Call::tensor` of gpu.h has the strides of one head.
    strides = (tokens * width, dim if heads > 1 else tokens * width, width, 1)
    size = (batch, heads, tokens, dim)
    q, k, v = (qkv.as_strided(size, strides, part * channels) for part in range(3))
    if mask is not None:
        mask = mask.reshape((1,) * (_AXES - mask.dim()) + tuple(mask.shape))
    rest = (mask, bool(terms["is_causal"]), terms["scale"], precision)
    return partial(torch.ops.elsa.attention.default, q, k, v, *rest)


def _window(
    terms: dict[str, Any], precision: str, qkv: Tensor, bias: Any = None, pad_qkv: Any = None,
    logit_scale: Any = None,
) -> Callable[[], object]:  # fmt: skip
    return partial(
        torch.ops.elsa.window_attention.default, qkv, bias, None, pad_qkv, logit_scale,
        terms["num_heads"], list(terms["window_size"]), list(terms["shift_size"]), terms["scale"],
        terms["mask_value"], terms["layout"], bool(terms["grid"]), precision,
    )  # fmt: skip


_CALLS: dict[str, Callable[..., Callable[[], object]]] = {
    "Attention": _attention, "PackedAttention": _packed, "WindowAttention": _window
}  # fmt: skip
