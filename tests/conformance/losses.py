"""Known losses, all but one on a GPU: results with over twice PyTorch's error, and by how much.

Each row is a fault of the product that is open. Its results are judged by the factor measured
(NVIDIA H200, torch 2.11.0, Triton 3.6) with a tenth to spare, others of the same case by twice
PyTorch's error. `math.inf`: the result is NaN. docs/limits.md says these in words.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from .cases import Case


class Loss(NamedTuple):
    """By which backends a case loses: "d value" and so on -> error over PyTorch's. mode: the one
    that loses, where not all do; device: where."""

    backends: tuple[str, ...]
    factors: Mapping[str, float]
    mode: str = ""
    device: str = "cuda"


# The backward computes weights again as exp(score - lse), from scores that the forward has rounded
# otherwise. Large scores keep few digits behind the point, and rows of one dominant key show it.
_OURS, _PACKED, _SPARSE = ("triton", "portable"), ("auto", "triton"), ("eager", "triton")
_DENSE = {
    "data huge": {"d value": 4.2},
    "data large": {"d value": 7.5},
    "data extreme": {"d value": 8.0},
    "data shifted": {"d query": 2.8, "d key": 7.1, "d value": 7.2},
    "data dominant key": {"d value": 13.1},
    "scale 1.7, float32": {"d query": 4.4, "d key": 4.5, "d value": 5.2},
    "scale 1.7, causal, float32": {"d query": 3.5, "d key": 3.8, "d value": 5.6},
}
_BY_CASE: dict[tuple[str, str], Loss] = {
    **{("attention", name): Loss(_OURS, factors) for name, factors in _DENSE.items()},
    **{("sparsity", name): Loss(_SPARSE, factors) for name, factors in _DENSE.items()},
    ("sparsity", "exact, long rows, causal"): Loss(
        _SPARSE, {"d query": 4.1, "d key": 3.7, "d value": 7.0}),
    ("varlen_attention", "data large"): Loss(
        _PACKED, {"d query": 4.1, "d key": 4.2, "d value": 16.4}),
    ("varlen_attention", "data shifted"): Loss(
        _PACKED, {"d query": 5.3, "d key": 4.5, "d value": 5.2}),
    ("entmax_attention", "alpha 1.0"): Loss(("triton",), {"d key": 4.3}),
    ("entmax_attention", "alpha 1.0, causal"): Loss(("triton",), {"d key": 4.6}),
    ("entmax_varlen_attention", "alpha 1.0"): Loss(_PACKED, {"d query": 4.4, "d key": 4.3}),
    # Halves keep 22 bits of each operand: a score of 5e4 is known to 0.02, where PyTorch's weights
    # are one and zeros; and roots of weights next to zero.
    ("entmax_attention", "data extreme"): Loss(_PACKED, {"d value": 23750.0}),
    ("entmax_attention", "alpha 3.0, causal"): Loss(_PACKED, {"out": 9.7, "d value": 8.9}),
    # The entmax gradient multiplies what a hidden key holds by zero.
    ("entmax_attention", "keys hidden that hold NaN"): Loss(_PACKED, {"d query": math.inf}),
    ("entmax_attention", "keys hidden that hold infinity"): Loss(_PACKED, {"d query": math.inf}),
    # Two steps of Newton's method, differentiated beside weights next to zero, whose derivative has
    # no bound above alpha 2.
    ("entmax_attention", "alpha 4.0"): Loss(
        ("auto", "eager"), {"d query": 2670.0, "d key": 3150.0}, "train func", ""),
    # Portable halves overflow.
    ("attention", "scores of 1e30"): Loss(("portable",), {"out": math.inf, "lse": math.inf}),
}  # fmt: skip
LOSSES = (
    *_BY_CASE.items(),
    (("entmax_attention", "alpha 3.0, causal"), Loss(  # as alpha 4.0
        ("auto", "eager"), {"d query": 2.3, "d key": 2.7}, "train func", "")),
)  # fmt: skip


def of_scores(case: Case, mode: str) -> tuple[float, float]:
    """How many roundings of the largest score an output, and a gradient, may be off beside those of
    its own.

    A float32 score is known to one rounding, and a backward that computes weights again as
    exp(score - lse) knows each to eight. The cases of the table are held to a quarter, or have
    their factors above; a random case, in which PyTorch may have no error by chance, has these.
    """
    if not is_random(case) or case.dtype != "float32":
        return 0.25, 0.25
    return 1.0, 8.0 if mode.startswith("train") else 0.25


def is_random(case: Case) -> bool:
    return case.name in ("drawn", "again")


def factors(case: Case, backend: str, mode: str, device: str) -> dict[str, float]:
    """How many times PyTorch's error results may have that may have more than twice it."""
    found: dict[str, float] = {}
    for key, loss in LOSSES:
        there = key == (case.operator, case.name) and backend in loss.backends
        if there and loss.mode in ("", mode) and loss.device in ("", device):
            found |= {name: 1.1 * factor for name, factor in loss.factors.items()}
    return found
