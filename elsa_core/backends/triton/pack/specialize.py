"""From a launch and its tensors to what Triton would compile, and the key of that in a pack.

A key holds all that decides the code: every file that kernels are written in, types, constants, the
alignment of pointers, every option of the compiler, the architecture and Triton's version. Where
settings change what the compiler does, there is no key: see `departs`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsa_core.backends.triton.shared.device import GLUON, gluon_known

KERNELS = Path(__file__).parents[1]
# the first and the last Triton whose JIT is read in their sources, and tested: Gluon's, too
TRITON, known = GLUON, gluon_known
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


@dataclass(frozen=True)
class Job:
    """What Triton compiles for one launch: its source object, the compiler's options and target,
    and the key in a pack.
    """

    kernel: Any
    source: Any
    options: Any
    target: Any
    key: str

    @property
    def name(self) -> str:
        """`module:function` of the kernel, the module below `elsa_core.backends.triton`."""
        module = self.kernel.__module__.removeprefix("elsa_core.backends.triton.")
        return f"{module}:{self.kernel.__qualname__}"

    def compile(self) -> Any:
        """Triton's compiled kernel; no GPU is needed."""
        import triton

        return triton.compile(self.source, target=self.target, options=self.options.__dict__)


class Compiler:
    """Triton's compiler for one architecture, 90 for sm_90, up to the source that it compiles.

    Triton's driver, which takes 20 ms to begin, is not asked.
    """

    def __init__(self, arch: int):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        self.arch = arch
        self.target = GPUTarget("cuda", arch, 32)
        self.backend = make_backend(self.target)
        # by a kernel's identity: its hash is that of its source, which takes long
        self._binders: dict[int, tuple[Any, Any]] = {}

    def job(
        self, kernel: Any, tensors: tuple[Any, ...], tail: dict[str, Any], options: dict[str, Any]
    ) -> Job:
        """As `JITFunction.run` does it; of tensors the dtype and the alignment of the address
        count.

        kernel: a `triton.jit` function; tensors, tail, options: its pointers, its other arguments
        by name, and the compiler's options.
        """
        import triton
        from triton import knobs
        from triton.runtime.jit import create_function_from_signature

        if id(kernel) not in self._binders:
            binder = create_function_from_signature(kernel.signature, kernel.params, self.backend)
            self._binders[id(kernel)] = kernel, binder
        given = {**tail, **options, "debug": kernel.debug or knobs.runtime.debug}
        for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
            if hasattr(knobs.compilation, name):
                given[name] = getattr(knobs.compilation, name)
        bound, specialization, rest = self._binders[id(kernel)][1](*tensors, **given)
        parsed, signature, constants, attributes = kernel._pack_args(
            self.backend, given, bound, specialization, rest
        )
        if kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            from triton.compiler import ASTSource as Source
        source = Source(kernel, signature, constants, attributes)
        parts = [
            triton.__version__, self.arch, sources_digest(), kernel.__module__,
            kernel.__qualname__, list(source.signature.items()),
            sorted((list(path), repr(value)) for path, value in source.constants.items()),
            sorted((list(path), found) for path, found in source.attrs.items()), parsed.hash(),
        ]  # fmt: skip
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return Job(kernel, source, parsed, self.target, key)


@functools.cache
def sources_digest() -> str:
    """SHA-256 of every file that kernels are written in, which takes 5 ms."""
    digest = hashlib.sha256()
    own = Path(__file__).parent
    for path in sorted(KERNELS.rglob("*.py")):
        if path.parent != own:
            content = path.read_bytes()
            name = path.relative_to(KERNELS).as_posix()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


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
