"""Runs the alpha-entmax kernels by Triton's interpreter; prints one JSON line of errors per case.

A program of its own, because TRITON_INTERPRET must be set before Triton is imported and must not
reach other tests. The interpreter has no bfloat16 products, and no float32 rounding of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
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

from elsa_core.backends import eager_entmax  # noqa: E402
from elsa_core.backends.triton.attention import entmax  # noqa: E402

F32, F16 = torch.float32, torch.float16
# name: (B, Hq, Hkv, Nq, Nk, D, Dv), dtype, alpha, options
CASES = {
    "1.5": ((1, 2, 2, 70, 150, 32, 32), F32, 1.5, {}),
    "2": ((1, 2, 2, 70, 150, 32, 32), F32, 2.0, {}),
    "1.25, groups, odd widths": ((2, 4, 2, 33, 100, 20, 12), F32, 1.25, {}),
    "near 1": ((1, 1, 1, 40, 90, 16, 16), F32, 1.001, {}),
    "3": ((1, 1, 1, 40, 90, 16, 16), F32, 3.0, {"whole": True}),
    "causal": ((1, 2, 1, 150, 150, 16, 16), F32, 1.5, {"causal": True}),
    "causal, more keys": ((1, 1, 1, 70, 200, 16, 16), F32, 1.3, {"causal": True}),
    "boolean mask": ((1, 2, 2, 40, 150, 16, 16), F32, 1.5, {"mask": "bool"}),
    "additive mask of keys": ((2, 2, 2, 40, 90, 16, 16), F32, 1.7, {"mask": "keys"}),
    "additive mask, hidden rows": ((1, 2, 2, 70, 90, 16, 16), F32, 1.5, {"mask": "float"}),
    "alpha of heads": ((2, 3, 3, 40, 70, 16, 16), F32, (1, 3, 1, 1), {}),
    "alpha of batches and heads, causal": (
        (2, 2, 1, 70, 70, 16, 16), F32, (2, 2, 1, 1), {"causal": True}
    ),
    "one alpha as a tensor": ((1, 2, 2, 40, 70, 16, 16), F32, (1, 1, 1, 1), {}),
    "sparse tiles": ((1, 1, 1, 130, 400, 16, 16), F32, 1.5, {"sharp": True}),
    "ties and large scores": ((1, 2, 2, 40, 70, 16, 16), F32, 1.5, {"whole": True, "huge": True}),
    "strides": ((2, 2, 2, 70, 70, 16, 16), F32, 1.5, {"packed": True}),
    "ieee": ((1, 1, 1, 40, 70, 16, 16), F32, 1.5, {"precision": "ieee"}),
    "scale below 0": ((1, 1, 1, 40, 150, 16, 16), F32, 1.5, {"scale": -0.3}),
    "scale 0": ((1, 1, 1, 40, 150, 16, 16), F32, 1.5, {"scale": 0.0}),
    "flat scores": ((1, 1, 1, 70, 300, 16, 16), F32, 1.5, {"scale": 0.02}),
    "half": ((1, 2, 1, 70, 150, 32, 24), F16, 1.5, {}),
    "half, causal, several blocks": ((1, 2, 1, 300, 300, 16, 16), F16, 1.5, {"causal": True}),
    "half, sparse tiles": ((1, 1, 1, 330, 400, 16, 16), F16, 1.5, {"sharp": True}),
    "half, 2": ((1, 1, 1, 150, 200, 16, 16), F16, 2.0, {}),
    "half, 3": ((1, 2, 1, 70, 150, 16, 16), F16, 3.0, {}),
    "half, boolean mask": ((1, 2, 2, 140, 150, 16, 16), F16, 1.5, {"mask": "bool"}),
    "half, alpha of heads, causal": (
        (1, 3, 3, 140, 70, 16, 16), F16, (1, 3, 1, 1), {"causal": True}
    ),
    "half, scores far below 0": ((1, 2, 1, 70, 150, 16, 16), F16, 1.5, {"below": True}),
    "no channels of queries": ((1, 2, 1, 70, 90, 0, 16), F32, 1.5, {}),
    "half, rows of the lowest number": (
        (1, 2, 2, 70, 90, 16, 16), F16, 1.5, {"mask": "lowest"}
    ),
    "half, wide": ((1, 1, 1, 100, 150, 96, 128), F16, 1.5, {}),
    "half, values of many sizes": ((1, 2, 1, 150, 200, 16, 16), F16, 1.5, {"sizes": True}),
    "half, small gradients": ((1, 1, 1, 40, 90, 16, 16), F16, 1.25, {"size": 1e-6}),
    "key alone": ((1, 2, 2, 40, 70, 16, 16), F32, 1.5, {"needs": (0, 1, 0, 0, 0)}),
    "query alone": ((1, 2, 2, 40, 70, 16, 16), F32, 1.5, {"needs": (1, 0, 0, 0, 0)}),
    "half, query alone": ((1, 2, 1, 70, 130, 16, 16), F16, 1.5, {"needs": (1, 0, 0, 0, 0)}),
    "alpha alone": ((1, 2, 2, 40, 70, 16, 16), F32, (1, 2, 1, 1), {"needs": (0, 0, 0, 0, 1)}),
}  # fmt: skip


def mask_of(kind, b, h, n, m, generator):
    if kind is None:
        return None
    if kind == "keys":
        return torch.randn(b, 1, 1, m, generator=generator)
    mask = torch.rand(1, h, n, m, generator=generator) > 0.3
    mask[:, :, 0] = False
    if kind == "bool":
        return mask
    hidden = torch.finfo(F32).min if kind == "lowest" else -math.inf
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


def distance(x, reference):
    return ((x.double() - reference).norm() / (reference.norm() if reference.any() else 1.0)).item()


def tensors(shape, dtype, options, generator):
    b, hq, hk, n, m, d, dv = shape
    q, k, v = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((b, hq, n, d), (b, hk, m, d), (b, hk, m, dv))
    )
    if options.get("packed"):
        k, v = torch.randn(b, m, 2, hk, d, generator=generator).permute(2, 0, 3, 1, 4)
    if options.get("sharp"):
        q, k = q * 6, k * 2
    if options.get("sizes"):  # a tile of large values ahead of one of small ones
        v = v * torch.tensor([9e3, 1e-3, 1.0, 50.0])[torch.arange(m) // 64][:, None].half()
    if options.get("below"):
        q[..., 0], k[..., 0] = 12.0, -12.0
    if options.get("whole"):
        q, k = (q * 2).round() / 2, (k * 2).round()
    if options.get("huge"):
        q[:, 0, :5] *= 4096
        q[:, 1, 3] = 0.0
    return q, k, v


def run(shape, dtype, alpha, options):
    b, hq, _, n, m, d, _ = shape
    generator = torch.Generator().manual_seed(n + m)
    q, k, v = tensors(shape, dtype, options, generator)
    mask = mask_of(options.get("mask"), b, hq, n, m, generator)
    head_alpha, number = None, alpha
    if isinstance(alpha, tuple):
        head_alpha, number = 1.2 + 0.7 * torch.rand(alpha, generator=generator), 0.0
    scale = options.get("scale", 0.5 if "whole" in options or not d else d**-0.5)
    terms = (number, options.get("causal", False), scale)
    precision = options.get("precision", "strict")
    call = (q, k, v, mask, head_alpha)
    with fenced() as fence:
        out, rows, tiles = entmax.entmax_forward(*call, *terms, precision)
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in call]
    exact, _, held = eager_entmax.attention(*wide, *terms)
    near = [t.float() if t is not None and t.is_floating_point() else t for t in call]
    peer = eager_entmax.attention(*near, *terms)
    g = (torch.randn(out.shape, generator=generator) * options.get("size", 1.0)).to(dtype)
    needs = [bool(x) for x in options.get("needs", (1, 1, 1, 0, head_alpha is not None))]
    with fenced() as fence_2:
        got = entmax.entmax_backward(g, *call, out, rows, tiles, *terms, precision, needs)
    again = entmax.entmax_forward(*call, *terms, precision)
    again_got = entmax.entmax_backward(g, *call, out, rows, tiles, *terms, precision, needs)
    expected = eager_entmax.backward(
        g.double(), *wide, *eager_entmax.attention(*wide, *terms), *terms, "strict", needs
    )
    theirs = [  # rounded to the dtype of the results
        t.to(dtype) for t in eager_entmax.backward(g.float(), *near, *peer, *terms, "strict", needs)
    ]
    pairs = [("o", out, exact, peer[0]), *zip("qkvma", got, expected, theirs, strict=True)]
    found = [x for x in pairs if x[1].numel()]
    return {
        "errors": {name: distance(x, ref) for name, x, ref, _ in found},
        "peer": {name: distance(p, ref) for name, _, ref, p in found},
        "finite": all(bool(x.isfinite().all()) for _, x, _, _ in found),
        "same": all(
            torch.equal(x, y)
            for x, y in zip((out, rows, tiles, *got), (*again, *again_got), strict=True)
        ),
        "tiles": [int(tiles.sum()), int((held & ~tiles).sum()), int((tiles & ~held).sum())],
        "all": tiles.numel(),
        "fence": fence["intact"] and fence_2["intact"],
    }


def blocks():
    """The worst error of a call under every size of block, and of the calls' tiles."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).half() for n in (150, 300, 300))
    wide = [t.double() for t in (q, k, v)]
    worst, tiles = 0.0, 0
    for causal in (False, True):
        terms = (None, None, 1.5, causal, 0.25)
        exact, _, held = eager_entmax.attention(*wide, *terms)
        for rows, keys in itertools.product((64, 128), (64, 128)):
            for groups in (32, 64):
                entmax.FORWARD["half"] = dataclasses.replace(
                    entmax.FORWARD["half"], rows=rows, keys=keys, groups=groups
                )
                entmax.PLANS.clear()
                out, _, found = entmax.entmax_forward(q, k, v, *terms, "strict")
                worst = max(worst, distance(out, exact))
                tiles += int((found != held).sum())
    return {"error": worst, "other_tiles": tiles}


def not_numbers():
    """Whether a NaN stays in the rows that see it, by its place and whether the call is causal."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator) for n in (100, 150, 150))
    found = {}
    for dtype, where, causal in itertools.product((F32, F16), "qk", (False, True)):
        call = [t.clone().to(dtype) for t in (q, k, v)]
        call["qk".index(where)][0, 0, 70, 3] = math.nan
        out = entmax.entmax_forward(*call, None, None, 1.5, causal, 0.25, "strict")[0]
        exact = eager_entmax.attention(*call, None, None, 1.5, causal, 0.25)[0]
        found[f"{dtype} {where} {causal}"] = torch.equal(out.isnan(), exact.isnan())
    return {"same": found}


OTHERS = {"blocks": blocks, "not numbers": not_numbers}


def main() -> None:
    names = sys.argv[1:] or [*CASES, *OTHERS]
    for name in names:
        row = OTHERS[name]() if name in OTHERS else run(*CASES[name])
        sys.stdout.write(json.dumps({"name": name, **row}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
