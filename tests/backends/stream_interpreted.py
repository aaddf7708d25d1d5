"""Runs the stream-K kernels by Triton's interpreter; prints one JSON line for each case.

A program of its own, since TRITON_INTERPRET is read at import. The interpreter runs one program
after another, here in several orders, so that not always the same one of those that share a query
tile is last.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from itertools import accumulate

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402
from conformance import oracle  # noqa: E402
from conformance.fence import fenced  # noqa: E402

from elsa_core.backends.triton.attention import schedules, varlen  # noqa: E402

F32, F16 = torch.float32, torch.float16
MIXED = ([5, 0, 9, 1, 4, 0], [5, 0, 130, 1, 64, 0])
CROSSED = ([7, 3, 0, 9], [70, 0, 4, 130])
ONES = ([1, 1, 0, 1, 1, 1], [700, 1, 9, 0, 130, 300])
THREE = ([3, 0, 0, 1], [300, 5, 4, 0])
# name: (query lengths, key lengths), (Hq, Hkv, D, Dv), dtype, precision, programs, options
CASES = {
    "row": (([1, 1], [500, 500]), (3, 3, 64, 64), F32, "strict", 5, {"mixed": True}),
    "row, one program": (([1, 1], [130, 130]), (2, 2, 32, 32), F32, "strict", 1, {}),
    "row, a program a tile": (([1], [1100]), (2, 2, 64, 64), F32, "strict", 99, {"mixed": True}),
    "row ieee, groups": (([1], [300]), (4, 2, 64, 64), F32, "ieee", 5, {}),
    "lean chains": (([2], [400]), (2, 1, 64, 64), F32, "lean", 2, {"chain": 1}),
    "ragged rows": (ONES, (3, 3, 64, 64), F32, "strict", 5, {"mixed": True}),
    "ragged rows, causal": (THREE, (1, 1, 32, 32), F32, "strict", 3, {"causal": True}),
    "ragged rows, groups, split": (ONES, (4, 2, 80, 72), F32, "strict", 5, {}),
    "ragged groups, causal": (THREE, (4, 1, 32, 32), F16, "strict", 3, {"causal": True}),
    "ragged half": (MIXED, (2, 1, 64, 64), F16, "strict", 5, {"mixed": True}),
    "ragged outlier": (CROSSED, (2, 1, 64, 64), F32, "strict", 3, {"outlier": True}),
    "ragged, no keys": (([3, 4], [0, 0]), (1, 1, 32, 32), F32, "strict", 3, {}),
    "ragged, many": (
        ([1, 0, 0, 3] * 33, [2, 1, 5, 0] * 33), (1, 1, 32, 32), F16, "strict", 3, {}
    ),
}  # fmt: skip


def packed_reference(q, k, v, starts, others, causal, scale, dtype=torch.float64):
    given = (t.to(dtype) for t in (q, k, v))
    found = oracle.varlen_attention(*given, starts, others, is_causal=causal, scale=scale)
    return found["out"], found["lse"]


FORWARDS, BACKWARDS, STRIDED = "forwards", "backwards", "strided"


def ragged(lengths, sizes, dtype, precision, options, programs):
    queries, keys = lengths
    heads, kv_heads, d, dv = sizes
    generator = torch.Generator().manual_seed(sum(keys))
    shapes = (sum(queries), heads, d), (sum(keys), kv_heads, d), (sum(keys), kv_heads, dv)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    if options.get("outlier"):
        for t, channel in ((q, 9), (k, 5), (v, 3)):
            t[..., channel] *= 2**20
    starts, others = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys)
    )
    causal, scale = options.get("causal", False), d**-0.5
    call = (q, k, v, starts, others, causal, scale, precision)
    out, lse = packed_reference(*call[:7])
    # as rows of heads: [1, H, T, D]
    expected = out.transpose(0, 1)[None], lse[None]
    peer_lse = packed_reference(*call[:7], dtype=torch.float32)[1][None]

    def run():
        problem = varlen.problem_of(q, k, v, causal, scale, precision)
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        varlen.streamed(problem, len(starts) - 1, programs, 1)(q, k, v, starts, others, out, lse)
        return out.transpose(0, 1)[None], lse[None]

    return run, expected, peer_lse


def measured(name):
    *case, programs, options = CASES[name]
    schedules.CHAIN_TILES = options.get("chain", 1024)
    orders = (FORWARDS, BACKWARDS, STRIDED) if options.get("mixed") else (FORWARDS, BACKWARDS)
    run, (expected, expected_lse), peer_lse = ragged(*case, options, programs)
    visible = expected_lse.isfinite()
    answers = []
    for order in orders:
        chosen[0] = order
        counts.clear()
        with fenced() as fence:
            answers.append(run())
        assert fence["intact"], order
    out, lse = answers[0]

    def of_lse(lse):
        found, exact = lse.double()[visible], expected_lse[visible]
        errors = (found - exact).abs() / (1 + exact.abs())
        return errors.max().item() if errors.numel() else 0.0

    return {
        "error": ((out.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item(),
        "lse": of_lse(lse),
        "peer_lse": of_lse(peer_lse),
        "finite": bool(out.isfinite().all()),
        "hidden": bool((lse.isinf() == ~visible).all() and (out[~visible] == 0).all()),
        "again": all(
            torch.equal(out, other) and torch.equal(lse, log) for other, log in answers[1:]
        ),
        "cleared": all(bool((t == 0).all()) for t in counts),
    }


counts: list[torch.Tensor] = []
chosen = [FORWARDS]


def watch() -> None:
    """The interpreter runs Python: its order of programs can be changed, what is allocated and
    what a kernel calls can be watched.
    """
    from triton.runtime import interpreter

    made = varlen.tickets

    def tickets(count, device):
        counts.append(made(count, device))
        return counts[-1]

    varlen.tickets = tickets
    place = interpreter.InterpreterBuilder.set_grid_idx

    def moved(self, x, y, z):
        count = self.grid_dim[0]
        if chosen[0] == BACKWARDS:
            x = count - 1 - x
        elif chosen[0] == STRIDED:
            x = next(x * n % count for n in (7, 11, 13, 1) if math.gcd(n, count) == 1)
        place(self, x, y, z)

    interpreter.InterpreterBuilder.set_grid_idx = moved


def main() -> None:
    watch()
    for name in sys.argv[1:] or CASES:
        sys.stdout.write(json.dumps({"name": name, **measured(name)}) + "\n")


if __name__ == "__main__":
    main()
