"""Calls of `window_attention`: any geometry, terms and memory layout, some of them wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from elsa_core.ops.window.api import window_attention

from .engine import Target, answered

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of an axis: the image, the window and the shift, which is taken modulo the window.
AXIS = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(0, 5))
DEPTH = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 1))
CALLS = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "dim": st.integers(1, 33) | st.just(64),
        "axes": st.tuples(AXIS, AXIS) | st.tuples(DEPTH, AXIS, AXIS),
        "dtype": st.sampled_from(DTYPES),
        "bias": st.sampled_from((None, "dense", "turned", "table")),
        "terms": st.lists(st.sampled_from(("pad", "cosine", "grid")), max_size=3),
        "mask_value": st.sampled_from((-100.0, -math.inf, -1.0, 0.0)),
        "scale": st.none() | st.sampled_from((0.0, 1.0, -0.5)),
        "layout": st.sampled_from(("qkv", "head")),
        "memory": st.sampled_from(("dense", "sliced", "expanded")),
        "wrong": st.sampled_from((None,) * 8 + ("heads", "bias", "index", "pad", "shift", "mask")),
        "seed": st.integers(0, 1000),
    }
)


def _image(call: dict[str, Any], size: list[int], generator: torch.Generator) -> Tensor:
    channels = 3 * call["heads"] * call["dim"]
    shape = (call["batch"], *size, channels)
    if call["memory"] == "sliced":
        wide = (shape[0], size[0] + 2, *size[1:], channels + 3)
        return torch.randn(wide, generator=generator)[:, 1:-1, ..., 3:]
    if call["memory"] == "expanded":
        return torch.randn(1, *shape[1:], generator=generator).expand(shape)
    return torch.randn(shape, generator=generator)


def _given(call: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The image, and the other arguments in the call's dtype."""
    generator = torch.Generator().manual_seed(call["seed"])
    window = [window for _, window, _ in call["axes"]]
    grid = "grid" in call["terms"]
    size = [min(n, 2) * w if grid else n for n, w, _ in call["axes"]]
    heads, tokens = call["heads"], math.prod(window)
    terms: dict[str, Any] = {
        "num_heads": heads, "window_size": window, "layout": call["layout"], "grid": grid,
        "shift_size": [0 if grid else shift % w for _, w, shift in call["axes"]],
        "mask_value": call["mask_value"], "scale": call["scale"],
    }  # fmt: skip
    dtype = call["dtype"]
    if call["bias"] == "table":
        index = torch.randint(5, (tokens, tokens), generator=generator)
        terms |= {"bias": torch.randn(5, heads, generator=generator).to(dtype), "bias_index": index}
    elif call["bias"]:
        bias = torch.randn(heads, tokens, tokens, generator=generator).to(dtype)
        terms["bias"] = bias.mT if call["bias"] == "turned" else bias
    if "pad" in call["terms"]:
        terms["pad_qkv"] = torch.randn(3 * heads * call["dim"], generator=generator).to(dtype)
    if "cosine" in call["terms"]:
        terms["logit_scale"] = 1 + 99 * torch.rand(heads, generator=generator)
    return _image(call, size, generator).to(dtype), terms


def _spoilt(call: dict[str, Any], terms: dict[str, Any]) -> bool:
    """Make an argument wrong; False where the call has none of that kind."""
    wrong = call["wrong"]
    if wrong == "heads":
        terms["num_heads"] = call["heads"] * call["dim"] + 1
    elif wrong == "bias" and call["bias"] in ("dense", "turned"):
        terms["bias"] = terms["bias"][..., :-1]
    elif wrong == "index" and "bias_index" in terms:
        terms["bias_index"].view(-1)[call["seed"] % terms["bias_index"].numel()] = (-1, 5)[
            call["seed"] % 2
        ]
    elif wrong == "pad" and "pad_qkv" in terms:
        terms["pad_qkv"] = terms["pad_qkv"][:-1]
    elif wrong == "shift":
        terms["shift_size"] = [terms["window_size"][0], *terms["shift_size"][1:]]
    elif wrong == "mask":
        terms["mask_value"] = math.nan
    else:
        return False
    return True


def check_window_call(call: dict[str, Any], folder: Path) -> None:
    """Twice the error of the plain formula in float32, or a typed error for a wrong argument."""
    qkv, terms = _given(call)
    bad = _spoilt(call, terms)
    out = answered(lambda: window_attention(qkv, **terms))
    assert (out is None) == bad, call
    if out is None:
        return
    peer = window_attention(qkv.float(), **_widened(terms, torch.float32), backend="eager")
    exact = window_attention(qkv.double(), **_widened(terms, torch.float64), backend="eager")
    largest = _largest_score(call, qkv, terms)
    eps = torch.finfo(torch.float32).eps
    band = 2 * torch.finfo(call["dtype"]).eps + 2 * eps * largest
    values = max(float(x.abs().max()) for x in (qkv, terms.get("pad_qkv", qkv)))
    allowed = 2 * (peer.double() - exact).norm() + band * values * exact.numel() ** 0.5
    assert out.shape == exact.shape and out.dtype == qkv.dtype and out.is_contiguous()
    assert (out.double() - exact).norm() <= allowed, call


def _widened(terms: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: term.to(dtype) if isinstance(term, Tensor) and term.is_floating_point() else term
        for name, term in terms.items()
    }


def _largest_score(call: dict[str, Any], qkv: Tensor, terms: dict[str, Any]) -> float:
    """No score of the call is larger."""
    bias = float(terms["bias"].abs().max()) if "bias" in terms else 0.0
    if "logit_scale" in terms:
        return float(terms["logit_scale"].max()) + bias
    scale = call["dim"] ** -0.5 if call["scale"] is None else abs(call["scale"])
    largest = max(float(x.abs().max()) for x in (qkv, terms.get("pad_qkv", qkv)))
    return scale * call["dim"] * largest**2 + bias


TARGET = Target("window call", CALLS, check_window_call)
