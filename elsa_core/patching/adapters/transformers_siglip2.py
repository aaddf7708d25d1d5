"""transformers' SigLIP 2 (images of different size in one batch, padded): padding is left out.

Read against transformers 5.23. The encoder is no site: its class is swapped beside the attention
layers within it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.siglip2.modeling_siglip2 import (
    Siglip2Attention,
    Siglip2Encoder,
    Siglip2EncoderLayer,
    Siglip2MLP,
)

from elsa_core import dispatch
from elsa_core.ops.varlen.api import varlen_attention
from elsa_core.patching.adapters import hf_transformers, padding
from elsa_core.patching.adapters.common import attend, join_heads, split_heads
from elsa_core.patching.adapters.hooks import is_watched


@dataclass(frozen=True)
class Packed:
    """Where the tokens of a padded batch [B, N] are, one padded token of each image among them.

    Attributes:
        rows: [T] the places of those tokens among B * N.
        places: [B * N] which of them stands for each place.
        queries: [B + 1] int32, cumulative: tokens and padded ones.
        keys: [B + 1] int32, cumulative: tokens alone.
        seen: [Tk] the keys among the T tokens.
        longest: the most queries of an image, or more.
    """

    rows: Tensor
    places: Tensor
    queries: Tensor
    keys: Tensor
    seen: Tensor
    longest: int


class ElsaSiglip2Attention(Siglip2Attention):  # type: ignore[misc]  # transformers is untyped
    """SigLIP 2's attention: [B, N, C] -> [B, N, C] and no weights; any floating dtype.

    On a CPU a mask that hides the same keys of all queries is not read: the keys are left out. On a
    GPU that is so within an encoder that packs its tokens.
    """

    elsa_base = Siglip2Attention
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        return _departs(Siglip2Attention, ("self", "hidden_states", "attention_mask", "kwargs"))

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        if not _looks_up_ours(self):
            found: tuple[Tensor, Any] = super().forward(hidden_states, attention_mask, **kwargs)
            return found
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(layer(hidden_states), self.num_heads) for layer in layers)
        dropout_p = self.dropout if self.training else 0.0
        out: Tensor | None = None
        if isinstance(attention_mask, Packed):
            out = _among_tokens(self, q, k, v, attention_mask)
        elif dropout_p == 0.0:
            out = padding.without_hidden_keys(self, q, k, v, attention_mask, self.scale)
        if out is None:
            out = attend(self, q, k, v, attention_mask, scale=self.scale, dropout_p=dropout_p)
        return self.out_proj(join_heads(out)), None


class ElsaSiglip2Encoder(Siglip2Encoder):  # type: ignore[misc]
    """In inference of batches with padding: tokens [B, N, C] -> the same.

    The padded tokens of an image are equal when they come from SigLIP 2's own embedding of padding,
    and no key of any query: then they stay equal through all layers. So the layers take the tokens
    of all images one after another, and one padded token of each image that has some; its results
    stand at all of that image's padded places, where the original has the same. Padded tokens that
    differ stay in the batch, and attention alone leaves them out as keys.
    """

    elsa_base = Siglip2Encoder
    elsa_companion = True
    elsa_any_scope = True
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why an instance keeps its class; it is no site, so no report names it."""
        return _departs(Siglip2Encoder, ("self", "inputs_embeds", "attention_mask", "kwargs"))

    @staticmethod
    def elsa_serves(module: Any) -> tuple[nn.Module, ...]:
        """The sites that take packed tokens."""
        return tuple(layer.self_attn for layer in module.layers)

    def forward(self, inputs_embeds: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        if not kwargs and _may_pack(self, inputs_embeds):
            packed = None
            if all(map(_is_plain, self.layers)):
                valid = padding.hidden_keys(attention_mask, on_gpu=True)
                packed = None if valid is None else _packed(inputs_embeds, valid)
            if packed is not None:
                return self._through_layers(inputs_embeds, packed)
        return super().forward(inputs_embeds, attention_mask, **kwargs)

    def _through_layers(self, x: Tensor, packed: Packed) -> Any:
        tokens = x.flatten(0, 1)[packed.rows].unsqueeze(0)  # [1, T, C]
        found = super().forward(tokens, packed)
        whole = found.last_hidden_state.squeeze(0)[packed.places]
        found.last_hidden_state = whole.unflatten(0, x.shape[:2])
        return found


def _packed(x: Tensor, valid: Tensor) -> Packed | None:
    """The tokens of a batch x [B, N, C] of which valid [B, N] are there; None where the padded ones
    of an image are not equal."""
    if x.shape[:2] != valid.shape:
        return None
    first = valid.int().argmin(1)  # of the padded ones, where there are any
    image, place = (~valid).nonzero(as_tuple=True)
    if not torch.equal(x[image, place], x[image, first[image]]):
        return None
    kept = valid.clone()
    kept[image, first[image]] = True
    rows = kept.flatten().nonzero().squeeze(1)
    order = (kept.flatten().cumsum(0) - 1).view_as(valid)
    places = torch.where(valid, order, order.gather(1, first[:, None]))
    return Packed(
        rows, places.flatten(), padding.bounds(kept.sum(1)), padding.bounds(valid.sum(1)),
        valid.flatten()[rows].nonzero().squeeze(1), valid.shape[1],
    )  # fmt: skip


def _among_tokens(site: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """[1, H, T, D] -> [1, H, T, D]: the queries of an image to its keys."""
    queries, keys, values = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))  # [T, H, D]
    out: Any = varlen_attention(
        queries, keys[packed.seen], values[packed.seen], packed.queries, packed.keys,
        packed.longest, packed.longest, scale=site.scale, precision=site.elsa_precision,
        backend=site.elsa_backend,
    )  # fmt: skip
    heads_first: Tensor = out.transpose(0, 1).unsqueeze(0)
    return heads_first


def _may_pack(encoder: Any, x: Tensor) -> bool:
    """Whether layers that are plain can take packed tokens x: no gradient of x wanted."""
    if torch.is_grad_enabled() and x.requires_grad:  # a gradient of each padded token of its own
        return False
    site = encoder.layers[0].self_attn if len(encoder.layers) else None
    if not isinstance(site, ElsaSiglip2Attention):
        return False
    return padding.may_wait(x, site.num_heads, site.head_dim, site)


def _is_plain(layer: Any) -> bool:
    """Whether a layer is transformers' own, in eval mode, with a patched attention: no hook
    is on it, and it is not compiled by itself."""
    if type(layer) is not Siglip2EncoderLayer or not isinstance(
        layer.self_attn, ElsaSiglip2Attention
    ):
        return False
    if getattr(type(layer.mlp), "elsa_base", type(layer.mlp)) is not Siglip2MLP:
        return False
    site = layer.self_attn
    if site.elsa_backend not in dispatch.names("varlen_attention") or not _looks_up_ours(site):
        return False
    return not any(
        part.training or is_watched(part) or part._compiled_call_impl for part in layer.modules()
    )


def _looks_up_ours(site: Any) -> bool:
    """Whether transformers' own forward would compute what the operator does: "eager" also returns
    weights, others take masks of their own."""
    return site.config._attn_implementation in hf_transformers.NAMES


def _departs(cls: type, expected: tuple[str, ...]) -> str:
    """Why this transformers' class is not the one that was read; empty if its arguments are."""
    known = tuple(inspect.signature(cls.forward).parameters) == expected  # type: ignore[attr-defined]
    return "" if known else f"this transformers' {cls.__name__} takes other arguments"
