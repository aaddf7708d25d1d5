"""`elsa.attention` of jagged nested tensors gives each sequence what it has alone."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core.errors import ArgumentError

LENGTHS, OTHERS = [5, 1, 70], [9, 33, 2]


def jagged(lengths: list[int], dim: int = 8, *, seed: int = 0, heads: int = 3) -> Tensor:
    """[B, H, j, dim], as a projection's output is split."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, heads, dim, generator=generator) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def apart(nested: Tensor) -> list[Tensor]:
    return [t[None].detach() for t in nested.unbind()]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, OTHERS])
def test_each_sequence_is_as_alone(lengths: list[int], is_causal: bool) -> None:
    q, k, v = jagged(LENGTHS), jagged(lengths, seed=1), jagged(lengths, 5, seed=2)
    out, lse = elsa.attention(q, k, v, is_causal=is_causal, return_lse=True)
    assert out.is_nested
    assert out.shape == (*q.shape[:3], 5)  # one symbol with the query's
    assert (lse.unsqueeze(-1) + out).shape == out.shape
    for one, of_lse, *operands in zip(*(map(apart, (out, lse, q, k, v))), strict=True):
        exact = F.scaled_dot_product_attention(*(t.double() for t in operands), is_causal=is_causal)
        peer = F.scaled_dot_product_attention(*operands, is_causal=is_causal)
        error = (one - exact).norm() / exact.norm()
        assert error <= 2 * (peer - exact).norm() / exact.norm() + 5e-7
        _, alone = elsa.attention(*operands, is_causal=is_causal, return_lse=True)
        assert torch.allclose(of_lse, alone, atol=2e-6)


@pytest.mark.parametrize("call", [elsa.attention, elsa.entmax_attention])
def test_gradients_reach_the_projection(call: Callable[..., Tensor]) -> None:
    """Each sequence's are those that it has alone."""
    x = torch.nested.nested_tensor(
        [torch.randn(n, 24) for n in LENGTHS], layout=torch.jagged, requires_grad=True
    )
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in x.chunk(3, -1))
    joined = call(q, k, v).transpose(1, 2).flatten(-2)
    (joined * joined).values().sum().backward()
    for grad, rows in zip(x.grad.unbind(), x.detach().unbind(), strict=True):
        alone = rows.double().requires_grad_()
        parts = (t.unflatten(-1, (2, 4)).transpose(0, 1)[None] for t in alone.chunk(3, -1))
        call(*parts).square().sum().backward()
        assert torch.allclose(grad.double(), alone.grad, rtol=1e-4, atol=1e-5)


def test_grouped_heads() -> None:
    q, k, v = jagged(LENGTHS, heads=6), jagged(LENGTHS, seed=1), jagged(LENGTHS, seed=2)
    out = elsa.attention(q, k, v, enable_gqa=True)
    wide = ([t.repeat_interleave(2, 1) for t in apart(each)] for each in (k, v))
    for one, *operands in zip(apart(out), apart(q), *wide, strict=True):
        assert torch.allclose(one, F.scaled_dot_product_attention(*operands), atol=1e-6)


def test_what_is_refused() -> None:
    q, dense = jagged(LENGTHS), torch.randn(3, 3, 5, 8)
    with pytest.raises(ArgumentError, match="key is dense"):
        elsa.attention(q, dense, dense)
    with pytest.raises(ArgumentError, match="take no attn_mask"):
        elsa.attention(q, q, q, torch.ones(5, 5))
    with pytest.raises(ArgumentError, match="take no dropout_p"):
        elsa.attention(q, q, q, dropout_p=0.5)
    with pytest.raises(ArgumentError, match="different lengths"):
        elsa.attention(q, q, jagged(OTHERS))
    with pytest.raises(ArgumentError, match="different batch sizes"):
        elsa.attention(q, jagged([1, 2]), jagged([1, 2]))
    with pytest.raises(ArgumentError, match=r"must be \[B, H, j, D\]"):
        elsa.attention(*[q.transpose(1, 2)] * 3)
    narrow = torch.nested.narrow(
        torch.randn(2, 7, 4, 8), 1, torch.tensor([0, 1]), torch.tensor([5, 3]), layout=torch.jagged
    )
    with pytest.raises(ArgumentError, match="holes"):
        elsa.attention(*[narrow.transpose(1, 2)] * 3)


@pytest.mark.usefixtures("inductor")
def test_compiles() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda q: elsa.attention(q, q, q), fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, OTHERS):
        q = jagged(lengths)
        expected = elsa.attention(q, q, q)
        assert torch.equal(compiled(q).values(), expected.values())
    torch.compiler.reset()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("others", [LENGTHS, OTHERS])
def test_entmax_of_nested_tensors(others: list[int], causal: bool) -> None:
    q, k = jagged(LENGTHS, heads=4), jagged(others, seed=5, heads=2)
    v = jagged(others, 4, seed=9, heads=2)
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
        elsa.entmax_attention(q, torch.randn(3, 4, 5, 8), q)
