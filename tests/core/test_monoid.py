"""The algebra of block summaries: laws, reductions, gradients, dtypes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elsa_core.errors import ArgumentError
from elsa_core.monoid import State, finalize, finalize_, fold, lift, merge, merge_, tree

INF = float("inf")
ULP = torch.finfo(torch.float64).eps
VALUE_DIM = 3

maxima = st.one_of(
    st.floats(-1e4, 1e4), st.sampled_from([-INF, -1e4, 1e4, 0.0, -745.2, 709.8, 1e-300])
)


@st.composite
def states(draw: st.DrawFn) -> State:
    """A state of one row in float64; S >= 1 wherever a key took part, as its maximum adds 1."""
    m = draw(maxima)
    if m == -INF:
        return State.identity((), VALUE_DIM, dtype=torch.float64)
    total = draw(st.floats(1.0, 8.0))
    weighted = draw(st.lists(st.floats(-10.0, 10.0), min_size=VALUE_DIM, max_size=VALUE_DIM))
    return State(*(torch.tensor(x, dtype=torch.float64) for x in (m, total, weighted)))


def weight_of(parts: list[State]) -> tuple[float, Tensor]:
    """sum |S_i| e^(m_i - m) and sum |W_i| e^(m_i - m): what rounding errors are measured by."""
    m = max(float(s.m) for s in parts)
    if m == -INF:
        return 0.0, torch.zeros(VALUE_DIM, dtype=torch.float64)
    factors = [math.exp(float(s.m) - m) for s in parts]
    absolute = sum(s.W.abs() * f for s, f in zip(parts, factors, strict=True))
    assert isinstance(absolute, Tensor)
    return math.fsum(float(s.S) * f for s, f in zip(parts, factors, strict=True)), absolute


def assert_close(a: State, b: State, parts: list[State], ulps: float = 24.0) -> None:
    total, weighted = weight_of(parts)
    assert torch.equal(a.m, b.m) and abs(float(a.S - b.S)) <= ulps * ULP * total
    assert bool(((a.W - b.W).abs() <= ulps * ULP * weighted.clamp(min=total)).all())


def oracle(parts: list[State]) -> State:
    """The sum of the parts with exact summation of correctly rounded terms."""
    m = max(float(s.m) for s in parts)
    if m == -INF:
        return State.identity((), VALUE_DIM, dtype=torch.float64)
    factors = [math.exp(float(s.m) - m) for s in parts]
    total = math.fsum(float(s.S) * f for s, f in zip(parts, factors, strict=True))
    weighted = [
        math.fsum(float(s.W[i]) * f for s, f in zip(parts, factors, strict=True))
        for i in range(VALUE_DIM)
    ]
    return State(*(torch.tensor(x, dtype=torch.float64) for x in (m, total, weighted)))


def stack(parts: list[State]) -> State:
    return State(*(torch.stack(t) for t in zip(*parts, strict=True)))


def equal(a: State, b: State) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@given(states(), states(), states())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_merge_is_associative(a: State, b: State, c: State) -> None:
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)), [a, b, c])


@given(states(), states())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_merge_is_commutative_to_the_bit(a: State, b: State) -> None:
    assert equal(merge(a, b), merge(b, a))


@given(states(), states())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_in_place_gives_the_same_bits(a: State, b: State) -> None:
    wanted = merge(a, b)
    total = State(*(t.clone() for t in a))
    found = merge_(total, State(*(t.clone() for t in b)))
    assert found is total and equal(found, wanted)
    output, lse = finalize(wanted)
    memory = total.W.data_ptr()
    in_place = finalize_(total)
    assert torch.equal(in_place[0], output) and torch.equal(in_place[1], lse)
    assert in_place[0].data_ptr() == memory


@given(states())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_identity_changes_no_bit(a: State) -> None:
    e = State.identity((), VALUE_DIM, dtype=torch.float64)
    assert equal(merge(a, e), a) and equal(merge(e, a), a)


@given(st.lists(states(), min_size=1, max_size=19))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_tree_chain_and_oracle_agree(parts: list[State]) -> None:
    expected = oracle(parts)
    ulps = 24.0 + 8.0 * len(parts)
    for total in (fold(parts), tree(parts), tree(stack(parts))):
        assert_close(total, expected, parts, ulps)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 31, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_give_softmax(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    scores = 5 * torch.randn(2, 4, n, 7, dtype=dtype)
    value = torch.randn(2, 1, n, 7, VALUE_DIM, dtype=dtype)
    blocks = [lift(scores[..., i, :], value[..., i, :, :]) for i in range(n)]
    whole = scores.flatten(-2).double()
    expected = torch.softmax(whole, -1) @ value.double().flatten(-3, -2).squeeze(1)
    for state in (fold(blocks), tree(blocks)):
        output, lse = finalize(state)
        assert output.dtype == lse.dtype == dtype
        tolerance = 64 * torch.finfo(dtype).eps
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), whole.logsumexp(-1), rtol=tolerance, atol=0)


def test_lift_with_a_value_of_its_own_for_each_query() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 5, 9, dtype=torch.float64)
    value = torch.randn(2, 5, 9, VALUE_DIM, dtype=torch.float64)
    output, _ = finalize(lift(scores, value))
    expected = (torch.softmax(scores, -1).unsqueeze(-1) * value).sum(-2)
    torch.testing.assert_close(output, expected)


def test_empty_blocks_and_empty_lists() -> None:
    nothing = lift(torch.empty(2, 3, 0), torch.empty(2, 1, 0, 4))
    assert equal(nothing, State.identity((2, 3), 4))
    output, lse = finalize(nothing)
    assert output.shape == (2, 3, 4) and bool((output == 0).all()) and bool((lse == -INF).all())
    none = State.identity((0, 2), 4)
    assert equal(tree(none), State.identity((2,), 4))
    for reduce in (fold, tree):
        with pytest.raises(ArgumentError, match="states: no state"):
            reduce([])


def test_masked_rows_are_the_identity_and_nan_survives() -> None:
    scores = torch.tensor([[-INF, -INF], [1.0, math.nan], [1.0, INF], [0.0, -INF]])
    output, lse = finalize(lift(scores, torch.ones(1, 2, 3)))
    assert bool((output[0] == 0).all()) and float(lse[0]) == -INF
    assert bool(output[1:3].isnan().all())
    assert bool((output[3] == 1).all()) and float(lse[3]) == 0.0


def test_gradients_are_those_of_softmax_and_never_nan() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 12, dtype=torch.float64)
    scores[0] = -INF
    scores[1, :4] = -INF
    scores.requires_grad_()
    value = torch.randn(1, 12, VALUE_DIM, dtype=torch.float64, requires_grad=True)
    pairs = [lift(scores[:, i : i + 4], value[:, i : i + 4]) for i in (0, 4, 8)]
    for reduce in (fold, tree):
        output, lse = finalize(reduce(pairs))
        loss = output.square().sum() + lse[1:].sum()
        grads = torch.autograd.grad(loss, (scores, value), retain_graph=True)
        expected = torch.softmax(scores[1:], -1) @ value.squeeze(0)
        reference = expected.square().sum() + scores[1:].logsumexp(-1).sum()
        wanted = torch.autograd.grad(reference, (scores, value))
        for got, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("m_b", [-INF, 0.5, 1.0, 2.0])
def test_merge_differentiates_through_m(m_b: float) -> None:
    """Also at a tie, where max() halves its gradient: lse = m + ln S is smooth there."""
    m_a = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    one = torch.tensor(1.0, dtype=torch.float64)
    b_sum = one * (0.0 if m_b == -INF else 3.0)
    a = State(m_a, one, one.expand(VALUE_DIM))
    _, lse = finalize(merge(a, State(torch.tensor(m_b).double(), b_sum, b_sum.expand(VALUE_DIM))))
    (gradient,) = torch.autograd.grad(lse, m_a)
    share = math.exp(1.0) / (math.exp(1.0) + 3.0 * math.exp(m_b))
    assert float(gradient) == pytest.approx(share, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    n = 5000
    state = lift(torch.zeros(n, dtype=dtype), torch.ones(n, 1, dtype=dtype))
    assert state.S.dtype == state.W.dtype == torch.float32 and float(state.S) == n
    assert State.identity((2,), 3, dtype=dtype).W.dtype == torch.float32
    narrow = State(*(t.to(dtype) for t in state))
    with pytest.raises(ArgumentError, match="float32"):
        merge(narrow, state)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="value: shape"):
        lift(torch.zeros(2, 5), torch.zeros(2, 4, 3))
    with pytest.raises(ArgumentError, match="not floating point"):
        State.identity((2,), 3, dtype=torch.int32)


def test_works_on_any_device() -> None:
    total = tree(State.identity((5, 2), 3, device="meta"))
    assert total.W.device.type == "meta" and total.W.shape == (2, 3)
