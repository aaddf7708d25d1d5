"""The calls of PyTorch's operators that a model.onnx makes where ONNX Runtime runs it on a GPU.

There `csrc/onnxruntime/gpu.h` serves a node by the plan of such a call. `of_nodes` gives calls of
the same layouts, so that their plans can be recorded, and `without_precision` what it finds them
by: a node does not say the precision, of which a model has one.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.cuda.planfile import Recorded
from elsa_core.errors import ExportError
from elsa_core.exporting.onnx import BATCH
from elsa_core.exporting.onnx_operator import DOMAIN

# ONNX's numbers of the types that the operators take.
_DTYPES = {1: torch.float32, 9: torch.bool, 10: torch.float16, 16: torch.bfloat16}
_AXES = 4  # of a mask


def of_nodes(
    path: Path, rows: int, precision: str, device: torch.device
) -> Iterator[Callable[[], object]]:
    """The calls of a batch of model.onnx, on tensors of zeros that each call alone holds. Raises
    ExportError where the library has no kernel of a node on GPUs, or a shape is not known."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    known: dict[str, tuple[torch.dtype, Sequence[int | str]]] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if kind.elem_type in _DTYPES:
            dims = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
            known[value.name] = (_DTYPES[kind.elem_type], dims)
    for tensor in graph.initializer:
        if tensor.data_type in _DTYPES:
            known[tensor.name] = (_DTYPES[tensor.data_type], list(tensor.dims))
    for node in graph.node:
        make = _CALLS.get(node.op_type.partition("_")[0])
        if node.domain != DOMAIN or make is None:  # elsa::Linear runs its body
            continue
        given: list[Tensor | None] = []
        for name in node.input:
            if name and name not in known:
                raise ExportError(f"ONNX: the exporter lost the shape of {name}")
            dtype, sizes = known.get(name, (None, ()))
            shape = [_size(size, rows) for size in sizes]
            given.append(torch.zeros(shape, dtype=dtype, device=device) if dtype else None)
        terms = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        yield make(terms, precision, *given)


def without_precision(found: Recorded, precision: str) -> Recorded:
    """Every layout that ends with the precision once more without it."""
    end = struct.pack("<QQ", len(precision), int.from_bytes(precision.encode(), "little"))
    more = tuple(
        (name, words.removesuffix(end), plan)
        for name, words, plan in found.layouts
        if words.endswith(end)
    )
    return dataclasses.replace(found, layouts=(*found.layouts, *more))


def _size(size: int | str, rows: int) -> int:
    """A dimension, which may be a formula of the batch: "(4*batch)//2"."""
    import sympy

    found = sympy.sympify(size).subs(BATCH, rows)
    if not found.is_Integer:
        raise ExportError(f"ONNX on a GPU: the size {size} is known for no batch")
    return int(found)


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
        mask = _four(mask)
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
    mask = None if mask is None else _four(mask)
    rest = (mask, bool(terms["is_causal"]), terms["scale"], precision)
    return partial(torch.ops.elsa.attention.default, q, k, v, *rest)


def _four(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (_AXES - mask.dim()) + tuple(mask.shape))


def _window(
    terms: dict[str, Any], precision: str, qkv: Tensor, bias: Any = None, pad_qkv: Any = None,
    logit_scale: Any = None,
) -> Callable[[], object]:  # fmt: skip
    return partial(
        torch.ops.elsa.window_attention.default, qkv, bias, None, pad_qkv, logit_scale,
        terms["num_heads"], list(terms["window_size"]), list(terms["shift_size"]), terms["scale"],
        terms["mask_value"], terms["layout"].decode(), bool(terms["grid"]), precision,
    )  # fmt: skip


_CALLS: dict[str, Callable[..., Callable[[], object]]] = {
    "Attention": _attention, "PackedAttention": _packed, "WindowAttention": _window
}  # fmt: skip
