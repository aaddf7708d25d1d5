"""`elsa::linear` on the GPU: the projections of patched sites, on tensor cores.

float32: an entry x is written as hi + lo, both of TF32's 11 significant bits and 8 exponent bits,
so 22 bits of every number from 2**-113 on; a product is lo * hi + hi * lo + hi * hi. The
products of BK channels have an accumulator of their own, which float32 additions gather: tensor
cores truncate where they accumulate, so that what error is left leans towards zero (about 2**-23 of
the result) and does not average out over tokens. A tile whose result is not finite, or has a row or
column that is nowhere above 2**-80 and not zero, is computed once more with float32 FMA, in the
same launch: halves of infinities are NaNs, and those of the smallest numbers lose bits (which goes
unseen where weights of 2**40 and more lift the result again).

float16 and bfloat16: one product, accumulated in float32 over few channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS

# Row tiles whose columns follow one another, so that they find their rows in cache.
GROUP = tl.constexpr(8)
# What the float32 guard compares: the bits of infinity, and of 2**-80.
INFINITE = tl.constexpr(0x7F800000)
TINY = tl.constexpr((127 - 80) << 23)


class LinearTile(NamedTuple):
    """Rows, columns and channels of a tile, warps of a program, and tiles under way."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Measured on one H200; `tile_for` says where each serves.
LARGE = LinearTile(128, 128, 32, 8, 3)
TALL = LinearTile(128, 64, 32, 4, 3)
SMALL = LinearTile(64, 64, 32, 4, 3)
NARROW = LinearTile(64, 32, 32, 4, 3)
# Of the last round of programs of a large tile, one to a multiprocessor, so many must be there.
FULL = 0.77
# With fewer rows PyTorch's library, which then cuts the sums over channels, is faster.
LEAST_ROWS = 64
# Sums of fewer products round so little that what 22 bits leave out would show.
LEAST_DEPTH = 64


@triton.jit
def nearest_tf32(x):
    """x to the nearest number of 11 significant bits; the largest ones become infinite."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def load_block(p, o_r, rows, o_k, depth, row, UNIT: tl.constexpr, EVEN: tl.constexpr):
    """Rows `o_r` of a matrix with `row` units of UNIT elements to a row; zeros beyond it."""
    mask = (o_r < rows)[:, None]
    if not EVEN:
        mask = mask & (o_k < depth)[None, :]
    return tl.load(p + o_r[:, None] * (row * UNIT) + o_k[None, :], mask=mask, other=0.0)


@triton.jit
def store_result(p, y, Bias, o_m, rows, o_n, columns, row, UNIT: tl.constexpr, BIAS: tl.constexpr):
    """Sums plus bias, to their rows."""
    if BIAS:
        b = tl.load(Bias + o_n, mask=o_n < columns, other=0.0)
        y += b.to(tl.float32)[None, :]
    mask = (o_m < rows)[:, None] & (o_n < columns)[None, :]
    tl.store(p + o_m[:, None] * (row * UNIT) + o_n[None, :], y.to(p.dtype.element_ty), mask=mask)


@triton.jit
def fails_guard(y):
    """Whether split products cannot be trusted with a tile of results. [R, C] float32"""
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    m_r = tl.max(bits, 1)
    m_c = tl.max(bits, 0)
    least = tl.minimum(
        tl.min(tl.where(m_r > 0, m_r, INFINITE), 0), tl.min(tl.where(m_c > 0, m_c, INFINITE), 0)
    )
    return (tl.max(m_c, 0) >= INFINITE) | (least < TINY)


@triton.jit
def exact_tile(
    p_x, p_w, Bias, p_y, rows, o_n, columns, depth, x_row, w_row, y_row,
    UNIT: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, XM: tl.constexpr, XK: tl.constexpr,
):  # fmt: skip
    """A tile of the result with float32 FMA, XM rows at a time."""
    for r in tl.range(0, BM, XM, num_stages=1):
        o_m = r + tl.arange(0, XM)
        y = tl.zeros([XM, o_n.shape[0]], tl.float32)
        for k0 in tl.range(0, depth, XK, num_stages=1):
            o_k = k0 + tl.arange(0, XK)
            x = load_block(p_x, o_m, rows, o_k, depth, x_row, UNIT, False)
            w = load_block(p_w, o_n, columns, o_k, depth, w_row, UNIT, False)
            y = tl.dot(x, w.T, y, input_precision="ieee")
        store_result(p_y, y, Bias, o_m, rows, o_n, columns, y_row, UNIT, BIAS)


@triton.jit(do_not_specialize=["rows", "depth", "x_row", "w_row", "y_row"])
def linear_tile(
    Input, Weight, Bias, Out, rows: tl.int64, depth: tl.int32, x_row: tl.int32, w_row: tl.int32,
    y_row: tl.int32, SPLIT: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, XM: tl.constexpr, XK: tl.constexpr,
):  # fmt: skip
    """Out = Input Weight^T + Bias, a tile of BM rows and BN columns to a program.

    Input [rows, depth], Weight [columns, depth], Out [rows, columns]; x_row, w_row and y_row are
    the elements from one row to the next, in units of UNIT (16 bytes). SPLIT: float32 in three
    products. EVEN: BK divides depth.
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
    p_y = Out + i_m * BM * y_row * UNIT
    left = tl.minimum(rows - i_m * BM, BM).to(tl.int32)
    y = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.range(0, depth, BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        x = load_block(p_x, o_m, left, o_k, depth, x_row, UNIT, EVEN)
        w = load_block(Weight, o_n, columns, o_k, depth, w_row, UNIT, EVEN)
        if SPLIT:
            xh = nearest_tf32(x)
            xl = nearest_tf32(x - xh)
            wh = nearest_tf32(w)
            wl = nearest_tf32(w - wh)
            part = tl.dot(xl, wh.T, input_precision="tf32")
            part = tl.dot(xh, wl.T, part, input_precision="tf32")
            part = tl.dot(xh, wh.T, part, input_precision="tf32")
            # by name: written with + the compiler lets the products accumulate into y
            y = tl.fma(part, 1.0, y)
        else:
            y = tl.dot(x, w.T, y)
    kept = left
    if SPLIT:
        bad = fails_guard(y)
        kept = tl.where(bad, 0, left)
    store_result(p_y, y, Bias, o_m, kept, o_n, columns, y_row, UNIT, BIAS)
    if SPLIT:  # noqa: SIM102 (one is decided at compile time, the other by the data)
        if bad:
            exact_tile(
                p_x, Weight, Bias, p_y, left, o_n, columns, depth, x_row, w_row, y_row,
                UNIT, BIAS, BM, XM, XK,
            )  # fmt: skip


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The CUDA kernel of `elsa::linear`: input @ weight.T + bias.

    Args:
        input: [..., K], float32, float16 or bfloat16. weight: [N, K], bias: [N], of its dtype and
            device.

    Returns:
        [..., N], dense; or None where this is PyTorch's to compute, or to refuse: another GPU than
        sm_90, few rows, few channels in float32, rows that do not begin at multiples of 16 bytes,
        shapes, dtypes or devices that do not fit together. None too where the kernel would have to
        be loaded while a CUDA graph is recorded.
    """
    call = planned(input, weight, bias)
    if call is None:
        return None
    if not call.loaded and input.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    out = input.new_empty((*input.shape[:-1], weight.shape[0]))
    pointers = (input, weight, weight if bias is None else bias, out)
    if input.is_cuda and input.get_device() != torch.cuda.current_device():
        with torch.cuda.device(input.device):
            call(*pointers)
    else:
        call(*pointers)
    return out


def warm(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Have the kernel of such calls compiled and loaded: a graph may be recorded of them later."""
    call = planned(input, weight, bias)
    if call is not None and not call.loaded:
        linear(input, weight, bias)


def planned(input: Tensor, weight: Tensor, bias: Tensor | None) -> Launch | None:
    """The launch of a call, cached by layout; None where the kernel does not serve it."""
    own = () if bias is None else _layout(bias)
    key = ("linear", *_layout(input), *_layout(weight), *own)
    return PLANS.get(key, _plan_if_served, input, weight, bias)


def _plan_if_served(input: Tensor, weight: Tensor, bias: Tensor | None) -> Launch | None:
    return plan(input, weight, bias) if _fits(input, weight, bias) else None


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel serves: see `linear`."""
    unit = 16 // input.element_size()
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if any(t.dtype != input.dtype or t.device != input.device for t in tensors):
        return False
    if input.is_cuda and torch.cuda.get_device_capability(input.device) != (9, 0):
        return False
    if input.dim() < 1 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return False
    columns, depth = weight.shape
    return (
        columns > 0
        and depth >= (LEAST_DEPTH if input.dtype == torch.float32 else 1)
        and input.numel() >= LEAST_ROWS * depth
        and columns % unit == 0
        and depth % unit == 0
        and input.is_contiguous()
        and weight.stride(1) == 1
        and weight.stride(0) % unit == 0
        and columns * weight.stride(0) < 1 << 31  # its offsets are 32 bits
        and not any(t.data_ptr() % 16 for t in tensors)
    )


def tile_for(rows: int, columns: int, depth: int, split: bool, multiprocessors: int) -> LinearTile:
    """The tile that serves a product of so many rows, columns and channels."""

    def programs(tile: LinearTile) -> int:
        return -(-rows // tile.rows) * -(-columns // tile.columns)

    if not split:
        return TALL
    if depth < 192 and programs(TALL) >= 3 * multiprocessors:
        return TALL
    large, small = programs(LARGE), programs(SMALL)
    rounds = -(-large // multiprocessors)
    wasted = -columns % LARGE.columns
    if large >= FULL * rounds * multiprocessors and wasted <= 0.2 * columns and depth >= 192:
        return LARGE
    few = small < 0.55 * multiprocessors or (small <= 1.5 * multiprocessors and depth < 768)
    return NARROW if few else SMALL


def plan(
    input: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile | None = None
) -> Launch:
    """The kernel's launch, by its own tile or a given one; it depends on layouts, not on data."""
    columns, depth = weight.shape
    rows = input.numel() // depth
    split = input.dtype == torch.float32
    if tile is None:
        multiprocessors = 132
        if input.is_cuda:
            properties = torch.cuda.get_device_properties(input.device)
            multiprocessors = properties.multi_processor_count
        tile = tile_for(rows, columns, depth, split, multiprocessors)
    unit = 16 // input.element_size()
    tail = {
        "rows": rows, "depth": depth, "x_row": depth // unit,
        "w_row": weight.stride(0) // unit, "y_row": columns // unit, "SPLIT": split,
        "BIAS": bias is not None, "EVEN": depth % tile.depth == 0, "UNIT": unit,
        "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "STAGES": tile.stages,
        "XM": 16, "XK": 16,
    }  # fmt: skip
    programs = -(-rows // tile.rows) * -(-columns // tile.columns)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Launch(linear_tile, (programs,), tail, options)
