"""States of a rank's rows merge in any dtype, and their gradients read no rounded normaliser."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elsa_core import monoid
from elsa_core.distributed import ways
from elsa_core.distributed.agreement import Agreement
from elsa_core.distributed.plan import Plan
from elsa_core.distributed.shards import Rows, Run, Saved, Wanted, state
from elsa_core.monoid import State
from elsa_core.offload import passes

WANTED = Wanted(query=True, key=True, value=True, attn_mask=False)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("method", ["ring", "gather", "offload"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_large_scores_read_no_rounded_lse(method: str, dtype: torch.dtype) -> None:
    """Tensor cores leave an error of 1e-3 in the lse of scores of 10 000, and as much of their
    scores' exp in out: a gradient has neither."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, 2, n, d, generator=generator, dtype=torch.float64).to(dtype)
        for n, d in ((7, 8), (12, 8), (12, 4), (7, 4))
    )
    query[..., 0], key[..., 0] = 10000, 1
    wide = [t.double().requires_grad_() for t in (query, key, value)]
    scores = wide[0] @ wide[1].mT
    out, lse = scores.softmax(-1) @ wide[2], scores.logsumexp(-1)
    exact = torch.autograd.grad(out, wide, grad.double())
    wrong = Saved(grad, out.detach().to(dtype) * 1.001, lse.detach().float() + 1e-3)
    if method == "offload":
        call = passes.Call(
            query, key, value, None, False, 1.0, "strict", "auto", torch.device("cpu"), 5, 3
        )
        found = passes.backward(call, wrong, WANTED)[:3]
    else:
        rows = Rows(query, None, 0, is_causal=False, scale=1.0, precision="strict", backend="auto")
        group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        plan = Plan(method, "", (7,), (12,), 0, 0, {})
        alone = ways.Call(rows, key, value, Agreement((7,), (12,), 0, {}), group, plan)
        found = ways.backward(alone, wrong, WANTED)[:3]
    for ours, wanted in zip(found, exact, strict=True):
        assert ours is not None and relative(ours, wanted) < 2 * torch.finfo(dtype).eps


def test_states_of_two_dtypes_merge() -> None:
    """m and S in float64 beside W in float32: weights as exact as lse, and no more memory."""
    generator = torch.Generator().manual_seed(0)
    scores = 14 + torch.randn(5, 64, generator=generator, dtype=torch.float64) / 100
    values = torch.randn(64, 3, generator=generator, dtype=torch.float64)
    exact = scores.softmax(-1) @ values

    def merged(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        halves = []
        for columns in (slice(0, 32), slice(32, 64)):
            part = scores[:, columns]
            lse = part.logsumexp(-1).to(dtype)
            out = (part.softmax(-1) @ values[columns]).float()
            halves.append(State(lse, torch.ones_like(lse), out))
        return monoid.finalize_(monoid.merge_(*halves))

    out, lse = merged(torch.float64)
    assert out.dtype == torch.float32 and lse.dtype == torch.float64
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)
    assert relative(out, exact) < 6e-8 < relative(merged(torch.float32)[0], exact)


def test_the_lse_of_a_state_keeps_the_digits_of_large_scores() -> None:
    """Scores near 5000 are exact, and the sum of weights adds 0.7 to 3: float32 keeps 2e-4 of it,
    and a merged run would weigh that much wrong."""
    generator = torch.Generator().manual_seed(0)
    query = torch.full((1, 2, 7, 8), 32.0)
    key = torch.full((1, 2, 19, 8), 20.0)
    key[..., 0] -= torch.randint(0, 3, (1, 2, 19), generator=generator) / 32
    value = torch.randn(1, 2, 19, 4, generator=generator)
    rows = Rows(query, None, 0, is_causal=False, scale=1.0, precision="strict", backend="auto")
    found = state(rows, Run(0, 19, key, value))
    assert found is not None
    exact = (query.double() @ key.double().mT).logsumexp(-1)
    assert (found.m + found.S.log() - exact).abs().max() < 1e-6
