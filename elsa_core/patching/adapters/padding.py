"""Padded tokens that a model leaves out: its blocks get the tokens of all images one after another.

On a GPU the host has to wait to read how many tokens there are. A model does it once in a forward,
before its blocks, where they have much to do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.dispatch import measured
from elsa_core.ops.varlen.api import varlen_attention

# Packing copies tokens: only where this share of them is padding.
_LEAST_PADDING = 0.125


class Packed(NamedTuple):
    """What blocks of packed tokens [1, T, C] get in the place of a mask.

    Attributes:
        queries: [B + 1] int32, cumulative: where each image's tokens are.
        longest: the most tokens of an image, or more.
        keys: [B + 1] int32, cumulative: the tokens of each image that are keys; None for all.
        seen: [Tk] those among the T tokens; None for all.
    """

    queries: Tensor
    longest: int
    keys: Tensor | None = None
    seen: Tensor | None = None


def may_wait(x: Tensor, heads: int, head_dim: int, module: Any) -> bool:
    """Whether a model's forward of tokens x [B, N, ...] may ask its device how many there are.

    On a GPU where blocks of so many tokens take longer there than on the host, packed sequences
    have a kernel and no graph is being recorded.
    """
    if calls.traced() or x.device.type not in ("cpu", "cuda"):
        return False
    if x.device.type == "cpu":
        return True
    work = x.shape[0] * heads * x.shape[1] ** 2 * head_dim
    if torch.cuda.is_current_stream_capturing():
        return False
    return work >= measured.eager_least("attention", x.dtype) and has_kernel(
        x, head_dim, module.elsa_precision, module.elsa_backend
    )


def has_kernel(x: Tensor, head_dim: int, precision: str, backend: str) -> bool:
    """Whether more than plain PyTorch takes packed sequences of x's dtype and device."""
    if backend not in dispatch.names("varlen_attention"):
        return False
    kind = (calls.place(x), x.dtype, head_dim, head_dim, precision, backend)
    return dispatch.choose("varlen_attention", *kind) != dispatch.PLAIN


def longest(valid: Tensor, least: int = 1) -> int:
    """The most tokens of a sequence, where so many of valid [B, N] are padding that leaving it out
    is the faster way; 0 elsewhere, and where a sequence has fewer than `least`."""
    counts: list[int] = valid.sum(1).tolist() if valid.numel() else [0]
    pays = min(counts) >= least and sum(counts) <= (1 - _LEAST_PADDING) * valid.numel()
    return max(counts) if pays else 0


def attend_packed(
    module: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float | None
) -> Tensor:
    """Attention within each image, [1, H, T, D] -> [1, H, T, Dv]."""
    queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))  # [T, H, D]
    if packed.seen is not None:
        keys, values = keys[packed.seen], values[packed.seen]
    out: Any = varlen_attention(
        queries, keys, values, packed.queries, packed.keys, packed.longest,
        None if packed.keys is None else packed.longest, scale=scale, enable_gqa=True,
        precision=module.elsa_precision, backend=module.elsa_backend,
    )  # fmt: skip
    heads_first: Tensor = out.transpose(0, 1).unsqueeze(0)
    return heads_first


def bounds(counts: Tensor) -> Tensor:
    """[B] lengths as cumulative ones, [B + 1] int32."""
    zero = counts.new_zeros(1)
    return torch.cat((zero, counts.cumsum(0))).to(torch.int32)
