"""Gradients of packed sequences by PyTorch's own kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elsa_core.backends.sdpa_layout import aligned, laid_out_as, step_of
from elsa_core.backends.support import Request, Support

_FLASH_DIM = 256  # the most channels of a head
_SEQUENCES = 65535  # the most programs along the second axis of a CUDA grid, one for each sequence


def support(request: Request) -> Support:
    """PyTorch's forward asks the host for the longest sequence."""
    return Support(False, "has kernels of the gradients alone")


def gradient(request: Request) -> Support:
    """Whether `backward` takes gradients of packed sequences like these."""
    reason = ""
    if request.device_type != "cuda" or torch.version.hip is not None:
        reason = "PyTorch's kernels of packed sequences are for NVIDIA GPUs"
    elif request.dtype not in (torch.float16, torch.bfloat16):
        reason = "PyTorch's kernels of packed sequences take float16 and bfloat16"
    elif request.head_dim != request.value_dim or not 0 < request.head_dim <= _FLASH_DIM:
        reason = f"wants values as wide as keys, {_FLASH_DIM} channels at most"
    elif request.head_dim % step_of(request.dtype):
        reason = f"wants multiples of {step_of(request.dtype)} channels"
    elif request.mask == "crossed":
        reason = "aligns causal limits to the bottom right"
    elif torch.backends.cuda.is_built() and not torch.backends.cuda.is_flash_attention_available():
        reason = "this PyTorch was built without flash attention"
    elif not torch.backends.cuda.flash_sdp_enabled():
        reason = "flash attention is switched off"
    return Support(not reason, reason)


def backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float, precision: str, needs: Sequence[bool],
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """The gradients of `elsa::varlen_attention` by PyTorch's flash kernel; None where it does not
    serve: it gives none of lse, and aligns causal limits to the bottom right.

    The longest lengths that the kernel asks for bound its grid: the number of tokens is one that
    the host knows without waiting for the device; programs beyond a sequence end at once.
    """
    if grad_lse.numel() or not (query.numel() and key.numel()):
        return None
    if cu_seqlens_q.shape[0] - 1 > _SEQUENCES:
        return None
    if is_causal and not _is_same(cu_seqlens_q, cu_seqlens_k):
        return None
    lse = lse.masked_fill(lse.isneginf(), torch.inf)  # exp(-inf - inf) = 0
    no_seed = torch.empty(0, dtype=torch.int64, device=query.device)  # nothing is dropped
    operands = [aligned(t) for t in (grad_out, query, key, value, out)]
    starts, others = (t.int().contiguous() for t in (cu_seqlens_q, cu_seqlens_k))
    grads = torch.ops.aten._flash_attention_backward.default(
        *operands, lse.contiguous(), starts, others, query.shape[0], key.shape[0], 0.0, is_causal,
        no_seed, no_seed, scale=scale,
    )  # fmt: skip
    return tuple(
        laid_out_as(g, t) if needed else t.new_empty(0)
        for t, g, needed in zip((query, key, value), grads, needs, strict=True)
    )


def _is_same(starts: Tensor, others: Tensor) -> bool:
    """Whether two operands are one tensor, which a dispatcher may have wrapped anew."""
    return starts is others or (
        starts.shape == others.shape
        and starts.stride() == others.stride()
        and starts.dtype == others.dtype
        and starts.data_ptr() == others.data_ptr()
    )
