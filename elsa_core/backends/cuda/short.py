"""Calls of planned layouts past PyTorch's dispatcher, which takes longer than their launch.

A call that the library served for `auto` is admitted with its layout: the next one of it goes from
Python's objects to the launch in C++ (`csrc/cuda/python.cpp`), where nothing of PyTorch would see
it anyway: no autograd, tracer, mode, transform, autocast or profiler. Who forgets plans (see
`elsa_core.backends.cuda.forget`) forgets what was admitted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# By names of this module: every small call asks them.
_functions, _profiled = torch._C._len_torch_function_stack, torch._C._autograd._profiler_enabled
_records, _required = torch.is_grad_enabled, torch._C._any_requires_grad
_LOCK = threading.Lock()


class Short:
    """The short way of one operator.

    Attributes:
        serve: the first result of a call that was admitted, else None. None until a call was.
    """

    __slots__ = ("_admit", "_asked", "_operator", "serve")

    def __init__(self, operator: str):
        self._operator, self._asked = operator, False
        self.serve: Callable[..., Tensor | None] | None = None
        self._admit: Callable[..., Any] | None = None

    def admit(self, *arguments: Any) -> None:
        """Let calls of this layout go the short way from now on: `auto` gave this one, which
        autograd does not record, to the operator's kernel."""
        if not self._asked:
            self._look()
        if self._admit is not None:
            self._admit(*arguments)

    def _look(self) -> None:
        from elsa_core.backends import cuda

        if not cuda.serves(self._operator):
            self._asked = True
            return
        from elsa_core.backends.cuda import library

        with _LOCK:
            found = None if self._asked else library.load().short(self._operator)
            if found is not None:
                self._admit, self.serve = found[1], found[0]
            self._asked = True


ATTENTION = Short("attention")


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *terms: Any
) -> Tensor | None:
    """The output of a call that was admitted; None of any other, and of one that something of
    PyTorch would see. Where `calls.traced` does not hold and there is no autocast.

    terms: is_causal, scale (None: the default) and precision.
    """
    serve = ATTENTION.serve
    if serve is None or _functions() or _profiled():
        return None
    if _records() and _required(query, key, value, attn_mask):
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():  # the dispatcher makes them what they say
        return None
    if attn_mask is not None and attn_mask.is_neg():
        return None
    return serve(query, key, value, attn_mask, *terms)
