"""Runs the kernel of `elsa::sparse_attention` by Triton's interpreter; prints one JSON line a case.

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

from elsa_core import reference  # noqa: E402
from elsa_core.backends import eager  # noqa: E402
from elsa_core.backends.triton.attention import sparse  # noqa: E402

F32, F16 = torch.float32, torch.float16
NONE = -math.inf
# name: (B, Hq, Hkv, Nq, Nk, D, Dv), dtype, threshold, relief, options
CASES = {
    "nothing left out": ((2, 2, 2, 70, 150, 32, 32), F32, NONE, 0, {}),
    "exact, groups, odd widths": ((1, 4, 2, 256, 300, 20, 12), F32, 0.0, 0, {"runs": 4}),
    "causal": ((1, 2, 1, 320, 320, 16, 16), F32, 0.0, 2, {"runs": 5, "causal": True}),
    "causal, more keys": ((1, 1, 1, 70, 200, 16, 16), F32, 0.0, 7, {"causal": True}),
    "causal, fewer keys": ((1, 1, 1, 200, 70, 16, 16), F32, 0.0, 7, {"causal": True}),
    "boolean mask, hidden rows": ((1, 2, 2, 70, 300, 16, 16), F32, 0.0, 0, {"mask": "bool"}),
    "first keys hidden": ((1, 2, 2, 70, 300, 16, 16), F32, 0.0, 7, {"mask": "first"}),
    "additive mask": ((1, 2, 2, 70, 300, 16, 16), F32, 0.0, 7, {"mask": "float"}),
    "half": ((1, 2, 2, 256, 400, 32, 24), F16, 0.0, 2, {"runs": 2}),
    "half, causal, relieved": ((1, 2, 2, 300, 300, 32, 24), F16, 0.0, 7, {"causal": True}),
    "summaries": ((1, 2, 2, 70, 400, 16, 16), F32, NONE, 1, {}),
    "order": ((1, 2, 2, 130, 400, 16, 16), F32, NONE, 2, {}),
    "frozen": ((1, 2, 2, 70, 400, 16, 16), F32, NONE, 4, {}),
    "all relief": ((1, 2, 1, 130, 400, 16, 16), F32, NONE, 7, {}),
    "all relief, tiles left out": ((1, 2, 2, 400, 400, 16, 16), F32, 0.0, 7, {"runs": 4}),
    "frozen, passed": ((1, 2, 2, 70, 400, 16, 16), F32, NONE, 4, {"late": 60.0}),
    "half, frozen, passed": ((1, 1, 1, 70, 400, 16, 16), F16, 0.0, 4, {"late": 20.0}),
    "large scores come last": ((1, 2, 2, 70, 400, 16, 16), F32, 0.0, 0, {"late": 60.0}),
    "ties": ((1, 1, 1, 70, 300, 16, 16), F32, -1.0, 7, {"ties": 1.0}),
    "strides": ((2, 2, 2, 70, 70, 16, 16), F32, 0.0, 0, {"packed": True}),
    "negative scale": ((1, 1, 1, 70, 200, 16, 16), F32, 0.0, 7, {"scale": -0.7}),
    "scale of zero": ((1, 1, 1, 70, 200, 16, 16), F32, 0.0, 7, {"scale": 0.0}),
    "rows at -1e9": ((1, 1, 1, 130, 256, 16, 16), F32, 0.0, 0, {"far": -1e9}),
    "rows at -1e9, all relief": ((1, 1, 1, 130, 256, 16, 16), F32, 0.0, 7, {"far": -1e9}),
    "ties at 2**33": ((1, 1, 1, 70, 256, 16, 16), F32, 0.0, 2, {"ties": 2.0**16, "scale": 0.125}),
    "scores of 1e10": ((1, 1, 1, 70, 256, 16, 16), F32, 0.0, 0, {"times": 1e5}),
    "ieee": ((1, 1, 1, 40, 200, 16, 16), F32, 0.0, 7, {"precision": "ieee"}),
}  # fmt: skip


def tensors(shape, dtype, options, g):
    b, hq, hk, n, m, d, dv = shape
    q, k, v = (
        torch.randn(size, generator=g) for size in ((b, hq, n, d), (b, hk, m, d), (b, hk, m, dv))
    )
    if options.get("packed"):
        k, v = torch.randn(b, m, 2, hk, d, generator=g).permute(2, 0, 3, 1, 4)
    if groups := options.get("runs"):  # runs of alike tokens: each sees little of the others
        centres = torch.eye(d)[:groups] * 24
        q, k = (t * 0.1 + centres[torch.arange(t.shape[2]) * groups // t.shape[2]] for t in (q, k))
    if late := options.get("late"):
        k[:, :, -3:] *= late
        q = q * 3
    if ties := options.get("ties"):
        q, k = torch.full_like(q, ties), torch.full_like(k, ties)
    if times := options.get("times"):
        q, k = q * times, k * times
    if "far" in options:  # scores that are the mask alone
        q[:, :, :70] = 0.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def mask_of(kind, shape, g):
    _, h, _, n, m, _, _ = shape
    if kind is None:
        return None
    mask = torch.rand(1, h, n, m, generator=g) > 0.3
    mask[:, :, 5] = False
    if kind == "first":
        mask[..., :200] = False
    bias = torch.randn(mask.shape, generator=g)
    return bias.masked_fill(~mask, -math.inf) if kind == "float" else mask


def run(shape, dtype, threshold, relief, options):
    g = torch.Generator().manual_seed(shape[3] + shape[4])
    q, k, v = tensors(shape, dtype, options, g)
    mask = mask_of(options.get("mask"), shape, g)
    if far := options.get("far"):
        mask = torch.zeros(1, 1, shape[3], shape[4])
        mask[:, :, :70] = far
    causal, scale = options.get("causal", False), options.get("scale", shape[5] ** -0.5)
    terms = (q, k, v, mask, causal, scale, options.get("precision", "strict"), threshold, relief)
    with fenced() as fence:
        out, lse, counts = sparse.sparse_attention(*terms)
    again = sparse.sparse_attention(*terms)
    exact, logs = reference.attention(q, k, v, mask, is_causal=causal, scale=scale)
    near = [t.float() for t in (q, k, v)]
    peer, _ = eager.attention(*near, mask, causal, scale)
    seen = logs.isfinite()
    size = exact.norm()
    return {
        "error": ((out.double() - exact).norm() / size).item(),
        "peer": ((peer.to(dtype).double() - exact).norm() / size).item(),
        "lse": ((lse.double() - logs)[seen].abs() / (1 + logs[seen].abs())).max().item(),
        "hidden": bool((lse[~seen] == -math.inf).all() and (out[~seen] == 0).all()),
        "hidden_rows": int((~seen).sum()),
        "finite": bool(out.isfinite().all()),
        "same": all(torch.equal(x, y) for x, y in zip((out, lse, counts), again, strict=True)),
        "counts": counts.sum((0, 1)).tolist(),
        "fence": fence["intact"],
    }


def main() -> None:
    for name in sys.argv[1:] or list(CASES):
        sys.stdout.write(json.dumps({"name": name, **run(*CASES[name])}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
