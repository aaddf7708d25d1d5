"""`torch.nn.MultiheadAttention` on `elsa_core.attention`, alone and inside PyTorch's layers.

Read against torch 2.10 to 2.15. In eval mode PyTorch sends the module, and the whole of a
`TransformerEncoderLayer`, through one C++ operator each, which no export format knows. The latter
is turned off through `_qkv_same_embed_dim`, which PyTorch reads before it takes that path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elsa_core.errors import ArgumentError
from elsa_core.patching.adapters.common import attend, project_by, split_heads, split_packed


class ElsaMultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention of [B, N, E] (or [N, B, E], or [N, E]), any floating dtype. A call that
    wants the attention weights back, which do not exist here, goes to PyTorch's own function."""

    elsa_base = nn.MultiheadAttention
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: nn.Module) -> str:
        """Why this instance stays as it is; empty if it does not."""
        if getattr(module, "bias_k", None) is not None or getattr(module, "add_zero_attn", False):
            return "appends learned or zero keys (bias_k, add_zero_attn): no adapter yet"
        return ""

    # A data descriptor: it wins over the instance's own value, which stays in its __dict__.
    _qkv_same_embed_dim = property(
        lambda self: False, lambda self, value: self.__dict__.update(_qkv_same_embed_dim=value)
    )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            alone = key_padding_mask is None and attn_mask is None and not need_weights
            if not (query is key is value and alone):
                raise ArgumentError(
                    "nested tensors are served in self-attention without masks and weights"
                )
            # within each sequence of a nested tensor (TransformerEncoder makes one)
            padded = query.to_padded_tensor(0.0)
            lengths = torch.tensor([len(one) for one in query.unbind()], device=query.device)
            absent = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
            out, _ = self.forward(padded, padded, padded, absent, need_weights=False)
            return torch._nested_tensor_from_mask(out, ~absent, mask_check=False), None
        if need_weights or self.elsa_why_not(self):  # or keys are appended
            turn = self.batch_first and query.dim() == 3
            if turn:
                query, key, value = (x.transpose(0, 1) for x in (query, key, value))
            whole, weights = F.multi_head_attention_forward(
                query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight,
                self.in_proj_bias, self.bias_k, self.bias_v, self.add_zero_attn, self.dropout,
                self.out_proj.weight, self.out_proj.bias, self.training, key_padding_mask,
                need_weights, attn_mask, self.in_proj_weight is None, self.q_proj_weight,
                self.k_proj_weight, self.v_proj_weight,
                average_attn_weights=average_attn_weights, is_causal=is_causal,
            )  # fmt: skip
            return whole.transpose(0, 1) if turn else whole, weights
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which is missing")
        q, k, v = self._elsa_projected(query, key, value)
        causal = is_causal and key_padding_mask is None
        mask = None if causal else _merged_mask(attn_mask, key_padding_mask, q, k)
        drop = self.dropout if self.training else 0.0
        out = attend(self, q, k, v, mask, dropout_p=drop, is_causal=causal)
        last, heads = self.out_proj, out.transpose(1, 2).flatten(2)
        joined = project_by(self, heads, last.weight, last.bias)
        if query.dim() == 2:
            joined = joined.squeeze(0)
        elif not self.batch_first:
            joined = joined.transpose(0, 1)
        return joined, None

    def _elsa_projected(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        alike, inputs = query is key is value, [query, key, value]
        if query.dim() == 2 or not self.batch_first:  # [B, N, E]
            inputs = [x.unsqueeze(0) if x.dim() == 2 else x.transpose(0, 1) for x in inputs]
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif alike:
            return split_packed(project_by(self, inputs[0], weight, bias), self.num_heads)
        else:
            weights = weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        batches = [x.shape[0] for x in inputs]
        if not batches[0] == batches[1] == batches[2]:
            raise ArgumentError(f"query, key and value have batches of {batches}: must be equal")
        q, k, v = (
            split_heads(project_by(self, x, w, b), self.num_heads)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        return q, k, v


def _merged_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """One mask for the operator, [B or 1, H or 1, Nq or 1, Nk]. The module's boolean masks say what
    is left out, the operator's what takes part."""
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if key_padding_mask is not None and key_padding_mask.dim() == 1:  # of queries without a batch
        key_padding_mask = key_padding_mask.unsqueeze(0)
    of_heads = attn_mask is not None and attn_mask.dim() == 3
    expected = {
        "attn_mask": (attn_mask, (*((batch * heads,) if of_heads else ()), queries, keys)),
        "key_padding_mask": (key_padding_mask, (batch, keys)),
    }
    for name, (mask, shape) in expected.items():
        if mask is None:
            continue
        # PyTorch refuses these: the operator would broadcast the mask, or add up its integers
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ArgumentError(f"{name} is {mask.dtype}: expected torch.bool or a floating dtype")
        if tuple(mask.shape) != shape:
            raise ArgumentError(f"{name} is {list(mask.shape)}: expected {list(shape)}")
    if attn_mask is not None and of_heads:
        attn_mask = attn_mask.view(batch, heads, queries, keys)
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.view(batch, 1, 1, keys)
    given = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    if not given:
        return None
    if all(mask.dtype == torch.bool for mask in given):
        return ~(given[0] if len(given) == 1 else given[0] | given[1])
    terms = [
        mask.to(q.dtype)
        if mask.dtype != torch.bool
        else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
        for mask in given
    ]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]
