"""States and gradients of a rank's rows, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elsa_core import monoid
from elsa_core.distributed import shards, ways
from elsa_core.distributed.agreement import Agreement
from elsa_core.distributed.shards import Rows, Run, Saved, Sums, Wanted
from elsa_core.monoid import State
from elsa_core.offload import passes

WANTED = Wanted(query=True, key=True, value=True, attn_mask=False)


def integers(*shape: int, seed: int, offset: int) -> Tensor:
    """Small integers, of which products and sums are exact; the first channel is `offset`."""
    drawn = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()
    drawn[..., 0] = offset
    return drawn


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("offset", [30, 60])
def test_rounding_lse_costs_no_digit_of_the_gradients(offset: int) -> None:
    query, key = (integers(1, 2, n, 8, seed=n, offset=offset) for n in (7, 12))
    value, grad = (integers(1, 2, n, 4, seed=n, offset=1) for n in (12, 7))
    wide = [t.double().requires_grad_() for t in (query, key, value)]
    scores = wide[0] @ wide[1].mT
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1) @ wide[2]
    exact = torch.autograd.grad(out, wide, grad.double())
    rows = Rows(query, None, 0, is_causal=False, scale=1.0, precision="strict", backend="auto")
    run = Run(0, 12, key, value)

    def errors(given: Tensor) -> list[float]:
        saved = shards.narrowed(Saved(grad, out.detach().float(), given))
        assert saved.lse.dtype == torch.float32
        sums = Sums.zeros(rows, WANTED)
        of_key, of_value = shards.gradients(rows, run, saved, sums, WANTED)
        assert sums.query is not None
        # the first channel's gradients are sums that cancel
        pairs = zip((sums.query, of_key), exact[:2], strict=True)
        found = [relative(ours[..., 1:], wanted[..., 1:]) for ours, wanted in pairs]
        return [*found, relative(of_value, exact[2])]

    rounded = errors(lse.detach().float().double())
    kept = errors(lse.detach())
    assert max(rounded) > 5e-6  # what is to be given back
    assert max(kept) < 1e-6


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
        found = passes.backward(call, wrong, WANTED)
    else:
        rows = Rows(query, None, 0, is_causal=False, scale=1.0, precision="strict", backend="auto")
        group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        alone = ways.Call(rows, key, value, Agreement((7,), (12,), 0, {}), group)
        found = ways.backward(alone, method, wrong, WANTED)[:3]
    for ours, wanted in zip(found, exact, strict=True):
        assert ours is not None
        assert relative(ours, wanted) < 2 * torch.finfo(dtype).eps


def test_rows_that_see_nothing_have_no_gradient() -> None:
    out, lse = torch.zeros(1, 1, 3, 4), torch.full((1, 1, 3), -torch.inf, dtype=torch.float64)
    saved = shards.narrowed(Saved(torch.ones(1, 1, 3, 4), out, lse))
    assert torch.equal(saved.grad_out, torch.ones(1, 1, 3, 4)) and saved.lse.isneginf().all()


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
