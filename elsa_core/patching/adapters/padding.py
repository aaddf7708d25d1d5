"""Padded tokens that attention leaves out instead of masking them.

An additive mask that a patched model made itself carries what it was made from, as an attribute:
which tokens are there. Nothing is concluded from its contents, and nothing outlives the mask. One
that came from the caller is a mask like any other. So is one that was written to since: it is
compared with a copy, because PyTorch counts no writes in inference mode, nor those through `.data`
or numpy. A boolean mask says what is there by its contents, whoever made it: `hidden_keys`.

On a GPU the host has to wait to read how many tokens there are. A model does it once in a forward,
before its blocks, where they have much to do; attention alone never does: there masks stay masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.dispatch import measured
from elsa_core.ops.varlen.api import varlen_attention

# Packing copies queries, keys and values: only where this share of the tokens is padding.
_LEAST_PADDING = 0.125
# A hidden score is the least number of these, and stays that with any score added. float16's does
# not: there a padded query sees all keys by their scores.
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Padding:
    """Where the tokens of a padded batch [B, N] are.

    Attributes:
        cu_seqlens: [B + 1] int32, of the tokens that are there.
        rows: [T] their places among B * N; None where the tokens lie packed already.
        longest: the most tokens of a sequence.
        of_queries: whether padded queries see no key either; then each sees all with equal weight,
            since all of its scores are the same least number.
        contents: of the mask that was made from it, on a CPU; None where it needs no comparison.
    """

    cu_seqlens: Tensor
    rows: Tensor | None
    longest: int
    of_queries: bool
    contents: Tensor | None


def note(mask: Tensor, valid: Tensor, of_queries: bool, least: int = 1) -> None:
    """Let attention know what a mask was made from: valid [B, N] bool, True for tokens.

    Only where it would be used: an eager call, an eighth of padding, sequences of `least` tokens or
    more; on a GPU where the model's forward asked `may_wait`.
    """
    here = mask.device.type == "cpu" and mask.dtype in _DTYPES
    if calls.traced() or not (here or mask.is_cuda):
        return
    counts = lengths(valid, least)
    if counts is not None:
        rows = valid.flatten().nonzero().squeeze(1)
        contents = mask.clone() if here else None
        found = Padding(bounds(valid.sum(1)), rows, max(counts), of_queries, contents)
        mask.elsa_padding = found  # type: ignore[attr-defined]


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


def lengths(valid: Tensor, least: int = 1) -> list[int] | None:
    """The tokens of each sequence, where so many of valid [B, N] are padding that leaving it out is
    the faster way; None elsewhere, and where a sequence has fewer than `least`."""
    counts: list[int] = valid.sum(1).tolist() if valid.numel() else [0]
    pays = min(counts) >= least and sum(counts) <= (1 - _LEAST_PADDING) * valid.numel()
    return counts if pays else None


def hidden_keys(mask: Any, on_gpu: bool = False) -> Tensor | None:
    """The keys that a boolean mask [B, 1, N, N] lets all queries of a sequence see, [B, N] bool.

    None in a call that is not eager, for a mask that hides keys of some queries alone, where
    leaving keys out does not pay, and of a GPU unless `on_gpu` says that the host may wait for it.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
        return None
    if calls.traced() or not (mask.device.type == "cpu" or (on_gpu and mask.is_cuda)):
        return None
    if mask.shape[1] != 1 or not mask.numel():
        return None
    row = mask[:, :, :1]
    valid = row[:, 0, 0]
    same = lengths(valid) is not None and torch.equal(mask, row.expand_as(mask))
    return valid if same else None


def without_hidden_keys(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None
) -> Tensor | None:
    """Attention [B, H, N, D] -> [B, H, N, Dv] of all queries to the keys that the mask shows; None
    where `attention` is to read the mask."""
    valid = hidden_keys(mask)
    if valid is None or (q.dtype != torch.float32 and calls.differentiates(q, k, v)):
        return None  # the packed backward of other dtypes is plain PyTorch
    rows = valid.flatten().nonzero().squeeze(1)
    padding = Padding(bounds(valid.sum(1)), rows, valid.shape[1], False, mask)
    return without_padding(module, q, k, v, padding, scale)


def packed_mask(padding: Padding) -> Tensor:
    """What takes the place of a mask where a model's tokens lie packed, [1, T, C]."""
    marker = padding.cu_seqlens.clone()
    marker.elsa_padding = replace(padding, rows=None, contents=None)  # type: ignore[attr-defined]
    return marker


def is_packed(mask: Tensor | None) -> bool:
    """Whether a mask is what `packed_mask` gave: the original forward cannot read it."""
    found = noted(mask)
    return found is not None and found.rows is None


def noted(mask: Tensor | None) -> Padding | None:
    """What `note` has just written on a mask that nobody else has seen."""
    return getattr(mask, "elsa_padding", None)


def padding_of(mask: Tensor | None) -> Padding | None:
    """What `note` wrote on a mask, as long as the mask is what it was; on a GPU only what
    `packed_mask` gave, which nobody else sees."""
    found = noted(mask)
    if found is None or mask is None or calls.traced():
        return None
    if found.contents is None:
        return found if found.rows is None else None
    return found if torch.equal(found.contents, mask) else None


def without_padding(
    module: Any, q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float | None
) -> Tensor | None:
    """Attention among the tokens that are there, [B, H, N, D] -> [B, H, N, Dv], in the memory of
    [B, N, H, Dv]; what the original gives at padded places too. None where the operands are not
    those that the mask was made for.
    """
    if module.elsa_backend not in dispatch.names("varlen_attention"):
        return None
    batch, heads, tokens, _ = q.shape
    options: dict[str, Any] = {
        "scale": scale, "enable_gqa": True, "precision": module.elsa_precision,
        "backend": module.elsa_backend,
    }  # fmt: skip
    starts, rows = padding.cu_seqlens, padding.rows
    queries, keys, values = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # [B * N, H, D]
    out: Any
    if rows is None:
        most = padding.longest
        out = varlen_attention(queries, keys, values, starts, max_seqlen_q=most, **options)
        return _heads_first(out, batch, tokens)
    if q.dtype not in _DTYPES or (batch, tokens) != (starts.shape[0] - 1, k.shape[2]):
        return None
    keys, values = keys[rows], values[rows]
    if padding.of_queries:
        out = varlen_attention(queries[rows], keys, values, starts, **options)
        mean = v.mean(2).repeat_interleave(heads // v.shape[1], 1)  # [B, H, Dv]
        whole = mean[:, None].expand(batch, tokens, -1, -1).flatten(0, 1)
        out = whole.to(out.dtype).index_copy(0, rows, out)
    else:
        every = torch.arange(batch + 1, dtype=starts.dtype) * tokens
        out = varlen_attention(queries, keys, values, every, starts, **options)
    return _heads_first(out, batch, tokens)


def _heads_first(out: Tensor, batch: int, tokens: int) -> Tensor:
    """[B * N, H, D] -> [B, H, N, D]."""
    apart: Tensor = out.unflatten(0, (batch, tokens))
    return apart.transpose(1, 2)


def bounds(counts: Tensor) -> Tensor:
    """[B] lengths as cumulative ones, [B + 1] int32."""
    zero = counts.new_zeros(1)
    return torch.cat((zero, counts.cumsum(0))).to(torch.int32)
