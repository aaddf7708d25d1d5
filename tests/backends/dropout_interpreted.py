"""Runs the kernels with dropout by Triton's interpreter; prints one JSON line per case.

A program of its own, as backward_interpreted.py: the oracle is the reference of the operator in
float64 with the same seed, the peer the reference in float32.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from backward_interpreted import distances, mask_of  # noqa: E402
from fence import fenced  # noqa: E402

from elsa_core.backends import eager, philox  # noqa: E402
from elsa_core.backends.philox import Dropout  # noqa: E402
from elsa_core.backends.triton.attention import dropout  # noqa: E402

F32, F16 = torch.float32, torch.float16
SEED = torch.tensor([-0x123456789ABCDEF, 0x187654321])
# name: (B, Hq, Hkv, Nq, Nk, D, Dv), dtype, precision, options
CASES = {
    "half, groups, odd widths": ((2, 4, 2, 17, 35, 40, 24), F16, "strict", {"kept": True}),
    "half causal": ((1, 2, 2, 70, 70, 16, 16), F16, "strict", {"causal": True}),
    "half bias": ((1, 2, 2, 33, 50, 16, 16), F16, "strict", {"mask": "bias"}),
    "half, nearly all dropped": ((1, 1, 1, 20, 50, 16, 16), F16, "strict", {"p": 0.995}),
    "strict": ((2, 2, 1, 17, 70, 32, 24), F32, "strict", {"kept": True}),
    "strict causal": ((1, 2, 1, 70, 70, 32, 32), F32, "strict", {"causal": True}),
    "strict boolean mask": ((1, 2, 2, 20, 100, 32, 32), F32, "strict", {"mask": "bool"}),
    "strict bias of keys": ((2, 2, 2, 20, 40, 32, 32), F32, "strict", {"mask": "keys"}),
    "strict, FMA": ((1, 1, 1, 20, 50, 64, 64), F32, "strict", {"outlier": True}),
    "strict one query": ((1, 2, 2, 1, 50, 32, 32), F32, "strict", {}),
    "strict large scores": ((1, 2, 2, 33, 50, 32, 32), F32, "strict", {"huge": True}),
    "strict, all dropped": ((1, 1, 1, 20, 50, 32, 32), F32, "strict", {"p": 1.0}),
    "lean": ((1, 2, 2, 20, 70, 32, 32), F32, "lean", {}),
    "ieee": ((1, 2, 2, 20, 70, 32, 32), F32, "ieee", {"kept": True}),
}  # fmt: skip


def every_factor(shape, p):
    b, hq, _, n, m = shape[:5]
    return philox.factors(Dropout(p, SEED), b, hq, slice(0, n), slice(0, m), torch.float32)


def number_of(row, key, head):
    """What decides on a weight, as a probability: one of just this size is kept."""
    counter = tuple(torch.tensor(i) for i in (key // 4, row, head, int(SEED[1]) & 0xFFFFFFFF))
    return (int(philox.words(counter, SEED[0])[key % 4]) >> 1) / 2**31


def kept_weights(shape, dtype, precision):
    """Whether the forward, and the gradient of the values, keep what the reference keeps."""
    b, hq, hk, n, m, d, _ = shape
    p = number_of(3, 5, 1)
    kept = every_factor(shape, p) > 0
    q, k = torch.zeros(b, hq, n, d, dtype=dtype), torch.zeros(b, hk, m, d, dtype=dtype)
    v = torch.eye(m, dtype=dtype).expand(b, hk, m, m)
    terms = (None, False, 1.0, precision, p, SEED)
    out, lse = dropout.attention_dropout(q, k, v, *terms)
    right = torch.equal(out > 0, kept) and bool(hq == 1 or kept[0, 1, 3, 5])
    if precision == "ieee":
        return right
    slope = torch.eye(n, dtype=dtype).expand(b, hq, n, n)
    grad = dropout.attention_dropout_backward(
        slope, torch.zeros_like(lse), q, k, torch.zeros(b, hk, m, n, dtype=dtype), None,
        torch.zeros(b, hq, n, n, dtype=dtype), lse, False, 1.0, precision, p, SEED,
        (False, False, True, False),
    )[2]  # fmt: skip
    shared = kept.unflatten(1, (hk, hq // hk)).any(2)
    return right and torch.equal(grad > 0, shared.mT)


def expected_of(dtype, tensors, mask, causal, scale, p, slopes):
    """out, lse and gradients of the reference in a dtype."""
    q, k, v = (t.to(dtype) for t in tensors)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    drawn = Dropout(p, SEED)
    out, lse = eager.attention(q, k, v, mask, causal, scale, dropout=drawn)
    g, g_lse = (t.to(dtype) for t in slopes)
    needs = (True, True, True, mask is not None and mask.dtype != torch.bool)
    terms = (g, g_lse, q, k, v, mask, out, lse, causal, scale, "strict", needs)
    return out, lse, eager.backward(*terms, dropout=drawn)


def run(shape, dtype, precision, options):
    b, hq, hk, n, m, d, dv = shape
    generator = torch.Generator().manual_seed(n + m)
    sizes = (b, hq, n, d), (b, hk, m, d), (b, hk, m, dv)
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    if options.get("outlier"):
        k[..., 5] *= 2**20
        q[..., 5] *= 2**-20
    if options.get("huge"):
        q, k = (q * 2).round(), (k * 2).round()
        q[:, 0, :5] *= 1024
    mask = mask_of(options.get("mask"), b, hq, n, m, generator, dtype)
    causal, p, scale = options.get("causal", False), options.get("p", 0.3), d**-0.5
    call = (mask, causal, scale, precision, p, SEED)
    with fenced() as fence:
        out, lse = dropout.attention_dropout(q, k, v, *call)
    g = torch.randn(out.shape, generator=generator).to(dtype)
    g_lse = torch.randn(lse.shape, generator=generator).masked_fill(lse.isneginf(), 0.0)
    terms = ((q, k, v), mask, causal, scale, p, (g, g_lse))
    exact, peer = expected_of(torch.float64, *terms), expected_of(F32, *terms)
    needs = (True, True, True, mask is not None and mask.dtype != torch.bool)
    rows = (g, g_lse, q, k, v, mask, out, lse, causal, scale, precision, p, SEED, needs)
    if precision == "ieee":
        got = again = ()
    else:
        with fenced() as fence_back:
            got = dropout.attention_dropout_backward(*rows)
        again = dropout.attention_dropout_backward(*rows)
        fence = {"intact": fence["intact"] and fence_back["intact"]}
    second = dropout.attention_dropout(q, k, v, *call)
    seen = ~exact[1].isneginf()
    results = {"errors": (out, lse, got), "peer": peer}
    return {
        **{name: errors_of(found, exact, seen) for name, found in results.items()},
        "finite": all(bool(x.isfinite().all()) for x in (out, *got)),
        "same": all(map(torch.equal, (out, lse, *got), (*second, *again))),
        "hidden": torch.equal(lse.isneginf(), ~seen),
        "kept": not options.get("kept") or kept_weights(shape, dtype, precision),
        "fence": fence["intact"],
    }


def errors_of(found, exact, seen):
    """Of out, the finite lse and the gradients."""
    out, lse, grads = found
    of_out, of_lse = distances([out], exact[:1]), distances([lse[seen]], [exact[1][seen]])
    return distances(grads, exact[2]) | {"out": of_out["q"], "lse": of_lse["q"]}


def main() -> None:
    for name in sys.argv[1:] or list(CASES):
        sys.stdout.write(json.dumps({"name": name, **run(*CASES[name])}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
