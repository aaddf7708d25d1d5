"""Runs the kernel of packed sequences by Triton's interpreter; prints one JSON line for each case.

A program of its own, as `triton_interpreted.py`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from itertools import accumulate, pairwise

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from fence import BYTE, fenced  # noqa: E402

from elsa_core.backends.triton.attention import schedules  # noqa: E402
from elsa_core.backends.triton.attention.varlen import varlen_attention  # noqa: E402

F32, F16 = torch.float32, torch.float16
MIXED = ([5, 0, 130, 1, 64, 0], [5, 0, 130, 1, 64, 0])
CROSSED = ([7, 3, 0, 65], [70, 0, 4, 1])
# name: (query lengths, key lengths), (Hq, Hkv, D, Dv), dtype, precision, options
CASES = {
    "half": (MIXED, (2, 1, 64, 64), F16, "strict", {}),
    "half causal": (MIXED, (1, 1, 32, 48), F16, "strict", {"causal": True}),
    "half two blocks": (CROSSED, (2, 2, 80, 72), F16, "strict", {}),
    "strict": (MIXED, (2, 1, 64, 64), F32, "strict", {}),
    "strict causal": (CROSSED, (1, 1, 32, 48), F32, "strict", {"causal": True}),
    "strict two blocks": (CROSSED, (1, 1, 80, 72), F32, "strict", {}),
    "strict negative scale": (CROSSED, (1, 1, 64, 64), F32, "strict", {"scale": -0.3}),
    "strict zero scale": (CROSSED, (1, 1, 64, 64), F32, "strict", {"scale": 0.0}),
    "strict strides": (MIXED, (3, 3, 32, 32), F32, "strict", {"packed": True}),
    "strict chains": (([20], [900]), (1, 1, 64, 64), F32, "strict", {"chain": 1}),
    "turbo": (CROSSED, (1, 1, 64, 64), F32, "turbo", {}),
    "ieee": (CROSSED, (2, 2, 64, 64), F32, "ieee", {"wide": True}),
    "huge logits": (CROSSED, (1, 1, 64, 64), F32, "strict", {"times": 1e15}),
    "outlier channels": (CROSSED, (1, 1, 64, 64), F32, "strict", {"outlier": True}),
    "no keys": (([3, 4], [0, 0]), (1, 1, 32, 32), F32, "strict", {}),
    "one sequence": (([150], [150]), (1, 1, 32, 32), F32, "strict", {}),
    "ahead": (MIXED, (1, 1, 32, 32), F16, "strict", {"ahead": 150}),
    "none": (([], []), (1, 1, 32, 32), F32, "strict", {"ahead": 70}),
    "many short": (([1, 2, 0, 3] * 9, [2, 1, 5, 0] * 9), (1, 1, 32, 32), F16, "strict", {}),
}  # fmt: skip


def bounds(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def reference(q, k, v, starts, others, causal, scale, dtype=torch.float64):
    """Output and lse by PyTorch, every step in `dtype`."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    outs = [v.new_empty((0, q.shape[1], v.shape[2]), dtype=dtype)]
    lses = [v.new_empty((q.shape[1], 0), dtype=dtype)]
    for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(others.tolist()), strict=True):
        s = torch.einsum("qhd,khd->hqk", q[a:b].to(dtype), k[c:d].to(dtype)) * scale
        if causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v[c:d].to(dtype)))
        lses.append(torch.logsumexp(s, -1))
    return torch.cat(outs), torch.cat(lses, 1)


def run(lengths, sizes, dtype, precision, options):
    queries, keys = lengths
    heads, kv_heads, d, dv = sizes
    ahead = options.get("ahead", 0)  # tokens of no sequence
    generator = torch.Generator().manual_seed(sum(keys))
    q, k, v = (
        (torch.randn(shape, generator=generator) * factor).to(dtype)
        for shape, factor in (
            ((ahead + sum(queries), heads, d), options.get("times", 1)),
            ((ahead + sum(keys), kv_heads, d), options.get("times", 1)),
            ((ahead + sum(keys), kv_heads, dv), 1),
        )
    )
    if options.get("packed"):
        q, k, v = torch.randn(sum(queries), 3, heads, d, generator=generator).unbind(1)
    if options.get("outlier"):
        k[..., 5], v[..., 3], q[..., 9] = k[..., 5] * 2**20, v[..., 3] * 2**20, q[..., 9] * 2**20
    starts, others = (
        bounds(queries),
        bounds(keys, torch.int64 if options.get("wide") else torch.int32),
    )
    starts, others = starts + ahead, others + ahead
    causal, scale = options.get("causal", False), options.get("scale", d**-0.5)
    schedules.forward.CHAIN_TILES = options.get("chain", 1024)
    with fenced() as fence:
        out, lse = varlen_attention(q, k, v, starts, others, causal, scale, precision)
    zeros = not queries and bool((out == 0).all() and (lse == -math.inf).all())
    unwritten = [t.contiguous().view(torch.uint8) for t in (out[:ahead], lse[:, :ahead])]
    untouched = zeros or all(bool((t == BYTE).all()) for t in unwritten)
    out, lse = out[ahead:], lse[:, ahead:]
    expected, expected_lse = reference(q, k, v, starts, others, causal, scale)
    visible = expected_lse.isfinite()
    _, peer_lse = reference(q, k, v, starts, others, causal, scale, F32)

    def distance(found):
        error = (found.double() - expected_lse)[visible].abs() / (1 + expected_lse[visible].abs())
        return error.max().item() if error.numel() else 0.0

    again = varlen_attention(q, k, v, starts, others, causal, scale, precision)[0][ahead:]
    return {
        "error": ((out.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item(),
        "lse": distance(lse),
        "peer_lse": distance(peer_lse),
        "finite": bool(out.isfinite().all()),
        "hidden": bool(
            (lse.isinf() == ~visible).all() and (out.transpose(0, 1)[~visible] == 0).all()
        ),
        "fence": fence["intact"] and untouched,
        "again": torch.equal(out, again),
    }


def main() -> None:
    for name, case in CASES.items():
        sys.stdout.write(json.dumps({"name": name, **run(*case)}) + "\n")


if __name__ == "__main__":
    main()
