"""The custom-op library for ONNX Runtime: the CPU kernels of `csrc/elsa` behind its C ABI.

It holds `elsa::Attention`, `elsa::PackedAttention` and `elsa::WindowAttention`; `elsa::Linear` runs
its body everywhere. It needs neither torch nor Python nor ONNX Runtime's headers, and serves every
ONNX Runtime from 1.17 on. Register it with `SessionOptions.register_custom_ops_library` (Python) or
`RegisterCustomOpsLibrary` (C, C++).

The library of a bundle for GPUs serves the CUDA provider too, from 1.18 on, by the file of plans
beside it (`gpu_library.PLANS`). It is built without a CUDA toolkit, and runs where no driver is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elsa_core.backends import compiler

OLDEST_RUNTIME = "1.17"
OLDEST_ON_GPU = "1.18"
# By the opset of a model: ONNX Runtime's CPU has the `Attention` of opset 23 from 1.23 on.
OLDEST_BY_OPSET = {18: OLDEST_RUNTIME, 23: "1.23"}

_RECIPE = compiler.Recipe(
    stem="libelsa_onnxruntime",
    title="ONNX Runtime library",
    folder="onnxruntime",
    units=(("onnxruntime", "library.cpp", ()),),
)
_ON_GPU = compiler.Recipe(
    stem="libelsa_onnxruntime-cuda",
    title="ONNX Runtime library for GPUs",
    folder="onnxruntime",
    units=(
        ("onnxruntime", "library.cpp", ("-DELSA_GPU",)),
        *((f"cuda-{name}", f"../cuda/{name}.cpp", ())
          for name in ("driver", "plan", "planfile")),
    ),
    link_flags=() if sys.platform == "darwin" else ("-ldl",),
)  # fmt: skip


def build(*, on_gpu: bool = False) -> Path:
    """Compile the library into the user's cache unless it is there already; `on_gpu` that of a
    bundle for GPUs."""
    return compiler.build(_ON_GPU if on_gpu else _RECIPE)
