"""Which backends are here, and which cases each of them must serve.

A case in which a backend refuses what this table gives it fails: the table, not the backend, says
what is promised.
"""

from __future__ import annotations

from .cases import CASES, Case

# What calls a case's own backend by name: operator -> backend -> device.
HAS = {
    "attention": {"eager": "any", "native": "cpu", "sdpa": "any", "triton": "cuda",
                  "portable": "cuda"},
}  # fmt: skip
MODES = ("infer", "train", "infer lse", "train lse")
# Of these the machine's processor has some; each needs a process of its own.
INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "neon")


def serves(backend: str, case: Case, mode: str) -> bool:
    """Whether the backend must serve the case."""
    operator, dtype, precision = case.operator, case.dtype, case.precision
    if "lse" in mode and operator not in ("attention", "varlen_attention"):
        return False
    if dtype != "float32" and precision != "strict":
        return False
    if case.causal and case.scale in (0.0, -0.3) and backend in ("auto", "sdpa"):
        return False  # until PyTorch's kernels, which give NaN, are not asked
    if backend == "auto":
        return True
    if backend == "eager":
        return precision != "turbo"
    if backend == "sdpa":
        if case.mask == "nan infinity":  # PyTorch adds to a hidden score
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


def table(
    operator: str, device: str, modes: tuple[str, ...] = MODES
) -> list[tuple[Case, str, str]]:
    """Every case, mode and backend that must hold on a device."""
    return [
        (case, mode, backend)
        for case in CASES[operator]
        for mode in MODES
        for backend in backends(operator, device)
        if serves(backend, case, mode)
    ]
