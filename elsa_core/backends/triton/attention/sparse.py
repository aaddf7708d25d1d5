"""Attention that leaves out tiles of negligible weights on a GPU: one launch.

These kernels were run by Triton's interpreter and compiled, never timed on a GPU yet: "auto" does
not choose them. Nothing is added by atomics but the counts, which are integers: equal arguments
give equal bits.

Sources: BLASST, arXiv 2512.12087 (tiles left out); VFA (maxima from summaries, first and local
tiles first, frozen).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.shared import layout
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS
from elsa_core.base.skipping import COUNTS, exact_threshold

KEYS = 64  # of a tile
ROWS = {False: 64, True: 128}  # queries of a tile; True: half precision
MODES = {"strict": 1, "lean": 1, "ieee": 2}
# the largest head dimensions whose operands fit in the 99 KiB of sm_120
LARGEST_WIDE, LARGEST_HALF = 64, 128
SUMMARIES, ORDER, FROZEN = 1, 2, 4
# float16 weights carry so many powers of two, that small ones stay normal; fewer where a frozen
# maximum may be passed
SHIFT, FROZEN_SHIFT = 7, 2


@dataclass(frozen=True)
class Options:
    """What a plan depends on beside the tensors' layouts."""

    is_causal: bool
    scale: float
    precision: str
    threshold: float
    relief: int


def support(request: Request) -> Support:
    """Whether the kernel serves such calls; whether a GPU is there is asked elsewhere."""
    if request.precision not in MODES:
        return Support(False, f"sparsity has no Triton kernel for {request.precision!r}")
    dim = max(request.head_dim, request.value_dim)
    largest = LARGEST_WIDE if request.dtype == torch.float32 else LARGEST_HALF
    if dim > largest:
        kind = str(request.dtype).removeprefix("torch.")
        return Support(False, f"head dimension {dim} is above {largest}, sparsity's for {kind}")
    return Support(True)


def schedule(query: Tensor, *rest: Any) -> str:
    """How a call is cut, in words."""
    rows = ROWS[query.dtype != torch.float32]
    return f"query tiles of {rows}, key tiles of {KEYS}, the value product behind a branch"


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    scale: float, precision: str, threshold: float, relief: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The CUDA kernel of `elsa::sparse_attention`; arguments and results are the operator's.

    query, key and value are float32, float16 or bfloat16, of any strides.
    """
    batch, heads, queries, _ = query.shape
    keys, value_dim = value.shape[2:]
    out = query.new_empty((batch, queries, heads, value_dim)).transpose(1, 2)
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32)
    counts = query.new_zeros((batch, heads, COUNTS), dtype=torch.int64)
    if not (out.numel() and keys):
        return out.zero_(), lse.fill_(-math.inf), counts
    limit = exact_threshold(query.dtype, keys) if threshold == 0.0 else threshold
    if attn_mask is not None:
        relief &= ~SUMMARIES  # a mask may hide the keys of summaries
    options = Options(is_causal, scale, precision, limit, relief)
    layouts = tuple(layout.key_of(t) for t in (query, key, value, attn_mask))
    cached = ("sparse", query.get_device(), layouts, options)
    launch = PLANS.get(cached, plan_call, query, key, value, attn_mask, options)
    with layout.on_device(query):
        index = counts
        if relief & SUMMARIES:  # the key of the largest norm of each tile, [B, Hkv, tiles]
            tiles = -(-keys // KEYS)
            norms = key.float().square().sum(-1)
            norms = torch.nn.functional.pad(norms, (0, tiles * KEYS - keys), value=-1.0)
            first = torch.arange(0, tiles * KEYS, KEYS, device=key.device)
            index = norms.unflatten(-1, (tiles, KEYS)).argmax(-1) + first
        mask = layout.mask_pointer(attn_mask, query)
        launch(query, key, value, mask, index, out, lse, counts)
    return out, lse, counts


def plan_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options
) -> Launch:
    """The launch of a call; everything here depends on layouts, never on data."""
    from elsa_core.backends.triton.attention import sparse_kernels

    read = {"q": query, "k": key, "v": value}
    tail = layout.read_terms(read, mask, options.is_causal)
    half = query.dtype != torch.float32
    rows = ROWS[half]
    if half and tail["STEP"] == 1:  # see `schedules.fold_tail`
        tail |= {name: max(64, tail[name]) for name in ("D0", "V0")}
    frozen = bool(options.relief & FROZEN)
    shift = FROZEN_SHIFT if frozen else SHIFT
    tail |= {
        "tiles": -(-tail["n_k"] // KEYS), "scale": float(options.scale) * layout.LOG2E,
        "threshold": options.threshold, "MODE": 0 if half else MODES[options.precision],
        "SKIP": options.threshold > -math.inf,
        "SUMMARIES": bool(options.relief & SUMMARIES), "ORDER": bool(options.relief & ORDER),
        "FROZEN": frozen, "SHIFT": shift if query.dtype == torch.float16 else 0,
        "STAGES": 2 if half else 1, "BM": rows, "BN": KEYS,
    }  # fmt: skip
    wide = max(tail["D0"], tail["V0"]) > 64
    grid = (tail["batch"] * tail["heads"] * -(-tail["n_q"] // rows),)
    settings = {"num_warps": 8 if wide and half else 4, "num_stages": 1}
    return Launch(sparse_kernels.forward, grid, tail, settings)
