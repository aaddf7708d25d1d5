"""Stream-K, by Triton's interpreter, joins the shares of packed sequences in any order."""

import math
from itertools import accumulate

import pytest
import torch
from conformance import oracle
from conformance.fence import fenced
from triton.runtime import interpreter

from elsa_core.backends.triton.attention import schedules, varlen

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


# The interpreter runs one program after another: so that not always the same one of those that
# share a query tile is last, their order is changed.
ORDERS = {
    "forwards": lambda x, count: x,
    "backwards": lambda x, count: count - 1 - x,
    "strided": lambda x, count: next(
        x * n % count for n in (7, 11, 13, 1) if math.gcd(n, count) == 1
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_any_order_of_programs_gives_the_same_bits(name, monkeypatch):
    lengths, (heads, kv_heads, d, dv), dtype, precision, programs, options = CASES[name]
    monkeypatch.setattr(schedules, "CHAIN_TILES", options.get("chain", 1024))
    counts, make, place = [], varlen.tickets, interpreter.InterpreterBuilder.set_grid_idx

    def tickets(count, device):
        counts.append(make(count, device))
        return counts[-1]

    monkeypatch.setattr(varlen, "tickets", tickets)
    queries, keys = map(sum, lengths)
    generator = torch.Generator().manual_seed(keys)
    shapes = (queries, heads, d), (keys, kv_heads, d), (keys, kv_heads, dv)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    if options.get("outlier"):
        for t, channel in ((q, 9), (k, 5), (v, 3)):
            t[..., channel] *= 2**20
    starts, others = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in lengths)
    causal, scale = options.get("causal", False), d**-0.5
    exact, peer = (
        oracle.varlen_attention(
            *(t.to(kind) for t in (q, k, v)), starts, others, is_causal=causal, scale=scale
        )
        for kind in (torch.float64, torch.float32)
    )
    problem = varlen.problem_of(q, k, v, causal, scale, precision)
    first = None
    for order in (
        ("forwards", "backwards", "strided") if options.get("mixed") else ("forwards", "backwards")
    ):
        monkeypatch.setattr(
            interpreter.InterpreterBuilder, "set_grid_idx",
            lambda self, x, y, z, turn=ORDERS[order]: place(self, turn(x, self.grid_dim[0]), y, z),
        )  # fmt: skip
        with fenced() as fence:
            out = q.new_empty((queries, heads, dv))
            lse = q.new_empty((heads, queries), dtype=torch.float32)
            call = varlen.streamed(problem, len(starts) - 1, programs, 1)
            call(q, k, v, starts, others, out, lse)
        assert fence["intact"], order
        first = first or (out, lse)
        assert all(map(torch.equal, first, (out, lse))), order
        assert not any(t.any() for t in counts), "tickets are left for the next call"
    visible = exact["lse"].isfinite()
    assert out.isfinite().all() and torch.equal(lse.isinf(), ~visible)
    assert not out[~visible.T].any()
    wanted = exact["out"]
    limit = 6e-4 if dtype == F16 else 6e-7
    assert (out.double() - wanted).norm() <= limit * wanted.norm()
    if visible.any():
        # scores of an outlier channel cancel: PyTorch's own rounding of them is the measure
        right = exact["lse"][visible]
        error, others = (
            ((t.double()[visible] - right).abs() / (1 + right.abs())).max()
            for t in (lse, peer["lse"])
        )
        assert error < max(4e-7, 2 * others)
