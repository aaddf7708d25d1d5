"""What attention with `sparsity` leaves out, counted, and what that costs in accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elsa_core import dispatch, reference
from elsa_core.base.operands import operands, require_tensor
from elsa_core.base.skipping import exact_threshold
from elsa_core.ops.arguments import default_scale, kind_of
from elsa_core.ops.attention.api import attention
from elsa_core.ops.sparse.api import EXACT, TAKEN, checked, relief_bits, threshold


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
    found = checked(sparsity)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, tensor)
    with torch.no_grad():
        q, k, v, mask = operands(query, key, value, attn_mask, is_causal, enable_gqa)
        scale = default_scale(q) if scale is None else scale
        name = dispatch.choose("sparse_attention", *kind_of(q, v, precision), backend)
        run = dispatch.RUNS["sparse_attention", name]
        bits, limit = relief_bits(relief), threshold(found)
        out, _, counts = run(q, k, v, mask, is_causal, float(scale), precision, limit, bits)
        dense = attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=True, precision=precision
        )
        exact, _ = reference.attention(q, k, v, mask, is_causal=is_causal, scale=scale)
        seen, skipped, maxima, rescaled, redone = counts.sum((0, 1)).tolist()
        rates = (counts[..., 1] / counts[..., 0].clamp_min(1)).tolist()
        assert isinstance(dense, Tensor)  # no lse was asked for
        return SparsityReport(
            name, found, exact_threshold(q.dtype, k.shape[2]) if limit == 0.0 else limit,
            seen, skipped, maxima, rescaled, redone, tuple(tuple(row) for row in rates),
            reference.relative_l2(out, exact), reference.relative_l2(dense, exact),
        )  # fmt: skip
