"""Calls of `attention` with dropout of the weights: who serves them, and the seed."""

from __future__ import annotations

from operator import index

from torch import Tensor

from elsa_core import dispatch, ops
from elsa_core.backends import philox
from elsa_core.base import calls
from elsa_core.errors import ArgumentError


def dropped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    precision: str,
    *,
    dropout_p: float,
    backend: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention with dropout of the weights, by the backend that serves such calls."""
    layout = dispatch.Layout(query, key, value, is_causal, scale)
    name = backend_of(layout, attn_mask, precision, dropout_p, backend, return_lse)
    run = dispatch.RUNS["attention_dropout", name]
    # PyTorch's own kernels draw for themselves, as they do in the original model
    own = dispatch.implementation("attention_dropout", name).whole
    seed = None if own else philox.draw(query.device)
    if calls.differentiates_otherwise():
        run = ops.ATTENTION_DROPOUT.reference
    answer: tuple[Tensor, Tensor | None] = run(
        query, key, value, attn_mask, is_causal, scale, precision, float(dropout_p), seed
    )
    return answer


def backend_of(
    layout: dispatch.Layout,
    attn_mask: Tensor | None,
    precision: str,
    dropout_p: float,
    backend: str,
    return_lse: bool,
) -> str:
    """The backend of a call with dropout; that a gradient is wanted does not change it, because a
    reentrant checkpoint runs without gradients first and must drop the same weights again.

    Raises:
        ArgumentError: dropout_p is no probability.
        UnavailableError: the backend asked for by name cannot serve the call.
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ArgumentError(f"dropout_p={dropout_p} must be in [0, 1]")
    if dispatch.plain_alone(backend):
        return dispatch.PLAIN
    query, key, value = layout[:3]
    width, value_width = index(query.shape[-1]), index(value.shape[-1])
    kind = (calls.place(query), query.dtype, width, value_width, precision)
    if backend == "auto" and not return_lse and dropout_p < 1.0:
        gradient = calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask)
        whole = dispatch.choose(
            "attention_dropout", *kind, mode="train", gradient=gradient or ("query",)
        )
        if dispatch.is_whole("attention_dropout", whole):
            takes = dispatch.implementation("attention_dropout", whole).takes
            taken = takes is None or takes(query, key, attn_mask)
            if taken and not dispatch.peer_fault(whole, layout, "whole"):
                return whole
    return dispatch.choose("attention_dropout", *kind, backend)
