"""`elsa::window_attention` on the GPU: one launch, planned once for each layout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_window
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.layout import LOG2E, key_of, on_device
from elsa_core.backends.triton.shared.plans import PLANS
from elsa_core.backends.triton.window import tiling
from elsa_core.backends.triton.window.tiling import WindowShape, WindowTable
from elsa_core.backends.window_call import WindowCall

INT32 = 1 << 31
GATHER_BLOCK = 512


def window_attention(*arguments: Any) -> Tensor:
    """Attention within windows, the CUDA kernel of `elsa::window_attention`.

    Args: a `WindowCall`'s fields. qkv: [B, D, H, W, 3C], float32, float16 or bfloat16, any strides
    with the last one 1; head_dim up to 256. The rest as in `ops.window.api`, window_size and
    shift_size with three entries.

    Returns:
        [B, D, H, W, C], dense, in qkv's dtype. Scores, sums and weights are float32.

    A bias given as a table and an index is gathered by a launch of its own. Split products (strict,
    lean and turbo on float32) are guarded by a test on the data of each window and head (see
    `window/helpers.py`); those that fail are computed with float32 FMA in the same launch.

    Source: W-ELSA (arXiv 2604.23798).
    """
    given = WindowCall(*arguments)
    # kernels take the size off once: no axis is rolled by more than that
    if any(s > n for s, n in zip(given.shift_size, given.qkv.shape[1:4], strict=True)):
        return eager_window.attention(*given)
    qkv, pad = given.qkv, given.pad_qkv
    if pad is not None and (pad.dtype != qkv.dtype or pad.stride(0) != 1):
        given = given._replace(pad_qkv=pad.to(qkv.dtype).contiguous())
    out = qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3))
    if not out.numel():
        return out
    with on_device(qkv):
        if given.bias_index is not None:
            assert given.bias is not None
            given = given._replace(bias=gathered(given.bias, given.bias_index), bias_index=None)
        launch: Launch = PLANS.get(layout_key("window", given), plan_call, given)
        # for a term that there is not, any tensor
        launch(*(qkv if t is None else t for t in given.differentiable), out)
    return out


def gathered(table: Tensor, index: Tensor) -> Tensor:
    """[heads, T, T] of a table [L, heads] read at index [T, T]; NaN where that is beyond the table.

    One small launch ahead of the kernel, which reads a dense bias two times faster than a table
    (measured at windows of 16x16 on one H200).
    """
    tokens, heads = index.shape[0], table.shape[1]
    out = table.new_empty((heads, tokens, tokens))
    key = ("bias", table.get_device(), *map(key_of, (table, index, out)))
    PLANS.get(key, plan_gather, table, index)(table, index, out)
    return out


def plan_gather(table: Tensor, index: Tensor) -> Launch:
    """The launch that reads a table [L, heads] at an index [T, T]."""
    from elsa_core.backends.triton.window.helpers import gather_bias

    tokens = index.shape[0]
    tail = {
        "tokens": tokens, "rows": table.shape[0],
        **dict(zip(("table_l", "table_h"), table.stride(), strict=True)),
        **dict(zip(("index_q", "index_k"), index.stride(), strict=True)), "BLOCK": GATHER_BLOCK,
    }  # fmt: skip
    grid = (-(-tokens * tokens // GATHER_BLOCK), table.shape[1])
    return Launch(gather_bias, grid, tail, {"num_warps": 4})


def layout_key(operator: str, given: WindowCall) -> tuple[Any, ...]:
    """All that a plan depends on, of a call whose bias is dense."""
    read = map(key_of, (given.qkv, given.bias, given.pad_qkv, given.logit_scale))
    return (
        operator, given.qkv.get_device(), *read, given.num_heads, tuple(given.window_size),
        tuple(given.shift_size), *given[8:],
    )  # fmt: skip


def tile_terms(given: WindowCall) -> tuple[WindowShape, str, WindowTable, int]:
    """What decides the tiles of a call: its shape and mode, its GPU's table and multiprocessors."""
    batch, *sizes, width = given.qkv.shape
    counts = (-(-n // w) for n, w in zip(sizes, given.window_size, strict=True))
    shape = WindowShape(
        batch * math.prod(counts), given.num_heads, math.prod(given.window_size),
        width // (3 * given.num_heads),
    )  # fmt: skip
    index = given.qkv.get_device()
    multiprocessors = device.device_table(index)[1]
    mode = device.mode_of(given.qkv.dtype, given.precision)
    return shape, mode, tiling.load_table(device.table_of(index)), multiprocessors


def common_terms(given: WindowCall, shape: WindowShape) -> dict[str, Any]:
    """The arguments that the forward's and the gradients' kernels share, by name."""
    q, pad, bias, logit = given.qkv, given.pad_qkv, given.bias, given.logit_scale
    sizes = tuple(zip(q.shape[1:4], given.window_size, strict=True))
    counts = [-(-size // window) for size, window in sizes]
    padded = 0  # see `window/helpers.py`
    if any(size % window for size, window in sizes):
        padded = 1 if pad is None else 2
    # 16 bytes in elements if all rows of qkv are aligned so
    unit = 16 // q.element_size()
    aligned = q.data_ptr() % 16 == 0 and (pad is None or pad.data_ptr() % 16 == 0)
    if not aligned or any(s % unit for s in q.stride()[:4]):
        unit = 1
    # the factor of scores in base 2, as significand and exponent where products are scaled
    size, exponent = given.scale * LOG2E, 0
    if q.dtype == torch.float32 and size and math.isfinite(size):
        significand, exponent = math.frexp(size)
        size, exponent = significand * 2.0, exponent - 1
    # elements from the first to the last of one image
    extent = sum((n - 1) * s for n, s in zip(q.shape[1:], q.stride()[1:], strict=True)) + 1
    return {
        "windows": shape.windows, "heads": shape.heads,
        **dict(zip(("depth", "height", "width"), q.shape[1:4], strict=True)),
        **dict(zip(("n_d", "n_h", "n_w"), counts, strict=True)),
        **dict(zip(("shift_d", "shift_h", "shift_w"), given.shift_size, strict=True)),
        "scale": size, "scale_exp": exponent, "mask_value": given.mask_value * LOG2E,
        **dict(zip(("q_b", "q_d", "q_h", "q_w"), (s // unit for s in q.stride()), strict=False)),
        **dict(
            zip(("bias_h", "bias_q", "bias_k"), bias.stride() if bias is not None else (0,) * 3,
                strict=True)
        ),
        "logit_h": 0 if logit is None else logit.stride(0), "BIAS": bias is not None,
        "DENSE": bias is not None and bias.is_contiguous(),
        "SHIFTED": any(given.shift_size), "PADDED": padded,
        "COSINE": logit is not None, "HEAD_FIRST": given.layout == "head",
        "GRID": given.grid, "VOLUME": q.shape[1] > 1 or given.window_size[0] > 1,
        "WIDE": extent >= INT32, "UNIT": unit,
        **dict(zip(("WD", "WH", "WW"), given.window_size, strict=True)), "T": shape.tokens,
        "SHIFT": 0.0 if q.dtype == torch.bfloat16 else 7.0, "D": shape.head_dim,
    }  # fmt: skip


def plan_call(given: WindowCall) -> Launch:
    """The kernel's launch; it depends on layouts, not on data. A bias is dense, [heads, T, T]."""
    from elsa_core.backends.triton.window.forward_kernels import window_fold, window_tile

    terms = tile_terms(given)
    p = tiling.plan(*terms)
    t, tokens, exact = p.tile, math.prod(given.window_size), p.tile.mode == "exact"
    tail: dict[str, Any] = {
        **common_terms(given, terms[0]), "count": p.count, "MODE": device.MODES[t.mode],
        "WEIGHT": 2.0 ** -(tokens - 1).bit_length(),
        "DP": p.padded_dim, "BM": p.block_m, "BN": p.block_n,
        "XM": p.block_m if exact else 16, "XN": p.block_n if exact else 16, "STAGES": t.stages,
        "LOOP": p.count > 1, "UNROLL": t.unroll,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": t.warps, "num_stages": t.stages}
    if t.registers:
        options["maxnreg"] = t.registers
    return Launch(window_tile if p.whole else window_fold, (p.programs,), tail, options)
