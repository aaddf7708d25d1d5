"""`elsa::attention` in ONNX: the nodes `Attention` and `PackedAttention`, and their bodies.

torch writes q, k and v as views of the packed projection and the heads back as a view of the
output. In ONNX Runtime each of these would be a copy, so a packed call is recognised by the strides
of its operands and becomes one node from projection to projection.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from elsa_core.errors import ExportError
from elsa_core.exporting.onnx_operator import (
    Body,
    OnnxExport,
    OnnxOperator,
    call,
    static_shape,
    take_over,
    value_of,
)

if TYPE_CHECKING:
    import onnx_ir as ir

# Operators whose result shares its input's memory whenever strides allow it.
_VIEWS = {
    torch.ops.aten.alias.default,
    torch.ops.aten.chunk.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.permute.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unbind.int,
    torch.ops.aten.unflatten.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
}
_JOINS = {
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.default,
}


def _replace_attention(graph: Graph, node: Node) -> None:
    query, key, value, attn_mask, is_causal, scale = node.args[:6]
    outs = _outputs(node)
    for operand in (query, key, value):
        if value_of(operand).dtype == torch.float64:
            raise ExportError("ONNX: float64 attention has no operator; cast the model to float32")
    with graph.inserting_before(node):
        base = _packed_base(query, key, value)
        if base is None:
            out = call(
                graph, node, ATTENTION.overload,
                (query, key, value, attn_mask, is_causal, scale), outs[0].meta["val"],
            )  # fmt: skip
            take_over(graph, outs[0], out)
            return
        batch, heads, tokens, head_dim = value_of(query).shape
        joined = value_of(base).new_empty((batch, tokens, heads * head_dim))
        packed = call(
            graph, node, PACKED.overload,
            (base, attn_mask, heads, is_causal, scale), joined,
        )  # fmt: skip
    for user in list(outs[0].users):
        if _joins_heads(user, joined.shape):
            for last in list(user.users):
                take_over(graph, last, packed)
    if outs[0].users:
        with graph.inserting_before(node):
            apart = value_of(query).transpose(1, 2)
            shape = [_size(graph, packed, 0, batch), tokens, heads, head_dim]
            split = call(graph, node, torch.ops.aten.view.default, (packed, shape), apart)
            moved = call(
                graph, node, torch.ops.aten.transpose.int, (split, 1, 2), value_of(outs[0])
            )
        take_over(graph, outs[0], moved)


def _outputs(node: Node) -> list[Node]:
    """The getitem of the attention's output, and nothing else: lse is not in the ONNX operator."""
    found = {user.args[1]: user for user in node.users if user.users or user.args[1] == 0}
    if set(found) - {0}:
        raise ExportError("ONNX: the model uses the log-sum-exp, which the ONNX operator has not")
    return [found[0]]


def _size(graph: Graph, node: Node, dim: int, size: Any) -> Any:
    """A size as the graph writes it: a number, or a node that asks the tensor."""
    if isinstance(size, int):
        return size
    asked = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    asked.meta = {"val": size}
    return asked


def _packed_base(query: Any, key: Any, value: Any) -> Node | None:
    """The dense [B, N, 3 * H * D] of which query, key and value are the three parts, if any."""
    base, *others = (_base(node) for node in (query, key, value))
    if base is None or any(other is not base for other in others):
        return None
    whole = value_of(base)
    batch, heads, tokens, head_dim = value_of(query).shape
    width = heads * head_dim
    if (
        whole.dim() != 3
        or not whole.is_contiguous()
        or not _same(whole.shape, (batch, tokens, 3 * width))
    ):
        return None
    for part, node in enumerate((query, key, value)):
        view = value_of(node)
        wanted = (tokens * 3 * width, head_dim, 3 * width, 1)
        offset = view.storage_offset() - whole.storage_offset()
        if not _same(view.shape, (batch, heads, tokens, head_dim)):
            return None
        if not _same(view.stride(), wanted) or not _same((offset,), (part * width,)):
            return None
    return base


def _base(node: Node) -> Node | None:
    """Walk up through views to the tensor that owns the memory."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        elif node.target in _VIEWS:
            source = node.args[0]
            if node.target in _JOINS and not value_of(source).is_contiguous():
                return None  # may copy
            node = source  # type: ignore[assignment]
        else:
            break
    return node


def _joins_heads(node: Node, shape: Any) -> bool:
    """Whether a node is `transpose(1, 2)` and all its users join the heads to [B, N, H * D]."""
    if node.target is not torch.ops.aten.transpose.int or tuple(node.args[1:]) not in (
        (1, 2),
        (2, 1),
    ):
        return False
    return bool(node.users) and all(
        user.target in _JOINS and _same(value_of(user).shape, shape) for user in node.users
    )


def _same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(
        statically_known_true(a == b) for a, b in zip(left, right, strict=True)
    )


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _packed_fake(
    qkv: Tensor, attn_mask: Tensor | None, num_heads: int, is_causal: bool, scale: float
) -> Tensor:
    return qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))


def _needs(node: ir.Node, given: dict[str, ir.Value], newest: bool) -> tuple[set[str], set[str]]:
    mask = given.get("attn_mask")
    traits = {"standard"} if newest else set()
    if mask is not None and mask.dtype is not None and mask.dtype.name == "BOOL":
        traits.add("boolean_mask")
    more = {"causal"} if node.attributes.get_int("is_causal") else set()
    if "query" in given and static_shape(given["query"])[1] != static_shape(given["key"])[1]:
        more.add("grouped")
    return traits, more


def _attention_lines(body: Body) -> list[str]:
    if "standard" in body:
        return _standard_attention(body, "query", "key", "value")
    lines = ["q = Cast<to = 1>(query)", "k = Cast<to = 1>(key)", "v = Cast<to = 1>(value)"]
    if "grouped" in body:
        lines += _repeat_heads("k") + _repeat_heads("v")
    key, value = ("k_all", "v_all") if "grouped" in body else ("k", "v")
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
    if "standard" in body:
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
    masked = "attn_mask" in body
    if masked or "causal" in body:
        lines.append("never = Constant<value = float {-inf}>()")
    if masked and "boolean_mask" in body:
        lines.append(f"scores_1 = Where(attn_mask, {scores}, never)")
        scores = "scores_1"
    elif masked:
        lines += ["mask = Cast<to = 1>(attn_mask)", f"scores_1 = Add({scores}, mask)"]
        scores = "scores_1"
    if "causal" in body:
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
    if "attn_mask" not in body:
        return [f"{out} = Attention<{attributes}>({query}, {key}, {value})"]
    seen = ["keys_axis = Constant<value = int64[1] {-1}>()"]
    if "boolean_mask" in body:
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


ATTENTION = OnnxOperator(
    name="Attention",
    call="attention",
    inputs=("query", "key", "value", "attn_mask?"),
    attributes=(("is_causal", "bool"), ("scale", "float")),
    fake=_fake,
    lines=_attention_lines,
    needs=_needs,
)
PACKED = OnnxOperator(
    name="PackedAttention",
    call="packed_attention",
    inputs=("qkv", "attn_mask?"),
    attributes=(("num_heads", "int"), ("is_causal", "bool"), ("scale", "float")),
    fake=_packed_fake,
    lines=_packed_lines,
    needs=_needs,
)
EXPORT = OnnxExport(operators=(ATTENTION, PACKED), rewrite=_replace_attention)
