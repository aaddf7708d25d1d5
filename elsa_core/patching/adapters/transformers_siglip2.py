"""transformers' SigLIP 2 (images of different size in one batch, padded): padding is left out.

Read against transformers 5.23. The encoder is no site: its class is swapped beside the attention
layers within it.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.siglip2.modeling_siglip2 import (
    Siglip2Attention,
    Siglip2Encoder,
    Siglip2EncoderLayer,
    Siglip2MLP,
)

from elsa_core.patching.adapters import hf_transformers, padding
from elsa_core.patching.adapters.common import split_heads
from elsa_core.patching.adapters.watched import run


def _departs(cls: type, expected: tuple[str, ...], module: nn.Module) -> str:
    """Why this transformers' class is not the one that was read; empty if its arguments are."""
    known = tuple(inspect.signature(cls.forward).parameters) == expected  # type: ignore[attr-defined]
    return "" if known else f"this transformers' {cls.__name__} takes other arguments"


class ElsaSiglip2Attention(Siglip2Attention):  # type: ignore[misc]  # transformers is untyped
    """SigLIP 2's attention: [B, N, C] -> [B, N, C] and no weights; any floating dtype. Within an
    encoder that packs its tokens keys are those of the same image."""

    elsa_base = Siglip2Attention
    elsa_why_not = staticmethod(
        partial(_departs, Siglip2Attention, ("self", "hidden_states", "attention_mask", "kwargs"))
    )

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        if not isinstance(attention_mask, padding.Packed):
            return run(self, Siglip2Attention.forward, (hidden_states, attention_mask), kwargs)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        out = padding.attend_packed(self, q, k, v, attention_mask, self.scale)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


class ElsaSiglip2Encoder(Siglip2Encoder):  # type: ignore[misc]
    """In inference of batches with padding: tokens [B, N, C] -> the same. Padded tokens of an image
    that are equal, and no key of any query, stay equal through all layers. So these take the tokens
    of all images one after another, and one padded token of each image, whose results stand at all
    of its padded places, where the original has the same."""

    elsa_base = Siglip2Encoder
    elsa_companion = True
    elsa_any_scope = True

    elsa_why_not = staticmethod(
        partial(_departs, Siglip2Encoder, ("self", "inputs_embeds", "attention_mask", "kwargs"))
    )

    def forward(self, inputs_embeds: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        found = None
        if not kwargs and _may_pack(self.layers, inputs_embeds):
            found = _packed(inputs_embeds, attention_mask)
        if found is None:
            return super().forward(inputs_embeds, attention_mask, **kwargs)
        rows, places, packed = found
        out = super().forward(inputs_embeds.flatten(0, 1)[rows].unsqueeze(0), packed)
        whole = out.last_hidden_state.squeeze(0)[places]
        out.last_hidden_state = whole.unflatten(0, inputs_embeds.shape[:2])
        return out


def _packed(x: Tensor, mask: Any) -> tuple[Tensor, Tensor, padding.Packed] | None:
    """Of a batch x [B, N, C] the places of its tokens and of one padded token of each image, [T],
    which of them stands for each place, [B * N], and what the layers get for a mask [B, 1, N, N];
    None where tokens cannot be left out, or it does not pay."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
        return None
    if mask.shape[1] != 1 or not mask.numel():
        return None
    row = mask[:, :, :1]
    valid = row[:, 0, 0]
    if x.shape[:2] != valid.shape or not padding.longest(valid):
        return None
    if not torch.equal(mask, row.expand_as(mask)):
        return None
    first = valid.int().argmin(1)  # of the padded ones, where there are any
    image, place = (~valid).nonzero(as_tuple=True)
    if not torch.equal(x[image, place], x[image, first[image]]):
        return None
    kept = valid.clone()
    kept[image, first[image]] = True
    rows = kept.flatten().nonzero().squeeze(1)
    order = (kept.flatten().cumsum(0) - 1).view_as(valid)
    places = torch.where(valid, order, order.gather(1, first[:, None])).flatten()
    seen = valid.flatten()[rows].nonzero().squeeze(1)
    ends, of_keys = (F.pad(t.sum(1).cumsum(0), (1, 0)).int() for t in (kept, valid))
    return rows, places, padding.Packed(ends, valid.shape[1], of_keys, seen)


def _may_pack(layers: Any, x: Tensor) -> bool:
    if torch.is_grad_enabled() and x.requires_grad:  # a gradient of each padded token of its own
        return False
    for layer in layers:
        if type(layer) is not Siglip2EncoderLayer:
            return False
        if getattr(type(layer.mlp), "elsa_base", type(layer.mlp)) is not Siglip2MLP:
            return False
        # "eager" also returns weights, others take masks of their own
        if layer.self_attn.config._attn_implementation not in hf_transformers.NAMES:
            return False
    return padding.may_pack(x, layers, "self_attn", ElsaSiglip2Attention)
