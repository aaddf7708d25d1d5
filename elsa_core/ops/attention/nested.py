"""`attention` of nested tensors: jagged ones are packed sequences already."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from elsa_core.base import calls
from elsa_core.base.operands import require_tensor
from elsa_core.errors import ArgumentError
from elsa_core.ops.varlen.api import varlen_attention


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool, precision: str, backend: str,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`elsa_core.attention` of jagged [B, H, j, D]: out [B, H, j, Dv] and lse [B, H, j], jagged.

    The lengths of key and value may be others than the query's.
    """
    if dropout_p:
        raise ArgumentError("nested tensors take no dropout_p: pad them")
    out: Any = varlen_attention(
        *packed(query, key, value, attn_mask), is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa, precision=precision, backend=backend, return_lse=return_lse,
    )  # fmt: skip
    offsets = query.offsets()  # type: ignore[attr-defined]
    jagged = partial(nested_tensor_from_jagged, offsets=offsets, jagged_dim=2)
    if return_lse:
        return jagged(out[0].transpose(0, 1)), jagged(out[1])
    return jagged(out.transpose(0, 1))


def packed(
    query: Any, key: Any, value: Any, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, int | None, int | None]:
    """The first arguments of `elsa_core.varlen_attention` for jagged [B, H, j, D]."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, tensor)
        if not tensor.is_nested:
            raise ArgumentError(f"{name} is dense, but query, key or value is nested: all or none")
        if tensor.layout is not torch.jagged:
            raise ArgumentError(
                f"{name} is a nested tensor of strided layout: use layout=torch.jagged, or pad it "
                "(torch.nested.to_padded_tensor) and hide the padding with attn_mask"
            )
        if tensor.dim() != 4 or tensor._ragged_idx != 2:
            raise ArgumentError(
                f"{name} is a nested tensor of shape {list(tensor.shape)}: it must be [B, H, j, D]"
            )
        if tensor.lengths() is not None:
            raise ArgumentError(f"{name} is a nested tensor with holes: call contiguous() on it")
    if attn_mask is not None:
        raise ArgumentError("nested tensors take no attn_mask: their padding is not there")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ArgumentError(
            "query, key and value have different batch sizes: "
            f"{query.shape[0]}, {key.shape[0]}, {value.shape[0]}"
        )
    starts, others, of_values = query.offsets(), key.offsets(), value.offsets()
    if others is not of_values and not calls.traced() and not torch.equal(others, of_values):
        raise ArgumentError("key and value have sequences of different lengths")
    q, k, v = (t.values().transpose(0, 1) for t in (query, key, value))  # [T, H, D] each
    # the longest sequences, where they are known without asking the device
    longest = (getattr(t, "_maybe_max_seqlen", None) for t in (query, key))
    return q, k, v, starts, None if others is starts else others, *longest
