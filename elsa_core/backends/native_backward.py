"""Gradients on the CPU: the kernels of `csrc/elsa/gradient*` where they serve, else PyTorch's own.

They take float32 and no gradient of an attention mask. All else goes to the formulas in plain
PyTorch, through the operators that hold them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

WINDOW_TOKENS_MAX = 640  # kMaxGradientTokens in csrc/elsa/gradient.h


@functools.cache
def register() -> None:
    """Let the CPU's backward operators ask here; the native library is loaded.

    A second library holds the registrations: they last as long as it does.
    """
    library = torch.library.Library("elsa", "IMPL")
    library.impl("attention_backward", attention_backward, "CPU")
    library.impl("window_attention_backward", window_attention_backward, "CPU")
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []


def attention_support(operands: Sequence[Tensor], needs: Sequence[bool]) -> str:
    """Why the kernel does not serve a call; empty where it does.

    Args:
        operands: grad_out, query, key and value.
        needs: of query, key, value and mask, as the operator takes them.
    """
    if needs[3]:
        return "has no gradient of a mask"
    return _float32(operands)


def window_support(operands: Sequence[Tensor], tokens: int) -> str:
    """The same for windows of `tokens` tokens; operands: grad_out, qkv and the terms there are."""
    if tokens > WINDOW_TOKENS_MAX:
        return f"takes windows of up to {WINDOW_TOKENS_MAX} tokens, not {tokens}"
    return _float32(operands)


def _float32(operands: Sequence[Tensor]) -> str:
    other = next((t.dtype for t in operands if t.dtype != torch.float32), None)
    return f"takes float32, not {str(other).removeprefix('torch.')}" if other else ""


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CPU kernel of `elsa::attention_backward`: arguments and results as in its schema."""
    needs = (*needs[:3], needs[3] and attn_mask is not None)
    if attention_support((grad_out, query, key, value), needs):
        formula = torch.ops.elsa.attention_eager_backward.default
        answer: tuple[Tensor, Tensor, Tensor, Tensor] = formula(
            grad_out, grad_lse, query, key, value, attn_mask, out, lse, is_causal, scale,
            precision, needs,
        )  # fmt: skip
        return answer
    grads = torch.ops.elsa.attention_backward_native.default(
        grad_out, grad_lse if grad_lse.numel() else None, query, key, value, attn_mask, out, lse,
        is_causal, scale, *needs[:3],
    )  # fmt: skip
    return *grads, query.new_empty(0)


def window_attention_backward(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    bias_index: Tensor | None,
    pad_qkv: Tensor | None,
    logit_scale: Tensor | None,
    num_heads: int,
    window_size: Sequence[int],
    shift_size: Sequence[int],
    scale: float,
    mask_value: float,
    layout: str,
    grid: bool,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CPU kernel of `elsa::window_attention_backward`, as `attention_backward`."""
    terms = [t for t in (bias, pad_qkv, logit_scale) if t is not None]
    head_dim = qkv.shape[-1] // (3 * num_heads)
    dense = qkv.stride(-1) == 1 and head_dim <= 256
    if not dense or window_support((grad_out, qkv, *terms), math.prod(window_size)):
        formula = torch.ops.elsa.window_attention_eager_backward.default
        answer: tuple[Tensor, Tensor, Tensor, Tensor] = formula(
            grad_out, qkv, bias, bias_index, pad_qkv, logit_scale, num_heads, window_size,
            shift_size, scale, mask_value, layout, grid, precision, needs,
        )  # fmt: skip
        return answer
    grad_qkv, grad_bias, grad_pad, grad_scale = (
        torch.ops.elsa.window_attention_backward_native.default(
            grad_out, qkv, bias, bias_index, pad_qkv, logit_scale, num_heads, window_size,
            shift_size, scale, mask_value, layout, grid, *needs,
        )
    )  # fmt: skip
    if needs[1] and bias is not None and bias_index is not None:
        # The entries that share a row of the table, in float64: sums in a fixed order either way.
        table = bias.new_zeros(bias.shape, dtype=torch.float64)
        rows = grad_bias.flatten(1).mT.double()
        grad_bias = table.index_add_(0, bias_index.flatten(), rows).to(bias.dtype)
    return grad_qkv, grad_bias, grad_pad, grad_scale
