"""A residual and a LayerScale on their way from a block to the layer of its last product.

The module between the two is called as its library wrote it. A block hands the terms to a layer for
the length of one call of that module; the layer takes them if it computes a result of the
residual's shape, and the block asks afterwards whether it did. Not where a compiler or a tracer
records the call: there the block's own operations are recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Terms = tuple[Tensor | None, Tensor | None]
NONE: Terms = (None, None)


# What adapters put into a product's call: its activation, and a block's residual with LayerScale.
ACTIVATION, RESIDUAL = "activation", "residual"
_LEFT_OUT: set[str] = set()


@contextmanager
def left_out(*folds: str) -> Iterator[None]:
    """Leave activations or residuals to PyTorch, in every thread: to measure what each gives."""
    before = set(_LEFT_OUT)
    _LEFT_OUT.update(folds)
    try:
        yield
    finally:
        _LEFT_OUT.clear()
        _LEFT_OUT.update(before)


def leaves_out(fold: str) -> bool:
    """Whether a fold is left out now."""
    return fold in _LEFT_OUT


leaves_out._dynamo_marked_constant = True  # type: ignore[attr-defined]  # of measurements alone


class _Waiting(threading.local):
    terms: Handing | None = None


_WAITING = _Waiting()


class Handing:
    """For the length of a `with` block, `layer` may multiply by `scale` and add `residual`.

    Attributes:
        taken: whether it did: then what the layer returned is residual + scale * product.
    """

    __slots__ = ("before", "layer", "residual", "scale", "taken")

    def __init__(self, layer: nn.Module | None, residual: Tensor, scale: Tensor | None):
        self.layer, self.residual, self.scale = layer, residual, scale
        self.taken = False
        self.before: Handing | None = None

    def __enter__(self) -> Handing:
        self.before, _WAITING.terms = _WAITING.terms, self
        return self

    def __exit__(self, *error: Any) -> None:
        _WAITING.terms = self.before


def taken(layer: nn.Module, x: Tensor, columns: int) -> Terms:
    """The terms handed to `layer`, once, if its product of x [..., K] with `columns` columns has
    the shape of the residual, and that is dense; else two times None.
    """
    if torch.compiler.is_compiling():  # a compiler reads no further than its own question
        return NONE
    terms = _WAITING.terms
    if terms is None or terms.layer is not layer or terms.taken:
        return NONE
    if terms.residual.shape != (*x.shape[:-1], columns) or not terms.residual.is_contiguous():
        return NONE  # kernels that add a residual read a dense one
    terms.taken = True
    return terms.residual, terms.scale
