"""Calls of dense attention that autograd does not record, by the backend that serves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from elsa_core import calls, routing, short_calls
from elsa_core.routing import Chosen, Layout

_profiled = torch._C._autograd._profiler_enabled


def inferred(
    choice: Chosen, arguments: tuple[Any, ...], alone: tuple[Tensor | None, float | None] | None
) -> tuple[Tensor, Tensor | None]:
    """An ordinary call that autograd does not record, by who serves it. alone: where that is the
    choice of "auto" and the output alone is wanted, mask and scale as the caller gave them, so that
    the next call of this layout may go the short way.
    """
    out = _by_row(choice, *arguments) if choice.rows and alone is not None else None
    if out is not None:
        return out, None
    found: tuple[Tensor, Tensor | None]
    if choice.direct is None or _profiled():
        found = calls.below_autograd(choice.run, *arguments)
        return found
    found = choice.direct(*arguments)
    if alone is not None and found[0].is_cuda and not _has_row(choice, *arguments[:5]):
        query, key, value, _, is_causal, _, precision = arguments
        given = (query, key, value, alone[0], is_causal, alone[1], precision)
        short_calls.ATTENTION.admit(arguments, given)
    return found


def _has_row(
    choice: Chosen, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> bool:
    """Whether a row holds for a call: its backend may have declined this one alone."""
    masked = None if mask is None else mask.shape
    shapes = query.shape, key.shape, masked
    return any(row.holds(*shapes, causal=causal) for row, _ in choice.rows)


def _by_row(
    choice: Chosen, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> Tensor | None:
    """An inference call by the backend that was measured to be faster there; None if there is none.

    Not for exported programs, which hold for other lengths too.
    """
    if mask is not None and mask.dtype != query.dtype:
        return None
    masked = None if mask is None else mask.shape
    for row, serve in choice.rows:
        if row.holds(query.shape, key.shape, masked, causal=rest[0]):
            layout = Layout(query, key, value, rest[0], rest[1])
            if routing.peer_fault(row.backend, layout, "whole"):
                continue
            out: Tensor | None = serve(query, key, value, mask, *rest)
            if out is not None:
                return out
    return None


def measured_faster(
    kind: tuple[str, torch.dtype, int, int, str], backend: str, arguments: tuple[Any, ...]
) -> Tensor | None:
    """The output of a call, as `_by_row` gives it; a compiler may be tracing it."""
    query, key, value, attn_mask = arguments[:4]
    if calls.exporting():  # such a program holds for other lengths and GPUs
        return None
    if is_compiling():
        if calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask):
            return None
        return _compiled_by_row(kind, backend, arguments)
    if calls.traced() or calls.differentiates(query, key, value, attn_mask):
        return None
    choice = routing.chosen("attention", query.device, *kind[1:], backend)
    return _by_row(choice, *arguments)


def _compiled_by_row(
    kind: tuple[str, torch.dtype, int, int, str], backend: str, arguments: tuple[Any, ...]
) -> Tensor | None:
    """As `_by_row`, for a graph that `torch.compile` makes for the lengths of this call alone.

    A length that it left open decides nothing: the graph would be made anew for each.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # 1.7 s, not eager's

    query, key, value, mask, causal, scale = arguments[:6]
    if mask is not None and mask.dtype != query.dtype:
        return None
    masked = None if mask is None else mask.shape
    for row in routing.rows_of("attention", *kind, backend):
        if row.holds(query.shape, key.shape, masked, statically_known_true, causal=causal):
            if routing.peer_fault(row.backend, Layout(query, key, value, causal, scale), "whole"):
                continue
            out: Tensor | None = routing.BY_ROW["attention", row.backend](*arguments)
            if out is not None:
                return out
    return None
