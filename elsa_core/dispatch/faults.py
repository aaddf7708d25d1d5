"""What PyTorch's kernels compute wrong: one table, read before a call is given to them.

A call with a fault goes to the next backend; asked for by name, the peer is refused. Not here is
what `backends/sdpa.py` mends by itself: rows that do not begin at a multiple of 16 bytes are copied
on a GPU, rows that see no key are taken out, and so are NaNs in hidden keys. What whole kinds of
calls cannot have (head dimensions, dtypes) is in `support` and `gradient` of a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# "whole": forward and, where wanted, its own backward; "gradients": of elsa's out and lse.
Mode = Literal["whole", "gradients"]


class Layout(NamedTuple):
    """A call of attention in the operator's layout; shapes, strides and dtypes are read."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    scale: float


class Fault(NamedTuple):
    """A peer's fault on one type of device: in which mode, for which calls, and the reason why."""

    peer: str
    device: str
    modes: tuple[Mode, ...]
    holds: Callable[[Layout], bool]
    reason: str


def _turns_hidden(layout: Layout) -> bool:
    return layout.scale <= 0.0  # minus infinity times that is NaN or infinity


def _half_without_flash(layout: Layout) -> bool:
    """Half precision for which PyTorch's own call takes its math kernel, whose sums are wider."""
    half = layout.query.dtype in (torch.float16, torch.bfloat16)
    return half and any(t.stride(-1) != 1 for t in layout[:3])


_BEFORE = "multiplies by the scale after it has masked: NaN for a scale of 0 or below"
FAULTS = (
    Fault(
        "sdpa", "cpu", ("whole",), lambda layout: layout.is_causal and _turns_hidden(layout),
        f"flash {_BEFORE}",
    ),
    Fault("sdpa", "cuda", ("whole", "gradients"), _turns_hidden, f"flash or cuDNN {_BEFORE}"),
    Fault(
        "sdpa", "cpu", ("gradients",), _half_without_flash,
        "flash sums gradients of a rounded output: up to 7 times the error of PyTorch's own call, "
        "which takes another kernel where a last axis is not dense",
    ),
)  # fmt: skip


def peer_fault(peer: str, layout: Layout, mode: Mode) -> str | None:
    """Why a peer would compute this call wrong; None where it does not."""
    device = layout.query.device.type
    for fault in FAULTS:
        known = fault.peer == peer and fault.device == device and mode in fault.modes
        if known and fault.holds(layout):
            return fault.reason
    return None


def without_gaps(rows: Tensor) -> Tensor:
    """The operand of a product, copied where PyTorch's product on a CPU would read past its rows.

    oneDNN's bfloat16 kernels for AMX read rows in steps of 32 elements. What lies behind a row is
    multiplied by zero, so that a NaN there becomes the result.
    """
    if rows.dtype != torch.bfloat16 or rows.device.type != "cpu" or rows.is_contiguous():
        return rows
    return rows if rows.shape[-1] % 32 == 0 or rows.stride(-1) != 1 else rows.contiguous()
