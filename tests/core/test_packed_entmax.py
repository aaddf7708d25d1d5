"""Packed attention, mostly alpha-entmax: what is refused, what is not computed, open lengths."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

import elsa_core as elsa
from elsa_core import ops
from elsa_core.backends import native
from elsa_core.ops.entmax import api as entmax_varlen
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


def test_gradients_that_are_not_wanted_are_empty() -> None:
    q, k, v, *ends = operands()
    out, *rest = OPERATOR.overload(q, k, v, *ends, None, 70, 130, 1.5, False, 1.0, "strict")
    backward = torch.ops.elsa.entmax_varlen_attention_backward.default
    grads = backward(
        out, q, k, v, *ends, None, out, *rest, 70, 130, 1.5, False, 1.0, "strict",
        [False, True, False, False],
    )  # fmt: skip
    assert [tuple(g.shape) for g in grads] == [(0,), tuple(k.shape), (0,), (0,)]


@pytest.mark.compiler
def test_gradients_of_softmax_that_are_not_wanted_are_empty() -> None:
    if not native.load().ok:
        pytest.skip(native.load().reason)
    q, k, v, *ends = operands(torch.float32)
    terms = (False, 1.0, "strict")
    out, lse = ops.VARLEN_ATTENTION.overload(q, k, v, *ends, *terms)
    backward = torch.ops.elsa.varlen_attention_backward.default
    for needs in ([False, True, False], [True, False, True]):
        grads = backward(out, torch.zeros_like(lse), q, k, v, *ends, out, lse, *terms, needs)
        wanted = [t.shape if need else (0,) for t, need in zip((q, k, v), needs, strict=True)]
        assert [tuple(g.shape) for g in grads] == [tuple(shape) for shape in wanted]


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


@pytest.mark.parametrize("heads", [(), (1, 2, 1, 1), (0, 2, 1, 1)])
def test_no_sequence_has_gradients(heads: tuple[int, ...]) -> None:
    """The output did not depend on the operands, so that `backward` raised."""
    q, k, v = (torch.zeros(0, 2, dim, requires_grad=True) for dim in (8, 8, 4))
    alpha = torch.full(heads, 1.5, requires_grad=True)
    out = entmax_varlen.entmax_varlen_attention(q, k, v, bounds([]), alpha=alpha)
    assert out.shape == (0, 2, 4)
    grads = torch.autograd.grad(out.sum(), (q, k, v, alpha))
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v, alpha)]


@pytest.mark.parametrize("shape", [(4, 5, 8), (2, 3, 4, 5, 8), (5, 8)])
@pytest.mark.parametrize("merged", [True, False])
def test_alpha_of_a_head_whatever_the_rank(shape: tuple[int, ...], merged: bool) -> None:
    """The operator has other batch dims than the call: alpha [B, Hq, 1, 1] was refused."""
    *batch, heads = (1, 1, *shape[:-2])[-3 if len(shape) > 4 else -2 :]
    sizes = torch.Size(batch).numel(), heads
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    if not merged and len(shape) > 4:  # batch and heads that no view joins
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    alpha = 1.1 + torch.arange(sizes[0] * heads).reshape(*sizes, 1, 1) / 16
    alpha.requires_grad_()
    found = entmax_varlen.entmax_attention(whole, whole, whole, alpha=alpha)
    q = whole.reshape(*sizes, *shape[-2:])
    wanted = entmax_varlen.entmax_attention(q, q, q, alpha=alpha)
    torch.testing.assert_close(found.reshape(wanted.shape), wanted)
    grads = [torch.autograd.grad(out.square().sum(), alpha)[0] for out in (found, wanted)]
    torch.testing.assert_close(*grads)
    compiled = torch.compile(entmax_varlen.entmax_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(whole, whole, whole, alpha=alpha), found)


def test_a_program_takes_any_number_of_sequences() -> None:
    class Packs(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
            longest = {"max_seqlen_q": 9, "max_seqlen_k": 9}
            return elsa.entmax_varlen_attention(q, k, v, ends, alpha=1.5, **longest)

    def given(lengths: list[int]) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(sum(lengths))
        q, k, v = torch.randn(3, sum(lengths), 2, 8, generator=generator).unbind()
        return q, k, v, bounds(lengths)

    tokens, ends = torch.export.Dim("tokens", min=2), torch.export.Dim("ends", min=3)
    sizes = ({0: tokens}, {0: tokens}, {0: tokens}, {0: ends})
    program = torch.export.export(Packs(), given([3, 7]), dynamic_shapes=sizes, strict=False)
    others = given([3, 2, 9, 0, 4])
    torch.testing.assert_close(program.module()(*others), Packs()(*others))


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
