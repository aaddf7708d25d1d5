"""What is right, and how far something is from it: oracle, vectorised reference, drift.

`attention` is the float64 oracle that every kernel is judged against. `algorithm2` is the paper's
vectorised reference in the precision of its inputs. `drift` measures the paper's six metrics.

Reference: ELSA, Sec. C (Algorithm 2, Eq. 25, Table 9).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from elsa_core.errors import ArgumentError

_NEGATIVE_INFINITY = float("-inf")
_CHUNK_SCORES = 2**25  # 256 MiB of float64 scores at a time


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64: the oracle. Differentiable; works through rows in chunks.

    Args:
        query: [..., Hq, Nq, D], any floating dtype.
        key: [..., Hkv, Nk, D]; query head h uses key head h // (Hq // Hkv).
        value: [..., Hkv, Nk, Dv].
        attn_mask: broadcastable to [..., Hq, Nq, Nk]; boolean (True takes part) or additive.
        is_causal: key j is visible to query i iff j <= i (may be combined with a mask).
        scale: factor of the scores; 1 / sqrt(D) where None.

    Returns:
        Output [..., Hq, Nq, Dv] and natural-log lse [..., Hq, Nq], both float64. A row without any
        key gives zeros and -inf. NaN and +inf scores give NaN.

    Raises:
        ArgumentError: the head counts do not divide.
    """
    query, key, value = (t.double() for t in _share_heads(query, key, value))
    per_row = max(1, query[..., 0].numel() // max(1, query.shape[-2]) * key.shape[-2])
    rows = max(1, min(query.shape[-2], _CHUNK_SCORES // per_row))
    outputs, sums = [], []
    for start in range(0, max(query.shape[-2], 1), rows):
        stop = min(start + rows, query.shape[-2])
        scores = _scores(query, key, attn_mask, is_causal, scale, start, stop)
        _, _, output, lse = _softmax(scores, value)
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs, -2), torch.cat(sums, -1)


def algorithm2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The paper's vectorised reference, step by step, in the precision of its inputs (float32 at
    least): S = QK^T / sqrt(d); m = max_j S; E = exp(S - m); s = sum_j E; P = E / s [..., Hq, Nq,
    Nk]; Y = (E V) / s. Arguments as in `attention`. Reference: ELSA, Algorithm 2 and Eq. 25. Masks,
    GQA and empty rows are additions."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key, value = (t.to(wide) for t in _share_heads(query, key, value))
    scores = _scores(query, key, attn_mask, is_causal, scale, 0, query.shape[-2])
    weights, total, output, _ = _softmax(scores, value)
    return weights / total.unsqueeze(-1), output


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected||_2 / ||expected||_2 over all elements, in float64 (0 / 0 is 0)."""
    expected = expected.double()
    error = float(torch.linalg.vector_norm(actual.double() - expected))
    norm = float(torch.linalg.vector_norm(expected))
    if norm == 0:
        return 0.0 if error == 0 else math.inf if error > 0 else math.nan
    return error / norm


@dataclass(frozen=True)
class Spread:
    """One drift metric: `value` over everything, and percentiles (nearest rank) over the rows."""

    value: float
    median: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Drift:
    """The six drift metrics of Sec. C.2, over the rows of all batches, heads and queries; those of
    P are None where no P was given. `value` is the maximum for the two absolute metrics, the ratio
    of whole norms for the two relative ones, the mean for the Jensen-Shannon divergence (nats) and
    for the argmax disagreement."""

    p_max_abs: Spread | None
    p_relative_l2: Spread | None
    p_jensen_shannon: Spread | None
    p_argmax_rate: Spread | None
    y_max_abs: Spread
    y_relative_l2: Spread

    def to_dict(self) -> dict[str, dict[str, float | None] | None]:
        """Plain data for JSON: {metric: {value, median, p95, p99}}; non-finite numbers are None."""
        return {
            name: spread
            and {k: number if math.isfinite(number) else None for k, number in spread.items()}
            for name, spread in asdict(self).items()
        }


def drift(p: Tensor | None, p_ref: Tensor | None, y: Tensor, y_ref: Tensor) -> Drift:
    """Measure how far attention matrices `p` [..., Nq, Nk] (both or neither) and outputs `y` [...,
    Nq, Dv] are from a reference. A row whose reference has several equal maxima disagrees only if
    `p` puts its maximum elsewhere. ArgumentError: shapes differ. Reference: ELSA, Sec. C.2."""
    if (p is None) != (p_ref is None):
        raise ArgumentError("p: give both p and p_ref, or neither")
    outputs = _distances("y", y, y_ref)
    if p is None or p_ref is None:
        return Drift(None, None, None, None, *outputs)
    weights = _distances("p", p, p_ref)
    p, p_ref = p.double(), p_ref.double()
    at_argmax = p_ref.gather(-1, p.argmax(-1, keepdim=True)).squeeze(-1)
    disagrees = (at_argmax < p_ref.amax(-1)).double()
    divergence = _jensen_shannon(p, p_ref)
    return Drift(*weights, _spread(divergence, "mean"), _spread(disagrees, "mean"), *outputs)


def _share_heads(query: Tensor, *key_value: Tensor) -> tuple[Tensor, ...]:
    if query.dim() < 3 or query.shape[-3] == key_value[0].shape[-3]:
        return (query, *key_value)
    heads, key_heads = query.shape[-3], key_value[0].shape[-3]
    if key_heads == 0 or heads % key_heads:
        raise ArgumentError(
            f"query: {heads} heads cannot share {key_heads} key heads; use a multiple of them"
        )
    return (query, *(t.repeat_interleave(heads // key_heads, dim=-3) for t in key_value))


def _scores(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    start: int, stop: int,
) -> Tensor:  # fmt: skip
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    scores = (query[..., start:stop, :] @ key.transpose(-1, -2)) * scale
    if attn_mask is not None:
        whole = attn_mask.dim() < 2 or attn_mask.shape[-2] == 1
        mask = attn_mask if whole else attn_mask[..., start:stop, :]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, _NEGATIVE_INFINITY)
        else:
            scores = scores + mask.to(scores.dtype)
    if is_causal:
        i = torch.arange(start, stop, device=query.device).unsqueeze(-1)
        j = torch.arange(key.shape[-2], device=query.device)
        scores = scores.masked_fill(j > i, _NEGATIVE_INFINITY)
    return scores


def _softmax(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp(scores - max), its row sums, output and lse. Of a row without a key the weights are 0,
    the sum is 1, the output 0 and lse -inf."""
    top = scores.detach().amax(-1) if scores.shape[-1] else scores.detach().sum(-1)
    anchor = top.masked_fill(top == _NEGATIVE_INFINITY, 0.0)
    weights = torch.exp(scores - anchor.unsqueeze(-1))
    total = weights.sum(-1)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    output = ((weights @ value) / total.unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0.0)
    lse = (anchor + torch.log(total)).masked_fill(empty, _NEGATIVE_INFINITY)
    return weights, total, output, lse


def _distances(name: str, actual: Tensor, expected: Tensor) -> tuple[Spread, Spread]:
    """The largest differences of the rows, and their relative L2 errors."""
    if actual.shape != expected.shape:
        raise ArgumentError(
            f"{name}: shape {tuple(actual.shape)} differs from the reference's "
            f"{tuple(expected.shape)}"
        )
    wanted = expected.double()
    difference = actual.double() - wanted
    error, norm = (torch.linalg.vector_norm(each, dim=-1) for each in (difference, wanted))
    relative = torch.where(error == 0, torch.zeros_like(error), error / norm)
    most = _spread(difference.abs().amax(-1), "amax")
    return most, _spread(relative, relative_l2(actual, expected))


def _jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Divergence of each row in nats, without cancellation between nearly equal rows.

    With mean r = (p + q) / 2 and d = (p - q) / (p + q) each element gives
    r/2 ((1+d) ln(1+d) + (1-d) ln(1-d)) = r/2 (2 d atanh(d) + ln(1 - d^2)), which is r d^2 / 2 for
    small d.
    """
    both = p + q
    d = torch.where(both == 0, torch.zeros_like(both), (p - q) / both)
    inside = torch.where(d.abs() < 1, d, torch.zeros_like(d))
    term = 2 * inside * torch.atanh(inside) + torch.log1p(-inside * inside)
    term = torch.where(d.abs() < 1, term, torch.full_like(term, 2 * math.log(2.0)))
    return (0.25 * both * term).sum(-1)


def _spread(rows: Tensor, value: float | str) -> Spread:
    """`value`: a number, or the method of the rows that gives it, 0 without rows."""
    ordered = rows.flatten().sort().values
    n = ordered.numel()
    if isinstance(value, str):
        value = float(getattr(rows, value)()) if n else 0.0
    if n == 0:
        return Spread(value, 0.0, 0.0, 0.0)
    ranks = (max(0, math.ceil(q * n) - 1) for q in (0.50, 0.95, 0.99))
    return Spread(value, *(float(ordered[rank]) for rank in ranks))
