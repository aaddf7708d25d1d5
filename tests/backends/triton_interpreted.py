"""Runs the Triton kernels by Triton's interpreter; prints one JSON line of errors per case.

A program of its own, because TRITON_INTERPRET must be set before Triton is imported and must not
reach other tests. The interpreter has no bfloat16 products, and no float32 rounding of its own.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import warnings

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fence import fenced  # noqa: E402

from elsa_core.backends.triton import attention_forward, attention_state  # noqa: E402
from elsa_core.backends.triton.attention import planner, schedules, tiling  # noqa: E402
from elsa_core.backends.triton.attention.schedules.merge import plan_merge  # noqa: E402

F32, F16 = torch.float32, torch.float16
# name: (B, Hq, Hkv, Nq, Nk, D, Dv), dtype, precision, options
CASES = {
    "half": ((1, 2, 2, 70, 150, 64, 64), F16, "strict", {}),
    "half two blocks, groups": ((1, 2, 1, 20, 100, 80, 72), F16, "strict", {}),
    "half lean": ((1, 1, 1, 20, 70, 32, 32), F16, "lean", {}),
    "half, one row and key more": ((1, 2, 2, 65, 65, 64, 64), F16, "strict", {}),
    "half, 17 more": ((1, 2, 2, 81, 81, 64, 64), F16, "strict", {}),
    "strict, one row and key more": ((2, 2, 1, 129, 129, 64, 64), F32, "strict", {}),
    "strict, 16 more, masked": ((1, 2, 2, 80, 272, 32, 48), F32, "strict", {"mask": "float"}),
    "turbo, one row and key more": ((1, 2, 2, 65, 65, 32, 32), F32, "turbo", {"mask": "bool"}),
    "strict short": ((1, 2, 2, 70, 100, 64, 64), F32, "strict", {}),
    "strict two blocks": ((1, 2, 2, 20, 300, 80, 72), F32, "strict", {}),
    "strict causal": ((1, 2, 2, 150, 150, 32, 32), F32, "strict", {"causal": True}),
    "strict boolean mask": ((1, 2, 2, 20, 300, 32, 32), F32, "strict", {"mask": "bool"}),
    "strict additive mask": ((1, 2, 2, 20, 300, 32, 32), F32, "strict", {"mask": "float"}),
    "strict negative scale": ((1, 1, 1, 20, 100, 64, 64), F32, "strict", {"scale": -0.3}),
    "strict zero scale": ((1, 1, 1, 20, 100, 64, 64), F32, "strict", {"scale": 0.0}),
    "strict strides": ((2, 3, 3, 20, 70, 32, 32), F32, "strict", {"packed": True}),
    "lean": ((1, 2, 2, 20, 150, 64, 32), F32, "lean", {}),
    "turbo": ((1, 2, 2, 20, 150, 64, 64), F32, "turbo", {}),
    "ieee": ((1, 2, 2, 20, 150, 64, 64), F32, "ieee", {}),
    "ieee partitions": ((1, 1, 1, 20, 600, 32, 32), F32, "ieee", {}),
    "split keys": ((1, 1, 1, 9, 900, 32, 32), F32, "strict", {}),
    "split keys half": ((1, 2, 2, 9, 900, 32, 48), F16, "strict", {}),
    "state": ((1, 2, 2, 20, 300, 64, 64), F32, "strict", {"mask": "float", "state": True}),
    "state, split keys": ((1, 1, 1, 9, 3000, 32, 32), F32, "strict", {"state": True}),
    "state, not split ahead": ((1, 2, 2, 20, 300, 32, 32), F32, "lean", {"state": True}),
    "strict chains": ((1, 1, 1, 20, 900, 64, 64), F32, "strict", {"chain": 1}),
    "strict chains, causal": (
        (1, 1, 1, 150, 150, 72, 80), F32, "lean", {"chain": 1, "causal": True}
    ),
    "turbo chains": ((1, 1, 1, 20, 900, 32, 32), F32, "turbo", {"chain": 1, "mask": "float"}),
    "one query": ((1, 4, 2, 1, 1500, 64, 64), F32, "strict", {}),
    "one query half": ((1, 4, 2, 1, 700, 64, 48), F16, "strict", {}),
    "one query, odd widths": ((1, 4, 2, 1, 300, 40, 24), F32, "strict", {"nan": True}),
    "strict odd widths": ((1, 2, 2, 20, 100, 40, 24), F32, "strict", {"nan": True}),
    "one query masked": ((1, 2, 2, 1, 300, 64, 64), F32, "strict", {"mask": "bool"}),
    "strict, hidden NaN": ((1, 2, 1, 20, 300, 32, 32), F32, "strict", {"hidden": True}),
    "half, few keys": ((2, 2, 2, 15, 16, 6, 6), F16, "strict", {}),
    "half, few keys, masked": ((1, 2, 2, 16, 13, 16, 32), F16, "strict", {"mask": "bool"}),
    "half, 49 keys, masked": ((1, 2, 2, 49, 49, 32, 32), F16, "strict", {"mask": "float"}),
    "half, wide values, masked": ((1, 2, 1, 49, 49, 32, 128), F16, "strict", {"mask": "float"}),
    "half, 196 keys, masked": ((1, 2, 2, 50, 196, 96, 96), F16, "strict", {"mask": "bool"}),
    "half, additive row, causal": (
        (1, 2, 2, 50, 100, 64, 64), F16, "strict", {"mask": "float row", "causal": True},
    ),
    "strict, additive row": ((1, 2, 1, 20, 300, 32, 32), F32, "strict", {"mask": "float row"}),
    "half, boolean row, causal": (
        (1, 2, 2, 70, 70, 128, 128), F16, "strict", {"mask": "bool row", "causal": True},
    ),
    "half, hidden NaN": ((1, 2, 2, 20, 100, 64, 64), F16, "strict", {"hidden": True}),
    "ieee, hidden NaN": ((1, 1, 1, 20, 300, 32, 32), F32, "ieee", {"hidden": True}),
    "one query, hidden NaN": ((1, 2, 2, 1, 300, 64, 64), F32, "strict", {"hidden": True}),
    "split keys, hidden NaN": ((1, 1, 1, 9, 900, 32, 32), F32, "strict", {"hidden": True}),
    "huge logits": ((1, 1, 1, 20, 150, 64, 64), F32, "strict", {"times": (1e15, 1e15, 1)}),
    "overflow": ((1, 1, 1, 20, 150, 64, 64), F32, "strict", {"times": (5e37, 5e37, 5e37)}),
    "denormals": ((1, 1, 1, 20, 150, 64, 64), F32, "strict", {"times": (1e-39, 1e-40, 1e-41)}),
    "zeros": ((1, 1, 1, 20, 150, 64, 64), F32, "strict", {"times": (0, 0, 0)}),
    "outlier channels": ((1, 1, 1, 20, 150, 64, 64), F32, "strict", {"outlier": True}),
    "outlier channels, row more": ((1, 1, 1, 65, 129, 64, 64), F32, "strict", {"outlier": True}),
    "small last row": ((1, 1, 1, 65, 129, 64, 64), F32, "strict", {"small": True}),
    "small last row lean": ((1, 1, 1, 65, 129, 64, 64), F32, "lean", {"small": True}),
    "small last row, two blocks": ((1, 1, 1, 129, 129, 80, 80), F32, "strict", {"small": True}),
    "outlier channels lean": ((1, 1, 1, 20, 150, 64, 64), F32, "lean", {"outlier": True}),
}  # fmt: skip


def reference(q, k, v, mask, causal, scale):
    group = q.shape[1] // k.shape[1]
    q = q.double()
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT * scale
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.double()
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return torch.softmax(s, -1).nan_to_num() @ v, torch.logsumexp(s, -1)


def run(shape, dtype, precision, options):
    b, hq, hk, n, m, d, dv = shape
    generator = torch.Generator().manual_seed(n + m)
    factors = options.get("times", (1, 1, 1))
    q, k, v = (
        (torch.randn(size, generator=generator) * factor).to(dtype)
        for size, factor in zip(
            ((b, hq, n, d), (b, hk, m, d), (b, hk, m, dv)), factors, strict=True
        )
    )
    if options.get("nan"):  # in the memory behind every row of channels
        q, k, v = (F.pad(t, (0, 8), value=math.nan)[..., : t.shape[-1]] for t in (q, k, v))
    if options.get("packed"):
        k, v = torch.randn(b, m, 2, hk, d, generator=generator).permute(2, 0, 3, 1, 4)
    if options.get("outlier"):
        k[..., 5], v[..., 3], q[..., 9] = k[..., 5] * 2**20, v[..., 3] * 2**20, q[..., 9] * 2**20
    if options.get("small"):
        k[..., -1, 5], v[..., -1, 3], q[..., -1, 9] = 1e-9, -1e-9, 1e-10
    mask = None
    if "mask" in options:
        kind, _, row = options["mask"].partition(" ")
        mask = torch.rand(1, hq, 1 if row else n, m, generator=generator) > 0.3
        if not row:
            mask[:, :, 0] = False
        if kind == "float":
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    if options.get("hidden"):  # NaN in keys that no query sees
        mask = torch.ones(1, 1, 1, m, dtype=torch.bool)
        mask[..., [0, 4, m - 1]] = False
        k[:, :, [0, 4, m - 1]] = math.nan
    causal, scale = options.get("causal", False), options.get("scale", d**-0.5)
    schedules.forward.CHAIN_TILES = options.get("chain", 1024)
    exact_folds.clear()
    attention = attention_state if options.get("state") else attention_forward
    with fenced() as fence:
        out, lse = attention(q, k, v, mask, causal, scale, precision)
    expected, expected_lse = reference(q, k, v, mask, causal, scale)
    visible = expected_lse.isfinite()
    difference = (lse.double() - expected_lse)[visible].abs() / (1 + expected_lse[visible].abs())
    return {
        "error": ((out.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item(),
        "lse": difference.max().item() if difference.numel() else 0.0,
        "finite": bool(out.isfinite().all()),
        "hidden": bool((lse.isinf() == ~visible).all() and (out[~visible] == 0).all()),
        "fence": fence["intact"],
        "memory": out.transpose(1, 2).is_contiguous(),
        "exact_folds": len(exact_folds),
        "words": planner.planned(q, k, v, mask, causal, scale, precision).words,
    }


def merged() -> dict:
    """Partial states of so many rows that a program merges several of them, the last one fewer."""
    shape, parts = tiling.Shape(1, 103, 103, 10, 1, 16, 5), 3
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(parts, 1030, 5, generator=generator)
    logs = 4 * torch.randn(parts, 1030, generator=generator)
    logs[:, 7] = -math.inf
    weights = (logs.double() * math.log(2)).softmax(0).nan_to_num()
    expected = (weights[..., None] * states.double()).sum(0).view(1, 103, 10, 5).transpose(1, 2)
    with fenced() as fence:
        out, lse = torch.empty(1, 10, 103, 5), torch.empty(1, 103, 10)
        plan_merge(shape, parts, overlap=False).launch(states, logs, out, lse)
    expected_lse = (logs.double() * math.log(2)).logsumexp(0).view(lse.shape)
    return {
        "error": (out.double() - expected).abs().max().item(),
        "lse": (lse - expected_lse).nan_to_num(0.0).abs().max().item(),
        "hidden": bool((lse.isinf() == expected_lse.isinf()).all()),
        "fence": fence["intact"],
    }


exact_folds: list[int] = []


def count_exact_folds() -> None:
    """The interpreter runs Python: what a kernel calls can be watched."""
    kernel = importlib.import_module("elsa_core.backends.triton.attention.forward")
    original = kernel.fold_exact

    def counted(*arguments, **options):
        exact_folds.append(1)
        return original(*arguments, **options)

    kernel.fold_exact = counted


def main() -> None:
    assert tiling.load_table("h200").measured
    count_exact_folds()
    torch.manual_seed(0)
    for name, case in CASES.items():
        sys.stdout.write(json.dumps({"name": name, **run(*case)}) + "\n")
    sys.stdout.write(json.dumps({"name": "merge", **merged()}) + "\n")


if __name__ == "__main__":
    main()
