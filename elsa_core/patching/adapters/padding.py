"""Padded tokens that a model leaves out: its blocks get the tokens of all images one after another.

On a GPU the host has to wait to read how many tokens there are. A model does it once in a forward,
before its blocks, where they have much to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.dispatch import measured
from elsa_core.ops.varlen.api import varlen_attention
from elsa_core.patching.adapters.hooks import is_watched

# Packing copies tokens: only where this share of them is padding.
_LEAST_PADDING = 0.125


class Packed(NamedTuple):
    """What blocks of packed tokens [1, T, C] get in the place of a mask."""

    queries: Tensor  # [B + 1] int32, cumulative: where each image's tokens are
    longest: int  # the most tokens of an image, or more
    keys: Tensor | None = None  # [B + 1] the same of the tokens that are keys; None for all
    seen: Tensor | None = None  # [Tk] those among the T tokens; None for all


def may_pack(x: Tensor, blocks: Iterable[nn.Module], attention: str, cls: Any) -> bool:
    """Whether blocks can take the tokens of x [B, N, ...] packed, and a model's forward may ask its
    device how many there are. The blocks are in eval mode, nothing watches or compiles a part of
    them, and their `attention` is a patched one of the class `cls`. On a GPU they must take longer
    there than on the host, packed sequences must have a kernel, and no graph be recorded."""
    if calls.traced() or x.device.type not in ("cpu", "cuda"):
        return False
    blocks = list(blocks)
    sites: list[Any] = [getattr(block, attention, None) for block in blocks]
    backends = dispatch.names("varlen_attention")
    if not sites or not all(isinstance(s, cls) and s.elsa_backend in backends for s in sites):
        return False
    parts = (part for block in blocks for part in block.modules())
    if any(part.training or is_watched(part) or part._compiled_call_impl for part in parts):
        return False
    if x.device.type == "cpu":
        return True
    site, dim = sites[0], sites[0].head_dim
    work = x.shape[0] * site.num_heads * x.shape[1] ** 2 * dim
    if torch.cuda.is_current_stream_capturing():
        return False
    kind = (calls.place(x), x.dtype, dim, dim, site.elsa_precision, site.elsa_backend)
    return (
        work >= measured.eager_least("attention", x.dtype)
        and dispatch.choose("varlen_attention", *kind) != dispatch.PLAIN
    )


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
