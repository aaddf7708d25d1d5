"""The cases that the window kernels are judged on, and how: for GPU tests.

A case is right by twice the error of the composite that models compute in the same dtype (matmul,
softmax, matmul on cut windows, as timm's Swin does), both against float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from elsa_core.backends import eager_window
from elsa_core.backends.eager_window import Windows
from elsa_core.backends.triton.shared.launch import INTERPRETED
from elsa_core.backends.triton.window import planner
from elsa_core.backends.window_call import WindowCall

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# One rounding of float32: with a single key the composite is exact, and split products are not.
ROUNDING = {F32: 2.0**-23, F16: 0.0, BF16: 0.0}
TURBO = 1e-3
PRECISIONS = [(F32, "strict"), (F32, "turbo"), (F32, "ieee"), (F16, "strict"), (BF16, "strict")]
DEVICE = "cpu" if INTERPRETED else "cuda"

# name: (batch, size, heads, head_dim, window, shift, options)
GEOMETRY: dict[str, tuple[Any, ...]] = {
    "swin": (3, (1, 56, 56), 3, 32, (1, 7, 7), (0, 3, 3), {}),
    "swin padded, pad_qkv": (2, (1, 30, 33), 3, 32, (1, 7, 7), (0, 3, 3), {"pad": True}),
    "padded zeros, one axis shifted": (2, (1, 15, 20), 2, 32, (1, 7, 7), (0, 0, 2), {}),
    "smaller than a window": (2, (1, 5, 4), 3, 32, (1, 7, 7), (0, 3, 3), {"pad": True}),
    "table, head first, -inf": (
        2, (1, 28, 28), 6, 32, (1, 7, 7), (0, 3, 3),
        {"bias": "table", "layout": "head", "mask": -math.inf},
    ),
    "table 16, padded": (
        2, (1, 40, 40), 4, 32, (1, 16, 16), (0, 8, 8), {"bias": "table", "pad": True}
    ),
    "table 4x6x5": (1, (8, 12, 11), 2, 32, (4, 6, 5), (2, 3, 2), {"bias": "table"}),
    "window 8": (2, (1, 64, 48), 4, 32, (1, 8, 8), (0, 4, 4), {}),
    "cosine 8": (2, (1, 32, 32), 3, 32, (1, 8, 8), (0, 4, 4), {"cosine": True}),
    "cosine 16": (2, (1, 32, 32), 3, 32, (1, 16, 16), (0, 8, 8), {"cosine": True}),
    "window 12": (2, (1, 24, 36), 4, 32, (1, 12, 12), (0, 6, 6), {}),
    "window 16 padded": (2, (1, 40, 40), 4, 32, (1, 16, 16), (0, 8, 8), {"pad": True}),
    "window 24": (1, (1, 48, 48), 2, 32, (1, 24, 24), (0, 12, 12), {}),
    "volume 8x7x7": (1, (8, 14, 14), 3, 32, (8, 7, 7), (0, 3, 3), {}),
    "volume 2x7x7": (1, (5, 15, 14), 3, 32, (2, 7, 7), (1, 3, 3), {"pad": True}),
    "grid 7": (2, (1, 28, 28), 2, 32, (1, 7, 7), (0, 0, 0), {"grid": True, "layout": "head"}),
    "small 4x4": (2, (1, 16, 20), 2, 32, (1, 4, 4), (0, 2, 2), {}),
    "small 2x2, dim 16": (2, (1, 6, 6), 2, 16, (1, 2, 2), (0, 1, 1), {}),
    "5x6, dim 24, no bias": (2, (1, 15, 18), 2, 24, (1, 5, 6), (0, 2, 3), {"bias": None}),
    "dim 64": (2, (1, 14, 14), 4, 64, (1, 7, 7), (0, 3, 3), {}),
    "dim 80": (1, (1, 14, 14), 2, 80, (1, 14, 14), (0, 7, 7), {}),
    "dim 128": (1, (1, 14, 14), 2, 128, (1, 7, 7), (0, 3, 3), {}),
    "dim 256": (1, (1, 8, 8), 1, 256, (1, 8, 8), (0, 4, 4), {}),
    "unaligned": (2, (1, 14, 14), 3, 32, (1, 7, 7), (0, 3, 3), {"unaligned": True}),
    "outlier channels": (1, (1, 14, 14), 3, 32, (1, 7, 7), (0, 3, 3), {"outlier": True}),
    "large logits": (1, (1, 14, 14), 3, 32, (1, 7, 7), (0, 3, 3), {"times": 12.0}),
}  # fmt: skip
for _w in (1, 2, 3, 6, 10, 14, 20):
    _size = (1, 2 * _w + 1, 3 * _w)
    GEOMETRY[f"window {_w}"] = (1, _size, 2, 32, (1, _w, _w), (0, _w // 2, _w - 1), {"pad": True})
# turbo and ieee are checked on these alone
SOME = ("swin", "swin padded, pad_qkv", "table, head first, -inf", "cosine 8", "cosine 16",
        "window 12", "volume 2x7x7", "outlier channels")  # fmt: skip


def limit(theirs: float, dtype: torch.dtype, precision: str) -> float:
    """The largest error that is right where the composite's is `theirs`."""
    return TURBO if precision == "turbo" else 2 * theirs + ROUNDING[dtype]


def cases() -> list[tuple[str, torch.dtype, str]]:
    """What `check` runs: geometry, dtype, precision."""
    return [(n, *p) for p in PRECISIONS for n in GEOMETRY if n in SOME or p[1] == "strict"]


def make(
    batch: int, size: tuple[int, ...], heads: int, dim: int, win: tuple[int, ...],
    shift: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, precision: str,
) -> WindowCall:  # fmt: skip
    """The arguments of a case; everything random, from one seed."""
    g = torch.Generator(DEVICE).manual_seed(len(size) + heads)
    channels, tokens = 3 * heads * dim, math.prod(win)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=g)

    extra = 1 if options.get("unaligned") else 0
    qkv = normal(batch, *size, channels + extra)[..., extra:] * options.get("times", 1.0)
    if options.get("outlier"):
        qkv[..., 3 :: channels // 3] *= 2.0**20 if dtype == F32 else 2.0**4
    bias = index = None
    if options.get("bias", "dense") == "dense":
        bias = normal(heads, tokens, tokens).to(dtype)
    elif options.get("bias") == "table":
        bias = normal(4 * tokens, heads).to(dtype)
        index = torch.randint(0, 4 * tokens, (tokens, tokens), device=DEVICE, generator=g)
    pad = normal(channels).to(dtype) if options.get("pad") else None
    logit = normal(heads).abs() * 10 if options.get("cosine") else None
    qkv = qkv.to(dtype) if extra == 0 or dtype == F32 else _shifted(qkv, dtype)
    return WindowCall(
        qkv, bias, index, pad, logit, heads, win, shift, dim**-0.5, options.get("mask", -100.0),
        options.get("layout", "qkv"), options.get("grid", False), precision,
    )  # fmt: skip


def _shifted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, its rows one element off an aligned address."""
    wide = torch.empty((*x.shape[:-1], x.shape[-1] + 1), device=x.device, dtype=dtype)
    wide[..., 1:] = x
    return wide[..., 1:]


def composite(given: WindowCall) -> torch.Tensor:
    """What a model computes in qkv's dtype: cut windows, matmul, softmax, matmul, join."""
    qkv, heads = given.qkv, given.num_heads
    cut = Windows(
        tuple(qkv.shape[1:4]), tuple(given.window_size), tuple(given.shift_size), given.grid
    )
    rows = eager_window.partition(qkv, cut, given.pad_qkv)
    shape = (3, heads, -1) if given.layout == "qkv" else (heads, 3, -1)
    q, k, v = rows.unflatten(-1, shape).unbind(2 if given.layout == "qkv" else 3)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if given.logit_scale is None:
        s = (q * given.scale) @ k.mT
    else:
        q, k = (torch.nn.functional.normalize(t, dim=-1, eps=1e-12) for t in (q, k))
        s = q @ k.mT * given.logit_scale.to(qkv.dtype).view(-1, 1, 1)
    if given.bias is not None:
        s = s + eager_window.dense_bias(given.bias, given.bias_index).to(s.dtype)
    mask = eager_window.region_mask(cut, given.mask_value, s)
    if mask is not None:
        s = (s.unflatten(0, (-1, mask.shape[0])) + mask[:, None]).flatten(0, 1)
    x = (s.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return eager_window.reverse(x, cut, qkv.shape[0])


def float64(given: WindowCall) -> torch.Tensor:
    terms = [t if t is None or t.dtype == torch.int64 else t.double() for t in given[:5]]
    return eager_window.attention(*terms, *given[5:])


def distance(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def poison() -> None:
    """NaN in what the allocator hands out next: an element never written shows."""
    torch.full((1 << 24,), math.nan, device=DEVICE)


def check_one(name: str, dtype: torch.dtype, precision: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "check": name, "dtype": str(dtype).removeprefix("torch."), "precision": precision
    }  # fmt: skip
    try:
        given = make(*GEOMETRY[name], dtype, precision)
        reference = float64(given)
        theirs = distance(composite(given), reference)
        poison()
        out = planner.window_attention(*given)
        ours = distance(out, reference)
        again = torch.equal(out, planner.window_attention(*given))
        result |= {
            "ours": ours,
            "theirs": theirs,
            "same twice": again,
            "ok": ours <= limit(theirs, dtype, precision),
        }
    except Exception as error:
        result |= {"ok": False, "error": repr(error)[:300]}
    return result
