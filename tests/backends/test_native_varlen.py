"""The CPU kernels of packed sequences: each sequence is what `elsa::attention` makes of it alone.

`test_instruction_sets` runs the file again on the other kernels. Against float64:
`tests/core/test_varlen.py`.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from native_kernels import guarded, make
from torch import Tensor

import elsa_core  # noqa: F401  (defines the operators)
from elsa_core.backends import native

LENGTHS = {
    "mixed": ([5, 0, 1, 130, 33, 64], [5, 0, 1, 130, 33, 64]),
    "crossed": ([7, 3, 0, 1, 50, 0], [1, 0, 4, 33, 65, 0]),
    "key blocks": ([700, 1, 40], [1300, 3, 641]),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    answer = native.load()
    assert answer.ok, answer.reason  # a machine that tests elsa has a compiler


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def operands(case: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Each ends where memory does."""
    queries, keys = LENGTHS[case]
    shapes = ((sum(queries), 4, 24), (sum(keys), 2, 24), (sum(keys), 2, 40))
    tensors = (guarded(make(*s, dtype=dtype, seed=i)) for i, s in enumerate(shapes))
    return (*tensors, bounds(queries), bounds(keys))


def alone(*packed: Tensor) -> list[Tensor]:
    return [t.transpose(0, 1)[None] for t in packed]


def parts(starts: Tensor, others: Tensor) -> list[tuple[slice, slice]]:
    pairs = zip(pairwise(starts.tolist()), pairwise(others.tolist()), strict=True)
    return [(slice(*rows), slice(*columns)) for rows, columns in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_each_sequence_is_as_alone(case: str, causal: bool, dtype: torch.dtype) -> None:
    q, k, v, starts, others = operands(case, dtype)
    out, lse = torch.ops.elsa.varlen_attention(q, k, v, starts, others, causal, 0.2, "strict")
    assert out.is_contiguous() and lse.is_contiguous()
    for rows, columns in parts(starts, others):
        one, of_lse = torch.ops.elsa.attention(
            *alone(q[rows], k[columns], v[columns]), None, causal, 0.2, "strict"
        )
        assert torch.equal(out[rows], one[0].transpose(0, 1))
        assert torch.equal(lse[:, rows], of_lse[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_gradients_of_each_are_as_alone(case: str, causal: bool) -> None:
    q, k, v, starts, others = operands(case)
    out, lse = torch.ops.elsa.varlen_attention(q, k, v, starts, others, causal, 0.2, "strict")
    slope, g_lse = guarded(make(*out.shape, seed=7)), make(*lse.shape, seed=8)
    backward = torch.ops.elsa.varlen_attention_backward_native
    given = (q, k, v, starts, others, out, lse, causal, 0.2)
    grads = backward(slope, g_lse, *given, True, True, True)
    for rows, columns in parts(starts, others):
        given_alone = [t.requires_grad_() for t in alone(q[rows], k[columns], v[columns])]
        whole = torch.ops.elsa.attention(*given_alone, None, causal, 0.2, "strict")
        single = torch.autograd.grad(
            whole, given_alone, (*alone(slope[rows]), g_lse[None, :, rows])
        )
        for grad, one, place in zip(grads, single, (rows, columns, columns), strict=True):
            assert torch.equal(grad[place], one[0].transpose(0, 1))
    for wanted in range(3):
        asked = [i == wanted for i in range(3)]
        found = backward(slope, g_lse, *given, *asked)
        for i in range(3):
            assert torch.equal(found[i], grads[i]) if asked[i] else found[i].shape == (0,)


def test_threads_change_nothing() -> None:
    q, k, v, starts, others = operands("key blocks")
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, lse = torch.ops.elsa.varlen_attention(
                q, k, v, starts, others, False, 0.2, "strict"
            )
            grads = torch.ops.elsa.varlen_attention_backward_native(
                out, None, q, k, v, starts, others, out, lse, False, 0.2, True, True, True
            )
            results.append((out, lse, *grads))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_no_tokens_and_no_sequences() -> None:
    q = make(0, 4, 24)
    for lengths in ([], [0, 0]):
        out, lse = torch.ops.elsa.varlen_attention(
            q, q, q, bounds(lengths), bounds(lengths), False, 0.2, "strict"
        )
        assert out.shape == (0, 4, 24)
        assert lse.shape == (4, 0)
