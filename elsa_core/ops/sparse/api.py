"""Attention that leaves out tiles of negligible weights: what `sparsity=` means, what a call left
out, and what that costs in accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from elsa_core import dispatch, reference
from elsa_core.base import calls
from elsa_core.base.operands import autocast, operands, require_number, require_tensor
from elsa_core.base.skipping import exact_threshold
from elsa_core.dispatch import Route
from elsa_core.errors import ArgumentError
from elsa_core.ops.arguments import default_scale, kind_of, request_of, restored, run
from elsa_core.ops.sparse.record import FROZEN, ORDER, SUMMARIES

EXACT = "exact"
RELIEF = {"summaries": SUMMARIES, "order": ORDER, "frozen": FROZEN}
# What calls with sparsity take: measured on a CPU it costs nothing, and more tiles are left out.
# The others cost more than they gave.
TAKEN = ("order",)


def checked(sparsity: object) -> str | float | None:
    """What `sparsity=` was given, or what is wrong with it.

    Raises:
        ArgumentError: no number in (0, 1), and not "exact" or None.
    """
    if sparsity is None or sparsity == EXACT:
        return None if sparsity is None else EXACT
    if isinstance(sparsity, Real) and 0.0 < float(sparsity) < 1.0:
        return float(sparsity)
    raise ArgumentError(f'sparsity={sparsity!r} must be None, "exact" or a number in (0, 1)')


def asked(
    query: object, key: object, value: object, attn_mask: object, dropout_p: float, sparsity: object
) -> str | float | None:
    """`checked`, for a call with these arguments: TypeError where one is no tensor, ArgumentError
    also with dropout, and for a number where gradients are wanted."""
    found = checked(sparsity)
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    for name, each in given.items():
        if each is not None or name != "attn_mask":
            require_tensor(name, each)
    if dropout_p != 0.0:
        raise ArgumentError("sparsity and dropout_p exclude each other")
    if isinstance(found, float) and calls.differentiates(*given.values()):
        raise ArgumentError(
            f"sparsity={sparsity} has no gradients: use 'exact' or None in training, or no_grad"
        )
    return found


def threshold(sparsity: str | float | None) -> float:
    """The term `threshold` of the operator `elsa::sparse_attention`."""
    if sparsity is None:
        return -math.inf
    return 0.0 if isinstance(sparsity, str) else math.log2(sparsity)


def relief_bits(relief: Sequence[str]) -> int:
    """The term `relief` of the operator `elsa::sparse_attention`.

    Raises:
        ArgumentError: a name is unknown.
    """
    unknown = [name for name in relief if name not in RELIEF]
    if unknown:
        raise ArgumentError(f"relief={unknown[0]!r} is unknown: choose of {', '.join(RELIEF)}")
    return sum({RELIEF[name] for name in relief})


def serve(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool, precision: str, backend: str,
    sparsity: str | float, relief: Sequence[str] = TAKEN,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """A call of `elsa_core.attention` with `sparsity`; None where the ordinary call serves it.

    Leaving out nothing is what any sparsity allows: so is served what "auto" has no kernel for that
    was measured, and what only plain PyTorch can do.

    Returns:
        out, lse and counts as the operator `elsa::sparse_attention` gives them.

    Raises:
        TypeError, ArgumentError: as `asked`, and scale is no number.
        UnavailableError: the backend asked for by name cannot serve the call.
    """
    found = asked(query, key, value, attn_mask, dropout_p, sparsity)
    if scale is not None:
        require_number("scale", scale)
    # a program for elsewhere holds `elsa::attention` alone
    if query.is_nested or calls.exporting_onnx() or calls.exporting():
        return None
    if dispatch.plain_alone(backend):
        return None
    cast = autocast(query, key, value, attn_mask)
    q, k, v, mask = operands(*cast, is_causal, enable_gqa)
    name = dispatch.choose("sparse_attention", *kind_of(q, v, precision), backend)
    if backend == "auto" and name == dispatch.PLAIN:
        return None
    factor = float(default_scale(q) if scale is None else scale)
    terms = (is_causal, factor, precision, threshold(found), relief_bits(relief))
    out, lse, counts = run("sparse_attention", name, (q, k, v, mask, *terms), (q, k, v, mask))
    return *restored((query, key, value), out, lse), counts  # type: ignore[return-value]


def route(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool,
    precision: str, backend: str, sparsity: str | float,
) -> Route | None:  # fmt: skip
    """How a call in the operator's layout is served; None where the ordinary call serves it."""
    if dispatch.plain_alone(backend):
        return None
    of_mask = dispatch.mask_kind(attn_mask, is_causal)
    request = request_of("sparse_attention", (query, key, value), precision, of_mask)
    name, _ = dispatch.select(request, backend)
    if backend == "auto" and name == dispatch.PLAIN:
        return None
    terms = (query, key, value, attn_mask, is_causal, precision)
    found = dispatch.route(request, backend, schedule=terms)
    limit = threshold(sparsity) or exact_threshold(query.dtype, key.shape[2])
    words = f"{found.schedule}; tiles of keys whose weights are all below 2**{limit:.1f} left out"
    return replace(found, schedule=words)


@dataclass(frozen=True)
class SparsityReport:
    """What a call left out, summed over batch and heads; tiles are of the kernel's own size.

    Attributes:
        backend: what served the call.
        sparsity: as it was asked for.
        threshold: log2 of the largest weight, relative to the maximum so far, that may be left out.
        tiles: tiles of keys that the causal limit leaves to each tile of queries.
        skipped: those left out.
        maxima: tiles of which the maxima of rows were found.
        rescaled: states that were multiplied because a maximum had grown or might have.
        redone: tiles of queries folded again because a frozen maximum did not hold; their tiles are
            counted twice.
        per_head: the share of tiles left out for each batch and head, [B, Hq].
        error: relative Euclidean error of the output against float64.
        dense_error: that of the ordinary call.
    """

    backend: str
    sparsity: str | float | None
    threshold: float
    tiles: int
    skipped: int
    maxima: int
    rescaled: int
    redone: int
    per_head: tuple[tuple[float, ...], ...]
    error: float
    dense_error: float

    @property
    def skip_rate(self) -> float:
        """The share of tiles left out."""
        return self.skipped / self.tiles if self.tiles else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a threshold of nothing left out is null."""
        found = dict(vars(self)) | {"skip_rate": self.skip_rate}
        found["per_head"] = [list(row) for row in self.per_head]
        return found | {"threshold": self.threshold if math.isfinite(self.threshold) else None}


def sparsity_report(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sparsity: str | float | None = EXACT,
    relief: Sequence[str] = TAKEN,
    precision: str = "strict",
    backend: str = "auto",
) -> SparsityReport:
    """Run attention with `sparsity` and count what it leaves out and what that costs.

    Args:
        query, key, value, attn_mask, is_causal, scale, enable_gqa, precision: as
            `elsa_core.attention` takes them.
        sparsity: as `elsa_core.attention` takes it; None leaves out nothing.
        relief: any of "summaries" (maxima begin at the scores of one key of each tile), "order"
            (the first keys, then those around the rows, then the rest) and "frozen" (then maxima
            stay, and rows are folded again where that does not hold). `elsa_core.attention` takes
            what is the default here.
        backend: "auto" or one of `elsa_core.dispatch.names("sparse_attention")`. "auto" is plain
            PyTorch, which saves no time, where no kernel that was measured leaves out tiles.

    Returns:
        The counts, and the errors of this and of the ordinary call against float64; scores are
        held in memory a few rows at a time.

    Raises:
        TypeError: query, key, value or attn_mask is no tensor.
        ArgumentError: an argument does not fit; the message names it.
        UnavailableError: the backend asked for by name cannot serve the call.

    Source: BLASST, arXiv 2512.12087; for `relief` VFA.
    """
    with torch.no_grad():
        found = asked(query, key, value, attn_mask, 0.0, sparsity)
        cast = autocast(query, key, value, attn_mask)
        q, k, v, mask = operands(*cast, is_causal, enable_gqa)
        scale = default_scale(q) if scale is None else scale
        kind = kind_of(q, v, precision)
        name = dispatch.choose("sparse_attention", *kind, backend)
        run = dispatch.RUNS["sparse_attention", name]
        bits, limit = relief_bits(relief), threshold(found)
        out, _, counts = run(q, k, v, mask, is_causal, float(scale), precision, limit, bits)
        ordinary = dispatch.RUNS["attention", dispatch.choose("attention", *kind)]
        dense = ordinary(q, k, v, mask, is_causal, float(scale), precision)[0]
        exact, _ = reference.attention(q, k, v, mask, is_causal=is_causal, scale=scale)
        seen, skipped, maxima, rescaled, redone = counts.sum((0, 1)).tolist()
        rates = (counts[..., 1] / counts[..., 0].clamp_min(1)).tolist()
        return SparsityReport(
            name, found, exact_threshold(q.dtype, k.shape[2]) if limit == 0.0 else limit,
            seen, skipped, maxima, rescaled, redone, tuple(tuple(row) for row in rates),
            reference.relative_l2(out, exact), reference.relative_l2(dense, exact),
        )  # fmt: skip
