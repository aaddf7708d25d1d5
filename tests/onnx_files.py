"""Files of ONNX in ONNX Runtime, and the rule that their outputs are judged by."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ULPS = 2.4e-7  # two roundings, so that a peer that happens to be exact is no trap


def one_node(op_type: str, inputs: list[Any], **attributes: Any) -> bytes:
    """A model of one of elsa's nodes; inputs: ONNX's number of a type, and sizes or None for any;
    None is an input left out."""
    from onnx import helper

    names = [f"input_{i}" if each is not None else "" for i, each in enumerate(inputs)]
    values = [
        helper.make_tensor_value_info(name, *each)
        for name, each in zip(names, inputs, strict=True)
        if each is not None
    ]
    node = helper.make_node(op_type, names, ["out"], domain="elsa", **attributes)
    first = next(each[0] for each in inputs if each is not None)
    out = helper.make_tensor_value_info("out", first, None)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("elsa", 1)]
    graph = helper.make_graph([node], "one", values, [out])
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return made


def session(path: Path, library: str | None = None) -> Any:
    """On the CPU, with the library of elsa's nodes if it is given."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(on: Any, *inputs: Tensor, library: str | None = None) -> list[Tensor]:
    """The outputs of a file or a session."""
    on = session(on, library) if isinstance(on, Path) else on
    names = [given.name for given in on.get_inputs()]
    feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return [torch.from_numpy(out) for out in on.run(None, feeds)]


def no_worse(out: Tensor, peer: Tensor, exact: Tensor) -> None:
    """At most twice as far from float64 as the peer."""
    assert out.shape == exact.shape
    error, allowed = float((out - exact).norm()), 2 * float((peer - exact).norm())
    assert error <= allowed + ULPS * float(exact.norm()), (error, allowed)
