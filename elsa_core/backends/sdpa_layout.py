"""Operands as PyTorch's attention kernels want them: aligned rows, biases, gradients laid out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDTH = 16  # bytes that the CUDA kernels load at once
_BIAS_KEYS = 16  # the rows of a bias are padded to a multiple of this


def written(t: Tensor) -> Tensor:
    """t, each element in a place of its own, and rows along the last dim aligned."""
    apart = all(stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1)
    return aligned(t) if apart else t.clone(memory_format=torch.contiguous_format)


def rows_of(out: Tensor) -> Tensor:
    """out with the rows of channels side by side, as a forward of these kernels gives it."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def bias_of(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    if attn_mask.dtype != torch.bool:
        return attn_mask.detach()
    return torch.zeros_like(attn_mask, dtype=dtype).masked_fill_(~attn_mask, -math.inf)


def padded_bias(bias: Tensor, keys: int) -> Tensor:
    """Rows [..., keys] that start at multiples of _BIAS_KEYS."""
    bias = bias.expand(*bias.shape[:-1], keys)
    if keys % _BIAS_KEYS:
        return F.pad(bias, (0, -keys % _BIAS_KEYS))[..., :keys]
    return aligned(bias)


def step_of(dtype: torch.dtype) -> int:
    return _WIDTH // dtype.itemsize


def starts_aligned(t: Tensor) -> bool:
    """Whether each row along the last dim starts at a multiple of 16 bytes."""
    step = step_of(t.dtype)
    # A compiler cannot read where a tensor begins; what it makes of a packed projection begins at a
    # multiple of its strides, and it copies inputs that begin elsewhere.
    begins = torch.compiler.is_compiling() or t.storage_offset() % step == 0
    return bool(begins and all(n % step == 0 for n in t.stride()[:-1]))


def aligned(t: Tensor) -> Tensor:
    ready = t.stride(-1) == 1 and starts_aligned(t)
    return t if ready else t.clone(memory_format=torch.contiguous_format)


def laid_out_as(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient in the shape and layout of query, key or value; heads of a group are summed."""
    if grad.shape[1] != like.shape[1]:
        grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    wanted = torch.empty_like(like)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)
