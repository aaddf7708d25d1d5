"""`sparsity=` of `elsa.attention` on the CPU: who serves it, gradients, compilers, counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import elsa_core as elsa
from elsa_core import reference
from elsa_core.backends import eager_sparse
from elsa_core.errors import ArgumentError, UnavailableError

F64 = torch.float64


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def runs(keys: int, groups: int = 8, d: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of alike tokens: each sees little of the others."""
    centres = 12 * torch.nn.functional.normalize(make(1, 2, groups, d), dim=-1)
    of = torch.arange(keys) * groups // keys
    q, k = (centres[:, :, of] + 0.1 * make(1, 2, keys, d, seed=s) for s in (1, 2))
    return q, k, make(1, 2, keys, d, seed=3)


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("causal", [False, True])
def test_exact_is_as_exact_as_the_ordinary_call(causal: bool) -> None:
    q, k, v = runs(700)
    exact, logs = reference.attention(q, k, v, is_causal=causal, scale=1.0)
    out, lse = elsa.attention(
        q, k, v, is_causal=causal, scale=1.0, sparsity="exact", return_lse=True
    )
    ordinary = elsa.attention(q, k, v, is_causal=causal, scale=1.0)
    assert relative(out, exact) <= 2 * relative(ordinary, exact) + 2.4e-7
    assert (lse.double() - logs).abs().max() <= 1e-6 * logs.abs().max()
    report = elsa.sparsity_report(q, k, v, is_causal=causal, scale=1.0)
    assert report.backend == "native" and report.skipped > 0.3 * report.tiles
    assert report.threshold == -27 - 10  # u / 8, and 700 keys are at most 2**10


def test_a_number_leaves_out_more_and_costs_an_error() -> None:
    q, k, v = runs(700)
    exact, loose = (elsa.sparsity_report(q, k, v, scale=0.075, sparsity=s) for s in ("exact", 0.01))
    assert loose.skipped > exact.skipped
    assert exact.error <= 2 * exact.dense_error + 2.4e-7 < loose.error < 0.1
    assert loose.threshold == math.log2(0.01) and loose.to_dict()["skip_rate"] == loose.skip_rate
    none = elsa.sparsity_report(q, k, v, scale=0.075, sparsity=None)
    assert none.skipped == 0 and none.to_dict()["threshold"] is None


def test_relief_changes_what_is_computed_and_not_the_output() -> None:
    q, k, v = (make(1, 2, n, 16, seed=i) for i, n in enumerate((200, 2000, 2000)))
    plain = elsa.sparsity_report(q, k, v, sparsity=None)
    whole = elsa.sparsity_report(q, k, v, sparsity=None, relief=("summaries", "order", "frozen"))
    assert whole.maxima < plain.maxima == plain.tiles and whole.rescaled < plain.rescaled
    assert whole.error <= 2 * plain.dense_error + 2.4e-7
    with pytest.raises(ArgumentError, match="relief='early' is unknown"):
        elsa.sparsity_report(q, k, v, relief=("early",))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_plain_pytorch_means_the_same(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in runs(333, groups=3))
    for mask in (None, make(1, 1, 333, 333, seed=4) > -1.0):
        for causal in (False, True):
            if mask is not None and causal:
                continue
            out, lse, counts = eager_sparse.attention(q, k, v, mask, causal, 1.0, "", 0.0, 0)
            exact, logs = reference.attention(q, k, v, mask, is_causal=causal, scale=1.0)
            ordinary = elsa.attention(q, k, v, mask, is_causal=causal, scale=1.0, backend="eager")
            band = 8 * torch.finfo(dtype).eps
            if dtype == F64:
                # the oracle is float64 too, and on some processors the very same sums: what is left
                # is the rounding of the scores, whose size is the relative error of a weight
                band = torch.finfo(dtype).eps * float((q @ k.mT).abs().max())
            assert relative(out, exact) <= 2 * relative(ordinary, exact) + band
            torch.testing.assert_close(lse.double(), logs, rtol=1e-6, atol=1e-6)
            assert counts.shape == (1, 2, 5) and counts[..., 1].sum() > 0
            assert (counts[..., 0] == (21 if causal else 36)).all()


def test_auto_leaves_out_nothing_where_no_kernel_does() -> None:
    q, k, v = (t.to(F64) for t in runs(150))
    ordinary = elsa.attention(q, k, v)
    assert torch.equal(elsa.attention(q, k, v, sparsity=0.01), ordinary)
    assert elsa.explain(q, k, v, sparsity=0.01).backend == "eager"
    asked = elsa.attention(q, k, v, sparsity=0.3, backend="eager")
    assert not torch.equal(asked, ordinary)
    route = elsa.explain(q, k, v, sparsity=0.3, backend="eager")
    assert "every score computed" in route.schedule and "2**-1.7" in route.schedule


def test_explain_says_who_and_what() -> None:
    route = elsa.explain(*runs(1024), sparsity="exact")
    assert route.backend == "native" and "below 2**-37.0 left out" in route.schedule


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = runs(40)
    for wrong in (0.0, 1.0, -0.5, "auto", math.nan, True):
        with pytest.raises(ArgumentError, match="sparsity="):
            elsa.attention(q, k, v, sparsity=wrong)
    with pytest.raises(ArgumentError, match="exclude each other"):
        elsa.attention(q, k, v, dropout_p=0.1, sparsity="exact")
    with pytest.raises(ArgumentError, match="has no gradients"):
        elsa.attention(q.requires_grad_(), k, v, sparsity=0.01)
    with torch.no_grad():
        elsa.attention(q, k, v, sparsity=0.01)
    with pytest.raises(UnavailableError, match="has no sparse_attention"):
        elsa.attention(q.detach(), k, v, sparsity=0.01, backend="sdpa")
    with pytest.raises(RuntimeError, match='as "exact" alone'):
        torch.ops.elsa.sparse_attention(q, k, v, None, False, 1.0, "strict", -3.0, 0)[
            0
        ].sum().backward()


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_exact(causal: bool) -> None:
    """By the formulas of the ordinary call, from this output and lse; lse included."""
    given = [t.requires_grad_() for t in runs(300)]
    wide = [t.detach().double().requires_grad_() for t in given]
    grad, slope = make(1, 2, 300, 32, seed=8), make(1, 2, 300, seed=9)

    def gradients(tensors: list[Tensor], sparsity: str | None) -> list[Tensor]:
        out, lse = elsa.attention(
            *tensors, is_causal=causal, scale=0.5, return_lse=True, sparsity=sparsity
        )
        ends = (grad.to(out.dtype), slope.to(lse.dtype))
        return list(torch.autograd.grad((out, lse), tensors, ends))

    exact = gradients(wide, None)
    ours, theirs = gradients(given, "exact"), gradients(given, None)
    for own, peer, true in zip(ours, theirs, exact, strict=True):
        assert relative(own, true) <= 2 * relative(peer, true) + 2.4e-7
    assert elsa.sparsity_report(*given, is_causal=causal, scale=0.5).skipped > 0


def far_scores(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores of which a unit in the last place is more than any threshold. Masks: causal, and the
    first 100 tokens are padding, so that rows of whole tiles see nothing else."""
    q, k, v = (make(1, 2, 256, 32, seed=s) for s in range(3))
    if kind == "ties at 2**33":
        return torch.full_like(q, 2.0**14), torch.full_like(k, 2.0**14), v, None
    if kind == "about 9e9":
        return 4e4 * q, 4e4 * k, v, None
    at = torch.arange(256)
    seen = (at <= at[:, None]) & (at >= 100)
    far = torch.finfo(torch.float32).min if kind == "finfo.min" else -1e9
    return q, k, v, torch.zeros(1, 1, 256, 256).masked_fill(~seen, far)


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("sparsity", ["exact", 1e-3])
@pytest.mark.parametrize("kind", ["finfo.min", "-1e9", "ties at 2**33", "about 9e9"])
def test_scores_that_a_threshold_does_not_move(kind: str, sparsity, backend: str) -> None:
    """Tiles that hold the maximum were left out: rows of zeros with lse -inf."""
    q, k, v, mask = far_scores(kind)
    terms = {"scale": 0.7, "return_lse": True, "backend": backend}
    out, lse = elsa.attention(q, k, v, mask, sparsity=sparsity, **terms)
    ordinary, their_lse = elsa.attention(q, k, v, mask, **terms)
    # gone: keys whose weights are at most 1e-3
    error = 2e-6 if sparsity == "exact" else 0.05
    torch.testing.assert_close(out, ordinary, rtol=0, atol=error)
    torch.testing.assert_close(lse, their_lse, rtol=1e-6, atol=error)
    if mask is None:
        exact, logs = reference.attention(q, k, v, scale=0.7)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), logs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["finfo.min", "-1e9", "ties at 2**33", "about 9e9"])
def test_gradients_where_a_threshold_does_not_move_scores(kind: str) -> None:
    *given, mask = far_scores(kind)
    given = [t.requires_grad_() for t in given]
    grad = make(1, 2, 256, 32, seed=8)

    def gradients(sparsity: str | None) -> tuple[Tensor, ...]:
        out, _ = elsa.attention(*given, mask, scale=0.7, sparsity=sparsity, return_lse=True)
        return torch.autograd.grad(out, given, grad)

    for own, peer in zip(gradients("exact"), gradients(None), strict=True):
        torch.testing.assert_close(own, peer, rtol=0, atol=2e-6 * peer.abs().max().item() + 1e-30)


def test_batch_dims_gqa_and_autocast() -> None:
    q, k, v = make(3, 4, 50, 16), make(3, 2, 60, 16), make(3, 2, 60, 8)
    ours = elsa.attention(q, k, v, enable_gqa=True, sparsity="exact")
    torch.testing.assert_close(ours, elsa.attention(q, k, v, enable_gqa=True))
    flat = elsa.attention(q[0, 0], k[0, 0], v[0, 0], sparsity="exact")
    torch.testing.assert_close(flat, ours[0, 0])
    deep = elsa.attention(q[:, None], k[:, None], v[:, None], enable_gqa=True, sparsity="exact")
    torch.testing.assert_close(deep[:, 0], ours)
    with torch.autocast("cpu", torch.bfloat16):
        assert elsa.attention(q, k, v, enable_gqa=True, sparsity="exact").dtype == torch.bfloat16


def test_compiles_without_a_break_and_for_any_length() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = elsa.attention(q * 2, k, v, sparsity="exact")
        assert isinstance(out, Tensor)
        return out + 1

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for keys in (70, 301):
        q, k, v = runs(keys)
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    q, k, v = (t.requires_grad_() for t in runs(70))
    ours = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    theirs = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("threshold", [0.0, -5.0, -math.inf])
def test_opcheck(threshold: float) -> None:
    q, k, v = (t.requires_grad_(threshold != -5.0) for t in runs(70))
    terms = (None, True, 0.3, "strict", threshold, 7)
    torch.library.opcheck(torch.ops.elsa.sparse_attention.default, (q, k, v, *terms))
    torch.library.opcheck(torch.ops.elsa.sparse_attention_eager.default, (q, k, v, *terms))


def test_derivatives_of_functions_take_the_ordinary_call() -> None:
    q, k, v = runs(20)
    found = torch.func.grad(lambda x: elsa.attention(x, k, v, sparsity="exact").sum())(q)
    expected = torch.func.grad(lambda x: elsa.attention(x, k, v).sum())(q)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("call", [elsa.attention, elsa.explain])
def test_explain_refuses_what_the_call_refuses(call) -> None:
    q, k, v = runs(64)
    with pytest.raises(ArgumentError, match="sparsity and dropout_p exclude each other"):
        call(q, k, v, dropout_p=0.1, sparsity="exact")
    with pytest.raises(ArgumentError, match=r"sparsity=0\.01 has no gradients"):
        call(q.requires_grad_(), k, v, sparsity=0.01)
