"""The custom-op library for ONNX Runtime: the CPU kernels of `csrc/elsa` behind its C ABI.

It holds `elsa::Attention`, `elsa::PackedAttention` and `elsa::WindowAttention`; `elsa::Linear` runs
its body everywhere. It needs neither torch nor Python nor ONNX Runtime's headers, and serves every
ONNX Runtime from 1.17 on. Register it with `SessionOptions.register_custom_ops_library` (Python) or
`RegisterCustomOpsLibrary` (C, C++).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elsa_core.backends import compiler

OLDEST_RUNTIME = "1.17"
# By the opset of a model: ONNX Runtime's CPU has the `Attention` of opset 23 from 1.23 on.
OLDEST_BY_OPSET = {18: OLDEST_RUNTIME, 23: "1.23"}

_RECIPE = compiler.Recipe(
    stem="libelsa_onnxruntime",
    title="ONNX Runtime library",
    folder="onnxruntime",
    units=(("onnxruntime", "library.cpp", ()),),
)


def build(*, force: bool = False, progress: Callable[[str], None] | None = None) -> Path:
    """Compile the library into the user's cache unless it is there already.

    Takes and raises what `elsa_core.backends.compiler.build` does.
    """
    return compiler.build(_RECIPE, force=force, progress=progress)


def library_path() -> Path:
    """Where the library of these sources, compiler and flags is kept, built or not.

    Raises:
        UnavailableError: no compiler and nothing built ahead, or a cache that cannot be read.
    """
    return compiler.library_path(_RECIPE)
