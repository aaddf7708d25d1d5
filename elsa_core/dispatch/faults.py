"""What PyTorch's kernels compute wrong, asked before a call is given to them.

A call with a fault goes to the next backend; asked for by name, the peer is refused. Not here is
what `backends/sdpa.py` mends by itself: rows that do not begin at a multiple of 16 bytes are copied
on a GPU, rows that see no key are taken out, and so are NaNs in hidden keys. What whole kinds of
calls cannot have (head dimensions, dtypes) is in `support` and `gradient` of a backend.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# "whole": forward and, where wanted, its own backward; "gradients": of elsa's out and lse.
Mode = Literal["whole", "gradients"]


def peer_fault(
    peer: str, mode: Mode, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> str | None:
    """Why a peer would compute this call of attention wrong, in the operator's layout; None where
    it does not. Shapes, strides and dtypes are read."""
    if peer != "sdpa":
        return None
    device = query.device.type
    if scale <= 0.0:  # minus infinity times that is NaN or infinity
        kernels = {"cuda": "flash or cuDNN", "cpu": "flash" if is_causal else ""}.get(device, "")
        if kernels and (device == "cuda" or mode == "whole"):
            return (
                f"{kernels} multiplies by the scale after it has masked: "
                "NaN for a scale of 0 or below"
            )
    # where a last axis is not dense, PyTorch's own call takes its math kernel, whose sums are wider
    half = query.dtype in (torch.float16, torch.bfloat16)
    apart = half and any(t.stride(-1) != 1 for t in (query, key, value))
    if mode == "gradients" and device == "cpu" and apart:
        return (
            "flash sums gradients of a rounded output: up to 7 times the error of PyTorch's own "
            "call, which takes another kernel where a last axis is not dense"
        )
    return None


def without_gaps(rows: Tensor) -> Tensor:
    """The operand of a product, copied where PyTorch's product on a CPU would read past its rows.

    oneDNN's bfloat16 kernels for AMX read rows in steps of 32 elements. What lies behind a row is
    multiplied by zero, so that a NaN there becomes the result.
    """
    if rows.dtype != torch.bfloat16 or rows.device.type != "cpu" or rows.is_contiguous():
        return rows
    return rows if rows.shape[-1] % 32 == 0 or rows.stride(-1) != 1 else rows.contiguous()
