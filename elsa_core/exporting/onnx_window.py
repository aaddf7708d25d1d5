"""`elsa::window_attention` in ONNX: the node `WindowAttention` and its body."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from elsa_core.exporting.onnx_operator import (
    Body,
    OnnxExport,
    OnnxOperator,
    call,
    static_shape,
    take_over,
    value_of,
)
from elsa_core.ops.window.record import fake

if TYPE_CHECKING:
    import onnx_ir as ir


def _replace_window(graph: Graph, node: Node) -> None:
    qkv, bias, bias_index, pad_qkv, logit_scale = node.args[:5]
    with graph.inserting_before(node):
        if bias_index is not None:  # table [L, heads] and index [T, T] -> [heads, T, T]
            bias = _dense_bias(graph, node, bias, bias_index)
        if logit_scale is not None and value_of(logit_scale).dtype != torch.float32:
            wide = value_of(logit_scale).to(torch.float32)
            logit_scale = call(
                graph, node, torch.ops.aten.to.dtype, (logit_scale, torch.float32), wide
            )
        out = call(
            graph, node, WINDOW.overload,
            (qkv, bias, pad_qkv, logit_scale, *node.args[5:12]), value_of(node),
        )  # fmt: skip
    take_over(graph, node, out)


def _dense_bias(graph: Graph, node: Node, bias: Any, bias_index: Any) -> Node:
    """As `eager_window.dense_bias`: ONNX too reads a negative entry from the end of the table."""
    ops = torch.ops.aten
    table, index = value_of(bias), value_of(bias_index)
    rows = table.new_empty((*index.shape, table.shape[1]))
    last = table.shape[0] - 1
    inside = call(graph, node, ops.clamp.default, (bias_index, 0, last), index)
    outside = call(graph, node, ops.ne.Tensor, (inside, bias_index), index != 0)
    outside = call(graph, node, ops.unsqueeze.default, (outside, -1), (index != 0).unsqueeze(-1))
    picked = call(graph, node, ops.index.Tensor, (bias, [inside]), rows)
    picked = call(graph, node, ops.masked_fill.Scalar, (picked, outside, math.nan), rows)
    return call(graph, node, ops.permute.default, (picked, [2, 0, 1]), rows.permute(2, 0, 1))


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


def _lines(body: Body) -> list[str]:
    """Roll, pad, cut, attend within windows, join, crop, un-roll; see `ops.window.api`."""
    image = "qkv"
    lines = _sizes()
    if "shifted" in body:
        lines += _roll(image, "rolled", back=False)
        image = "rolled"
    if "padded" in body:
        lines += _pad(body, image)
        image = "padded"
    lines += [
        *_cut(body, image, "cut"),
        "heads = Constant<value_int : int = @num_heads>()",
        "heads_1d = Reshape(heads, minus_1)",
        "front = Concat<axis = 0>(zero, windows, tokens)",
        *_split_channels(body),
        *_scores(body),
        "weights = Softmax<axis = -1>(scores)",
        "result = MatMul(weights, v)",
        "own_type = CastLike(result, qkv)",
        *_uncut(body),
    ]
    image = "joined"
    if "padded" in body:
        lines += [f"cropped = Slice({image}, three_zeros, sizes, axes)"]
        image = "cropped"
    if "shifted" in body:
        return [*lines, *_roll(image, "out", back=True)]
    return [*lines, f"out = Identity({image})"]


def _sizes() -> list[str]:
    """`sizes`, `window`, `counts` and `padded_sizes` [3], `tokens` [1]; constants."""
    return [
        "zero = Constant<value = int64[1] {0}>()",
        "one = Constant<value = int64[1] {1}>()",
        "minus_1 = Constant<value = int64[1] {-1}>()",
        "axes = Constant<value = int64[3] {1, 2, 3}>()",
        "three_zeros = Constant<value = int64[3] {0, 0, 0}>()",
        "sizes = Shape<start = 1, end = 4>(qkv)",
        "window = Constant<value_ints : ints = @window_size>()",
        "sizes_up = Add(sizes, window)",
        "sizes_last = Sub(sizes_up, one)",
        "counts = Div(sizes_last, window)",
        "padded_sizes = Mul(counts, window)",
        "tokens = ReduceProd<keepdims = 1>(window, zero)",
        "windows = ReduceProd<keepdims = 1>(counts, zero)",
        *(f"at_{i} = Constant<value = int64[1] {{{i}}}>()" for i in range(3)),
        *(f"count_{i} = Gather(counts, at_{i})" for i in range(3)),
        *(f"window_{i} = Gather(window, at_{i})" for i in range(3)),
        "channels = Shape<start = 4>(qkv)",
    ]


def _roll(image: str, out: str, *, back: bool) -> list[str]:
    """Roll the three axes by -shift, or back by +shift."""
    way = "back" if back else "roll"
    lines = [
        f"{way}_by = Constant<value_ints : ints = @shift_size>()",
        f"{way}_within = Mod({way}_by, sizes)",
        f"{way}_at = Sub(sizes, {way}_within)" if back else f"{way}_at = Identity({way}_within)",
    ]
    for i in range(3):
        target = out if i == 2 else f"{out}_{i}"
        lines += [
            f"{way}_from_{i} = Gather({way}_at, at_{i})",
            f"{way}_axis_{i} = Constant<value = int64[1] {{{i + 1}}}>()",
            f"{way}_end_{i} = Gather(sizes, at_{i})",
            f"{way}_head_{i} = Slice({image}, zero, {way}_from_{i}, {way}_axis_{i})",
            f"{way}_tail_{i} = Slice({image}, {way}_from_{i}, {way}_end_{i}, {way}_axis_{i})",
            f"{target} = Concat<axis = {i + 1}>({way}_tail_{i}, {way}_head_{i})",
        ]
        image = target
    return lines


def _pad(body: Body, image: str) -> list[str]:
    """`padded`: the image up to `padded_sizes`, with pad_qkv or zeros."""
    lines = [
        "missing = Sub(padded_sizes, sizes)",
        "five_zeros = Constant<value = int64[6] {0, 0, 0, 0, 0, 0}>()",
        "pads = Concat<axis = 0>(five_zeros, missing, zero)",
    ]
    if "pad_qkv" not in body:
        return [*lines, f"padded = Pad({image}, pads)"]
    return [
        *lines,
        "mark_shape = Concat<axis = 0>(one, sizes, one)",
        "mark = ConstantOfShape<value = float[1] {1}>(mark_shape)",
        "mark_padded = Pad(mark, pads)",
        "inside = Cast<to = 9>(mark_padded)",
        f"with_zeros = Pad({image}, pads)",
        "padded = Where(inside, with_zeros, pad_qkv)",
    ]


def _cut(body: Body, image: str, out: str) -> list[str]:
    """[B, P0, P1, P2, C] -> [B, windows, tokens, C]."""
    pairs = [(f"count_{i}", f"window_{i}") for i in range(3)]
    order = [name for c, w in pairs for name in ((w, c) if "grid" in body else (c, w))]
    perm = [0, 2, 4, 6, 1, 3, 5, 7] if "grid" in body else [0, 1, 3, 5, 2, 4, 6, 7]
    return [
        f"{out}_split = Concat<axis = 0>(zero, {', '.join(order)}, minus_1)",
        f"{out}_eight = Reshape({image}, {out}_split)",
        f"{out}_moved = Transpose<perm = {perm}>({out}_eight)",
        f"{out}_batch = Shape<start = 0, end = 1>({image})",
        f"{out}_shape = Concat<axis = 0>({out}_batch, minus_1, tokens, "
        + ("channels)" if image != "label" else "one)"),
        f"{out} = Reshape({out}_moved, {out}_shape)",
    ]


def _split_channels(body: Body) -> list[str]:
    """`q`, `k` and `v` [B, windows, heads, tokens, head_dim], float32."""
    three = "three = Constant<value = int64[1] {3}>()"
    order = "heads_1d, three" if "head_first" in body else "three, heads_1d"
    perm = [4, 0, 1, 3, 2, 5] if "head_first" in body else [3, 0, 1, 4, 2, 5]
    return [
        three,
        f"six = Concat<axis = 0>(front, {order}, minus_1)",
        "cut_six = Reshape(cut, six)",
        f"parts = Transpose<perm = {perm}>(cut_six)",
        "q_1, k_1, v_1 = Split<axis = 0, num_outputs = 3>(parts)",
        *(f"{n}_own = Squeeze({n}_1, zero)" for n in "qkv"),
        *(f"{n} = Cast<to = 1>({n}_own)" for n in "qkv"),
    ]


def _scores(body: Body) -> list[str]:
    """`scores` [B, windows, heads, tokens, tokens]."""
    q, k = "q", "k"
    lines = []
    if "logit_scale" in body:
        lines.append("least = Constant<value = float {1e-12}>()")
        for n in "qk":
            lines += [
                f"{n}_norm = ReduceL2<keepdims = 1>({n}, minus_1)",
                f"{n}_long = Max({n}_norm, least)",
                f"{n}_unit = Div({n}, {n}_long)",
            ]
        q, k = "q_unit", "k_unit"
    lines += [
        f"k_turned = Transpose<perm = [0, 1, 2, 4, 3]>({k})",
        f"products = MatMul({q}, k_turned)",
    ]
    if "logit_scale" in body:
        lines += [
            "last_axes = Constant<value = int64[2] {1, 2}>()",
            "factor = Unsqueeze(logit_scale, last_axes)",
        ]
    else:
        lines.append("factor = Constant<value_float : float = @scale>()")
    terms = []
    if "bias" in body:
        lines.append("bias_wide = Cast<to = 1>(bias)")
        terms.append("bias_wide")
    if "shifted" in body:
        lines += _region_mask(body)
        terms.append("mask")
    scores = "products_0" if terms else "scores"
    lines.append(f"{scores} = Mul(products, factor)")
    for index, term in enumerate(terms):
        added = "scores" if index == len(terms) - 1 else f"products_{index + 1}"
        lines.append(f"{added} = Add({scores}, {term})")
        scores = added
    return lines


def _region_mask(body: Body) -> list[str]:
    """`mask` [1, windows, 1, tokens, tokens]: 0 within a region, mask_value across.

    An axis without shift has two regions that no window holds both of, so it needs no exception.
    """
    lines = [
        "shift = Constant<value_ints : ints = @shift_size>()",
        "first_edge = Sub(padded_sizes, window)",
        "second_edge = Sub(padded_sizes, shift)",
        "from_0 = Constant<value = int64 {0}>()",
        "by_1 = Constant<value = int64 {1}>()",
        "regions = Constant<value = int64 {3}>()",
    ]
    total = ""
    for i, others in enumerate(("{1, 2}", "{0, 2}", "{0, 1}")):
        lines += [
            f"size_{i}_1d = Gather(padded_sizes, at_{i})",
            f"size_{i} = Squeeze(size_{i}_1d, zero)",
            f"position_{i} = Range(from_0, size_{i}, by_1)",
            f"edge_{i}_a = Gather(first_edge, at_{i})",
            f"edge_{i}_b = Gather(second_edge, at_{i})",
            f"past_{i}_a = GreaterOrEqual(position_{i}, edge_{i}_a)",
            f"past_{i}_b = GreaterOrEqual(position_{i}, edge_{i}_b)",
            f"one_{i}_a = Cast<to = 7>(past_{i}_a)",
            f"one_{i}_b = Cast<to = 7>(past_{i}_b)",
            f"region_{i} = Add(one_{i}_a, one_{i}_b)",
            f"others_{i} = Constant<value = int64[2] {others}>()",
            f"axis_{i} = Unsqueeze(region_{i}, others_{i})",
        ]
        if i == 0:
            total = "axis_0"
        else:
            lines += [f"scaled_{i} = Mul({total}, regions)", f"sum_{i} = Add(scaled_{i}, axis_{i})"]
            total = f"sum_{i}"
    return [
        *lines,
        "ends = Constant<value = int64[2] {0, 4}>()",
        f"label = Unsqueeze({total}, ends)",
        *_cut(body, "label", "labels"),
        "as_row = Transpose<perm = [0, 1, 3, 2]>(labels)",
        "same = Equal(labels, as_row)",
        "none = Constant<value = float {0}>()",
        "across = Constant<value_float : float = @mask_value>()",
        "added = Where(same, none, across)",
        "at_heads = Constant<value = int64[1] {2}>()",
        "mask = Unsqueeze(added, at_heads)",
    ]


def _uncut(body: Body) -> list[str]:
    """`joined`: own_type [B, windows, heads, tokens, head_dim] -> [B, P0, P1, P2, C]."""
    perm = [0, 4, 1, 5, 2, 6, 3, 7] if "grid" in body else [0, 1, 4, 2, 5, 3, 6, 7]
    return [
        "heads_last = Transpose<perm = [0, 1, 3, 2, 4]>(own_type)",
        "apart = Concat<axis = 0>(zero, counts, window, minus_1)",
        "apart_eight = Reshape(heads_last, apart)",
        f"moved = Transpose<perm = {perm}>(apart_eight)",
        "whole = Concat<axis = 0>(zero, padded_sizes, minus_1)",
        "joined = Reshape(moved, whole)",
    ]


WINDOW = OnnxOperator(
    name="WindowAttention",
    call="window_attention",
    inputs=("qkv", "bias?", "pad_qkv?", "logit_scale?"),
    attributes=(
        ("num_heads", "int"),
        ("window_size", "int[]"),
        ("shift_size", "int[]"),
        ("scale", "float"),
        ("mask_value", "float"),
        ("layout", "str"),
        ("grid", "bool"),
    ),
    fake=fake,
    lines=_lines,
    needs=_needs,
)
EXPORT = OnnxExport(operators=(WINDOW,), rewrite=_replace_window)
