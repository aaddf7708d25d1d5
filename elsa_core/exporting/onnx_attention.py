"""`elsa::attention` in ONNX: the nodes `Attention` and `PackedAttention`, and their bodies.

torch writes q, k and v as views of the packed projection and the heads back as a view of the
output. In ONNX Runtime each of these would be a copy, so a packed call is recognised by the strides
of its operands and becomes one node from projection to projection.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from elsa_core.errors import ExportError
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

# Operators whose result shares its input's memory whenever strides allow it.
_JOINS = {"flatten", "reshape", "view"}
_VIEWS = _JOINS | {
    "alias", "chunk", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "transpose", "unbind", "unflatten", "unsqueeze",
}  # fmt: skip


def _replace_attention(graph: Graph, node: Node) -> None:
    given: Any = node.args
    query, key, value, attn_mask, is_causal, scale = given[:6]
    # The getitems that are used: the output alone, as no lse is in the ONNX operator.
    outs = {user.args[1]: user for user in node.users if user.users or user.args[1] == 0}
    if set(outs) - {0}:
        raise ExportError("ONNX: the model uses the log-sum-exp, which the ONNX operator has not")
    out = outs[0]
    for operand in (query, key, value):
        if operand.meta["val"].dtype == torch.float64:
            raise ExportError("ONNX: float64 attention has no operator; cast the model to float32")
    with graph.inserting_before(node):
        base = _packed_base(query, key, value)
        if base is None:
            operands, terms = (query, key, value, attn_mask), (is_causal, scale)
            made = ATTENTION.call(graph, node, operands, terms, out.meta["val"])
            out.replace_all_uses_with(made)
            return
        batch, heads, tokens, head_dim = query.meta["val"].shape
        joined = base.meta["val"].new_empty((batch, tokens, heads * head_dim))
        packed = PACKED.call(graph, node, (base, attn_mask), (heads, is_causal, scale), joined)
    for user in list(out.users):
        # `transpose(1, 2)`, all of whose users join the heads to [B, N, H * D]
        turned = user.target is torch.ops.aten.transpose.int and set(user.args[1:]) == {1, 2}
        if (
            turned
            and user.users
            and all(
                getattr(last.target, "_opname", "") in _JOINS
                and statically_known_true(sym_eq(last.meta["val"].shape, joined.shape))
                for last in user.users
            )
        ):
            for last in list(user.users):
                last.replace_all_uses_with(packed)
    if out.users:
        with graph.inserting_before(node):
            rows: Any = batch
            if not isinstance(batch, int):  # a node asks the tensor
                rows = graph.call_function(torch.ops.aten.sym_size.int, (packed, 0))
                rows.meta = {"val": batch}
            apart, shape = query.meta["val"].transpose(1, 2), [rows, tokens, heads, head_dim]
            split = call(graph, node, torch.ops.aten.view.default, (packed, shape), apart)
            turn = torch.ops.aten.transpose.int
            back = call(graph, node, turn, (split, 1, 2), out.meta["val"])
            out.replace_all_uses_with(back)


def _packed_base(query: Any, key: Any, value: Any) -> Any:
    """The dense [B, N, 3 * H * D] of which query, key and value are the three parts, if any."""
    bases: set[Any] = set()
    for part in (query, key, value):
        base = part
        while (
            name := getattr(base.target, "_opname", "")
        ) in _VIEWS or base.target is operator.getitem:
            if name in _JOINS and not base.args[0].meta["val"].is_contiguous():
                return None  # may copy
            base = base.args[0]
        bases.add(base)
    if len(bases) > 1:
        return None
    base = bases.pop()
    whole = base.meta["val"]
    batch, heads, tokens, head_dim = query.meta["val"].shape
    width = heads * head_dim
    known = sym_eq(whole.shape, (batch, tokens, 3 * width))
    if not whole.is_contiguous() or not statically_known_true(known):
        return None
    for index, node in enumerate((query, key, value)):
        view = node.meta["val"]
        wanted = (tokens * 3 * width, head_dim, 3 * width, 1)
        offset = view.storage_offset() - whole.storage_offset()
        found = (*view.shape, *view.stride(), offset)
        places = (batch, heads, tokens, head_dim, *wanted, index * width)
        if view.dtype != whole.dtype or not statically_known_true(sym_eq(found, places)):
            return None
    return base


def _needs(node: ir.Node, given: dict[str, ir.Value], newest: bool) -> tuple[set[str], set[str]]:
    mask = given.get("attn_mask")
    traits = {"standard"} if newest else set()
    if mask is not None and mask.dtype is not None and mask.dtype.name == "BOOL":
        traits.add("boolean_mask")
    more = {"causal"} if node.attributes.get_int("is_causal") else set()
    if "query" in given and static_shape(given["query"])[1] != static_shape(given["key"])[1]:
        more.add("grouped")
    return traits, more


def _packed_body(op: Writer, qkv: Value, mask: Value) -> Value:
    """[B, N, 3 * H * D] -> [3, B, H, N, D] and back to [B, N, H * D]."""
    heads = op.Reshape(op.attribute("num_heads"), [1])
    split = op.Reshape(qkv, op.Concat([0, 0, 3], heads, [-1], axis=0))
    parts = op.Split(op.Transpose(split, perm=[2, 0, 3, 1, 4]), axis=0, num_outputs=3, outputs=3)
    q, k, v = (op.Squeeze(part, [0]) for part in parts)
    out = _attention_body(op, q, k, v, mask)
    return op.Reshape(op.Transpose(out, perm=[0, 2, 1, 3]), [0, 0, -1])


def _attention_body(op: Writer, query: Value, key: Value, value: Value, mask: Value) -> Value:
    """softmax(q k^T * scale + mask) v in float32; a row that sees no key gives zeros.

    The `Attention` of opset 23 leaves such rows open.
    """
    if "standard" in op.traits:
        given = [query, key, value, *([mask] if mask else [])]
        out = op.Attention(*given, is_causal="@is_causal", scale="@scale")
        if mask is None:
            return out
        most = op.ReduceMax(op.Cast(mask, to=1), [-1], keepdims=1)
        boolean = "boolean_mask" in op.traits
        none = op.Equal(most, 0.0) if boolean else op.IsInf(most, detect_positive=0)
        return op.Where(none, op.CastLike(0.0, out), out)
    q, k, v = (op.Cast(each, to=1) for each in (query, key, value))
    if "grouped" in op.traits:  # [B, Hkv, Nk, D] -> [B, H, Nk, D]: each for its query heads
        own, wanted = [k, v], op.Shape(q, start=1, end=2)
        for i, x in enumerate(own):
            batch, heads = op.Shape(x, end=1), op.Shape(x, start=1, end=2)
            rest = op.Shape(x, start=2)
            many = op.Concat(batch, heads, op.Div(wanted, heads), rest, axis=0)
            whole = op.Concat(batch, wanted, rest, axis=0)
            own[i] = op.Reshape(op.Expand(op.Unsqueeze(x, [2]), many), whole)
        k, v = own
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), op.attribute("scale"))
    if mask and "boolean_mask" in op.traits:
        scores = op.Where(mask, scores, -math.inf)
    elif mask:
        scores = op.Add(scores, op.Cast(mask, to=1))
    if "causal" in op.traits:
        # [Nq, Nk]: key j <= query i, or everything where the node is not causal
        sizes = op.Shape(scores)
        row, column = (op.Range(0, op.Gather(sizes, axis), 1) for axis in (2, 3))
        past = op.GreaterOrEqual(op.Unsqueeze(row, [1]), column)
        visible = op.Or(past, op.Equal(op.attribute("is_causal"), 0))
        scores = op.Where(visible, scores, -math.inf)
    weights = op.Softmax(scores, axis=-1)
    if mask:
        none = op.IsInf(op.ReduceMax(scores, [-1], keepdims=1), detect_positive=0)
        weights = op.Where(none, 0.0, weights)
    return op.CastLike(op.MatMul(weights, v), query)


_OPTIONS = {"is_causal": "INT", "scale": "FLOAT"}
ATTENTION = OnnxOperator(
    name="Attention",
    inputs=("query", "key", "value", "attn_mask"),
    attributes=_OPTIONS,
    write=_attention_body,
    needs=_needs,
)
PACKED = OnnxOperator(
    name="PackedAttention",
    inputs=("qkv", "attn_mask"),
    attributes={"num_heads": "INT", **_OPTIONS},
    write=_packed_body,
    needs=_needs,
)
EXPORT = OnnxExport(operators=(ATTENTION, PACKED), rewrite=_replace_attention)
