"""Nodes of the domain `elsa` in an exported graph, and their functions."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from elsa_core.errors import ExportError
from elsa_core.exporting import onnx_functions
from elsa_core.exporting.onnx_body import Body
from elsa_core.exporting.onnx_functions import DOMAIN, VARIANTS_MAX

if TYPE_CHECKING:
    import onnx_ir as ir

_OLDEST_IR = 8  # the first with functions, and all that opset 18 needs: old runtimes read no newer
_SCOPES = "pkg.torch.onnx.name_scopes"


def translations() -> dict[Any, Callable[..., Any]]:
    """What torch.onnx makes of the operators of `elsa_onnx`."""
    from onnxscript.values import Op, Opset

    opset = Opset(DOMAIN, 1)
    ops = {name: Op(opset, name, _schema(name)) for name in onnx_functions.OPERATORS}

    def attention(query, key, value, attn_mask, is_causal, scale):  # type: ignore[no-untyped-def]
        return ops["Attention"](
            query, key, value, attn_mask, is_causal=int(is_causal), scale=float(scale)
        )

    def packed(qkv, attn_mask, num_heads, is_causal, scale):  # type: ignore[no-untyped-def]
        return ops["PackedAttention"](
            qkv, attn_mask, num_heads=num_heads, is_causal=int(is_causal), scale=float(scale)
        )

    def window(  # type: ignore[no-untyped-def]
        qkv, bias, pad_qkv, logit_scale, num_heads, window_size, shift_size, scale, mask_value,
        layout, grid,
    ):  # fmt: skip
        return ops["WindowAttention"](
            qkv, bias, pad_qkv, logit_scale, num_heads=num_heads, window_size=list(window_size),
            shift_size=list(shift_size), scale=float(scale), mask_value=float(mask_value),
            layout=layout, grid=int(grid),
        )  # fmt: skip

    return {
        torch.ops.elsa_onnx.attention.default: attention,
        torch.ops.elsa_onnx.packed_attention.default: packed,
        torch.ops.elsa_onnx.window_attention.default: window,
    }


def _schema(name: str) -> Any:
    """The operator's schema in onnx's own registry, which onnxscript asks for."""
    import onnx

    if not onnx.defs.has(name, DOMAIN):
        onnx.defs.register_schema(_new_schema(name))
    return onnx.defs.get_schema(name, 1, DOMAIN)


def _new_schema(name: str) -> Any:
    from onnx.defs import OpSchema

    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    kinds = OpSchema.FormalParameterOption
    inputs = []
    for index, (parameter, required) in enumerate(onnx_functions.parameters_of(name)):
        option = kinds.Single if required else kinds.Optional
        own = "T" if required else f"M{index}"
        inputs.append(OpSchema.FormalParameter(parameter, own, param_option=option))
    free = [
        (p.type_str, [*floats, "tensor(bool)"], "mask or additional operand")
        for p in inputs
        if p.type_str != "T"
    ]
    attributes = [
        OpSchema.Attribute(a, getattr(OpSchema.AttrType, kind), required=False)
        for a, kind in onnx_functions.attributes_of(name)
    ]
    return OpSchema(
        name, DOMAIN, 1,
        inputs=inputs,
        outputs=[OpSchema.FormalParameter("out", "T")],
        type_constraints=[("T", floats, "floating"), *free],
        attributes=attributes,
    )  # fmt: skip


def finish(model: ir.Model, mode: str, opset: int) -> None:
    """Give the nodes of `elsa` their functions, or their places, and every node a readable name.

    Raises:
        ExportError: the nodes need more different bodies than there are names.
    """
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    if mode != "custom-only":
        _add_functions(model, nodes, standard=mode == "standard", opset=opset)
    if mode == "standard":
        _inline(model)
    else:
        model.graph.opset_imports[DOMAIN] = 1
    if opset < onnx_functions.ATTENTION_OPSET:
        model.ir_version = _OLDEST_IR
    _regroup_gelu(model)
    _name_nodes(model)


def _add_functions(model: ir.Model, nodes: list[ir.Node], *, standard: bool, opset: int) -> None:
    """One function a kind of body; in "standard" the leanest, as they are inlined."""
    import onnx_ir as ir

    kinds: dict[Body, Body] = {}  # what must agree -> all that its nodes need
    of_node = []
    for node in nodes:
        body = _body(node, standard and opset >= onnx_functions.ATTENTION_OPSET)
        kind = body if standard else body.kind()
        kinds[kind] = body.joined(kinds.get(kind, body))
        of_node.append(kind)
    names: dict[Body, str] = {}
    for kind, body in kinds.items():
        earlier = sum(other.op_type == kind.op_type for other in names)
        if earlier == VARIANTS_MAX and not standard:
            raise ExportError(
                f"ONNX: the model needs more than {VARIANTS_MAX} kinds of elsa::{kind.op_type}; "
                "use mode 'custom-only' or 'standard'"
            )
        names[kind] = kind.op_type if earlier == 0 else f"{kind.op_type}_{earlier + 1}"
        function = ir.serde.deserialize_function(onnx_functions.function(body, names[kind], opset))
        model.functions[function.identifier()] = function
    for node, kind in zip(nodes, of_node, strict=True):
        node.op_type = names[kind]


def _body(node: ir.Node, standard: bool) -> Body:
    """What the body of a node must do."""
    inputs = onnx_functions.inputs_of(node.op_type)
    given = {name: value for name, value in zip(inputs, node.inputs, strict=False) if value}
    body = Body(node.op_type, tuple(given))
    if node.op_type == "WindowAttention":
        window = node.attributes.get_ints("window_size")
        sizes = _static(given["qkv"])[1:4]
        return replace(
            body,
            shifted=any(node.attributes.get_ints("shift_size")),
            padded=any(not isinstance(n, int) or n % w for n, w in zip(sizes, window, strict=True)),
            head_first=node.attributes.get_string("layout") == "head",
            grid=bool(node.attributes.get_int("grid")),
        )
    mask = given.get("attn_mask")
    grouped = node.op_type == "Attention" and (
        _static(given["query"])[1] != _static(given["key"])[1]
    )
    return replace(
        body,
        boolean_mask=mask is not None and mask.dtype is not None and mask.dtype.name == "BOOL",
        causal=bool(node.attributes.get_int("is_causal")),
        grouped=grouped,
        standard=standard,
    )


def _static(value: ir.Value) -> tuple[Any, ...]:
    if value.shape is None:
        raise ExportError(f"ONNX: the exporter lost the shape of {value.name}")
    return tuple(value.shape)


def _inline(model: ir.Model) -> None:
    from onnx_ir.passes.common import InlinePass

    InlinePass()(model)
    model.graph.opset_imports.pop(DOMAIN, None)


def _regroup_gelu(model: ir.Model) -> None:
    """x * (0.5 * (1 + erf)) -> 0.5 * (x * (1 + erf)): the same number, in the order that ORT fuses.

    Halving is exact, so nothing changes but where it happens (short of subnormal numbers). Opset 20
    has Gelu as one operator; below it, ONNX Runtime runs five nodes where it does not see one.
    """
    for outer in model.graph:
        if outer.op_type != "Mul" or outer.domain:
            continue
        for place, value in enumerate(outer.inputs):
            inner = value.producer() if value is not None else None
            if inner is None or inner.op_type != "Mul" or len(inner.outputs[0].uses()) != 1:
                continue
            half = _index_of_half(inner)
            if half is None or not _adds_erf(inner.inputs[1 - half]):
                continue
            factor, x = inner.inputs[half], outer.inputs[1 - place]
            inner.replace_input_with(half, x)
            outer.replace_input_with(1 - place, factor)
            break


def _index_of_half(node: ir.Node) -> int | None:
    for index, value in enumerate(node.inputs):
        constant = value.const_value if value is not None else None
        if constant is not None and constant.size == 1 and float(constant.numpy().item()) == 0.5:
            return index
    return None


def _adds_erf(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Add":
        return False
    producers = [given.producer() for given in node.inputs if given is not None]
    return any(producer is not None and producer.op_type == "Erf" for producer in producers)


def _name_nodes(model: ir.Model) -> None:
    """Call nodes `blocks.0.attn/PackedAttention`; drop the tracer's notes (local paths)."""
    used: dict[str, int] = {}
    for node in model.graph:
        scopes = node.metadata_props.get(_SCOPES)
        path = _module_path(scopes) if scopes else ""
        name = f"{path}/{node.op_type}" if path else node.op_type
        used[name] = used.get(name, 0) + 1
        node.name = name if used[name] == 1 else f"{name}_{used[name]}"
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def _module_path(scopes: str) -> str:
    """The innermost module of "['', 'blocks', 'blocks.0', 'linear']", whose last is the node."""
    try:
        listed = ast.literal_eval(scopes)
    except (SyntaxError, ValueError):
        return ""
    return str(listed[-2]) if len(listed) > 1 else ""
