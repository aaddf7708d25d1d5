"""Kernel arguments that follow from the layout of tensors: units, strides, scales, masks."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

LOG2E = 1.4426950408889634


def padded(size: int, least: int = 16) -> int:
    """The power of two, at least `least`, that holds `size`."""
    return max(least, 1 << (size - 1).bit_length())


def key_of(t: Tensor | None) -> tuple[Any, ...] | None:
    """What plans know of a tensor."""
    return None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16)


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """The context in which a tensor's GPU is the current one."""
    elsewhere = t.is_cuda and t.get_device() != torch.cuda.current_device()
    return torch.cuda.device(t.device) if elsewhere else nullcontext()


def mask_pointer(mask: Tensor | None, query: Tensor) -> Tensor:
    """What kernels get for a mask: a boolean one as uint8, for None anything, which is not read."""
    if mask is None:
        return query
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def row_unit(tensors: tuple[Tensor, ...]) -> tuple[int, bool]:
    """(UNIT, UNIT_D): 16 bytes in elements if all rows are 16-byte aligned, and whether rows are
    contiguous.
    """
    rows = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)
    unit = 16 // tensors[0].element_size()
    for t in tensors:
        if t.data_ptr() % 16 or any(s % unit for s in t.stride()[:3]):
            return 1, rows
    return (unit if rows else 1), rows


def in_rows(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands in half precision with the channels of a token side by side: copies of those in
    which other tokens' lie between, as in the output of a convolution. The kernels would read these
    one by one, which takes longer than all else (62 us for 49 tokens on an H200).
    """
    if operands[0].element_size() > 2:  # split ahead, from any layout
        return operands
    return tuple(t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in operands)


def score_scale(scale: float, mode: str) -> dict[str, float | int | bool]:
    """|scale| * log2(e) as significand and exponent (half: whole), and the sign or zero apart."""
    size = abs(scale) * LOG2E if scale else 1.0
    exponent = 0
    if mode != "half":
        significand, exponent = math.frexp(size)
        size, exponent = significand * 2.0, exponent - 1
    flip = math.copysign(1.0, scale) if scale else 0.0
    return {"scale": size, "scale_exp": exponent, "flip": flip, "FLIP": flip != 1.0}


def strides(name: str, t: Tensor, unit: int) -> dict[str, int]:
    """Strides of a [B, H, N, D] tensor; those of batch, head and row in units."""
    b, h, n, d = t.stride()
    return {f"{name}_b": b // unit, f"{name}_h": h // unit, f"{name}_n": n // unit, f"{name}_d": d}


def read_terms(
    read: dict[str, Tensor], mask: Tensor | None, is_causal: bool, least: int = 16
) -> dict[str, Any]:
    """The arguments of kernels that read q [B, Hq, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv],
    perhaps others of the same kind, and a mask: counts, widths and the powers of two, at least
    `least`, that hold them, and strides.
    """
    q, k, v = (read[name] for name in "qkv")
    batch, heads, queries, dim = q.shape
    keys, value_dim = v.shape[2:]
    step, unit_d = row_unit(tuple(read.values()))
    terms: dict[str, Any] = {
        "batch": batch, "heads": heads, "group": heads // k.shape[1], "n_q": queries, "n_k": keys,
        "CAUSAL": is_causal, "STEP": step, "UNIT_D": unit_d,
        "D": dim, "D0": padded(dim, least), "DV": value_dim, "V0": padded(value_dim, least),
        **mask_terms(mask),
    }  # fmt: skip
    for name, t in read.items():
        terms |= strides(name, t, step)
    return terms


def mask_terms(mask: Tensor | None) -> dict[str, int]:
    """MASK of the kernels, 0 none, 1 boolean, 2 additive, and a mask's strides, 0 in the dimensions
    that it is broadcast over.
    """
    names = ("mask_b", "mask_h", "mask_q", "mask_k")
    if mask is None:
        return dict.fromkeys(("MASK", *names), 0)
    terms = {"MASK": 1 if mask.dtype == torch.bool else 2}
    for name, size, stride in zip(names, mask.shape, mask.stride(), strict=True):
        terms[name] = 0 if size == 1 else stride
    return terms
