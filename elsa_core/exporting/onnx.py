"""model.onnx: elsa's operators as nodes, with bodies of standard operators for other runtimes; and
model.int8.onnx: the same with INT8 weights and layers, by ONNX Runtime's own quantisation."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elsa_core.base import calls
from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ArgumentError, ExportError
from elsa_core.exporting.export_target import attempt

if TYPE_CHECKING:
    import onnx_ir as ir

MODES = ("custom", "standard", "custom-only")
OPSETS = (18, 23)
# Protocol buffers end at 2 GB; beyond this the weights lie in a file beside the model.
INLINE_BYTES_MAX = 1_900_000_000
EXTERNAL_SUFFIX = ".data"
BATCH = "batch"  # the name of the open dimension
INT8_NOTE = (
    "an approximation: weights of linear layers as 8-bit integers, their inputs rounded to 8 bits "
    "by one scale a batch, so that an image's result depends on the others of its batch"
)


def export_onnx(
    module: nn.Module,
    example_inputs: tuple[Tensor, ...],
    path: str | os.PathLike[str],
    *,
    mode: str = "custom",
    opset: int = 18,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    program: torch.export.ExportedProgram | None = None,
) -> tuple[Path, ...]:
    """Write a patched model as ONNX; gives the files written.

    The batch, the first dimension of all inputs, stays open and is called "batch". Weights above
    2 GB go to `<path>.data` beside `path`. Names default to "input" or "input_0", ..., likewise
    "output". `program` is what torch.export made of the module and these inputs; it is rewritten.

    Args:
        mode: "custom": nodes of the domain `elsa`, each with a function of standard operators, so
            that ONNX Runtime with the library (`ort_library`) runs elsa's kernels and any other
            runtime the function; "standard": no `elsa` domain, and at opset 23 the standard
            `Attention`; "custom-only": nodes alone, and standard operators for what the library has
            no kernel of.
        opset: 18 or 23.

    Raises:
        ArgumentError: the names are wrong.
        ExportError: the model cannot be exported; the line names the module where it is known.
    """
    import onnx
    import onnx_ir as ir

    from elsa_core.exporting import onnx_linear, onnx_operator

    if program is None:
        # A batch of one would be taken for a constant.
        inputs = tuple(torch.cat([t, t]) if t.shape[0] == 1 else t for t in example_inputs)
        batch = torch.export.Dim(BATCH, min=1)
        shapes = tuple({0: batch} for _ in inputs)
        with calls.products(kept=True):
            program = attempt(
                "torch.export",
                module,
                lambda: torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False),
            )
    if onnx_operator.rewrite(program) == 0:
        raise ExportError("the graph calls none of elsa's operators: no patched site was reached")
    try:
        with quiet(), torch.no_grad():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                custom_translation_table=onnx_linear.translations(opset),
                verbose=False,
            )
            assert exported is not None
            model = exported.model
            onnx_operator.finish(model, mode, opset)
    except (ExportError, MemoryError, OSError):
        raise
    except Exception as error:
        raise ExportError(f"translation to ONNX failed: {first_line(error)}") from error
    for kind, values, given in (
        ("input", model.graph.inputs, input_names),
        ("output", model.graph.outputs, output_names),
    ):
        count = len(values)
        names = given or ([kind] if count == 1 else [f"{kind}_{i}" for i in range(count)])
        if len(names) != count or len(set(names)) != count:
            raise ArgumentError(f"{kind}_names must be {count} different names, not {names}")
        for value, name in zip(values, names, strict=True):
            value.name = name
    _name_batch(model)
    path = Path(path)
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    external = path.name + EXTERNAL_SUFFIX if size > INLINE_BYTES_MAX else None
    ir.save(model, path, external_data=external)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise ExportError(f"onnx.checker refuses the model: {first_line(error)}") from error
    return (path,) if external is None else (path, path.parent / external)


def _name_batch(model: ir.Model) -> None:
    import onnx_ir as ir

    first = (model.graph.inputs[0].shape or [None])[0]
    if not isinstance(first, ir.SymbolicDim) or not first.value:
        raise ExportError("the batch is a constant in the exported graph")
    symbol = re.compile(rf"\b{re.escape(first.value)}\b")
    for value in (*model.graph.inputs, *(out for node in model.graph for out in node.outputs)):
        if value.shape is not None:
            sizes = (each if isinstance(each, int) else each.value for each in value.shape)
            value.shape = ir.Shape(
                [symbol.sub(BATCH, each) if isinstance(each, str) else each for each in sizes]
            )


def quantise(source: Path, target: Path) -> None:
    """Write an ONNX model whose linear layers multiply 8-bit integers, from a float32 one.

    Dynamic quantisation of `onnxruntime.quantization`: weights by channel, activations by a scale
    found as the model runs. Both are unsigned: on CPUs without VNNI the products of an unsigned and
    a signed byte saturate.
    """
    import onnx
    from onnx.inliner import inline_selected_functions
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from elsa_core.exporting.onnx_operator import onnx_operators

    try:
        # Beside the source: its weights may lie there in a file of their own.
        with quiet(), tempfile.NamedTemporaryFile(dir=source.parent, suffix=".onnx") as opened:
            # The quantiser sees the bodies of linear layers where they are in the graph.
            model, known = onnx.load(str(source), load_external_data=False), onnx_operators()
            layers = [
                (each.domain, each.name)
                for each in model.functions
                if not known[each.name.partition("_")[0]].kernel
            ]
            onnx.save(inline_selected_functions(model, layers) if layers else model, opened.name)
            quantize_dynamic(
                opened.name,
                target,
                # Attention, LayerNorm and the patch embedding stay as they are: their share of the
                # time is small, or their rounding large.
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                weight_type=QuantType.QUInt8,
                use_external_data_format=source.with_name(f"{source.name}.data").exists(),
            )
    except OSError:
        raise
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot quantise it: {first_line(error)}") from error
    nodes = onnx.load(str(target), load_external_data=False).graph.node
    if not any(node.op_type == "MatMulInteger" for node in nodes):
        raise ExportError("model.int8.onnx: the graph holds no linear layer to quantise")
