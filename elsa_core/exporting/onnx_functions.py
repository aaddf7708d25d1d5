"""Bodies of elsa's ONNX operators in standard operators: what a runtime without the library runs.

A body is a model-local function. ONNX Runtime before 1.27 knows one function a name, so nodes that
need different bodies get different names: `Attention`, then `Attention_2`. The library knows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elsa_core.exporting.onnx_body import Body
from elsa_core.exporting.onnx_window import window_lines

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


def function(body: Body, name: str, opset: int) -> onnx.FunctionProto:
    """The model-local function `elsa::<name>`."""
    import onnx.parser

    lines = {
        "Attention": _attention_lines,
        "PackedAttention": _packed_lines,
        "WindowAttention": window_lines,
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
