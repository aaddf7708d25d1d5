"""cuDNN's forward, where the shipped tables say that it is the faster exact kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elsa_core.backends.sdpa import WIDTH, cudnn_takes, starts_aligned
from elsa_core.base import calls


def measured_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str,
) -> Tensor | None:  # fmt: skip
    """cuDNN's kernel, which the shipped tables were measured with; None where it does not serve.

    attn_mask: of the query's dtype, or None. is_causal: of as many queries as keys.
    """
    masked = attn_mask is not None
    if (is_causal and masked) or not reads(query, key, value, attn_mask):
        return None
    if torch.compiler.is_compiling():
        if not _compiles(calls.place(query), query.dtype, query.shape[-1], masked, is_causal):
            return None
    elif not cudnn_takes(query, key, value, attn_mask, is_causal) or (
        masked and not _gives_zeros(calls.place(query))
    ):
        return None
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out: Tensor = cudnn(query, key, value, attn_mask, False, 0.0, is_causal, scale=scale)[0]
    return out


def reads(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether operands lie in memory as `measured_attention` takes them."""
    if not all(t.stride(-1) == 1 and starts_aligned(t) for t in (query, key, value)):
        return False
    if attn_mask is None:
        return True
    # rows one after another, from a multiple of 16 bytes on; compilers cannot read where a tensor
    # begins, see `starts_aligned`
    rows = attn_mask.stride(-1) == 1 and attn_mask.stride(-2) == attn_mask.shape[-1]
    begins = torch.compiler.is_compiling() or (
        attn_mask.storage_offset() % (WIDTH // attn_mask.dtype.itemsize) == 0
    )
    return bool(rows and begins)


def serves(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> bool:
    """Whether `measured_attention` serves a call in eager mode, as far as this machine can tell."""
    if (is_causal and attn_mask is not None) or not reads(query, key, value, attn_mask):
        return False
    if not torch.cuda.is_available():  # a call is described
        return True
    taken = cudnn_takes(query, key, value, attn_mask, is_causal)
    return taken and (attn_mask is None or _gives_zeros(calls.place(query)))


_ZEROS: dict[str, bool] = {}


def _gives_zeros(place: str) -> bool:
    """Whether cuDNN takes a mask and gives zeros for a row that sees no key: looked at once on each
    GPU, not while a CUDA graph is recorded."""
    if place not in _ZEROS:
        if torch.cuda.is_current_stream_capturing():
            return False
        wanted = torch.ones(128, 64, dtype=torch.float16)
        wanted[1] = 0.0
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        try:
            with torch.no_grad():
                row = torch.ones(1, 1, 128, 64, dtype=torch.float16, device=place)
                mask = row.new_zeros(1, 1, 128, 128)
                mask[..., 1, :] = -math.inf
                out = cudnn(row, row, row, mask, False)[0][0, 0].cpu()
            _ZEROS[place] = torch.equal(out, wanted)
        except RuntimeError:  # this cuDNN has no plan for it
            _ZEROS[place] = False
    return _ZEROS[place]


def _compiles(place: str, dtype: torch.dtype, head_dim: int, masked: bool, is_causal: bool) -> bool:
    """`cudnn_takes` of a short row: a constant for compilers, who have no tensors to ask by."""
    row = torch.empty(1, 1, 128, head_dim, dtype=dtype, device=place)
    if not masked:
        return cudnn_takes(row, row, row, None, is_causal)
    mask = torch.empty(1, 1, 128, 128, dtype=dtype, device=place)
    return cudnn_takes(row, row, row, mask) and _gives_zeros(place)


_compiles._dynamo_marked_constant = True  # type: ignore[attr-defined]
