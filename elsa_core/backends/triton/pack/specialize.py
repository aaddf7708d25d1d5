"""From a launch and its tensors to what Triton would compile, and the key of that in a pack.

A key holds all that decides the code: the kernel's source with everything it calls (`sources`),
types, constants, the alignment of pointers, every option of the compiler, the architecture and
Triton's version. Where settings change what the compiler does, there is no key: see `departs`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from elsa_core.backends.triton.shared.device import triton_version

# the first and the last Triton whose JIT is read in their sources, and tested
TRITON = ((3, 6), (3, 9))
# Variables that begin so change code or Triton's stages, except for these.
_PREFIXES = ("TRITON_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "DISABLE_LLVM", "DISABLE_PTXAS",
             "USE_IR_LOC")  # fmt: skip
_HARMLESS = frozenset(
    (
        *("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER", "TRITON_STORE_BINARY_ONLY"),
        *("TRITON_LIBCUDA_PATH", "TRITON_PRINT_AUTOTUNING", "TRITON_CACHE_AUTOTUNING"),
        *("TRITON_BUILD_DIR", "LLVM_SYMBOLIZER_PATH"),
        *("TRITON_CUOBJDUMP_PATH", "TRITON_NVDISASM_PATH", "TRITON_DUMP_DIR"),
        *("TRITON_OVERRIDE_DIR", "TRITON_FRONT_END_DEBUGGING", "TRITON_DEFAULT_FP_FUSION"),
    )
)
_KNOBS = {
    "compilation": ("override", "dump_ir", "always_compile", "use_ir_loc", "enable_asan",
                    "instrumentation_mode", "fpsan_homomorphic_casts", "listener",
                    "disable_line_info", "dump_ir_extract_di_local_variables"),
    "runtime": ("debug", "override_arch", "jit_cache_hook", "jit_post_compile_hook",
                "add_stages_inspection_hook"),
    "language": ("fp32_default", "force_disable_fp_fusion"),
    "nvidia": ("disable_ptxas_opt", "ptxas_options", "mock_ptx_version", "libdevice_path"),
}  # fmt: skip


class Specialized(NamedTuple):
    """What Triton compiles for one launch: its source object, and the compiler's options."""

    source: Any
    options: Any


def known() -> bool:
    """Whether packs are made and used with the Triton that is installed."""
    return TRITON[0] <= triton_version() <= TRITON[1]


def departs(environ: Mapping[str, str] = os.environ) -> str:
    """Which setting makes Triton compile otherwise than a pack's build; empty where none does."""
    import triton
    from triton import knobs

    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        return "a Triton without a ptxas of its own"
    for name, value in environ.items():
        if name.startswith(_PREFIXES) and name not in _HARMLESS and value not in ("", "0"):
            return name
    for group, names in _KNOBS.items():
        for name in names:
            if getattr(getattr(knobs, group, None), name, None):
                return f"triton.knobs.{group}.{name}"
    return ""


def binder_of(kernel: Any, backend: Any) -> Any:
    """What Triton's JIT sorts a call's arguments with."""
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, backend)


def specialize(
    kernel: Any, tensors: tuple[Any, ...], tail: dict[str, Any], options: dict[str, Any],
    backend: Any, binder: Any,
) -> Specialized:  # fmt: skip
    """As `JITFunction.run` does it; of tensors the dtype and the alignment of the address count."""
    from triton import knobs

    given = {**tail, **options, "debug": kernel.debug or knobs.runtime.debug}
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
        if hasattr(knobs.compilation, name):
            given[name] = getattr(knobs.compilation, name)
    bound, specialization, rest = binder(*tensors, **given)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, given, bound, specialization, rest
    )
    return Specialized(_source_class(kernel)(kernel, signature, constants, attributes), parsed)


def _source_class(kernel: Any) -> Any:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def name_of(kernel: Any) -> str:
    """`module:function` of a kernel, the module below `elsa_core.backends.triton`."""
    module = kernel.__module__.removeprefix("elsa_core.backends.triton.")
    return f"{module}:{kernel.__qualname__}"


def facts_of(kernel: Any, special: Specialized) -> dict[str, Any]:
    """What an index tells of a kernel beside its key: for people, and to find why a call misses."""
    source = special.source
    names = kernel.arg_names
    aligned = [names[path[0]] for path, found in source.attrs.items() if found]
    constants = {names[path[0]]: value for path, value in source.constants.items()}
    chosen = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
    return {
        "name": name_of(kernel),
        "constants": constants,
        "aligned": aligned,
        "options": {name: getattr(special.options, name, None) for name in chosen},
    }


def key_of(kernel: Any, special: Specialized, source_key: str, arch: int) -> str:
    """The key of a kernel: 64 hexadecimal digits. source_key: see `sources`."""
    import triton

    source = special.source
    parts = [
        triton.__version__, arch, name_of(kernel), source_key,
        list(source.signature.items()),
        sorted((list(path), repr(value)) for path, value in source.constants.items()),
        sorted((list(path), found) for path, found in source.attrs.items()),
        special.options.hash(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
