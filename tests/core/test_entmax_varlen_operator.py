"""`elsa::entmax_varlen_attention` in plain PyTorch, and how the public function takes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import elsa_core as elsa
from elsa_core import dispatch, ops
from elsa_core.backends.support import Support
from elsa_core.errors import ArgumentError
from elsa_core.ops.entmax import varlen as entmax_varlen
from elsa_core.ops.varlen.api import Packed

QUERIES, KEYS = [5, 0, 70, 1, 3], [5, 4, 66, 0, 130]
OPERATOR = ops.ENTMAX_VARLEN_ATTENTION


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def operands(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(QUERIES), 4, 8), (sum(KEYS), 2, 8), (sum(KEYS), 2, 6)
    parts = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*parts, bounds(QUERIES), bounds(KEYS, torch.int64)]


def of_sequences() -> Tensor:
    return 1.1 + torch.rand(5, 4, 1, 1, dtype=torch.float64)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function takes the operator, as on CUDA, by plain PyTorch."""
    monkeypatch.setattr(entmax_varlen, "_served_by", lambda *kind: dispatch.PLAIN)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["number", "heads", "sequences"])
def test_it_is_the_loop_over_sequences(
    kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, *ends = operands()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    alpha: float | Tensor = 1.5
    if kind != "number":
        alpha = of_sequences() if kind == "sequences" else of_sequences()[0]
        leaves.append(alpha.requires_grad_())

    def call() -> list[Tensor]:
        out = elsa.entmax_varlen_attention(
            q, k, v, *ends, 70, 130, alpha=alpha, is_causal=causal, enable_gqa=True
        )
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    looped = call()
    monkeypatch.setattr(entmax_varlen, "_served_by", lambda *kind: dispatch.PLAIN)
    for x, y in zip(call(), looped, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    terms = (70, 130, 1.5, causal, 8**-0.5)
    heads = alpha if isinstance(alpha, Tensor) else None
    if heads is not None and heads.dim() == 3:
        heads = heads[None]
    portable, *_ = OPERATOR.exported(q, k, v, *ends, heads, *terms)
    torch.testing.assert_close(portable, looped[0], rtol=1e-7, atol=1e-8)


def test_without_longest_lengths_they_are_all_tokens(served: None) -> None:
    q, k, v, *ends = operands(torch.float32)
    one = elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True)
    other = elsa.entmax_varlen_attention(q, k, v, *ends, 70, 10**6, enable_gqa=True)
    assert torch.equal(one, other)
    tiles = OPERATOR.eager(q, k, v, *ends, None, 70, 130, 1.5, False, 1.0, "strict")[2]
    assert tiles.shape == (4, 79 // 64 + 5, 3)


def test_lengths_are_read_where_the_workspace_would_be_large(
    served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, *ends = operands(torch.float32)
    given = entmax_varlen.Packed(q, k, v, *ends)
    assert entmax_varlen._bounded(given, None, None) == (79, 205)
    expected = elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True)
    monkeypatch.setattr(entmax_varlen, "_MANY_TILES", 0)
    assert entmax_varlen._bounded(given, None, None) == (70, 130)
    assert entmax_varlen._bounded(given, 75, None) == (75, 130)
    assert torch.equal(elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True), expected)
    alone = entmax_varlen.Packed(q, k, v, bounds([79]), bounds([205]))
    assert entmax_varlen._bounded(alone, None, None) == (79, 205)  # one sequence has them all
    monkeypatch.setattr(entmax_varlen, "_reads", lambda query: False)
    assert entmax_varlen._bounded(given, None, None) == (79, 205)


@pytest.mark.parametrize("kind", ["number", "sequences"])
def test_opcheck(kind: str) -> None:
    parts = [t.requires_grad_(t.is_floating_point()) for t in operands()]
    alpha = of_sequences().requires_grad_() if kind == "sequences" else None
    for overload in (OPERATOR.overload, OPERATOR.eager):
        arguments = (*parts, alpha, 70, 130, 1.5, True, 8**-0.5, "strict")
        torch.library.opcheck(overload, arguments)


def test_compiles_whole_for_any_number_of_tokens(served: None) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return elsa.entmax_varlen_attention(q, k, v, ends)

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    counts = set()
    for lengths in ([5, 170], [99, 130], [100, 80]):
        q, k, v = torch.randn(3, sum(lengths), 2, 8)
        given = (q.requires_grad_(), k, v, bounds(lengths))
        one, other = compiled(*given), call(*given)
        grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (one, other)]
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(*grads)
        counts.add(counter.frame_count)
    assert len(counts) == 1  # no length compiles anything again
    torch.compiler.reset()


def test_gradients_that_are_not_wanted_are_empty() -> None:
    q, k, v, *ends = operands()
    out, *rest = OPERATOR.overload(q, k, v, *ends, None, 70, 130, 1.5, False, 1.0, "strict")
    backward = torch.ops.elsa.entmax_varlen_attention_backward.default
    grads = backward(
        out, q, k, v, *ends, None, out, *rest, 70, 130, 1.5, False, 1.0, "strict",
        [False, True, False, False],
    )  # fmt: skip
    assert [tuple(g.shape) for g in grads] == [(0,), tuple(k.shape), (0,), (0,)]


def test_wrong_bounds_and_second_derivatives_are_named(served: None) -> None:
    q, k, v, *ends = operands()
    with pytest.raises(ArgumentError, match="cu_seqlens_k must start with 0"):
        elsa.entmax_varlen_attention(q, k, v, ends[0], ends[1] + 1, enable_gqa=True)
    q.requires_grad_()
    out = elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True)
    grad = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_forward_mode_is_left_to_the_loop(served: None) -> None:
    q, k, v, ends = *torch.randn(3, 79, 2, 8).unbind(), bounds([5, 70, 4])

    def call(q: Tensor) -> Tensor:
        return elsa.entmax_varlen_attention(q, k, v, ends, None, 70)

    out, tangent = torch.func.jvp(call, (q,), (torch.ones_like(q),))
    assert out.isfinite().all() and tangent.isfinite().all()


def test_derivatives_of_torch_func_where_a_sequence_has_no_keys() -> None:
    """The maximum over no keys was an error."""
    q, k, v, *ends = operands()
    alpha = of_sequences()

    def call(*given: Tensor) -> Tensor:
        return elsa.entmax_varlen_attention(*given[:3], *ends, alpha=given[3], enable_gqa=True)

    given = (q, k, v, alpha)
    out, tangent = torch.func.jvp(call, given, tuple(map(torch.ones_like, given)))
    assert out.isfinite().all() and tangent.isfinite().all()
    assert out[75].eq(0).all() and tangent[75].eq(0).all()  # 1 query, no key
    leaves = [t.clone().requires_grad_() for t in given]
    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    found = torch.func.grad(lambda *x: call(*x).square().sum(), argnums=(0, 1, 2, 3))(*given)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-8)


def test_alpha_of_half_precision_is_summed_in_float32() -> None:
    """Over 200 sequences: sums in bfloat16 lost two digits."""
    ends = bounds([7] * 200)
    q, k, v = torch.randn(3, 1400, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        alpha = torch.full((1, 2, 1, 1), 1.375, dtype=dtype, requires_grad=True)
        terms = (7, 7, 0.0, False, 0.5, "strict")
        out = OPERATOR.overload(q, k, v, ends, ends, alpha, *terms)[0]
        found.append(torch.autograd.grad(out.square().sum(), alpha)[0])
    torch.testing.assert_close(found[1], found[0].bfloat16(), rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_longest_lengths_of_a_wrong_kind_are_named(name: str, served: None) -> None:
    q, k, v, *ends = operands()
    given: Any = "70"
    for given in ("70", 70.0, torch.tensor(70.0)):
        with pytest.raises(TypeError, match=f"{name} must be an integer, not"):
            elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True, **{name: given})
    with pytest.raises(ArgumentError, match=f"{name}=-1 must not be negative"):
        elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True, **{name: -1})
    given = torch.tensor(130)
    one = elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True, **{name: given})
    assert torch.equal(one, elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton is said to run, and tensors on "cuda" have no memory."""
    monkeypatch.setattr("elsa_core.backends.triton._environment", lambda _: Support(True))
    dispatch.chooser.chosen.cache_clear()
    with FakeTensorMode():
        yield
    dispatch.chooser.chosen.cache_clear()  # what was chosen for that GPU


def test_who_is_asked_on_a_gpu(gpu: None) -> None:
    kind = ("cuda:0", torch.float32, 8, 6, "strict")
    for backend in ("auto", "triton"):
        assert entmax_varlen._served_by(*kind, backend) == "triton"
        assert dispatch.choose("entmax_attention", *kind, backend) == "triton"
    for other in ("sdpa", "nobody", "eager"):
        assert entmax_varlen._served_by(*kind, other) == ""
    for backend in ("auto", "triton"):
        assert entmax_varlen._served_by("cuda:0", torch.float64, *kind[2:], backend) == ""
    assert entmax_varlen._served_by("cpu", *kind[1:], "triton") == ""


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("longest", [(), (70, 130)])
def test_calls_on_a_gpu_take_the_operator_and_explain_says_so(
    longest: tuple[int, ...], backend: str, gpu: None
) -> None:
    shapes = (sum(QUERIES), 4, 8), (sum(KEYS), 2, 8), (sum(KEYS), 2, 6)
    parts = [torch.empty(shape, device="cuda", requires_grad=True) for shape in shapes]
    ends = [torch.empty(6, dtype=torch.int32, device="cuda") for _ in range(2)]
    alpha = torch.empty(5, 4, 1, 1, device="cuda", requires_grad=True)
    given: tuple[Any, ...] = (*parts, *ends, *longest)
    terms: dict[str, Any] = {"alpha": alpha, "enable_gqa": True, "backend": backend}
    route = elsa.explain_entmax_varlen_attention(*given, **terms)
    assert route.backend == "triton" and route.schedule.startswith("all sequences in one launch; ")
    assert route.reasons == ("gradients: kernels of the same backend",)
    out = elsa.entmax_varlen_attention(*given, **terms)
    assert out.shape == (79, 4, 6) and "entmax_varlen_attention" in type(out.grad_fn).__name__


def test_longest_lengths_in_a_compiled_program() -> None:
    """Given as constants or symbols, shorter than the tokens or not."""

    def call(x: torch.Tensor, starts: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
        longest = entmax_varlen._bounded(Packed(x, x, x, starts, starts), queries, keys)
        return x.sum() * longest[0] + longest[1]

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for tokens in (70, 90, 130):
        x, starts = torch.randn(tokens, 2, 8), torch.tensor([0, tokens])
        for given in ((1000, 1000), (30, 40), (tokens, tokens)):
            assert torch.equal(compiled(x, starts, *given), call(x, starts, *given))
    torch.compiler.reset()
