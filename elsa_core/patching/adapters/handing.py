"""A residual and a LayerScale on their way from a block to the layer of its last product, and a
layer norm on its way to that of its first one.

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

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from elsa_core.linear import Norm

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
    norm: Normalising | None = None


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


def waiting() -> bool:
    """Whether anything is on its way to a layer; not where a compiler records."""
    # a compiler reads no further than its own question
    return not is_dynamo_compiling() and (_WAITING.terms is not None or _WAITING.norm is not None)


def taken(layer: nn.Module, x: Tensor, columns: int) -> Terms:
    """The terms handed to `layer`, once, if its product of x [..., K] with `columns` columns has
    the shape of the residual, and that is dense; else two times None.
    """
    if is_dynamo_compiling():  # a compiler reads no further than its own question
        return NONE
    terms = _WAITING.terms
    if terms is None or terms.layer is not layer or terms.taken:
        return NONE
    if terms.residual.shape != (*x.shape[:-1], columns) or not terms.residual.is_contiguous():
        return NONE  # kernels that add a residual read a dense one
    terms.taken = True
    return terms.residual, terms.scale


class Normalising:
    """For the length of a `with` block, `layer` may normalise x itself, where it is called with x.

    Attributes:
        taken: whether it did: then it was called with x in the place of norm(x).
    """

    __slots__ = ("before", "layer", "norm", "taken", "x")

    def __init__(self, layer: nn.Module, x: Tensor, norm: Norm):
        self.layer, self.x, self.norm = layer, x, norm
        self.taken = False
        self.before: Normalising | None = None

    def __enter__(self) -> Normalising:
        self.before, _WAITING.norm = _WAITING.norm, self
        return self

    def __exit__(self, *error: Any) -> None:
        _WAITING.norm = self.before
        if not self.taken and _WAITING.terms is not None:
            _WAITING.terms.taken = False  # the call was for nothing, and comes again


@contextmanager
def for_nothing() -> Iterator[None]:
    """Calls whose results are not used: what they take is left for the call that counts."""
    waiting = [each for each in (_WAITING.terms, _WAITING.norm) if each is not None]
    before = [each.taken for each in waiting]
    try:
        yield
    finally:
        for each, was in zip(waiting, before, strict=True):
            each.taken = was


def taken_norm(layer: nn.Module, x: Tensor) -> Norm | None:
    """The norm handed to `layer` for x, once; whoever takes it must apply it."""
    if is_dynamo_compiling():
        return None
    waiting = _WAITING.norm
    if waiting is None or waiting.layer is not layer or waiting.x is not x or waiting.taken:
        return None
    waiting.taken = True
    return waiting.norm
