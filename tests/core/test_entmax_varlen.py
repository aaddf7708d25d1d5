"""`elsa.entmax_varlen_attention` and jagged tensors: sequences as alone, and against float64."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

import elsa_core as elsa
from elsa_core import entmax_varlen
from elsa_core.errors import ArgumentError, UnavailableError

F64 = torch.float64
LENGTHS = {
    "mixed": ([5, 0, 1, 100, 33], [5, 0, 1, 100, 33]),
    "crossed": ([7, 3, 0, 1, 50, 0], [1, 0, 4, 33, 65, 0]),
    "no key at all": ([3, 2], [0, 0]),
    "no sequence": ([], []),
}


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def operands(case: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries of 4 heads, keys and values of 2, and where the sequences start."""
    queries, keys = LENGTHS[case]
    shapes = (sum(queries), 4, 16), (sum(keys), 2, 16), (sum(keys), 2, 8)
    parts = (make(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    return (*parts, bounds(queries), bounds(keys))


def apart(q, k, v, cu_q, cu_k) -> list[tuple[Tensor, ...]]:
    """The sequences as batches of one, [1, H, n, D]."""
    ends = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    return [
        tuple(t[slice(*end)].transpose(0, 1)[None] for t, end in ((q, of_q), (k, of_k), (v, of_k)))
        for of_q, of_k in ends
    ]


def oracle(q: Tensor, k: Tensor, v: Tensor, alpha, causal: bool) -> Tensor:
    """One sequence by the package `entmax`."""
    entmax = pytest.importorskip("entmax")
    if not (q.shape[2] and k.shape[2]):
        return (q.sum() + k.sum() + v.sum()) * 0 + q.new_zeros((*q.shape[:3], v.shape[3]))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -1e30)
    if isinstance(alpha, Tensor):
        alpha = alpha.expand(1, 4, s.shape[2], 1)
    return entmax.entmax_bisect(s, alpha, n_iter=100) @ v


@pytest.fixture(params=["sequences", "padded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who serves: one sequence after another, or a padded batch as in compiled programs."""
    if request.param == "padded":
        monkeypatch.setattr(entmax_varlen, "_reads", lambda query: False)
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", ["mixed", "crossed", "no key at all"])
@pytest.mark.parametrize("alpha", [1.5, 1.25, "heads"])
def test_agrees_with_float64(alpha, case: str, causal: bool, way: str) -> None:
    if way == "padded" and case == "no key at all":
        pytest.skip("a compiler's call of nothing is not padded")
    q, k, v, *ends = operands(case, F64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if alpha == "heads":
        alpha = torch.tensor([1.2, 1.5, 1.7, 2.0], dtype=F64).reshape(4, 1, 1).requires_grad_()
        leaves.append(alpha)
    out = elsa.entmax_varlen_attention(
        q, k, v, *ends, 100, 100, alpha=alpha, is_causal=causal, enable_gqa=True
    )
    parts = [oracle(*part, alpha, causal)[0].transpose(0, 1) for part in apart(q, k, v, *ends)]
    exact = torch.cat(parts)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-11)
    grad = make(*out.shape, dtype=F64, seed=9)
    found, expected = (
        torch.autograd.grad(x, leaves, grad, allow_unused=True, materialize_grads=True)
        for x in (out, exact)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LENGTHS)
def test_each_sequence_is_as_alone(case: str, dtype: torch.dtype) -> None:
    given = operands(case, dtype)
    alpha = 1.1 + torch.rand(len(LENGTHS[case][0]), 4, 1, 1)
    out = elsa.entmax_varlen_attention(*given, alpha=alpha, enable_gqa=True)
    assert out.shape == (*given[0].shape[:2], 8) and out.dtype == dtype
    row = 0
    for i, part in enumerate(apart(*given)):
        alone = elsa.entmax_attention(*part, alpha=alpha[i], enable_gqa=True)[0].transpose(0, 1)
        assert torch.equal(out[row : row + len(alone)], alone)
        row += len(alone)
    assert row == len(out)


def test_views_of_a_projection_and_keys_of_equal_length() -> None:
    packed, ends = make(39, 3, 4, 8), bounds([5, 1, 33])
    out = elsa.entmax_varlen_attention(*packed.unbind(1), ends)
    dense = (t.contiguous() for t in packed.unbind(1))
    assert torch.equal(out, elsa.entmax_varlen_attention(*dense, ends, ends.clone(), 33, 40))


def test_alpha_one_is_softmax() -> None:
    given = operands("mixed")
    out = elsa.entmax_varlen_attention(*given, alpha=1, enable_gqa=True)
    assert torch.equal(out, elsa.varlen_attention(*given, enable_gqa=True))


def test_autocast_casts_as_attention_does() -> None:
    q, k, v, *ends = operands("mixed")
    with torch.autocast("cpu", torch.bfloat16):
        out = elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True)
    half = (t.bfloat16() for t in (q, k, v))
    assert torch.equal(out, elsa.entmax_varlen_attention(*half, *ends, enable_gqa=True))


def test_compiles_with_the_longest_lengths_and_says_so_without() -> None:
    q, k, v, *ends = operands("mixed")
    q.requires_grad_()

    def call(q: Tensor, *longest: int) -> Tensor:
        return elsa.entmax_varlen_attention(q, k, v, *ends, *longest, enable_gqa=True)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, out = call(q), compiled(q, 100, 100)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (out, expected)]
    torch.testing.assert_close(*grads)
    with pytest.raises(Exception, match="needs max_seqlen_q and max_seqlen_k where it is compiled"):
        compiled(q)
    torch.compiler.reset()


def test_explain_and_meta() -> None:
    given = operands("mixed")
    route = elsa.explain_entmax_varlen_attention(*given, enable_gqa=True)
    assert route.schedule.startswith("one sequence after another; ")
    softmax = elsa.explain_entmax_varlen_attention(*given, alpha=1.0, enable_gqa=True)
    assert softmax == elsa.explain_varlen_attention(*given, enable_gqa=True)
    out = elsa.entmax_varlen_attention(*(t.to("meta") for t in given), enable_gqa=True)
    assert out.shape == (139, 4, 8) and out.is_meta


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alpha": 0.9}, r"alpha=0.9 must be in \[1, 4\]"),
        ({"alpha": torch.ones(3, 1, 1)}, r"does not broadcast to \[5, 4, 1, 1\]"),
        ({"alpha": torch.full((4, 1, 1), 5.0)}, "entries from 5.0"),
        ({"enable_gqa": False}, "key has 2 heads, query 4"),
        ({"max_seqlen_q": 99}, "max_seqlen_q=99, but a sequence has 100 tokens"),
        ({"cu_seqlens_q": bounds([5, 3, 1, 100, 33])}, "end with 139 tokens"),
        ({"scale": torch.ones(())}, "scale must be a number"),
    ],
)
def test_wrong_arguments_are_named(given: dict, words: str) -> None:
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    terms = dict(zip(names, operands("mixed"), strict=True)) | {"enable_gqa": True} | given
    with pytest.raises(ArgumentError, match=words):
        elsa.entmax_varlen_attention(**terms)


def test_wrong_types_and_unavailable_calls() -> None:
    q, k, v, *ends = operands("mixed")
    with pytest.raises(TypeError, match="alpha must be a number or"):
        elsa.entmax_varlen_attention(q, k, v, *ends, alpha="1.5", enable_gqa=True)
    with pytest.raises(TypeError, match=r"key must be a torch\.Tensor"):
        elsa.entmax_varlen_attention(q, [1], v, *ends)
    with pytest.raises(UnavailableError, match="backend='sdpa' has no entmax_attention"):
        elsa.entmax_varlen_attention(q, k, v, *ends, enable_gqa=True, backend="sdpa")


def jagged(lengths: list[int], dim: int = 8, *, seed: int = 0, heads: int = 4) -> Tensor:
    """[B, H, j, dim], as a projection's output is split."""
    parts = [make(n, heads, dim, seed=seed + i) for i, n in enumerate(lengths)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("others", [[5, 1, 70], [9, 33, 2]])
def test_nested_tensors(others: list[int], causal: bool) -> None:
    q, k, v = (
        jagged([5, 1, 70]),
        jagged(others, seed=5, heads=2),
        jagged(others, 4, seed=9, heads=2),
    )
    alpha = torch.tensor([1.2, 1.5, 1.7, 2.0]).reshape(4, 1, 1)
    out = elsa.entmax_attention(q, k, v, alpha=alpha, is_causal=causal, enable_gqa=True)
    assert out.is_nested and out.shape == (*q.shape[:3], 4)
    for one, *part in zip(*(t.unbind() for t in (out, q, k, v)), strict=True):
        alone = elsa.entmax_attention(*part, alpha=alpha, is_causal=causal, enable_gqa=True)
        assert torch.equal(one, alone)
    assert elsa.entmax_attention(q, k, v, alpha=1, enable_gqa=True).is_nested
    with pytest.raises(ArgumentError, match="take no attn_mask"):
        elsa.entmax_attention(q, q, q, torch.ones(5, 5))
    with pytest.raises(ArgumentError, match="key is dense"):
        elsa.entmax_attention(q, make(3, 4, 5, 8), q)


def test_gradients_of_nested_tensors_reach_the_projection() -> None:
    x = torch.nested.nested_tensor(
        [make(n, 24, seed=n) for n in (5, 1, 40)], layout=torch.jagged, requires_grad=True
    )
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in x.chunk(3, -1))
    out = elsa.entmax_attention(q, k, v).transpose(1, 2).flatten(-2)
    (out * out).values().sum().backward()
    for grad, rows in zip(x.grad.unbind(), x.detach().unbind(), strict=True):
        alone = rows.clone().requires_grad_()
        parts = (t.unflatten(-1, (2, 4)).transpose(0, 1)[None] for t in alone.chunk(3, -1))
        elsa.entmax_attention(*parts).square().sum().backward()
        torch.testing.assert_close(grad, alone.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_on_a_gpu(backend: str) -> None:
    exact = elsa.entmax_varlen_attention(*operands("crossed", F64), enable_gqa=True)
    given = [t.cuda() for t in operands("crossed")]
    out = elsa.entmax_varlen_attention(*given, enable_gqa=True, backend=backend)
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-5, atol=1e-5)
