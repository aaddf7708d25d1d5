"""Products of float32 matrices in turbo, with one launch to a call where the weight's halves are
kept: the product reads its input as it lies and rounds it to float16 itself.

The input has no power of two: a row with an entry beyond float16's range makes its tile infinite,
and one whose largest magnitude lies below 2**-13 would keep fewer than 11 bits of it. Tiles with
such rows, and those in which the guard of `product.py` fails, are computed again with FMA.

No GPU has run it yet: not chosen by auto until measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from elsa_core.backends.triton.linear import launches
from elsa_core.backends.triton.linear.halves import magnitude, row_exponent, row_power
from elsa_core.backends.triton.linear.product import (
    ACTIVATIONS,
    GROUP,
    exact_tile,
    fails_guard,
    finish,
    load_half,
)
from elsa_core.backends.triton.shared.helpers import power
from elsa_core.backends.triton.shared.launch import Launch

# 2**-13 as the bits of a float32: rows whose largest magnitude is less are too small for float16
LEAST: tl.constexpr = tl.constexpr((127 - 13) << 23)


@triton.jit(do_not_specialize=["rows", "columns", "depth", "padded", "w_row"])
def rounded_product(
    X, Right, RightPowers, Weight, Bias, Scale, Residual, Out,
    rows: tl.int32, columns: tl.int32, depth: tl.int32, padded: tl.int32, w_row: tl.int64,
    EVEN: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SCALE: tl.constexpr,
    RESIDUAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, XM: tl.constexpr, XK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BM rows and BN columns): Out [rows, columns] of X [rows, depth], dense.

    Right [.., columns, padded] float16 with RightPowers [columns]: the high halves of Weight, whose
    rows lie w_row elements apart. padded counts units of 8, columns and depth units of 4. EVEN: BK
    divides depth. The terms are those of `product`.
    """
    padded = padded * 8
    columns = columns * 4
    depth = depth * 4
    tiles_n = tl.cdiv(columns, BN)
    tiles_m = tl.cdiv(rows, BM)
    pid = tl.program_id(0)
    first_m = pid // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first_m, GROUP)
    place = pid % (GROUP * tiles_n)
    i_m = (first_m + place % group).to(tl.int64)
    i_n = (place // group).to(tl.int64)
    left = tl.minimum(rows - i_m * BM, BM).to(tl.int32)
    beside = tl.minimum(columns - i_n * BN, BN).to(tl.int32)
    o_m = tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    # rows beyond the last are copies of it, which are not stored
    p_x = X + i_m * BM * depth + tl.minimum(o_m, left - 1)[:, None] * depth + o_k[None, :]
    p_r = Right + i_n * BN * padded
    p_r = p_r + tl.minimum(o_n, beside - 1)[None, :] * padded + o_k[:, None]
    top = tl.zeros([BM], tl.int32)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.range(0, depth, BK, num_stages=STAGES):
        deep = k0 + o_k < depth
        x = load_half(p_x, deep[None, :], EVEN)
        top = tl.maximum(top, tl.max(magnitude(x), 1))
        acc = tl.dot(x.to(tl.float16), load_half(p_r, deep[:, None], EVEN), acc)
        p_x += BK
        p_r += BK
    of_right = tl.load(RightPowers + i_n * BN + o_n, mask=o_n < beside, other=0.0)
    # as if rows had been scaled before
    scaled = acc * power(row_exponent(top))[:, None]
    bad = fails_guard(scaled, row_power(top), of_right, BM, BN)
    bad |= tl.max(((top != 0) & (top < LEAST)).to(tl.int32), 0) != 0
    at = i_m * BM * columns + i_n * BN
    finish(
        acc * of_right[None, :], Bias + i_n * BN, Scale + i_n * BN, Residual, Out + at, o_m,
        tl.where(bad, 0, left), o_n, beside, at, columns, BIAS, ACTIVATION, SCALE, RESIDUAL,
    )  # fmt: skip
    if bad:
        exact_tile(
            X + i_m * BM * depth, Weight + i_n * BN * w_row, Bias + i_n * BN, Scale + i_n * BN,
            Residual, Out + at, left, o_n, beside, columns, 0, depth, depth, 1, w_row, 1, at, X, X,
            X, rows, BIAS, ACTIVATION, SCALE, RESIDUAL, False, False, False, BM, XM, XK,
        )  # fmt: skip


class Rounded:
    """The launches of a linear layer in turbo."""

    def __init__(self, input: Tensor, weight: Tensor, epilogue: launches.Epilogue, frozen: bool):
        columns, depth = weight.shape
        shape = launches.Shape(input.numel() // depth, columns, depth)
        tile = launches.tile_for(shape, launches.gpu_of(input.device))
        self.frozen, self.columns, self.padded = frozen, columns, launches.padded_depth(depth)
        self.split = launches.split_launch((columns, 0, depth), weight.stride(0), 0, single=True)
        bias, activation, scale, residual = epilogue
        tail = {
            "rows": shape.rows, "columns": columns // 4, "depth": depth // 4,
            "padded": self.padded // 8, "w_row": weight.stride(0), "EVEN": depth % tile.depth == 0,
            "BIAS": bias, "ACTIVATION": ACTIVATIONS.index(activation), "SCALE": scale,
            "RESIDUAL": residual, "BM": tile.rows, "BN": tile.columns, "BK": tile.depth,
            "STAGES": tile.stages, "XM": 16, "XK": 16,
        }  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        self.multiply = Launch(rounded_product, (launches.tiles_of(shape, tile),), tail, options)

    @property
    def loaded(self) -> bool:
        """Whether the kernels are compiled and on the device."""
        return (self.frozen or self.split.loaded) and self.multiply.loaded

    def __call__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
        residual: Tensor | None, halves: Tensor | None, powers: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if halves is None or powers is None:
            halves = input.new_empty((self.columns, self.padded), dtype=torch.float16)
            powers = input.new_empty(self.columns)
            self.split(weight, halves, powers, weight, halves, powers, *(powers,) * 3)
        out = input.new_empty((*input.shape[:-1], self.columns))
        absent = powers
        self.multiply(
            input, halves, powers, weight, absent if bias is None else bias,
            absent if scale is None else scale, absent if residual is None else residual, out,
        )  # fmt: skip
        return out
