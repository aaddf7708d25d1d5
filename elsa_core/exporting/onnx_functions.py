"""Bodies of elsa's ONNX operators in standard operators: what a runtime without the library runs.

A body is a model-local function. ONNX Runtime before 1.27 knows one function a name, so nodes that
need different bodies get different names: `Attention`, then `Attention_2`. The library knows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elsa_core.exporting.onnx_operator import Body, OnnxOperator

if TYPE_CHECKING:
    import onnx

DOMAIN = "elsa"
VARIANTS_MAX = 4  # names that the library registers for each operator

ATTENTION_OPSET = 23  # the first that has the standard `Attention`


def function(operator: OnnxOperator, body: Body, name: str, opset: int) -> onnx.FunctionProto:
    """The model-local function `elsa::<name>`."""
    import onnx.parser

    parameters = [
        given if given in body.inputs else f"{given}_absent" for given, _ in operator.parameters
    ]
    while parameters[-1].endswith("_absent"):
        parameters.pop()
    attributes = ", ".join(attribute for attribute, _ in operator.attributes)
    text = (
        f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">\n'
        f"{name} <{attributes}> ({', '.join(parameters)}) => (out)\n"
        "{\n" + "\n".join(f"  {line}" for line in operator.lines(body)) + "\n}"
    )
    return onnx.parser.parse_function(text)
