"""Dropout in the CPU kernels: the reference's keep mask bit by bit, whatever tiles and threads."""

from __future__ import annotations

import math

import pytest
import torch
from native_kernels import guarded, make, relative
from torch import Tensor

from elsa_core.backends import native, philox
from elsa_core.backends.philox import Dropout

P, SEED = 0.3, torch.tensor([0x7123456789ABCDEF, 0x1FFFFFFFF])
NATIVE, EAGER = torch.ops.elsa.attention_dropout, torch.ops.elsa.attention_dropout_eager


@pytest.fixture(autouse=True)
def library() -> None:
    answer = native.load()
    assert answer.ok, answer.reason  # a machine that tests elsa has a compiler


# batch, heads, queries, keys: panels that are narrow, several key blocks, one row, many heads
@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 1), (2, 3, 7, 17), (1, 1, 65, 97), (1, 2, 5, 1403), (3, 4, 50, 49)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_kept_weights_are_the_references(shape: tuple[int, int, int, int], causal: bool) -> None:
    """In the forward, and in the gradient of the values, which reads the same mask."""
    b, h, n, m = shape
    q, k = torch.zeros(b, h, n, 4), torch.zeros(b, h, m, 4)
    kept = philox.factors(Dropout(P, SEED), b, h, slice(0, n), slice(0, m), torch.float32) > 0
    if causal:
        kept = kept & torch.ones(n, m, dtype=torch.bool).tril()
    for first in range(0, m, 200):  # values are at most 256 wide
        last = min(m, first + 200)
        v = torch.zeros(b, h, m, last - first)
        v[:, :, range(first, last), range(last - first)] = 1.0
        out, lse = NATIVE(q, k, v, None, causal, 1.0, "strict", P, SEED)
        assert torch.equal(out > 0, kept[..., first:last])
    for first in range(0, n, 200):
        last = min(n, first + 200)
        slope = torch.zeros(b, h, n, last - first)
        slope[:, :, range(first, last), range(last - first)] = 1.0
        zeros = torch.zeros(b, h, m, last - first)
        terms = (False, False, True, False)
        out = torch.zeros_like(slope)
        grads = torch.ops.elsa.attention_dropout_backward(
            slope, torch.zeros_like(lse), q, k, zeros, None, out, lse, causal, 1.0, "strict", P,
            SEED, terms,
        )  # fmt: skip
        assert torch.equal(grads[2] > 0, kept[:, :, first:last].mT)


def run(operator, tensors: list[Tensor], mask: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """out, lse and the three gradients."""
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in tensors)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    out, lse = operator(q, k, v, mask, False, 0.25, "strict", P, SEED)
    slopes = make(*out.shape, seed=5).to(dtype), make(*lse.shape, seed=6).to(dtype)
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    return [out, lse, *torch.autograd.grad((out, finite), (q, k, v), slopes)]


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("keys", [49, 197, 1403])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_against_float64(mask: str | None, keys: int, size: float) -> None:
    """Within twice the error of the reference in float32; equal bits on any number of threads."""
    tensors = [make(2, 4, 33, 16) * size, make(2, 2, keys, 16, seed=1), make(2, 2, keys, 8, seed=2)]
    given = None
    if mask is not None:
        given = make(1, 4, 33, keys, seed=3) > -0.5
        given[:, :, 3] = False
        if mask == "float":
            given = torch.zeros(given.shape).masked_fill(~given, -math.inf)
    found = run(NATIVE, tensors, given, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = run(NATIVE, tensors, given, torch.float32)
    finally:
        torch.set_num_threads(threads)
    peer = run(EAGER, tensors, given, torch.float32)
    exact = run(EAGER, tensors, given, torch.float64)
    for ours, same, other, oracle in zip(found, again, peer, exact, strict=True):
        assert torch.equal(ours, same)
        visible = ~oracle.isinf()
        assert torch.equal(~ours.isinf(), visible)
        limit = 2 * relative(other[visible], oracle[visible]) + 2.5e-7
        assert relative(ours[visible], oracle[visible]) <= limit


@pytest.mark.parametrize("keys", [1, 5, 63, 130])
def test_no_byte_beyond_the_operands_is_touched(keys: int) -> None:
    q, k, v = (guarded(make(1, 2, n, 12, seed=n)) for n in (11, keys, keys))
    out, lse = NATIVE(q, k, v, None, False, 0.3, "strict", P, SEED)
    grads = torch.ops.elsa.attention_dropout_backward(
        guarded(out.contiguous()), guarded(lse), q, k, v, None, guarded(out.contiguous()),
        guarded(lse), False, 0.3, "strict", P, SEED, (True, True, True, False),
    )  # fmt: skip
    assert all(bool(t.isfinite().all()) for t in (out, lse, *grads))


@pytest.mark.parametrize(
    ("p", "seed", "word"),
    [(0.5, SEED[:1], "int64"), (0.5, SEED.int(), "int64"), (1.5, SEED, "dropout_p")],
)
def test_wrong_terms(p: float, seed: Tensor, word: str) -> None:
    x = make(1, 1, 3, 4)
    with pytest.raises(RuntimeError, match=word):
        NATIVE(x, x, x, None, False, 1.0, "strict", p, seed)
