"""Gradients on the CPU: the kernels of `csrc/elsa/gradient*` and `csrc/elsa/entmax*`.

They take float32 and no gradient of an attention mask; each function gives None for other calls.
Half precision is widened where it says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.window_call import SCHEMA, WindowCall
from elsa_core.base.limits import HALF_KEYS_MAX, LARGEST_HEAD_DIM
from elsa_core.precision import dtype_name

_SCHEMAS = {
    "attention_backward_native": "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, "
    "Tensor value, Tensor? attn_mask, Tensor out, Tensor lse, bool is_causal, float scale, "
    "float dropout_p, Tensor? seed, bool needs_query, bool needs_key, bool needs_value, "
    "bool is_shard) -> (Tensor, Tensor, Tensor)",
    "attention_state_native": "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
    "window_attention_backward_native": f"(Tensor grad_out, {SCHEMA.rpartition(', ')[0]}, "
    "bool needs_qkv, bool needs_bias, bool needs_pad, bool needs_scale) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "varlen_attention_backward_native": "(Tensor grad_out, Tensor? grad_lse, Tensor query, "
    "Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, Tensor lse, "
    "bool is_causal, float scale, bool needs_query, bool needs_key, bool needs_value) "
    "-> (Tensor, Tensor, Tensor)",
    "entmax_attention_backward_native": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor? head_alpha, Tensor rows, Tensor tiles, float alpha, "
    "bool is_causal, float scale, bool needs_query, bool needs_key, bool needs_value, "
    "bool needs_alpha) -> (Tensor, Tensor, Tensor, Tensor)",
}
_LIBRARY = torch.library.Library("elsa", "FRAGMENT")
WINDOW_TOKENS_MAX = 640  # kMaxGradientTokens in csrc/elsa/gradient.h


@functools.cache
def define() -> None:
    """Define the operators that the native library has kernels of.

    Here and not in the library: a bundle's copy of it may be loaded in the same process.
    """
    for name, schema in _SCHEMAS.items():
        _LIBRARY.define(name + schema)


def support(request: Request) -> Support:
    """Whether the kernels take gradients of such calls, as far as lengths do not decide."""
    widened = request.operator == "attention_dropout" or (
        request.operator == "attention"
        and (request.mask in ("bool", "additive") or request.layout == "strided")
    )
    if request.dtype != torch.float32 and not widened:
        return Support(False, f"gradients are float32, not {dtype_name(request.dtype)}")
    if "attn_mask" in request.gradient:
        return Support(False, "has no gradient of a mask")
    if max(request.head_dim, request.value_dim) > LARGEST_HEAD_DIM:
        return Support(False, f"takes head dimensions up to {LARGEST_HEAD_DIM}")
    return Support(True)


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    precision: str, needs: Sequence[bool], *, dropout_p: float = 0.0, seed: Tensor | None = None,
    is_shard: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:  # fmt: skip
    """As `elsa::attention_backward`, or with a seed `elsa::attention_dropout_backward`; None where
    the kernel does not serve the call. is_shard: `out` and `lse` are of rows that see further keys.

    Half precision is widened, and the forward runs again: from a rounded output rowsum(grad_out *
    out) has several times the error in rows of nearly one weight. Without a seed that is so up to
    HALF_KEYS_MAX keys, with a mask or a last axis that is not dense: PyTorch serves the others.
    """
    if needs[3] and attn_mask is not None:
        return None
    kind, dropped = query.dtype, () if seed is None else (dropout_p, seed)
    if kind != torch.float32:
        plain = attn_mask is None and all(t.stride(-1) == 1 for t in (query, key, value))
        if seed is None and (plain or kind == torch.float64 or key.shape[2] > HALF_KEYS_MAX):
            return None
        grad_out, query, key, value = (t.float() for t in (grad_out, query, key, value))
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.float()
        forward = torch.ops.elsa.attention if seed is None else torch.ops.elsa.attention_dropout
        terms = (query, key, value, attn_mask, is_causal, scale, precision, *dropped)
        out, lse = forward.default(*terms)
    if any(t.dtype != torch.float32 for t in (grad_out, query, key, value)):
        return None
    grads = torch.ops.elsa.attention_backward_native.default(
        grad_out, grad_lse if grad_lse.numel() else None, query, key, value, attn_mask, out, lse,
        is_causal, scale, dropout_p, seed, *needs[:3], is_shard,
    )  # fmt: skip
    grad_query, grad_key, grad_value = (grad.to(kind) for grad in grads)
    return grad_query, grad_key, grad_value, query.new_empty(0, dtype=kind)


def attention_dropout_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """As `elsa::attention_dropout_backward`, whose arguments it takes; None where the kernel does
    not serve the call.
    """
    *terms, p, seed, needs = arguments
    return attention_backward(*terms, needs, dropout_p=p, seed=seed)  # type: ignore[misc]


def window_attention_backward(
    grad_out: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """As `elsa::window_attention_backward`; None where the kernel does not serve the call."""
    call, needs = WindowCall(*arguments[:-1]), arguments[-1]
    qkv, bias, bias_index = call[:3]
    head_dim = qkv.shape[-1] // (3 * call.num_heads)
    operands = [grad_out, *(t for t in call.differentiable if t is not None)]
    small = math.prod(call.window_size) <= WINDOW_TOKENS_MAX and head_dim <= LARGEST_HEAD_DIM
    if not small or qkv.stride(-1) != 1 or any(t.dtype != torch.float32 for t in operands):
        return None
    grad_qkv, grad_bias, grad_pad, grad_scale = (
        torch.ops.elsa.window_attention_backward_native.default(
            grad_out,
            *call[:-1],
            *needs,  # float32: no other precision
        )
    )
    if needs[1] and bias is not None and bias_index is not None:
        # The entries that share a row of the table, in float64: sums in a fixed order either way.
        table = bias.new_zeros(bias.shape, dtype=torch.float64)
        rows = grad_bias.flatten(1).mT.double()
        grad_bias = table.index_add_(0, bias_index.flatten(), rows).to(bias.dtype)
    return grad_qkv, grad_bias, grad_pad, grad_scale


def varlen_attention_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float, precision: str, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """As `elsa::varlen_attention_backward`; None where the kernel does not serve the call."""
    if any(t.dtype != torch.float32 for t in (grad_out, query, key, value)):
        return None
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.elsa.varlen_attention_backward_native.default(
        grad_out, grad_lse if grad_lse.numel() else None, query, key, value, cu_seqlens_q,
        cu_seqlens_k, out, lse, is_causal, scale, *needs,
    )  # fmt: skip
    return grads


def entmax_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    head_alpha: Tensor | None, out: Tensor, rows: Tensor, tiles: Tensor, alpha: float,
    is_causal: bool, scale: float, precision: str, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `elsa::entmax_attention_backward`, but for the gradient of a mask, which is left out.

    The kernels list, for each row, the keys that can still weigh something, and compute all but the
    scores for listed keys alone. Half precision is widened.
    """
    others = (*needs[:3], needs[4])
    nothing = query.new_empty(0)
    grads = [nothing] * 4
    if any(others):
        wide = [t.float() for t in (grad_out, query, key, value)]
        mask = attn_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.float()
        grads = list(
            torch.ops.elsa.entmax_attention_backward_native.default(
                *wide, mask, head_alpha, rows, tiles, alpha, is_causal, scale, *others
            )
        )
    grad_alpha = nothing
    if needs[4] and head_alpha is not None:
        grad_alpha = grads[3].sum_to_size(head_alpha.shape).to(head_alpha.dtype)
    grad_query, grad_key, grad_value = (grad.to(query.dtype) for grad in grads[:3])
    return grad_query, grad_key, grad_value, nothing, grad_alpha
