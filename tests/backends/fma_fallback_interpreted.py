"""The FMA fallback of `hopper.forward`, by Triton's interpreter: blocks with a flag are folded
again and right, and nothing else is written."""

import pytest
import torch
from conformance import quick_interpreter  # noqa: F401

from elsa_core import reference
from elsa_core.backends.triton.attention import fma_fallback, schedules, tiling
from elsa_core.backends.triton.attention.schedules import Problem

fma_fallback.PROGRAMS = 2  # so that one looks after more blocks than it reads flags of at once

# (B, Hq, Hkv, Nq, Nk, D, Dv), partitions, causal
CASES = [
    ((2, 2, 1, 130, 70, 32, 16), 1, False),
    ((1, 3, 3, 200, 200, 16, 32), 1, True),
    ((1, 2, 2, 70, 150, 16, 16), 2, False),
    ((3, 6, 6, 70, 20, 16, 16), 1, False),
]


@pytest.mark.parametrize(("shape", "parts", "causal"), CASES)
def test_flagged_blocks_are_folded_again(shape: tuple[int, ...], parts: int, causal: bool) -> None:
    b, h, hk, n, m, d, dv = shape
    q, k, v = torch.randn(b, n, h, d), torch.randn(b, m, hk, d), torch.randn(b, m, hk, dv)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sizes = tiling.Shape(b, h, hk, n, m, d, dv)
    tile = tiling.Tile("split", 64, None, None, 64, 16, 4, 2, True)
    plan = tiling.Plan(tile, parts, -(-m // 16 // parts) * 16)
    problem = Problem(q, k, v, None, causal, -0.3, "strict", "split", sizes, plan)
    again = schedules.fallback_launch(problem, schedules.fold_tail(problem))
    flags = torch.arange(again.tail["blocks"], dtype=torch.int32) % 3 == 1
    states = (parts, b * h, n)
    if parts > 1:
        out, lse = torch.full((*states, dv), torch.nan), torch.full(states, torch.nan)
    else:
        out, lse = torch.full((b, n, h, dv), torch.nan), torch.full((b, h, n), torch.nan)
    again(q, k, v, flags.int(), out, lse)

    outs, logs = [], []
    for keys in torch.arange(m).split(plan.chunk):
        seen = torch.ones(n, m, dtype=torch.bool)
        if causal:
            seen = seen.tril()
        hidden = torch.ones(m, dtype=torch.bool)
        hidden[keys] = False
        seen = (seen & ~hidden)[None, None]
        o, logsumexp = reference.attention(q, k, v, seen, scale=-0.3)
        outs.append(o)
        logs.append(logsumexp)
    if parts > 1:
        expected = torch.stack(outs).flatten(1, 2)
        scores = torch.stack(logs).flatten(1, 2) / torch.log(torch.tensor(2.0))
    else:
        expected, scores = outs[0].transpose(1, 2), logs[0]
    blocks = -(-n // 64)
    chosen = flags.reshape(-1, blocks).repeat_interleave(64, 1)[:, :n].reshape(lse.shape)
    rows = chosen if parts > 1 else chosen.transpose(1, 2)
    assert flags.any() and out[~rows].isnan().all() and lse[~chosen].isnan().all()
    wanted = expected[rows]
    assert (out[rows].double() - wanted).norm() < 6e-7 * wanted.norm()
    finite = scores[chosen].isfinite()
    assert (lse[chosen] - scores[chosen])[finite].abs().max() < 1e-5
    assert (lse[chosen][~finite] == -torch.inf).all()
