"""The cases of packed sequences: sequences of even lengths up to the longest, so that a padded
batch is half padding."""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core import reference
from elsa_core.base import packing
from elsa_core.measuring.timing import Contender
from elsa_core.ops.attention.api import attention
from elsa_core.ops.varlen.api import explain_varlen_attention, varlen_attention
from elsa_core.profiling.bench.cases import VARLEN_TABLE, Case, Inputs, lengths_of, square
from elsa_core.profiling.bench.peers import Bench, of_elsa

_SHAPES: Final = ((16, 12, 576, 64), (8, 12, 1024, 64), (16, 3, 197, 64), (4, 12, 2048, 64))
_CUDA_SHAPES: Final = ((16, 16, 4096, 64), (32, 12, 1024, 64))


Packed = tuple[tuple[Any, ...], list[int], Tensor, Callable[[Any], Tensor]]


def _packed(case: Case, tensors: Inputs) -> Packed:
    """Operands [T, H, D], where sequences begin and end as numbers and as a tensor, and what brings
    an output [T, H, D] to [B, H, N, D], with zeros at padded places."""
    ends = [0, *accumulate(lengths_of(case.batch, case.queries))]
    starts = torch.tensor(ends, dtype=torch.int32, device=tensors.query.device)
    operands = (packing.packed(t.transpose(1, 2), starts, ends[-1]) for t in tensors[:3])
    return (
        tuple(operands), ends, starts,
        lambda returned: packing.padded(returned, starts, case.queries).transpose(1, 2),
    )  # fmt: skip


def _peers(case: Case, tensors: Inputs, flex: bool) -> dict[str, Callable[[], Contender] | str]:
    operands, ends, starts, read = _packed(case, tensors)
    parts = [[t[a:b].transpose(0, 1).unsqueeze(0) for t in operands] for a, b in pairwise(ends)]
    found: dict[str, Callable[[], Contender] | str] = {}
    there = packing.inside(starts, case.queries)
    zeroed: Any = operator.methodcaller("masked_fill", ~there[:, None, :, None], 0)
    padded: dict[str, Callable[..., Any]] = {
        "padded-sdpa": F.scaled_dot_product_attention,
        "padded-elsa": attention,
    }
    for name, attend in padded.items():
        call = functools.partial(attend, *tensors[:3], there[:, None, None, :])
        found[name] = functools.partial(Contender, name, call, read=zeroed)
    found["each-sdpa"] = functools.partial(
        Contender, "each-sdpa", read=read,
        call=lambda: torch.cat([
            F.scaled_dot_product_attention(*each).squeeze(0).transpose(0, 1) for each in parts
        ]),
    )  # fmt: skip
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        found["varlen-attn"] = "this torch has none"
    elif tensors.query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        sizes: list[Any] = [starts, starts, case.queries, case.queries]
        call = functools.partial(varlen_attn, *operands, *sizes)
        found["varlen-attn"] = functools.partial(Contender, "varlen-attn", call, read=read)
    return found


def _exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The first sequence is the longest: a part of it alone needs no lengths."""
    batch, _, longest, _ = key.shape
    lengths = torch.tensor(lengths_of(batch, longest), device=key.device)
    there = torch.arange(longest, device=key.device) < lengths[:, None]  # [B, N]
    out = reference.attention(query, key, value, there[:, None, None, :])[0]
    return out.masked_fill(~there[:, None, :, None], 0) if query.shape == key.shape else out


def _elsa(case: Case, tensors: Inputs, precision: str, backend: str) -> Contender:
    operands, _, starts, read = _packed(case, tensors)
    given = (*operands, starts, None, case.queries)
    return of_elsa(varlen_attention, explain_varlen_attention, given, precision, backend, read=read)


VARLEN = Bench(
    {
        "cpu": {VARLEN_TABLE: tuple(square(VARLEN_TABLE, shape, goal=1.5) for shape in _SHAPES)},
        "cuda": {
            VARLEN_TABLE: tuple(
                square(VARLEN_TABLE, shape, dtype=dtype, goal=goal)
                for dtype, goal in (("fp32", 5.0), ("fp16", 1.0), ("bf16", 1.0))
                for shape in _CUDA_SHAPES
            )
        },
    },
    _elsa,
    _peers,
    _exact,
)
