"""Attention that leaves out tiles of negligible weights: what `sparsity=` means, and its counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.base.operands import require_number, require_tensor
from elsa_core.base.skipping import exact_threshold
from elsa_core.dispatch import Route
from elsa_core.errors import ArgumentError
from elsa_core.ops.arguments import default_scale, kind_of, prepared, request_of, restored, run
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
    """`checked`, for a call with these arguments.

    Raises:
        TypeError: query, key, value or attn_mask is no tensor.
        ArgumentError: sparsity is unknown, with dropout, or a number where gradients are wanted.
    """
    found = checked(sparsity)
    for name, given in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, given)
    if attn_mask is not None:
        require_tensor("attn_mask", attn_mask)
    if dropout_p != 0.0:
        raise ArgumentError("sparsity and dropout_p exclude each other")
    given = (query, key, value, attn_mask)
    learns = torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in given
    )
    if isinstance(found, float) and learns:
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
    q, k, v, mask = prepared(query, key, value, attn_mask, is_causal, enable_gqa)
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
    """How a call in the operator's layout is served; None where the ordinary call serves it.

    Raises:
        ArgumentError, UnavailableError: as `serve`.
    """
    if dispatch.plain_alone(backend):
        return None
    of_mask = dispatch.mask_kind(attn_mask, is_causal)
    request = request_of("sparse_attention", (query, key, value), precision, of_mask)
    name, _ = dispatch.select(request, backend)
    if backend == "auto" and name == dispatch.PLAIN:
        return None
    terms = (query, key, value, attn_mask, is_causal, precision)
    found = dispatch.route(request, backend, schedule=terms)
    limit = threshold(checked(sparsity)) or exact_threshold(query.dtype, key.shape[2])
    words = f"{found.schedule}; tiles of keys whose weights are all below 2**{limit:.1f} left out"
    return replace(found, schedule=words)
