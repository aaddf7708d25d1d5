"""Gated linear units in float32 on tensor cores, one launch after those that split:

    Out = activation(X Weight^T + Bias) * (X Value^T + ValueBias)

The columns of both products take turns in a tile, those of Weight at even places, so that one
thread holds both factors of a result. Operands, sums and the guard are those of `product.py`: where
the guard fails, both factors of the tile are computed again with FMA, in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from elsa_core.backends.triton.linear import launches, planner
from elsa_core.backends.triton.linear.product import (
    ACTIVATIONS,
    LIFT,
    UNSCALE,
    activated,
    exact_rows,
    fails_guard,
    split_products,
    tile_of_program,
)
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.layout import on_device
from elsa_core.backends.triton.shared.plans import PLANS


@triton.jit
def gate(
    y, Bias, ValueBias, p_out, o_m, kept, beside, columns, BIAS: tl.constexpr,
    VALUE_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write activation(y's even columns + bias) * (its odd ones + bias): `kept` rows and `beside`
    columns of the result, which has half as many columns as y.
    """
    o_y = tl.arange(0, y.shape[1])
    there = o_y // 2 < beside
    if BIAS:
        b = tl.load(Bias + o_y // 2, mask=there & (o_y % 2 == 0), other=0.0)
        y += b[None, :]
    if VALUE_BIAS:
        b = tl.load(ValueBias + o_y // 2, mask=there & (o_y % 2 == 1), other=0.0)
        y += b[None, :]
    first, second = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
    o_n = tl.arange(0, y.shape[1] // 2)
    mask = (o_m < kept)[:, None] & (o_n < beside)[None, :]
    p = p_out + o_m[:, None] * columns + o_n[None, :]
    tl.store(p, activated(first, ACTIVATION) * second, mask=mask)


@triton.jit(do_not_specialize=["rows", "columns", "depth", "w_row", "region_w", "region_v"])
def gated_product(
    Left, LeftPowers, Right, RightPowers, ValueHalves, ValuePowers, X, Weight, Bias, Value,
    ValueBias, Out, rows: tl.int32, columns: tl.int32, depth: tl.int32, w_row: tl.int64,
    region_w: tl.int64, region_v: tl.int64, SINGLE: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, VALUE_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, XM: tl.constexpr, XK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BM rows and BN / 2 columns of the result).

    Left [2, rows, depth] with LeftPowers [rows]: the halves of X [rows, depth], dense. Right and
    ValueHalves: those of Weight and Value [columns, depth], hi and lo `region_w` and `region_v`
    units of 8 elements apart; w_row counts the elements from row to row of both weights.
    depth counts units of 8, columns units of 4; EVEN: BK divides depth. SINGLE: only hi * hi is
    computed. Bias [columns] is read if BIAS, ValueBias if
    VALUE_BIAS. Out [rows, columns].
    """
    depth = depth * 8
    columns = columns * 4
    i_m, i_n = tile_of_program(rows, columns, BM, BN // 2)
    i_n *= BN // 2
    left = tl.minimum(rows - i_m * BM, BM).to(tl.int32)
    beside = tl.minimum(columns - i_n, BN // 2).to(tl.int32)
    o_m = tl.arange(0, BM)
    o_y = tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    # rows beyond the last are copies of it, which are not stored
    p_l = Left + i_m * BM * depth + tl.minimum(o_m, left - 1)[:, None] * depth + o_k[None, :]
    from_w = (o_y % 2 == 0)[None, :]
    o_r = tl.minimum(o_y // 2, beside - 1)[None, :] * depth + o_k[:, None]
    p_r = tl.where(from_w, Right + i_n * depth + o_r, ValueHalves + i_n * depth + o_r)
    region_l = rows.to(tl.int64) * depth
    region_r = tl.where(from_w, region_w, region_v) * 8
    acc = split_products(p_l, p_r, region_l, region_r, 0, depth, SINGLE, EVEN, BK, STAGES)
    of_left = tl.load(LeftPowers + i_m * BM + o_m, mask=o_m < left, other=0.0)
    p_p = tl.where(o_y % 2 == 0, RightPowers + i_n + o_y // 2, ValuePowers + i_n + o_y // 2)
    of_right = tl.load(p_p, mask=o_y // 2 < beside, other=0.0)
    bad = fails_guard(acc, of_left, of_right, BM, BN)
    y = acc * UNSCALE * ((of_left * LIFT)[:, None] * (of_right * LIFT)[None, :])
    p_out = Out + i_m * BM * columns + i_n
    gate(
        y, Bias + i_n, ValueBias + i_n, p_out, o_m, tl.where(bad, 0, left), beside, columns, BIAS,
        VALUE_BIAS, ACTIVATION,
    )  # fmt: skip
    if bad:
        p_x = X + i_m * BM * depth
        o_w = o_y[None, :] // 2 * w_row
        p_w = tl.where(from_w, Weight + i_n * w_row + o_w, Value + i_n * w_row + o_w)
        for r in tl.range(0, BM, XM, num_stages=1):
            o_x = r + tl.arange(0, XM)
            exact = exact_rows(
                p_x, p_w, o_x, left, (o_y // 2 < beside)[None, :], 0, depth, depth, 1, 1, XK
            )
            gate(
                exact, Bias + i_n, ValueBias + i_n, p_out, o_x, left, beside, columns, BIAS,
                VALUE_BIAS, ACTIVATION,
            )  # fmt: skip


def gated_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str = "silu", precision: str = "strict",
) -> Tensor | None:  # fmt: skip
    """The float32 CUDA kernel of `elsa::gated_linear`; None where `planner.linear` returns None for
    one of the two products, and where their weights differ in shape or strides.
    """
    given = (input, weight, bias, value, value_bias)
    key = ("gated_linear", *map(planner.layout, given), activation, precision)
    call = PLANS.get(key, plan, *given, activation, precision == "turbo")
    if call is None:
        return None
    with on_device(input):
        out: Tensor = call(*given)
    return out


def plan(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str, single: bool,
) -> Callable[..., Tensor] | None:  # fmt: skip
    """What makes the launches of such calls of `gated_linear`; None where that returns None."""
    alike = value.shape == weight.shape and value.stride() == weight.stride()
    if not alike or not planner.serves(input, weight, (bias, value_bias)):
        return None
    if value.dtype != weight.dtype or value.device != weight.device or value.data_ptr() % 16:
        return None
    columns, depth = weight.shape
    rows, stride = input.numel() // depth, weight.stride(0)
    split = launches.split_launch((rows, columns, depth), depth, stride, single)
    split_value = launches.split_launch((columns, 0, depth), stride, 0, single)
    shape = launches.Shape(rows, 2 * columns, depth)
    tile = launches.tile_for(shape, launches.gpu_of(input.device))
    region = columns * depth // 8
    tail = {
        "rows": rows, "columns": columns // 4, "depth": depth // 8, "w_row": stride,
        "region_w": region, "region_v": region, "SINGLE": single,
        "EVEN": depth % tile.depth == 0, "BIAS": bias is not None,
        "VALUE_BIAS": value_bias is not None, "ACTIVATION": ACTIVATIONS.index(activation),
        "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "STAGES": tile.stages,
        "XM": 16, "XK": 16,
    }  # fmt: skip
    tiles = -(-rows // tile.rows) * -(-columns // (tile.columns // 2))
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    multiply = Launch(gated_product, (tiles,), tail, options)

    def run(
        input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None
    ) -> Tensor:
        left = planner.halves_for(input, rows, depth)
        right = planner.halves_for(input, columns, depth)
        other = planner.halves_for(input, columns, depth)
        split(input, *left, weight, *right)
        split_value(value, *other, value, *other)
        out = input.new_empty((*input.shape[:-1], columns))
        absent = left[1]
        multiply(
            *left, *right, *other, input, weight, absent if bias is None else bias, value,
            absent if value_bias is None else value_bias, out,
        )  # fmt: skip
        return out

    return run
