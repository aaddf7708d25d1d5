"""Runs a schedule of listed key tiles by Triton's interpreter; prints one JSON line per case.

The schedule is defined here: a sparse pattern needs a record and a list, and no other kernel. A
program of its own, because TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import json
import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from conformance import quick_interpreter  # noqa: F401

from elsa_core import reference
from elsa_core.backends.triton.attention import planner, schedules, tiling
from elsa_core.backends.triton.attention.schedules import Call, Parts, Problem, Schedule
from elsa_core.backends.triton.attention.schedules import forward as dense
from elsa_core.backends.triton.shared.launch import Launch

ROWS, KEYS = 64, 32
F32, F16 = torch.float32, torch.float16
# name: (B, Hq, Hkv, Nq, Nk, D), dtype, precision, options
CASES = {
    "half": ((2, 2, 2, 130, 200, 32), F16, "strict", {}),
    "half, causal": ((1, 2, 2, 150, 150, 32), F16, "strict", {"causal": True}),
    "split": ((1, 4, 2, 70, 150, 64), F32, "lean", {}),
    "split, causal, masked": ((1, 2, 2, 150, 150, 64), F32, "lean", {"causal": True, "mask": True}),
    "float32 FMA": ((1, 2, 2, 70, 150, 32), F32, "ieee", {}),
    "guard fails": ((1, 2, 2, 70, 150, 64), F32, "lean", {"outlier": True, "causal": True}),
    "no tile listed": ((1, 2, 2, 70, 150, 32), F16, "strict", {"none": True}),
    "every tile listed": ((1, 2, 2, 70, 150, 64), F32, "lean", {"all": True}),
}


def listed(seen: torch.Tensor) -> torch.Tensor:
    """[programs, 1 + most]: the number of tiles that a program folds, then which."""
    programs = seen.flatten(0, -2)
    tiles = torch.full((len(programs), 1 + seen.shape[-1]), -(1 << 20), dtype=torch.int32)
    for row, wanted in zip(tiles, programs, strict=True):
        found = wanted.nonzero().flatten()
        row[0], row[1 : 1 + len(found)] = len(found), found
    return tiles


def sparse(tiles: torch.Tensor) -> Schedule:
    """Attention to the listed tiles alone."""

    def plan(problem: Problem) -> Parts:
        from elsa_core.backends.triton.attention.forward import forward

        tail = {**dense.fold_tail(problem), "LISTED": tiles.shape[1] - 1}
        del tail["Tiles"]
        options = dense.fold_options(problem, tail)
        return Parts({"fold": Launch(forward, dense.fold_grid(problem), tail, options)})

    def run(call: Call, q, k, v, mask):
        out, lse = call.results(q)
        call.fold(q, k, v, mask, out, out, lse, tiles)
        return out, lse

    return Schedule("sparse", lambda problem: True, plan, run, lambda problem: "listed tiles")


def run(shape, dtype, precision, options) -> dict:
    b, h, hk, n, m, d = shape
    g = torch.Generator().manual_seed(n)
    q = torch.randn(b, h, n, d, generator=g).to(dtype)
    k, v = (torch.randn(b, hk, m, d, generator=g).to(dtype) for _ in range(2))
    if options.get("outlier"):
        v[..., 3] *= 2.0**20
    query_tiles, key_tiles = -(-n // ROWS), -(-m // KEYS)
    seen = torch.rand(b, h, query_tiles, key_tiles, generator=g) > 0.5
    if options.get("none"):
        seen[0, 0, 0] = False
    if options.get("all"):
        seen[:] = True
    mask = torch.rand(1, 1, n, m, generator=g) > 0.2 if options.get("mask") else None
    causal = options.get("causal", False)

    mode = {"lean": "split", "ieee": "exact"}.get(precision, "half")
    tile = tiling.Tile(mode, 256, None, None, ROWS, KEYS, 4, 1, False)
    schedules.SCHEDULES = (sparse(listed(seen)),)
    call = planner.plan_call(
        q, k, v, mask, causal, 0.2, precision, tiles=tiling.Plan(tile, 1, key_tiles * KEYS)
    )
    out, lse = planner.execute(call, q, k, v, mask)

    whole = seen.repeat_interleave(ROWS, 2)[:, :, :n].repeat_interleave(KEYS, 3)[..., :m]
    whole = whole if mask is None else whole & mask
    expected, logs = reference.attention(q, k, v, whole, is_causal=causal, scale=0.2)
    visible = logs.isfinite()
    difference = (lse.double() - logs)[visible].abs() / (1 + logs[visible].abs())
    return {
        "words": call.words,
        "error": ((out.double() - expected).norm() / expected.norm()).item(),
        "lse": difference.max().item(),
        "hidden": bool((lse[~visible] == -torch.inf).all() and (out[~visible] == 0).all()),
        "hidden_rows": int((~visible).sum()),
    }


if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps({"name": name, **run(*case)}), flush=True)
