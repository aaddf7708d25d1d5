"""What the record of alpha-entmax attention says of `elsa bench attention`, at alpha = 1.5.

Causal calls, training and sparse operands are measured by `benchmarks.entmax`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core import ops
from elsa_core.measuring.timing import Contender
from elsa_core.ops.entmax.api import entmax_attention, explain_entmax_attention
from elsa_core.profiling.bench.cases import Case, square
from elsa_core.profiling.bench.operators import Bench
from elsa_core.profiling.bench.peers import Inputs, of_elsa, too_large

ALPHA: Final = 1.5
_CPU = ((8, 12, 197, 64), (1, 12, 577, 64), (1, 12, 1025, 64), (1, 4, 4096, 64))
_CUDA = tuple((1, 8, 2**exponent, 64) for exponent in range(11, 16))


def _cases(dtypes: tuple[str, ...], shapes: tuple[tuple[int, int, int, int], ...]) -> list[Case]:
    quick = ((8, 12, 197, 64), (1, 8, 4096, 64))
    return [square("entmax", s, dtype=dtype, quick=s in quick) for dtype in dtypes for s in shapes]


def _elsa(case: Case, tensors: Inputs, precision: str, backend: str) -> Contender:
    terms = {"alpha": ALPHA}
    return of_elsa(
        entmax_attention, explain_entmax_attention, tensors, precision, backend, terms=terms
    )


def _peers(case: Case, tensors: Inputs, flex: bool) -> dict[str, Callable[[], Contender] | str]:
    """The packages `entmax` (all scores in memory, 30 halvings) and `adasplash` (CUDA), both of the
    authors of alpha-entmax; softmax by PyTorch, which computes something else."""
    device = tensors.query.device
    softmax = functools.partial(F.scaled_dot_product_attention, *tensors)
    found: dict[str, Callable[[], Contender] | str] = {
        "softmax": lambda: Contender("softmax", softmax, notes={"computes": "softmax"}),
        "entmax": too_large(case, device) or (lambda: _entmax(tensors)),
    }
    if importlib.util.find_spec("entmax") is None:
        found["entmax"] = "the package entmax is not installed"
    if device.type != "cuda":
        return found
    # its second version is causal alone: see `entmax_steps`
    if importlib.util.find_spec("adasplash") is None:
        return found | {"adasplash_v1": "the package adasplash is not installed"}
    return found | {"adasplash_v1": lambda: _adasplash(tensors)}


def _entmax(tensors: Inputs) -> Contender:
    from entmax import entmax_bisect

    query, key, value, mask = tensors
    scale, transposed = query.shape[-1] ** -0.5, key.transpose(-1, -2)

    def call() -> Tensor:
        scores = query @ transposed * scale
        scores = scores if mask is None else scores + mask
        weights: Tensor = entmax_bisect(scores, ALPHA, n_iter=30)
        return weights @ value

    return Contender("entmax", call)


def _adasplash(tensors: Inputs) -> Contender:
    from adasplash import adasplash_v1

    query, key, value, mask = tensors
    if mask is not None:
        raise NotImplementedError("it takes no mask")
    return Contender(
        "adasplash_v1", lambda: adasplash_v1(query, key, value, alpha=ALPHA, is_causal=False)
    )


def _exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """In float64, by the reference of the operator."""
    wide = [t.double() for t in (query, key, value)]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    scale = query.shape[-1] ** -0.5
    call = (*wide, mask, None, ALPHA, False, scale, "strict")
    out: Tensor = ops.ENTMAX_ATTENTION.reference(*call)[0]
    return out


ENTMAX = Bench(
    {
        "cpu": {"entmax": tuple(_cases(("fp32",), _CPU))},
        "cuda": {"entmax": tuple(_cases(("fp32", "fp16", "bf16"), _CUDA))},
    },
    _elsa,
    _peers,
    _exact,
)
