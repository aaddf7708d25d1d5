"""Which backends are here, and which cases each of them must serve.

A case in which a backend refuses what this table gives it fails: the table, not the backend, says
what is promised.
"""

import os
import zlib

from .cases import CASES, Case

WHOLE = os.environ.get("WHOLE_MATRICES", "0") != "0"

# operator -> backend -> the device that it serves.
_OURS = {"eager": "any", "native": "cpu", "triton": "cuda"}
HAS = {
    "attention": _OURS | {"sdpa": "any", "portable": "cuda"},
    "window_attention": _OURS, "linear": {"eager": "any", "triton": "cuda"},
    "varlen_attention": _OURS, "entmax_attention": _OURS, "entmax_varlen_attention": _OURS,
    "sparsity": _OURS, "dropout": {"eager": "any", "native": "cpu"},
}  # fmt: skip
MODES = ("infer", "train", "infer lse", "train lse")
# What takes longer, of some cases: compiled as one graph, exported, and by `torch.func`.
RARE = ("infer compiled", "train compiled", "infer exported", "train func", "tangent", "twice")
# On a GPU, as a CUDA graph.
GRAPHS = ("infer graph", "train graph")
WITH_LSE = ("attention", "varlen_attention", "dropout")
TWICE = ("attention", "window_attention", "linear", "dropout")
# Of these the machine's processor has some; each needs a process of its own.
INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "neon")


def _on_a_gpu(backend: str, case: Case, mode: str) -> bool:
    """Whether the backend must serve the case on a GPU as far as that is not as on a CPU."""
    operator, precision = case.operator, case.precision
    if operator == "dropout" and (backend == "auto" or "graph" in mode):
        return False  # PyTorch draws for itself; each replay draws anew
    if "graph" in mode and not _captures(backend, case, mode):
        return False
    by_pytorch = backend == "auto" and mode in ("train", "train graph")
    if operator in ("attention", "sparsity") and case.mask == "nan infinity" and by_pytorch:
        return False  # PyTorch adds to a hidden score
    if backend == "sdpa" and (precision != "strict" or ("graph" in mode and case.mask)):
        return False
    if backend != "triton":
        return True
    if operator == "linear":  # it splits float32 into halves for tensor cores
        return case.dtype == "float32" and precision != "ieee"
    if operator in ("entmax_attention", "entmax_varlen_attention", "sparsity"):
        return _has_kernels(case)
    return True


def _has_kernels(case: Case) -> bool:
    """Whether Triton has a kernel of entmax or of sparsity for the case."""
    widest = max(case.dim, case.value_dim or 0)
    fits = widest <= (64 if case.dtype == "float32" else 128)
    return fits and case.precision != "turbo" and case.dtype != "float64"


def _captures(backend: str, case: Case, mode: str) -> bool:
    """Whether a CUDA graph can hold the case: whatever reads sizes on the host cannot be in one."""
    operator = case.operator
    if operator == "sparsity":
        return False
    if not operator.startswith("entmax") and operator != "varlen_attention":
        return True
    if operator == "entmax_attention":  # plain PyTorch looks whether a threshold moved
        empty = 0 in (case.queries, case.keys, *case.batch)
        plain = backend == "eager" or not _has_kernels(case)
        return case.alpha == 1.0 or empty or not plain
    if backend == "eager" or not (operator == "varlen_attention" or _has_kernels(case)):
        return False
    if case.dtype == "float64" or not case.longest:
        return False
    softmax = operator == "varlen_attention" or case.alpha == 1.0
    crossed = case.causal and case.key_lengths is not None  # PyTorch aligns to the other end
    uneven = case.dim % 8 or case.value_dim not in (None, case.dim)
    negative = case.scale is not None and case.scale <= 0.0  # which PyTorch gives NaN
    padded = case.dtype == "float32" or uneven or crossed or negative
    if softmax and mode == "train graph" and padded:
        # such gradients pad, and read lengths; auto pads ahead, where there are tokens
        return backend == ("auto" if sum(case.lengths) else "triton")
    return True


def serves(backend: str, case: Case, mode: str, device: str = "cpu") -> bool:
    """Whether the backend must serve the case."""
    operator, dtype, precision = case.operator, case.dtype, case.precision
    if device == "cuda" and not _on_a_gpu(backend, case, mode):
        return False
    if device == "cpu" and case.name.startswith("many"):  # grids of a GPU end at 65 535
        return False
    if "lse" in mode and operator not in WITH_LSE:
        return False
    if operator == "entmax_attention" and backend == "eager" and "nan" in (case.mask or ""):
        return mode == "infer"  # its gradient multiplies hidden keys by zero
    if operator == "sparsity" and case.sparsity != "exact" and mode.startswith("train"):
        return False
    if mode.endswith(("compiled", "exported")) and backend == "sdpa":
        return False
    if mode in ("train func", "tangent", "twice"):
        if (
            backend not in ("auto", "eager")
            or (mode, backend) == ("twice", "auto")
            or (mode != "tangent" and "nan" in (getattr(case, "mask", None) or ""))  # times zero
            or precision == "turbo"
            or dtype == "bfloat16"
            or "expanded" in case.name  # PyTorch writes into tangents of the operand's strides
        ):
            return False  # by plain PyTorch
        if operator == "sparsity" or (mode == "twice" and operator not in TWICE):
            return False
    if operator == "attention" and case.data == "huge" and case.scale is None:
        # no gradient has a digit of such scores
        return mode.startswith("infer") and (backend, "lse" in mode) != ("sdpa", True)
    if dtype != "float32" and precision != "strict":
        return False
    if backend == "auto":
        return True
    if backend == "eager":
        return precision != "turbo"
    if backend == "sdpa":
        if case.mask == "nan infinity":  # PyTorch adds to a hidden score
            return False
        if case.scale is not None and case.scale <= 0.0:  # which it then scales
            return False
        return precision in ("strict", "ieee") and "lse" not in mode
    if dtype == "float64":
        return False
    if backend == "portable":
        return dtype == "float32" and precision != "turbo"
    return True


def backends(operator: str, device: str) -> list[str]:
    """The names that `backend=` takes on a device, "auto" first."""
    return ["auto", *(n for n, home in HAS[operator].items() if home in ("any", device))]


def taken(case: Case, mode: str, backend: str) -> bool:
    """Whether a row is of the fixed sample: half of all, unless WHOLE_MATRICES is set."""
    name = f"{case.operator} {case} {mode} {backend}"
    return WHOLE or mode in RARE or zlib.crc32(name.encode()) % 2 == 0


def table(operator: str, device: str) -> list[tuple[Case, str, str]]:
    """Every case, mode and backend that must hold on a device."""
    graphs = GRAPHS if device == "cuda" else ()
    one_in = 6 if WHOLE else 36
    return [
        (case, mode, backend)
        for place, case in enumerate(CASES[operator])
        for mode in (
            *MODES,
            *graphs,
            *(m for i, m in enumerate(RARE) if (place + 6 * i) % one_in == 0),
        )
        for backend in backends(operator, device)
        if serves(backend, case, mode, device)
    ]
