"""From torch.export's graph to one with a single node for each attention, as ONNX will hold it.

torch writes q, k and v as views of the packed projection and the heads back as a view of the
output. In ONNX Runtime each of these would be a copy, so a packed call is recognised by the strides
of its operands and becomes one node from projection to projection.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from elsa_core import operators
from elsa_core.errors import ExportError

_ATTENTION = (operators.ATTENTION.overload, operators.ATTENTION.eager)
_WINDOW = (operators.WINDOW_ATTENTION.overload, operators.WINDOW_ATTENTION.eager)
_LIBRARY = torch.library.Library("elsa_onnx", "DEF")
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


def _define(schema: str, fake: Callable[..., Tensor]) -> None:
    _LIBRARY.define(schema)
    torch.library.register_fake(f"elsa_onnx::{schema.partition('(')[0]}", fake, lib=_LIBRARY)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _packed_attention(
    qkv: Tensor, attn_mask: Tensor | None, num_heads: int, is_causal: bool, scale: float
) -> Tensor:
    return qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))


def _window_attention(qkv: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))


_define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, "
    "float scale) -> Tensor",
    _attention,
)
_define(
    "packed_attention(Tensor qkv, Tensor? attn_mask, int num_heads, bool is_causal, float scale) "
    "-> Tensor",
    _packed_attention,
)
_define(
    "window_attention(Tensor qkv, Tensor? bias, Tensor? pad_qkv, Tensor? logit_scale, "
    "int num_heads, int[] window_size, int[] shift_size, float scale, float mask_value, "
    "str layout, bool grid) -> Tensor",
    _window_attention,
)


def rewrite(program: torch.export.ExportedProgram) -> int:
    """Replace elsa's operators in place by the single-output ones of `elsa_onnx`.

    Returns:
        How many attentions the graph holds.

    Raises:
        ExportError: the graph asks for what the ONNX operators do not give.
    """
    graph = program.graph_module.graph
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _ATTENTION:
            _replace_attention(graph, node)
        elif node.target in _WINDOW:
            _replace_window(graph, node)
        elif node.target == operators.LINEAR.overload:  # ONNX has it
            node.target = torch.ops.aten.linear.default
            continue
        else:
            continue
        count += 1
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return count


def _replace_attention(graph: Graph, node: Node) -> None:
    query, key, value, attn_mask, is_causal, scale = node.args[:6]
    outs = _outputs(node)
    for operand in (query, key, value):
        if _value(operand).dtype == torch.float64:
            raise ExportError("ONNX: float64 attention has no operator; cast the model to float32")
    with graph.inserting_before(node):
        base = _packed_base(query, key, value)
        if base is None:
            out = _call(
                graph, node, torch.ops.elsa_onnx.attention.default,
                (query, key, value, attn_mask, is_causal, scale), outs[0].meta["val"],
            )  # fmt: skip
            _take_over(graph, outs[0], out)
            return
        batch, heads, tokens, head_dim = _value(query).shape
        joined = _value(base).new_empty((batch, tokens, heads * head_dim))
        packed = _call(
            graph, node, torch.ops.elsa_onnx.packed_attention.default,
            (base, attn_mask, heads, is_causal, scale), joined,
        )  # fmt: skip
    for user in list(outs[0].users):
        if _joins_heads(user, joined.shape):
            for last in list(user.users):
                _take_over(graph, last, packed)
    if outs[0].users:
        with graph.inserting_before(node):
            apart = _value(query).transpose(1, 2)
            shape = [_size(graph, packed, 0, batch), tokens, heads, head_dim]
            split = _call(graph, node, torch.ops.aten.view.default, (packed, shape), apart)
            moved = _call(graph, node, torch.ops.aten.transpose.int, (split, 1, 2), _value(outs[0]))
        _take_over(graph, outs[0], moved)


def _replace_window(graph: Graph, node: Node) -> None:
    qkv, bias, bias_index, pad_qkv, logit_scale = node.args[:5]
    with graph.inserting_before(node):
        if bias_index is not None:  # table [L, heads] and index [T, T] -> [heads, T, T]
            table, index = _value(bias), _value(bias_index)
            rows = table.new_empty((*index.shape, table.shape[1]))
            picked = _call(graph, node, torch.ops.aten.index.Tensor, (bias, [bias_index]), rows)
            bias = _call(
                graph, node, torch.ops.aten.permute.default, (picked, [2, 0, 1]),
                rows.permute(2, 0, 1),
            )  # fmt: skip
        if logit_scale is not None and _value(logit_scale).dtype != torch.float32:
            wide = _value(logit_scale).to(torch.float32)
            logit_scale = _call(
                graph, node, torch.ops.aten.to.dtype, (logit_scale, torch.float32), wide
            )
        out = _call(
            graph, node, torch.ops.elsa_onnx.window_attention.default,
            (qkv, bias, pad_qkv, logit_scale, *node.args[5:12]), _value(node),
        )  # fmt: skip
    _take_over(graph, node, out)


def _call(graph: Graph, origin: Node, target: Any, args: tuple[Any, ...], value: Tensor) -> Node:
    """A new node that knows the module and the line of the one it stands for."""
    node = graph.call_function(target, args)
    node.meta = {**origin.meta, "val": value}
    return node


def _take_over(graph: Graph, old: Node, new: Node) -> None:
    """Let the users of `old` read `new`, also where `old` is an output of the program."""
    old.replace_all_uses_with(new)
    if not old.users:
        graph.erase_node(old)


def _outputs(node: Node) -> list[Node]:
    """The getitem of the attention's output, and nothing else: lse is not in the ONNX operator."""
    found = {user.args[1]: user for user in node.users if user.users or user.args[1] == 0}
    if set(found) - {0}:
        raise ExportError("ONNX: the model uses the log-sum-exp, which the ONNX operator has not")
    return [found[0]]


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


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
    whole = _value(base)
    batch, heads, tokens, head_dim = _value(query).shape
    width = heads * head_dim
    if (
        whole.dim() != 3
        or not whole.is_contiguous()
        or not _same(whole.shape, (batch, tokens, 3 * width))
    ):
        return None
    for part, node in enumerate((query, key, value)):
        view = _value(node)
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
            if node.target in _JOINS and not _value(source).is_contiguous():
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
        user.target in _JOINS and _same(_value(user).shape, shape) for user in node.users
    )


def _same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(
        statically_known_true(a == b) for a, b in zip(left, right, strict=True)
    )
