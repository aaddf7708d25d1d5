"""Runs the gradient kernels by Triton's interpreter; prints one JSON line of errors per case.

A program of its own, because TRITON_INTERPRET must be set before Triton is imported and must not
reach other tests. The interpreter has no bfloat16 products, and no float32 rounding of its own.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from fence import fenced  # noqa: E402

from elsa_core.backends.triton import attention_forward as attention  # noqa: E402
from elsa_core.backends.triton.attention import backward  # noqa: E402

F32, F16 = torch.float32, torch.float16
# name: (B, Hq, Hkv, Nq, Nk, D, Dv), dtype, precision, options
# Tiles are of 32 rows: 40 are a whole one and a part of one.
CASES = {
    "half": ((1, 2, 2, 70, 150, 64, 64), F16, "strict", {}),
    "half, groups, odd widths": ((2, 4, 2, 33, 100, 40, 24), F16, "strict", {}),
    "half causal": ((1, 2, 2, 150, 150, 32, 32), F16, "strict", {"causal": True}),
    "half boolean mask": ((1, 2, 2, 70, 100, 32, 32), F16, "strict", {"mask": "bool"}),
    "half bias": ((2, 2, 2, 40, 70, 32, 32), F16, "strict", {"mask": "bias"}),
    "half large scores": ((1, 2, 2, 70, 90, 64, 64), F16, "strict", {"huge": True}),
    "half large lse": ((1, 2, 2, 20, 70, 32, 32), F16, "strict", {"mask": "all low"}),
    "strict": ((1, 2, 2, 70, 300, 64, 64), F32, "strict", {}),
    "strict, groups, odd widths": ((2, 4, 2, 40, 75, 40, 24), F32, "strict", {}),
    "strict causal": ((1, 2, 2, 150, 150, 32, 32), F32, "strict", {"causal": True}),
    "strict causal, more queries": ((1, 2, 1, 200, 70, 32, 32), F32, "strict", {"causal": True}),
    "strict causal, more keys": ((1, 2, 1, 70, 200, 32, 32), F32, "strict", {"causal": True}),
    "strict boolean mask": ((1, 2, 2, 20, 300, 32, 32), F32, "strict", {"mask": "bool"}),
    "strict additive mask": ((1, 2, 2, 40, 130, 32, 32), F32, "strict", {"mask": "float"}),
    "strict bias of heads": ((3, 2, 2, 40, 40, 32, 32), F32, "strict", {"mask": "bias"}),
    "strict bias of keys": ((2, 2, 2, 40, 40, 32, 32), F32, "strict", {"mask": "keys"}),
    "strict bias of queries": ((2, 2, 2, 40, 40, 32, 32), F32, "strict", {"mask": "queries"}),
    "strict bias of all": ((2, 2, 2, 40, 40, 32, 32), F32, "strict", {"mask": "one"}),
    "strict bias of batches, causal": (
        (2, 2, 1, 40, 40, 32, 32), F32, "strict", {"mask": "batches", "causal": True}
    ),
    "strict negative scale": ((1, 1, 1, 20, 100, 64, 64), F32, "strict", {"scale": -0.3}),
    "strict zero scale": ((1, 1, 1, 20, 100, 64, 64), F32, "strict", {"scale": 0.0}),
    "strict strides": ((2, 3, 3, 40, 40, 32, 32), F32, "strict", {"packed": True}),
    "strict expanded gradient": ((1, 2, 2, 20, 70, 32, 32), F32, "strict", {"expanded": True}),
    "strict large scores": ((1, 2, 2, 70, 90, 64, 64), F32, "strict", {"huge": True}),
    "strict large lse": ((1, 2, 2, 20, 70, 32, 32), F32, "strict", {"mask": "all low"}),
    "strict outlier channels": ((1, 1, 1, 20, 150, 64, 64), F32, "strict", {"outlier": True}),
    "strict small gradients": ((1, 1, 1, 20, 150, 64, 64), F32, "strict", {"size": 1e-18}),
    "strict one query": ((1, 4, 2, 1, 100, 64, 64), F32, "strict", {}),
    "turbo": ((1, 2, 2, 20, 150, 64, 64), F32, "turbo", {}),
    "lean": ((1, 2, 2, 40, 150, 64, 32), F32, "lean", {}),
    "key alone": ((1, 2, 2, 40, 150, 32, 32), F32, "strict", {"needs": (0, 1, 0, 0)}),
    "value alone": ((1, 2, 2, 40, 150, 32, 32), F32, "strict", {"needs": (0, 0, 1, 0)}),
    "query alone": ((1, 2, 2, 40, 150, 32, 32), F16, "strict", {"needs": (1, 0, 0, 0)}),
    "mask alone": (
        (1, 2, 2, 40, 50, 32, 32), F16, "strict", {"needs": (0, 0, 0, 1), "mask": "bias"}
    ),
}  # fmt: skip
MASKS = {
    "bias": lambda b, h, n, m: (1, h, n, m), "keys": lambda b, h, n, m: (1, 1, 1, m),
    "queries": lambda b, h, n, m: (b, 1, n, 1), "one": lambda b, h, n, m: (1, 1, 1, 1),
    "batches": lambda b, h, n, m: (b, 1, n, m),
}  # fmt: skip


def reference(q, k, v, mask, causal, scale):
    """out and lse in float64, differentiable; rows without a visible key are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT * scale
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~seen, -math.inf)
    dead = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    out = torch.softmax(s, -1).masked_fill(dead, 0.0) @ v
    return out, torch.logsumexp(s, -1).masked_fill(dead[..., 0], 0.0)


def mask_of(kind, b, h, n, m, generator, dtype):
    if kind is None:
        return None
    if kind in MASKS:
        return torch.randn(MASKS[kind](b, h, n, m), generator=generator).to(dtype)
    if kind == "all low":
        # a finite value that hides: rows 0 and 1 are hidden whole, and yet uniform
        low = torch.zeros(1, 1, n, m, dtype=dtype)
        low[:, :, :2] = -65504.0 if dtype == F16 else -1e9
        low[:, :, 2, 5:] = -3e4
        return low
    mask = torch.rand(1, h, n, m, generator=generator) > 0.3
    mask[:, :, 0] = False
    return mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


def exact(tensors, mask, causal, scale, grad_out, grad_lse, dtype=torch.float64):
    """Gradients of query, key, value and mask by autograd in float64, or another dtype."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    additive = mask is not None and mask.dtype != torch.bool
    if additive:
        mask = mask.detach().to(dtype).requires_grad_()
        leaves.append(mask)
    out, lse = reference(*leaves[:3], mask, causal, scale)
    return torch.autograd.grad((out, lse), leaves, (grad_out.to(dtype), grad_lse.to(dtype)))


def distances(grads, expected):
    """Of each gradient that is there: the error, relative unless zeros are expected."""
    return {
        name: ((x.double() - ref).norm() / (ref.norm() if ref.any() else 1.0)).item()
        for name, x, ref in zip("qkvm", grads, expected, strict=False)
        if x.numel()
    }


def run(shape, dtype, precision, options):
    b, hq, hk, n, m, d, dv = shape
    generator = torch.Generator().manual_seed(n + m)
    q, k, v = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((b, hq, n, d), (b, hk, m, d), (b, hk, m, dv))
    )
    if options.get("packed"):
        k, v = torch.randn(b, m, 2, hk, d, generator=generator).permute(2, 0, 3, 1, 4)
    if options.get("outlier"):
        k[..., 5] *= 2**20
        q[..., 5] *= 2**-20
    if options.get("huge"):
        # rows of nearly one weight, with an lse beyond 2**11; whole numbers, so that every order of
        # summing gives the same scores
        q, k = (q * 2).round(), (k * 2).round()
        q[:, 0, :5] *= 1024
    mask = mask_of(options.get("mask"), b, hq, n, m, generator, dtype)
    causal, scale = options.get("causal", False), options.get("scale", d**-0.5)
    out, lse = attention(q, k, v, mask, causal, scale, precision)
    g = (torch.randn(out.shape, generator=generator) * options.get("size", 1.0)).to(dtype)
    if options.get("expanded"):
        g = g[..., :1, :1].expand(out.shape)
    g_lse = torch.randn(lse.shape, generator=generator) * options.get("size", 1.0)
    needs = tuple(bool(x) for x in options.get("needs", (1, 1, 1, 1)))
    call = (g, g_lse, q, k, v, mask, out, lse, causal, scale, precision, needs)
    with fenced() as fence:
        got = backward.attention_backward(*call)
    again = backward.attention_backward(*call)
    terms = (q, k, v), mask, causal, scale, g, g_lse.masked_fill(lse.isneginf(), 0.0)
    expected = exact(*terms)
    return {
        "errors": distances(got, expected),
        "peer": distances(exact(*terms, torch.float32), expected),
        "finite": all(bool(x.isfinite().all()) for x in got),
        "same": all(torch.equal(x, y) for x, y in zip(got, again, strict=True)),
        "shapes": [list(x.shape) for x in got],
        "fence": fence["intact"],
    }


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    for name in names:
        sys.stdout.write(json.dumps({"name": name, **run(*CASES[name])}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
