"""Runs the alpha-entmax kernels on packed sequences by Triton's interpreter; prints one JSON line
of errors per case.

A program of its own, as `entmax_interpreted.py`. What a call allocates is NaN before it is written.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import warnings
from itertools import accumulate

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import fence  # noqa: E402
import torch  # noqa: E402

from elsa_core.backends import eager_entmax_varlen  # noqa: E402
from elsa_core.backends.triton.attention import entmax, entmax_varlen  # noqa: E402

fence.BYTE = 0xFF  # of every floating dtype a NaN
F32, F16 = torch.float32, torch.float16
MIXED = ([5, 0, 130, 1, 64, 0], [5, 0, 130, 1, 64, 0])
CROSSED = ([7, 3, 0, 65, 0], [70, 0, 4, 1, 0])
LONG = ([150, 63], [150, 290])
# name: (query lengths, key lengths), (Hq, Hkv, D, Dv), dtype, alpha, options
CASES = {
    "mixed": (MIXED, (2, 1, 32, 24), F32, 1.5, {}),
    "causal": (MIXED, (2, 2, 16, 16), F32, 1.5, {"causal": True}),
    "crossed": (CROSSED, (2, 1, 16, 16), F32, 2.0, {}),
    "crossed, causal": (CROSSED, (2, 1, 20, 12), F32, 1.25, {"causal": True}),
    "several blocks": (LONG, (1, 1, 16, 16), F32, 1.5, {}),
    "one sequence": (([150], [150]), (2, 1, 16, 16), F32, 1.5, {"causal": True}),
    "many short": (([1, 2, 0, 3] * 9, [2, 1, 5, 0] * 9), (2, 2, 16, 16), F32, 1.5, {}),
    "no longest length": (MIXED, (1, 1, 16, 16), F32, 1.5, {"unknown": True}),
    "no key": (([3, 4], [0, 0]), (1, 1, 16, 16), F32, 1.5, {}),
    "alpha of heads": (CROSSED, (3, 3, 16, 16), F32, (1, 3, 1, 1), {}),
    "one alpha as a tensor": (MIXED, (2, 2, 16, 16), F32, (1, 1, 1, 1), {}),
    "alpha of sequences": (MIXED, (2, 1, 16, 16), F32, (6, 1, 1, 1), {"causal": True}),
    "alpha of sequences and heads": (CROSSED, (2, 1, 16, 16), F32, (5, 2, 1, 1), {}),
    "sparse tiles": (LONG, (1, 1, 16, 16), F32, 1.5, {"sharp": True}),
    "large scores": (CROSSED, (2, 2, 16, 16), F32, 1.5, {"huge": True}),
    "strides": (MIXED, (3, 3, 16, 16), F32, 1.5, {"packed": True, "wide": True}),
    "ieee": (CROSSED, (2, 2, 16, 16), F32, 1.5, {"precision": "ieee"}),
    "scale below 0": (CROSSED, (2, 2, 16, 16), F32, 1.5, {"scale": -0.3}),
    "half": (MIXED, (2, 1, 32, 24), F16, 1.5, {}),
    "half, causal": (LONG, (2, 1, 16, 16), F16, 1.5, {"causal": True}),
    "half, crossed": (CROSSED, (2, 1, 96, 128), F16, 1.5, {"wide": True}),
    "half, alpha of heads": (MIXED, (2, 2, 16, 16), F16, (1, 2, 1, 1), {}),
    "half, small gradients": (CROSSED, (2, 2, 16, 16), F16, 1.25, {"size": 1e-6}),
    "key alone": (MIXED, (2, 1, 16, 16), F32, 1.5, {"needs": (0, 1, 0, 0)}),
    "query alone": (MIXED, (2, 1, 16, 16), F32, 1.5, {"needs": (1, 0, 0, 0)}),
    "half, query alone": (MIXED, (2, 1, 16, 16), F16, 1.5, {"needs": (1, 0, 0, 0)}),
    "alpha alone": (LONG, (2, 1, 16, 16), F32, (1, 2, 1, 1), {"needs": (0, 0, 0, 1)}),
}  # fmt: skip


def bounds(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def distance(x, reference):
    return ((x.double() - reference).norm() / (reference.norm() if reference.any() else 1.0)).item()


def tensors(lengths, sizes, dtype, options, generator):
    (queries, keys), (heads, kv_heads, d, dv) = lengths, sizes
    q, k, v = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in (
            (sum(queries), heads, d),
            (sum(keys), kv_heads, d),
            (sum(keys), kv_heads, dv),
        )
    )
    if options.get("packed"):
        q, k, v = torch.randn(sum(queries), 3, heads, d, generator=generator).unbind(1)
    if options.get("sharp"):
        q, k = q * 6, k * 2
    if options.get("huge"):
        q, k = (q * 2).round() / 2, (k * 2).round()
        q[:, 0] *= 4096
    return q, k, v


def run(lengths, sizes, dtype, alpha, options):
    queries, keys = lengths
    generator = torch.Generator().manual_seed(sum(keys))
    q, k, v = tensors(lengths, sizes, dtype, options, generator)
    of_keys = torch.int64 if options.get("wide") else torch.int32
    ends = bounds(queries), bounds(keys, of_keys)
    head_alpha, number = None, alpha
    if isinstance(alpha, tuple):
        head_alpha, number = 1.2 + 0.7 * torch.rand(alpha, generator=generator), 0.0
    longest = (sum(queries), sum(keys)) if options.get("unknown") else (max(queries), max(keys))
    scale = options.get("scale", 0.5 if "huge" in options else sizes[2] ** -0.5)
    terms = (*longest, number, options.get("causal", False), scale)
    precision = options.get("precision", "strict")
    call = (q, k, v, *ends, head_alpha)
    with fence.fenced() as intact:
        out, rows, tiles = entmax_varlen.entmax_varlen_forward(*call, *terms, precision)
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in call]
    near = [t.float() if t is not None and t.is_floating_point() else t for t in call]
    exact, *exact_rows = eager_entmax_varlen.attention(*wide, *terms)
    peer, *peer_rows = eager_entmax_varlen.attention(*near, *terms)
    g = (torch.randn(out.shape, generator=generator) * options.get("size", 1.0)).to(dtype)
    needs = [bool(x) for x in options.get("needs", (1, 1, 1, head_alpha is not None))]
    end = (*terms, precision, needs)
    with fence.fenced() as intact_2:
        got = entmax_varlen.entmax_varlen_backward(g, *call, out, rows, tiles, *end)
    again = entmax_varlen.entmax_varlen_forward(*call, *terms, precision)
    again_got = entmax_varlen.entmax_varlen_backward(g, *call, out, rows, tiles, *end)
    expected = eager_entmax_varlen.backward(g.double(), *wide, exact, *exact_rows, *end)
    theirs = eager_entmax_varlen.backward(g.float(), *near, peer, *peer_rows, *end)
    pairs = [("o", out, exact, peer), *zip("qkva", got, expected, theirs, strict=True)]
    found = [x for x in pairs if x[1].numel()]
    alone = {s for s, (n, m) in enumerate(zip(queries, keys, strict=True)) if n and not m}
    unseen = [out[ends[0][s] : ends[0][s + 1]] for s in alone]
    return {
        "errors": {name: distance(x, ref) for name, x, ref, _ in found},
        # rounded to the dtype of the results
        "peer": {name: distance(p.to(dtype), ref) for name, _, ref, p in found},
        "finite": all(bool(x.isfinite().all()) for _, x, _, _ in found),
        "same": all(
            torch.equal(x, y)
            for x, y in zip((out, rows, tiles, *got), (*again, *again_got), strict=True)
        ),
        "tiles": [int(tiles.sum()), int((tiles != exact_rows[1]).sum()), tiles.numel()],
        "zeros": not any(bool(x.any()) for x in unseen),
        "fence": intact["intact"] and (intact_2["intact"] or not any(keys)),
    }


def as_alone():
    """Whether every sequence has the bits of a dense call of it alone, forward and gradients."""
    generator = torch.Generator().manual_seed(0)
    lengths = [70, 0, 130, 1]
    ends = bounds(lengths)
    found = {}
    for dtype, causal in itertools.product((F32, F16), (False, True)):
        q, k, v, g = (torch.randn(201, 2, 16, generator=generator).to(dtype) for _ in range(4))
        terms = (1.5, causal, 0.25, "strict")
        call = (q, k, v, ends, ends, None)
        out, *rest = entmax_varlen.entmax_varlen_forward(*call, 130, 130, *terms)
        needs = [True, True, True, False]
        got = entmax_varlen.entmax_varlen_backward(g, *call, out, *rest, 130, 130, *terms, needs)
        same = []
        for s, n in enumerate(lengths):
            rows = slice(ends[s], ends[s] + n)
            alone = [t[rows].transpose(0, 1)[None] for t in (q, k, v)]
            own, *others = entmax.entmax_forward(*alone, None, None, *terms)
            grad = g[rows].transpose(0, 1)[None]
            grads = entmax.entmax_backward(
                grad, *alone, None, None, own, *others, *terms, [True] * 3 + [False] * 2
            )
            pairs = zip((out, *got[:3]), (own, *grads[:3]), strict=True)
            same += [torch.equal(x[rows], y[0].transpose(0, 1)) for x, y in pairs]
        found[f"{dtype} {causal}"] = all(same)
    return {"same": found}


def blocks():
    """The worst error of a call under every size of block, and of the calls' tiles."""
    generator = torch.Generator().manual_seed(0)
    (queries, keys), worst, tiles = ([150, 3, 70], [5, 170, 140]), 0.0, 0
    q, k, v = (torch.randn(n, 1, 16, generator=generator).half() for n in (223, 315, 315))
    wide = [t.double() for t in (q, k, v)]
    for causal in (False, True):
        terms = (bounds(queries), bounds(keys), None, 150, 170, 1.5, causal, 0.25)
        exact, _, held = eager_entmax_varlen.attention(*wide, *terms)
        for rows, columns in itertools.product((64, 128), (64, 128)):
            entmax.FORWARD["half"] = dataclasses.replace(
                entmax.FORWARD["half"], rows=rows, keys=columns, groups=64
            )
            entmax_varlen.PLANS.clear()
            out, _, found = entmax_varlen.entmax_varlen_forward(q, k, v, *terms, "strict")
            worst = max(worst, distance(out, exact))
            tiles += int((found != held).sum())
    return {"error": worst, "other_tiles": tiles}


def too_short():
    """Whether longest lengths that are too small, and bounds beyond the tokens, stay inside what a
    call allocates."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(200, 2, 16, generator=generator) for _ in range(4))
    found = []
    for ends in ([0, 5, 200], [0, 150, 900], [-5, 20, 100]):
        starts = torch.tensor(ends, dtype=torch.int32)
        call, terms = (q, k, v, starts, starts, None, 70, 60), (1.5, False, 0.25, "strict")
        with fence.fenced() as intact:
            out, *rest = entmax_varlen.entmax_varlen_forward(*call, *terms)
            entmax_varlen.entmax_varlen_backward(
                g, *call[:6], out, *rest, 70, 60, *terms, [True, True, True, False]
            )
        found.append(intact["intact"])
    return {"inside": found}


def nobodys():
    """Whether tokens before the first sequence and behind the last, which are NaN, change no bit of
    the others.
    """
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype, before, causal in itertools.product((F32, F16), (3, 64, 200), (False, True)):
        shape = (before + 150, 2, 16)
        q, k, v, g = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
        for t in (q, k, v, g):
            t[:before] = t[before + 135 :] = torch.nan
        inner = bounds([70, 0, 65])
        terms, needs = (70, 70, 1.5, causal, 0.25, "strict"), [True, True, True, False]
        results = []
        for cut, ends in ((slice(None), inner + before), (slice(before, before + 135), inner)):
            call = (*(t[cut] for t in (q, k, v)), ends, ends, None)
            out, *rest = entmax_varlen.entmax_varlen_forward(*call, *terms)
            got = entmax_varlen.entmax_varlen_backward(g[cut], *call, out, *rest, *terms, needs)
            results.append((out, *got[:3]))
        rows = slice(before, before + 135)
        same = [torch.equal(x[rows], y) for x, y in zip(*results, strict=True)]
        found[f"{dtype} {before} {causal}"] = all(same) and bool(results[1][0].isfinite().all())
    return {"same": found}


def no_sequences():
    """Whether a call without sequences gives zeros, of tokens that there are all the same."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(200, 2, 16, generator=generator) for _ in range(4))
    for alpha in (None, torch.empty(0, 2, 1, 1)):
        call = (q, k, v, bounds([]), bounds([]), alpha)
        terms = (200, 200, 1.5, False, 0.25, "strict")
        out, *rest = entmax_varlen.entmax_varlen_forward(*call, *terms)
        needs = [True, True, True, alpha is not None]
        got = entmax_varlen.entmax_varlen_backward(g, *call, out, *rest, *terms, needs)
        if any(bool(x.any()) for x in (out, *got)):
            return {"zeros": False}
    return {"zeros": True}


OTHERS = {
    "as alone": as_alone, "blocks": blocks, "too short": too_short, "tokens of nobody": nobodys,
    "no sequences": no_sequences,
}  # fmt: skip


def main() -> None:
    names = sys.argv[1:] or [*CASES, *OTHERS]
    for name in names:
        row = OTHERS[name]() if name in OTHERS else run(*CASES[name])
        sys.stdout.write(json.dumps({"name": name, **row}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
