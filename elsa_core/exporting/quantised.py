"""model.int8.onnx: model.onnx with INT8 weights and layers, by ONNX Runtime's own quantisation."""

from __future__ import annotations

import tempfile
from pathlib import Path

from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ExportError
from elsa_core.exporting.onnx_operator import onnx_operators

# Attention, LayerNorm and the patch embedding stay as they are: their share of the time is small,
# or their rounding large.
LAYERS = ("MatMul", "Gemm")
NOTE = (
    "an approximation: weights of linear layers as 8-bit integers, their inputs rounded to 8 bits "
    "by one scale a batch, so that an image's result depends on the others of its batch"
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
                op_types_to_quantize=list(LAYERS),
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
