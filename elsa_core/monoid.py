"""The algebra of softmax attention: block summaries, and the one way to join two of them.

A block of keys is summarised for a query by u = (m, S, W) in (R + {-inf}) x R>=0 x R^dv:

    m = max_j s_j        S = sum_j exp(s_j - m)        W = sum_j exp(s_j - m) v_j

`merge` joins the summaries of two disjoint blocks into that of their union. It is associative and
commutative and has an identity, so every order and every tree gives softmax(s) @ v = W / S exactly
in real arithmetic. Every schedule of every backend is this monoid evaluated along another tree.

Plain PyTorch, any device, differentiable. A state is float32 or wider, whatever the inputs are:
sums kept in a half precision lose keys beyond a few thousand.

Reference: ELSA, Sec. 4, Eq. 4 (symmetric form) and Proposition 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elsa_core.errors import ArgumentError

_WIDE = (torch.float32, torch.float64)
_NEGATIVE_INFINITY = float("-inf")


class State(NamedTuple):
    """The summary of a set of keys for each query: `m` [...] is the largest score (-inf for the
    empty set), `S` [...] the sum of exp(score - m) and `W` [..., dv] the same sum weighted with the
    values; all float32 or all float64."""

    m: Tensor
    S: Tensor
    W: Tensor

    @classmethod
    def identity(
        cls,
        shape: Sequence[int],
        value_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> State:
        """The summary of no key at all, (-inf, 0, 0): `m` and `S` of `shape`, `W` of [*shape,
        value_dim]; float16 and bfloat16 become float32. ArgumentError: `dtype` is not floating
        point."""
        wide = state_dtype(dtype)
        shape = tuple(shape)
        return cls(
            torch.full(shape, _NEGATIVE_INFINITY, dtype=wide, device=device),
            torch.zeros(shape, dtype=wide, device=device),
            torch.zeros((*shape, value_dim), dtype=wide, device=device),
        )


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the state: float64 for float64, else float32; ArgumentError for no float."""
    if not dtype.is_floating_point:
        raise ArgumentError(f"dtype: {dtype} is not floating point; use float32 or float64")
    return torch.float64 if dtype == torch.float64 else torch.float32


def lift(scores: Tensor, value: Tensor) -> State:
    """Summarise one block of keys: scaled scores [..., n] with every bias added (-inf takes a key
    out) and value [..., n, dv], whose leading dimensions broadcast; where the dimension before n is
    1, all queries share the values, and one matrix product serves them. The State is in float64 if
    either input is, else in float32; `m` carries no gradient: it cancels in the output and in lse.
    ArgumentError: a dtype is not floating point, or the lengths n differ. Reference: ELSA,
    Algorithm 1; the block form of Eq. 4."""
    if value.dim() < 2 or scores.dim() < 1 or scores.shape[-1] != value.shape[-2]:
        raise ArgumentError(
            f"value: shape {tuple(value.shape)} does not hold one vector for each of the scores "
            f"of shape {tuple(scores.shape)}; expected [..., n, dv] for scores [..., n]"
        )
    wide = torch.promote_types(state_dtype(scores.dtype), state_dtype(value.dtype))
    scores, value = scores.to(wide), value.to(wide)
    shared = scores.dim() >= 2 and value.dim() >= 3 and value.shape[-3] == 1
    if scores.shape[-1] == 0:
        rows = (scores.sum(-1) + value.sum((-1, -2))).shape
        return State.identity(rows, value.shape[-1], dtype=wide, device=scores.device)
    m = scores.detach().amax(-1)
    weights = torch.exp(scores - m.masked_fill(m == _NEGATIVE_INFINITY, 0.0).unsqueeze(-1))
    if shared:
        weighted = weights @ value.squeeze(-3)
    else:
        weighted = (weights.unsqueeze(-2) @ value).squeeze(-2)
    rows = weighted.shape[:-1]
    return State(m.expand(rows), weights.sum(-1).expand(rows), weighted)


def merge(a: State, b: State) -> State:
    """Join the summaries of two disjoint sets of keys (broadcasting their shapes).

    m = max(m_a, m_b);  S = S_a e^(m_a - m) + S_b e^(m_b - m);  W likewise. Where both m are -inf
    the factors are 1, so that no exp(-inf + inf) is evaluated, forward or backward.

    Raises:
        TypeError: not two states of tensors.
        ArgumentError: a state is float16 or bfloat16.

    Reference: ELSA, Eq. 4 in its symmetric form.
    """
    _check(a, b, wide=True)
    m = torch.maximum(a.m, b.m)
    factor_a = _factor(a.m, m)
    factor_b = _factor(b.m, m)
    return State(
        m,
        a.S * factor_a + b.S * factor_b,
        a.W * factor_a.unsqueeze(-1) + b.W * factor_b.unsqueeze(-1),
    )


def merge_(total: State, other: State) -> State:
    """As `merge`, in the memory of `total`, which it returns; `other` is used up. No gradients. For
    states of long sequences that share no memory with others. m and S may be float64 beside a
    float32 W: a normalised state, (lse, 1, out), loses no digits of its sum then."""
    _check(total, other, wide=True)
    m = torch.maximum(total.m, other.m)
    factor, factor_other = _factor(total.m, m), _factor(other.m, m)
    total.S.mul_(factor).add_(other.S.mul_(factor_other))
    of_rows = [f.to(total.W.dtype).unsqueeze(-1) for f in (factor, factor_other)]
    total.W.mul_(of_rows[0]).add_(other.W.mul_(of_rows[1]))
    total.m.copy_(m)
    return total


def fold(states: Iterable[State]) -> State:
    """Merge states from left to right: ((u_0 + u_1) + u_2) + ...; ArgumentError without any."""
    remaining = iter(states)
    total = next(remaining, None)
    if total is None:
        raise ArgumentError("states: no state to fold; pass at least one, or State.identity(...)")
    for state in remaining:
        total = merge(total, state)
    return total


def tree(states: State | Iterable[State]) -> State:
    """Merge states pairwise, level by level: depth ceil(log2 n) instead of n - 1. One `State` is
    reduced along dimension 0, of any length. ArgumentError: an iterable without any state."""
    if isinstance(states, State):
        level = states
    else:
        listed = list(states)
        if not listed:
            raise ArgumentError(
                "states: no state to merge; pass at least one, or State.identity(...)"
            )
        _check(*listed)
        level = State(*(torch.stack(parts) for parts in zip(*listed, strict=True)))
    if level.S.shape[0] == 0:
        return State.identity(
            level.S.shape[1:], level.W.shape[-1], dtype=level.S.dtype, device=level.S.device
        )
    while (n := level.S.shape[0]) > 1:
        even, odd = (State(*(t[i : n - n % 2 : 2] for t in level)) for i in (0, 1))
        pairs = merge(even, odd)
        if n % 2:
            last = (t[n - 1 :] for t in level)
            pairs = State(*(torch.cat(parts) for parts in zip(pairs, last, strict=True)))
        level = pairs
    return State(*(t[0] for t in level))


def finalize(state: State) -> tuple[Tensor, Tensor]:
    """Leave the monoid: output = W / S [..., dv] and lse = m + ln S [...] (natural logarithm).
    Where no key took part (S = 0) the output is zeros and lse is -inf. NaN stays NaN."""
    _check(state)
    empty = state.S == 0
    safe = torch.where(empty, torch.ones_like(state.S), state.S)
    output = torch.where(
        empty.unsqueeze(-1), torch.zeros_like(state.W), state.W / safe.unsqueeze(-1)
    )
    lse = torch.where(empty, torch.full_like(safe, _NEGATIVE_INFINITY), state.m + torch.log(safe))
    return output, lse


def finalize_(state: State) -> tuple[Tensor, Tensor]:
    """As `finalize`, with the output in the memory of `W`; the state is used up. No gradients."""
    empty = state.S == 0  # W is zero there
    safe = state.S.masked_fill(empty, 1.0)
    lse = (state.m + torch.log(safe)).masked_fill_(empty, _NEGATIVE_INFINITY)
    return state.W.div_(safe.to(state.W.dtype).unsqueeze(-1)), lse


def _factor(m_own: Tensor, m: Tensor) -> Tensor:
    nothing = m == _NEGATIVE_INFINITY
    # The subtrahend is made finite before the subtraction, so that what is filled over holds no NaN
    # either: its gradient would be 0 * NaN.
    delta = m_own - m.masked_fill(nothing, 0.0)
    return torch.exp(delta.masked_fill(nothing, 0.0))


def _check(*states: State, wide: bool = False) -> None:
    for state in states:
        if not isinstance(state, State):
            raise TypeError(f"states must be of elsa_core.State, not {type(state).__name__}")
        for name, part in zip(State._fields, state, strict=True):
            if not isinstance(part, Tensor):
                raise TypeError(f"{name} of a State must be a tensor, not {type(part).__name__}")
        if wide and not (state.S.dtype in _WIDE and state.W.dtype in _WIDE):
            raise ArgumentError(
                f"state: {state.S.dtype}/{state.W.dtype} sums lose keys; convert the state to "
                "float32"
            )
