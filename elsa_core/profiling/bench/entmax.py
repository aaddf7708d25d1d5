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
from elsa_core.profiling.bench.cases import ENTMAX_TABLE, Case, Inputs, square
from elsa_core.profiling.bench.peers import Bench, of_elsa, too_large

ALPHA: Final = 1.5
_CPU = ((8, 12, 197, 64), (1, 12, 577, 64), (1, 12, 1025, 64), (1, 4, 4096, 64))
_CUDA = tuple((1, 8, 2**exponent, 64) for exponent in range(11, 16))
_QUICK = ((8, 12, 197, 64), (1, 8, 4096, 64))


def _peers(case: Case, tensors: Inputs, flex: bool) -> dict[str, Callable[[], Contender] | str]:
    """The packages `entmax` (all scores in memory, 30 halvings) and `adasplash` (CUDA), both of the
    authors of alpha-entmax; softmax by PyTorch, which computes something else."""
    device = tensors.query.device

    attends: dict[str, Callable[..., Tensor]] = {
        "softmax": F.scaled_dot_product_attention, "entmax": by_entmax, "adasplash_v1": by_adasplash
    }  # fmt: skip
    made = {
        name: functools.partial(Contender, name, functools.partial(attend, *tensors))
        for name, attend in attends.items()
    }
    found: dict[str, Callable[[], Contender] | str] = {
        "softmax": functools.partial(made["softmax"], notes={"computes": "softmax"}),
        "entmax": missing("entmax") or too_large(case, device) or made["entmax"],
    }
    if device.type == "cuda":
        found["adasplash_v1"] = missing("adasplash") or made["adasplash_v1"]
    return found


def missing(package: str) -> str:
    """Why a package takes no part: it is not installed."""
    found = importlib.util.find_spec(package) is not None
    return "" if found else f"the package {package} is not installed"


def by_entmax(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """By the authors' package `entmax`: all scores in memory, 30 halvings."""
    from entmax import entmax_bisect

    scores = query @ key.mT * query.shape[-1] ** -0.5
    if causal:
        hidden = ~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min / 4)
    scores = scores if mask is None else scores + mask
    weights: Tensor = entmax_bisect(scores, ALPHA, n_iter=30)
    return weights @ value


def by_adasplash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """By the authors' package `adasplash`, in its first version: the second is causal alone."""
    from adasplash import adasplash_v1

    if mask is not None:
        raise NotImplementedError("it takes no mask")
    out: Tensor = adasplash_v1(query, key, value, alpha=ALPHA, is_causal=causal)
    return out


def _exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    wide = [t.double() for t in (query, key, value)]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    scale = query.shape[-1] ** -0.5
    call = (*wide, mask, None, ALPHA, False, scale, "strict")
    out: Tensor = ops.ENTMAX_ATTENTION.reference(*call)[0]
    return out


ENTMAX = Bench(
    {
        device: {
            ENTMAX_TABLE: tuple(
                square(ENTMAX_TABLE, shape, dtype=dtype, quick=shape in _QUICK)
                for dtype in dtypes
                for shape in shapes
            )
        }
        for device, dtypes, shapes in (
            ("cpu", ("fp32",), _CPU), ("cuda", ("fp32", "fp16", "bf16"), _CUDA)
        )
    },
    lambda case, tensors, precision, backend: of_elsa(
        entmax_attention, explain_entmax_attention, tensors, precision, backend,
        terms={"alpha": ALPHA},
    ),
    _peers,
    _exact,
)  # fmt: skip
