"""Bodies of elsa's ONNX operators in standard operators: what a runtime without the library runs.

A body is a model-local function. ONNX Runtime before 1.27 knows one function a name, so nodes that
need different bodies get different names: `Attention`, then `Attention_2`. The library knows them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

DOMAIN = "elsa"
VARIANTS_MAX = 4  # names that the library registers for each operator

ATTENTION_OPSET = 23  # the first that has the standard `Attention`

_INPUTS = {
    "Attention": ("query", "key", "value", "attn_mask"),
    "PackedAttention": ("qkv", "attn_mask"),
    "WindowAttention": ("qkv", "bias", "pad_qkv", "logit_scale"),
}
_REQUIRED = {"Attention": 3, "PackedAttention": 1, "WindowAttention": 1}
_KINDS = {
    "is_causal": "INT",
    "scale": "FLOAT",
    "num_heads": "INT",
    "window_size": "INTS",
    "shift_size": "INTS",
    "mask_value": "FLOAT",
    "layout": "STRING",
    "grid": "INT",
}
_ATTRIBUTES = {
    "Attention": ("is_causal", "scale"),
    "PackedAttention": ("num_heads", "is_causal", "scale"),
    "WindowAttention": (
        "num_heads", "window_size", "shift_size", "scale", "mask_value", "layout", "grid",
    ),
}  # fmt: skip
OPERATORS = tuple(_INPUTS)


@dataclass(frozen=True)
class Body:
    """What decides a body.

    Attributes:
        op_type: "Attention", "PackedAttention" or "WindowAttention".
        inputs: which inputs the nodes have.
        boolean_mask: the mask is boolean rather than additive.
        causal: some node is causal.
        grouped: some node has fewer key heads than query heads.
        shifted: some node shifts its windows.
        padded: some node pads its image.
        head_first: channels are (heads, 3, head_dim).
        grid: windows take every n-th token.
        standard: may hold the standard `Attention` of opset 23.
    """

    op_type: str
    inputs: tuple[str, ...]
    boolean_mask: bool = False
    causal: bool = False
    grouped: bool = False
    shifted: bool = False
    padded: bool = False
    head_first: bool = False
    grid: bool = False
    standard: bool = False

    def kind(self) -> Body:
        """What nodes of one function must agree in: the rest serves more than asks for it."""
        return replace(self, causal=False, grouped=False, shifted=False, padded=False)

    def joined(self, other: Body) -> Body:
        """A body for the nodes of both, which are of one kind."""
        return replace(
            self,
            causal=self.causal or other.causal,
            grouped=self.grouped or other.grouped,
            shifted=self.shifted or other.shifted,
            padded=self.padded or other.padded,
        )


def function(body: Body, name: str, opset: int) -> onnx.FunctionProto:
    """The model-local function `elsa::<name>`."""
    import onnx.parser

    lines = {
        "Attention": _attention_lines,
        "PackedAttention": _packed_lines,
        "WindowAttention": _window_lines,
    }[body.op_type](body)
    parameters = [n if n in body.inputs else f"{n}_absent" for n in _INPUTS[body.op_type]]
    while parameters[-1].endswith("_absent"):
        parameters.pop()
    text = (
        f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">\n'
        f"{name} <{', '.join(_ATTRIBUTES[body.op_type])}> ({', '.join(parameters)}) => (out)\n"
        "{\n" + "\n".join(f"  {line}" for line in lines) + "\n}"
    )
    return onnx.parser.parse_function(text)


def inputs_of(op_type: str) -> tuple[str, ...]:
    """The names of an operator's inputs, in order."""
    return _INPUTS[op_type]


def parameters_of(op_type: str) -> list[tuple[str, bool]]:
    """Each input's name, and whether every node has it."""
    return [(name, i < _REQUIRED[op_type]) for i, name in enumerate(_INPUTS[op_type])]


def attributes_of(op_type: str) -> list[tuple[str, str]]:
    """Each attribute's name and type."""
    return [(name, _KINDS[name]) for name in _ATTRIBUTES[op_type]]


def _attention_lines(body: Body) -> list[str]:
    if body.standard:
        return _standard_attention(body, "query", "key", "value")
    lines = ["q = Cast<to = 1>(query)", "k = Cast<to = 1>(key)", "v = Cast<to = 1>(value)"]
    if body.grouped:
        lines += _repeat_heads("k") + _repeat_heads("v")
    key, value = ("k_all", "v_all") if body.grouped else ("k", "v")
    return [*lines, *_softmax_lines(body, "q", key, value), "out = CastLike(result, query)"]


def _packed_lines(body: Body) -> list[str]:
    """[B, N, 3 * H * D] -> [3, B, H, N, D] and back to [B, N, H * D]."""
    lines = [
        "heads = Constant<value_int : int = @num_heads>()",
        "one = Constant<value = int64[1] {1}>()",
        "heads_1d = Reshape(heads, one)",
        "first = Constant<value = int64[3] {0, 0, 3}>()",
        "last = Constant<value = int64[1] {-1}>()",
        "apart = Concat<axis = 0>(first, heads_1d, last)",
        "split = Reshape(qkv, apart)",
        "parts = Transpose<perm = [2, 0, 3, 1, 4]>(split)",
        "q_1, k_1, v_1 = Split<axis = 0, num_outputs = 3>(parts)",
        "zero = Constant<value = int64[1] {0}>()",
        *(f"{n}_own = Squeeze({n}_1, zero)" for n in "qkv"),
    ]
    if body.standard:
        return [
            *lines,
            *_standard_attention(body, "q_own", "k_own", "v_own", "together"),
            *_join("together"),
        ]
    lines += [f"{n} = Cast<to = 1>({n}_own)" for n in "qkv"]
    lines += [*_softmax_lines(body, "q", "k", "v"), "together = CastLike(result, qkv)"]
    return [*lines, *_join("together")]


def _join(name: str) -> list[str]:
    """[B, H, N, D] -> out [B, N, H * D]."""
    return [
        f"tokens_first = Transpose<perm = [0, 2, 1, 3]>({name})",
        "joined = Constant<value = int64[3] {0, 0, -1}>()",
        "out = Reshape(tokens_first, joined)",
    ]


def _softmax_lines(body: Body, q: str, k: str, v: str) -> list[str]:
    """`result` = softmax(q k^T * scale + mask) v in float32; a row that sees no key gives zeros."""
    lines = [
        f"k_turned = Transpose<perm = [0, 1, 3, 2]>({k})",
        f"products = MatMul({q}, k_turned)",
        "factor = Constant<value_float : float = @scale>()",
        "scores_0 = Mul(products, factor)",
    ]
    scores = "scores_0"
    masked = "attn_mask" in body.inputs
    if masked or body.causal:
        lines.append("never = Constant<value = float {-inf}>()")
    if masked and body.boolean_mask:
        lines.append(f"scores_1 = Where(attn_mask, {scores}, never)")
        scores = "scores_1"
    elif masked:
        lines += ["mask = Cast<to = 1>(attn_mask)", f"scores_1 = Add({scores}, mask)"]
        scores = "scores_1"
    if body.causal:
        lines += [*_causal_lines(scores), f"scores_2 = Where(visible, {scores}, never)"]
        scores = "scores_2"
    lines.append(f"weights_0 = Softmax<axis = -1>({scores})")
    weights = "weights_0"
    if masked:
        lines += [
            "keys_axis = Constant<value = int64[1] {-1}>()",
            f"most = ReduceMax<keepdims = 1>({scores}, keys_axis)",
            "sees_none = IsInf<detect_positive = 0>(most)",
            "nothing = Constant<value = float {0}>()",
            "weights_1 = Where(sees_none, nothing, weights_0)",
        ]
        weights = "weights_1"
    return [*lines, f"result = MatMul({weights}, {v})"]


def _causal_lines(scores: str) -> list[str]:
    """`visible` [Nq, Nk]: key j <= query i, or everything where the node is not causal."""
    return [
        f"sizes = Shape({scores})",
        "at_2 = Constant<value = int64 {2}>()",
        "at_3 = Constant<value = int64 {3}>()",
        "rows = Gather(sizes, at_2)",
        "columns = Gather(sizes, at_3)",
        "from_0 = Constant<value = int64 {0}>()",
        "by_1 = Constant<value = int64 {1}>()",
        "row = Range(from_0, rows, by_1)",
        "column = Range(from_0, columns, by_1)",
        "second = Constant<value = int64[1] {1}>()",
        "row_up = Unsqueeze(row, second)",
        "past = GreaterOrEqual(row_up, column)",
        "asked = Constant<value_int : int = @is_causal>()",
        "everything = Equal(asked, from_0)",
        "visible = Or(past, everything)",
    ]


def _repeat_heads(name: str) -> list[str]:
    """[B, Hkv, Nk, D] -> [B, H, Nk, D]: each key head for its group of query heads."""
    return [
        f"{name}_batch = Shape<start = 0, end = 1>({name})",
        f"{name}_heads = Shape<start = 1, end = 2>({name})",
        f"{name}_rest = Shape<start = 2>({name})",
        f"{name}_wanted = Shape<start = 1, end = 2>(q)",
        f"{name}_group = Div({name}_wanted, {name}_heads)",
        f"{name}_axis = Constant<value = int64[1] {{2}}>()",
        f"{name}_apart = Unsqueeze({name}, {name}_axis)",
        f"{name}_five = Concat<axis = 0>({name}_batch, {name}_heads, {name}_group, {name}_rest)",
        f"{name}_many = Expand({name}_apart, {name}_five)",
        f"{name}_four = Concat<axis = 0>({name}_batch, {name}_wanted, {name}_rest)",
        f"{name}_all = Reshape({name}_many, {name}_four)",
    ]


def _standard_attention(
    body: Body, query: str, key: str, value: str, out: str = "out"
) -> list[str]:
    """The `Attention` of opset 23, and zeros for rows that see no key, which it leaves open."""
    attributes = "is_causal : int = @is_causal, scale : float = @scale"
    if "attn_mask" not in body.inputs:
        return [f"{out} = Attention<{attributes}>({query}, {key}, {value})"]
    seen = ["keys_axis = Constant<value = int64[1] {-1}>()"]
    if body.boolean_mask:
        seen += [
            "open = Cast<to = 1>(attn_mask)",
            "most = ReduceMax<keepdims = 1>(open, keys_axis)",
            "nothing_f = Constant<value = float {0}>()",
            "sees_none = Equal(most, nothing_f)",
        ]
    else:
        seen += [
            "open = Cast<to = 1>(attn_mask)",
            "most = ReduceMax<keepdims = 1>(open, keys_axis)",
            "sees_none = IsInf<detect_positive = 0>(most)",
        ]
    return [
        f"attended = Attention<{attributes}>({query}, {key}, {value}, attn_mask)",
        *seen,
        "zero_f = Constant<value = float {0}>()",
        "nothing = CastLike(zero_f, attended)",
        f"{out} = Where(sees_none, nothing, attended)",
    ]


def _window_lines(body: Body) -> list[str]:
    """Roll, pad, cut, attend within windows, join, crop, un-roll; see `elsa_core.window`."""
    image = "qkv"
    lines = _window_sizes()
    if body.shifted:
        lines += _roll(image, "rolled", back=False)
        image = "rolled"
    if body.padded:
        lines += _pad(body, image)
        image = "padded"
    lines += [
        *_cut(body, image, "cut"),
        "heads = Constant<value_int : int = @num_heads>()",
        "heads_1d = Reshape(heads, minus_1)",
        "front = Concat<axis = 0>(zero, windows, tokens)",
        *_split_channels(body),
        *_window_scores(body),
        "weights = Softmax<axis = -1>(scores)",
        "result = MatMul(weights, v)",
        "own_type = CastLike(result, qkv)",
        *_uncut(body),
    ]
    image = "joined"
    if body.padded:
        lines += [f"cropped = Slice({image}, three_zeros, sizes, axes)"]
        image = "cropped"
    if body.shifted:
        return [*lines, *_roll(image, "out", back=True)]
    return [*lines, f"out = Identity({image})"]


def _window_sizes() -> list[str]:
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
    if "pad_qkv" not in body.inputs:
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
    order = [name for c, w in pairs for name in ((w, c) if body.grid else (c, w))]
    perm = [0, 2, 4, 6, 1, 3, 5, 7] if body.grid else [0, 1, 3, 5, 2, 4, 6, 7]
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
    order = "heads_1d, three" if body.head_first else "three, heads_1d"
    perm = [4, 0, 1, 3, 2, 5] if body.head_first else [3, 0, 1, 4, 2, 5]
    return [
        three,
        f"six = Concat<axis = 0>(front, {order}, minus_1)",
        "cut_six = Reshape(cut, six)",
        f"parts = Transpose<perm = {perm}>(cut_six)",
        "q_1, k_1, v_1 = Split<axis = 0, num_outputs = 3>(parts)",
        *(f"{n}_own = Squeeze({n}_1, zero)" for n in "qkv"),
        *(f"{n} = Cast<to = 1>({n}_own)" for n in "qkv"),
    ]


def _window_scores(body: Body) -> list[str]:
    """`scores` [B, windows, heads, tokens, tokens]."""
    q, k = "q", "k"
    lines = []
    if "logit_scale" in body.inputs:
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
    if "logit_scale" in body.inputs:
        lines += [
            "last_axes = Constant<value = int64[2] {1, 2}>()",
            "factor = Unsqueeze(logit_scale, last_axes)",
        ]
    else:
        lines.append("factor = Constant<value_float : float = @scale>()")
    terms = []
    if "bias" in body.inputs:
        lines.append("bias_wide = Cast<to = 1>(bias)")
        terms.append("bias_wide")
    if body.shifted:
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
    perm = [0, 4, 1, 5, 2, 6, 3, 7] if body.grid else [0, 1, 4, 2, 5, 3, 6, 7]
    return [
        "heads_last = Transpose<perm = [0, 1, 3, 2, 4]>(own_type)",
        "apart = Concat<axis = 0>(zero, counts, window, minus_1)",
        "apart_eight = Reshape(heads_last, apart)",
        f"moved = Transpose<perm = {perm}>(apart_eight)",
        "whole = Concat<axis = 0>(zero, padded_sizes, minus_1)",
        "joined = Reshape(moved, whole)",
    ]
