"""What can be exported: format x device x dtype, one answer for the refusal and for the docs."""

from __future__ import annotations

from collections.abc import Iterator

from elsa_core.backends.support import Support
from elsa_core.exporting.manifest import FORMATS
from elsa_core.exporting.ort_library import OLDEST_BY_OPSET, OLDEST_ON_GPU

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "float16", "bfloat16")
_RUNTIMES = {
    "torchscript": "Python or C++ with torch from 2.10, and the bundle's library",
    "onnx": "ONNX Runtime from "
    + " or ".join(f"{oldest} (opset {opset})" for opset, oldest in OLDEST_BY_OPSET.items())
    + ", any language; the bundle's library optional",
    "pt2": "Python with the torch that exported it or later, and the bundle's library",
    "aoti": "Python or C++ with the torch that compiled it, and the bundle's library",
    "onnx-int8": "as onnx; an approximation, whose cost is in the bundle's README",
}
_GPU = (
    "Python with torch and elsa's package (Triton kernels); exported with ELSA_CUDA_LIBRARY=1 "
    "or --gpu-archs, {} with torch alone"
)
_ALONE_ON_GPU = {"torchscript": "Python or C++"}
_AOTI_ON_GPU = (
    "Python or C++ with the torch that compiled it, and the bundle's library and plans: exported "
    "with ELSA_CUDA_LIBRARY=1 or --gpu-archs, model.pt2 beside it"
)
_ONNX_ON_GPU = (
    f"ONNX Runtime from {OLDEST_ON_GPU} with its CUDA provider, any language; the bundle's library "
    "and plans"
)


def support(format: str, device: str, dtype: str) -> Support:
    """Whether a format can hold a model of this dtype on this device, and where it runs or why not.

    Args:
        format: one of `FORMATS`.
        device: "cpu" or "cuda".
        dtype: "float32", "float16" or "bfloat16".
    """
    refusal = _refusal(format, device, dtype)
    if refusal:
        return Support(False, refusal)
    if device == "cpu":
        return Support(True, _RUNTIMES[format])
    if format == "onnx":
        return Support(True, _ONNX_ON_GPU)
    if format == "aoti":
        return Support(True, _AOTI_ON_GPU)
    return Support(True, _GPU.format(_ALONE_ON_GPU.get(format, "Python")))


def _refusal(format: str, device: str, dtype: str) -> str:
    if format == "onnx-int8" and device == "cuda":
        return "INT8 is made and verified on the CPU: use --device cpu"
    if format == "onnx-int8" and dtype != "float32":
        return "INT8 is made from float32 weights: leave --dtype out"
    if format == "onnx" and dtype == "bfloat16":
        if device == "cuda":
            return "numpy has no bfloat16 to verify it with: use float32 or float16"
        return "ONNX Runtime's CPU kernels take no bfloat16: use float32 or float16"
    return ""


def rows() -> Iterator[tuple[str, str, str, Support]]:
    """Every combination with its answer, in the order of the docs."""
    for format in FORMATS:
        for device in DEVICES:
            for dtype in DTYPES:
                yield format, device, dtype, support(format, device, dtype)


def table() -> str:
    """The answers as a Markdown table; dtypes that share an answer share a row."""
    lines = ["| format | device | dtype | runs in |", "|---|---|---|---|"]
    groups: dict[tuple[str, str, Support], list[str]] = {}
    for format, device, dtype, answer in rows():
        groups.setdefault((format, device, answer), []).append(dtype)
    for (format, device, answer), dtypes in groups.items():
        where = answer.reason if answer.ok else f"no: {answer.reason}"
        lines.append(f"| {format} | {device} | {', '.join(dtypes)} | {where} |")
    return "\n".join(lines) + "\n"
