"""The CPU kernels of alpha-entmax attention: `csrc/elsa/entmax*`.

They list, for each row, the keys that can still weigh something, and all but the scores is
computed for listed keys alone. float16 and bfloat16 are converted on the way in and out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_SCHEMA = (
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
    "Tensor? head_alpha, Tensor rows, Tensor tiles, float alpha, bool is_causal, float scale, "
    "bool needs_query, bool needs_key, bool needs_value, bool needs_alpha) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY = torch.library.Library("elsa", "FRAGMENT")


@functools.cache
def define() -> None:
    """Define the operator that the native library has a kernel of, as `native_backward.define`."""
    _LIBRARY.define(f"entmax_attention_backward_native{_SCHEMA}")


def entmax_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    head_alpha: Tensor | None,
    out: Tensor,
    rows: Tensor,
    tiles: Tensor,
    alpha: float,
    is_causal: bool,
    scale: float,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `elsa::entmax_attention_backward`, but for the gradient of a mask, which is left out.

    Half precision is widened.
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
