"""`elsa::window_attention` in ONNX: the node `WindowAttention` and its body."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from elsa_core.exporting.onnx_operator import (
    OnnxExport,
    OnnxOperator,
    Value,
    Writer,
    call,
    static_shape,
)

if TYPE_CHECKING:
    import onnx_ir as ir


def _replace_window(graph: Graph, node: Node) -> None:
    given: Any = node.args
    qkv, bias, bias_index, pad_qkv, logit_scale = given[:5]
    aten = torch.ops.aten
    with graph.inserting_before(node):
        if bias_index is not None:
            # Table [L, heads] and index [T, T] -> [heads, T, T], as `eager_window.dense_bias`: ONNX
            # too reads a negative entry from the end of the table.
            table, index = bias.meta["val"], bias_index.meta["val"]
            rows, far = table.new_empty((*index.shape, table.shape[1])), (index != 0).unsqueeze(-1)
            at = call(graph, node, aten.clamp.default, (bias_index, 0, len(table) - 1), index)
            outside = call(graph, node, aten.ne.Tensor, (at, bias_index), index != 0)
            outside = call(graph, node, aten.unsqueeze.default, (outside, -1), far)
            picked = call(graph, node, aten.index.Tensor, (bias, [at]), rows)
            picked = call(graph, node, aten.masked_fill.Scalar, (picked, outside, math.nan), rows)
            turned = rows.permute(2, 0, 1)
            bias = call(graph, node, aten.permute.default, (picked, [2, 0, 1]), turned)
        if logit_scale is not None and logit_scale.meta["val"].dtype != torch.float32:
            wide = logit_scale.meta["val"].to(torch.float32)
            logit_scale = call(graph, node, aten.to.dtype, (logit_scale, torch.float32), wide)
        operands = (qkv, bias, pad_qkv, logit_scale)
        out = WINDOW.call(graph, node, operands, node.args[5:12], node.meta["val"])
    node.replace_all_uses_with(out)


def _needs(node: ir.Node, given: dict[str, ir.Value], newest: bool) -> tuple[set[str], set[str]]:
    sizes, window = static_shape(given["qkv"])[1:4], node.attributes.get_ints("window_size")
    open_or_cut = (not isinstance(n, int) or n % w for n, w in zip(sizes, window, strict=True))
    traits = {"head_first"} if node.attributes.get_string("layout") == "head" else set()
    if node.attributes.get_int("grid"):
        traits.add("grid")
    more = {"padded"} if any(open_or_cut) else set()
    if any(node.attributes.get_ints("shift_size")):
        more.add("shifted")
    return traits, more


def _body(op: Writer, qkv: Value, bias: Value, pad: Value, logit: Value) -> Value:
    """Roll, pad, cut, attend within windows, join, crop, un-roll; see `ops.window.api`.

    `sizes`, `window`, `counts` and `padded` are [3], of the axes of the image.
    """
    sizes, window = op.Shape(qkv, start=1, end=4), op.attribute("window_size")
    counts = op.Div(op.Sub(op.Add(sizes, window), [1]), window)
    padded = op.Mul(counts, window)
    tokens, windows = (op.ReduceProd(each, [0], keepdims=1) for each in (window, counts))
    image = _roll(op, qkv, sizes, back=False) if "shifted" in op.traits else qkv
    if "padded" in op.traits:
        pads = op.Concat([0] * 6, op.Sub(padded, sizes), [0], axis=0)
        image = op.Pad(image, pads)
        if pad:
            ones = op.Expand(1.0, op.Concat([1], sizes, [1], axis=0))
            image = op.Where(op.Cast(op.Pad(ones, pads), to=9), image, pad)
    cut = _cut(op, image, counts, window, tokens, op.Shape(qkv, start=4))
    front = op.Concat([0], windows, tokens, axis=0)
    heads = op.Reshape(op.attribute("num_heads"), [-1])
    order = (heads, [3]) if "head_first" in op.traits else ([3], heads)
    perm = [4, 0, 1, 3, 2, 5] if "head_first" in op.traits else [3, 0, 1, 4, 2, 5]
    six = op.Transpose(op.Reshape(cut, op.Concat(front, *order, [-1], axis=0)), perm=perm)
    parts = op.Split(six, axis=0, num_outputs=3, outputs=3)
    # [B, windows, heads, tokens, head_dim]
    q, k, v = (op.Cast(op.Squeeze(part, [0]), to=1) for part in parts)
    if logit:
        q, k = (op.Div(x, op.Max(op.ReduceL2(x, [-1], keepdims=1), 1e-12)) for x in (q, k))
    factor = op.Unsqueeze(logit, [1, 2]) if logit else op.attribute("scale")
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 2, 4, 3])), factor)
    if bias:
        scores = op.Add(scores, op.Cast(bias, to=1))
    if "shifted" in op.traits:
        scores = op.Add(scores, _region_mask(op, counts, window, padded, tokens))
    out = op.CastLike(op.MatMul(op.Softmax(scores, axis=-1), v), qkv)
    perm = [0, 4, 1, 5, 2, 6, 3, 7] if "grid" in op.traits else [0, 1, 4, 2, 5, 3, 6, 7]
    tokens_first = op.Transpose(out, perm=[0, 1, 3, 2, 4])
    eight = op.Reshape(tokens_first, op.Concat([0], counts, window, [-1], axis=0))
    image = op.Reshape(op.Transpose(eight, perm=perm), op.Concat([0], padded, [-1], axis=0))
    if "padded" in op.traits:
        image = op.Slice(image, [0, 0, 0], sizes, [1, 2, 3])
    return _roll(op, image, sizes, back=True) if "shifted" in op.traits else image


def _roll(op: Writer, image: Value, sizes: Value, *, back: bool) -> Value:
    """Roll the three axes by -shift, or back by +shift."""
    at = op.Mod(op.attribute("shift_size"), sizes)
    at = op.Sub(sizes, at) if back else at
    for i in range(3):
        begin, end = op.Gather(at, [i]), op.Gather(sizes, [i])
        head = op.Slice(image, [0], begin, [i + 1])
        image = op.Concat(op.Slice(image, begin, end, [i + 1]), head, axis=i + 1)
    return image


def _cut(op: Writer, image: Value, counts: Value, window: Value, tokens: Value, last: Any) -> Value:
    """[B, P0, P1, P2, C] -> [B, windows, tokens, C]; `last` is [C]."""
    order = [3, 0, 4, 1, 5, 2] if "grid" in op.traits else [0, 3, 1, 4, 2, 5]
    perm = [0, 2, 4, 6, 1, 3, 5, 7] if "grid" in op.traits else [0, 1, 3, 5, 2, 4, 6, 7]
    sides = op.Gather(op.Concat(counts, window, axis=0), order)
    eight = op.Reshape(image, op.Concat([0], sides, [-1], axis=0))
    shape = op.Concat(op.Shape(image, end=1), [-1], tokens, last, axis=0)
    return op.Reshape(op.Transpose(eight, perm=perm), shape)


def _region_mask(op: Writer, counts: Value, window: Value, padded: Value, tokens: Value) -> Value:
    """[1, windows, 1, tokens, tokens]: 0 within a region, mask_value across.

    An axis without shift has two regions that no window holds both of, so it needs no exception.
    """
    edges = op.Sub(padded, window), op.Sub(padded, op.attribute("shift_size"))
    label = ""
    for axis in range(3):
        position = op.Range(0, op.Gather(padded, axis), 1)
        past = (op.GreaterOrEqual(position, op.Gather(edge, [axis])) for edge in edges)
        region = op.Add(*(op.Cast(each, to=7) for each in past))
        region = op.Unsqueeze(region, [each for each in range(3) if each != axis])
        label = op.Add(op.Mul(label, [3]), region) if label else region
    labels = _cut(op, op.Unsqueeze(label, [0, 4]), counts, window, tokens, [1])
    same = op.Equal(labels, op.Transpose(labels, perm=[0, 1, 3, 2]))
    return op.Unsqueeze(op.Where(same, 0.0, op.attribute("mask_value")), [2])


WINDOW = OnnxOperator(
    name="WindowAttention",
    inputs=("qkv", "bias", "pad_qkv", "logit_scale"),
    attributes={
        "num_heads": "INT", "window_size": "INTS", "shift_size": "INTS", "scale": "FLOAT",
        "mask_value": "FLOAT", "layout": "STRING", "grid": "INT",
    },
    write=_body,
    needs=_needs,
)  # fmt: skip
EXPORT = OnnxExport(operators=(WINDOW,), rewrite=_replace_window)
