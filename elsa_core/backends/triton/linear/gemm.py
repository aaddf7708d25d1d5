"""`elsa::linear` in half precision of few channels, for which PyTorch's library has no kernel that
fits, with what follows the product in the same launch.

One product on tensor cores, accumulated in float32; the terms in float32 too, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from elsa_core.backends.triton.linear.launches import Tile
from elsa_core.backends.triton.linear.planner import is_layer, layout
from elsa_core.backends.triton.linear.product import ACTIVATIONS, activated
from elsa_core.backends.triton.shared.device import capability_of, described, on_device_of
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS
from elsa_core.base.limits import HALF_DEPTH

# Row tiles whose columns follow one another, so that they find their rows in cache.
GROUP = tl.constexpr(8)
# Measured on one H200.
TILE = Tile(128, 64, 32, 4, 3)
# Elements of 16 bytes.
UNIT = 8


@triton.jit
def load_block(p, o_r, rows, o_k, depth, row, UNIT: tl.constexpr, EVEN: tl.constexpr):
    """Rows `o_r` of a matrix with `row` units of UNIT elements to a row; zeros beyond it."""
    mask = (o_r < rows)[:, None]
    if not EVEN:
        mask = mask & (o_k < depth)[None, :]
    return tl.load(p + o_r[:, None] * (row * UNIT) + o_k[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["rows", "depth", "x_row", "w_row", "y_row"])
def linear_tile(
    Input, Weight, Bias, Scale, Residual, Out, rows: tl.int64, depth: tl.int32, x_row: tl.int32,
    w_row: tl.int32, y_row: tl.int32, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Out = Residual + Scale * activation(Input Weight^T + Bias), a tile of BM rows and BN columns
    to a program; Bias, Scale [columns] and Residual [rows, columns] if BIAS, SCALE, RESIDUAL.

    Input [rows, depth], Weight [columns, depth], Out [rows, columns]; x_row, w_row and y_row are
    the elements from one row to the next, in units of UNIT (16 bytes). EVEN: BK divides depth.
    """
    columns = y_row * UNIT  # so that the compiler knows: masks cut no 16 bytes
    tiles_n = (columns + BN - 1) // BN
    tiles_m = ((rows + BM - 1) // BM).to(tl.int32)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first, GROUP)
    place = pid % (GROUP * tiles_n)
    i_m = (first + place % group).to(tl.int64)
    o_m = tl.arange(0, BM)
    o_n = place // group * BN + tl.arange(0, BN)
    # rows and addresses count from the tile's first row
    p_x = Input + i_m * BM * x_row * UNIT
    left = tl.minimum(rows - i_m * BM, BM).to(tl.int32)
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.range(0, depth, BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        x = load_block(p_x, o_m, left, o_k, depth, x_row, UNIT, EVEN)
        w = load_block(Weight, o_n, columns, o_k, depth, w_row, UNIT, EVEN)
        y = tl.dot(x, w.T, y)
    if BIAS:
        y += tl.load(Bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    y = activated(y, ACTIVATION)
    if SCALE:
        y *= tl.load(Scale + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    at = i_m * BM * columns
    offsets = o_m[:, None] * columns + o_n[None, :]
    mask = (o_m < left)[:, None] & (o_n < columns)[None, :]
    if RESIDUAL:
        y += tl.load(Residual + at + offsets, mask=mask, other=0.0).to(tl.float32)
    p_y = Out + at + offsets
    tl.store(p_y, y.to(Out.dtype.element_ty), mask=mask)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """The CUDA kernel of `elsa::linear` in half precision.

    Args:
        input: [..., K], float16 or bfloat16. weight: [N, K], of its dtype and device, as are bias
            and scale: [N], and residual: [..., N], dense.

    Returns:
        [..., N], dense; or None where this is PyTorch's to compute, or to refuse: another GPU than
        sm_90, more than HALF_DEPTH channels, rows that do not begin at multiples of 16 bytes,
        shapes, dtypes or devices that do not fit together.
    """
    given = (input, weight, bias, residual, scale)

    def planned() -> Launch | None:
        fits = _serves(*given[:2]) and is_layer(input, weight, (bias, scale), residual, UNIT)
        return plan(input, weight, bias, activation, residual, scale) if fits else None

    call = PLANS.get(("linear", *map(layout, given), activation), planned)
    if call is None:
        return None
    out = input.new_empty((*input.shape[:-1], weight.shape[0]))
    terms = (weight if term is None else term for term in (bias, scale, residual))
    with on_device_of(input):
        call(input, weight, *terms, out)
    return out


def _serves(input: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes such dtypes and sizes: see `linear`."""
    if input.dtype not in (torch.float16, torch.bfloat16) or weight.dim() != 2:
        return False
    if (input.is_cuda or described()) and capability_of(input.device) != (9, 0):
        return False
    columns, depth = weight.shape
    return (
        0 < depth <= HALF_DEPTH
        and input.numel() > 0
        and columns % UNIT == 0
        and depth % UNIT == 0
        and columns * weight.stride(0) < 1 << 31  # its offsets are 32 bits
    )


def plan(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None,
) -> Launch:  # fmt: skip
    """The kernel's launch; it depends on layouts, not on data."""
    columns, depth = weight.shape
    rows = input.numel() // depth
    tail = {
        "rows": rows, "depth": depth, "x_row": depth // UNIT, "w_row": weight.stride(0) // UNIT,
        "y_row": columns // UNIT, "BIAS": bias is not None,
        "ACTIVATION": ACTIVATIONS.index(activation), "SCALE": scale is not None,
        "RESIDUAL": residual is not None, "EVEN": depth % TILE.depth == 0, "UNIT": UNIT,
        "BM": TILE.rows, "BN": TILE.columns, "BK": TILE.depth, "STAGES": TILE.stages,
    }  # fmt: skip
    programs = -(-rows // TILE.rows) * -(-columns // TILE.columns)
    options = {"num_warps": TILE.warps, "num_stages": TILE.stages}
    return Launch(linear_tile, (programs,), tail, options)
