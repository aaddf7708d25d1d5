"""Calls of planned layouts past PyTorch's dispatcher, which takes longer than their launch.

A call that the library served for `auto` is admitted with its layout: the next one of it goes from
Python's objects to the launch in C++ (`csrc/cuda/python.cpp`), where nothing of PyTorch would see
it anyway: no autograd, tracer, mode, transform, autocast or profiler. Its arguments need no second
check: shapes, strides, dtypes and all terms are a part of the layout. Who forgets plans (see
`elsa_core.backends.cuda.forget`) forgets what was admitted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elsa_core import calls, routing

# By names of this module: every small call asks them.
_functions, _profiled = torch._C._len_torch_function_stack, torch._C._autograd._profiler_enabled
_records, _required = torch.is_grad_enabled, torch._C._any_requires_grad
_precision, _cast = torch._C._get_fp32_precision_getter, torch._C._is_any_autocast_enabled
_LOCK = threading.Lock()


class Short:
    """The short way of one operator.

    Attributes:
        serve: the first result of a call that was admitted, else None. None until a call was.
        admits: whether this process has such a way, as far as is known.
    """

    __slots__ = ("_admit", "_asked", "_operator", "admits", "serve")

    def __init__(self, operator: str):
        self._operator, self._asked, self.admits = operator, False, True
        self.serve: Callable[..., Tensor | None] | None = None
        self._admit: Callable[..., Any] | None = None

    def admit(self, arguments: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """Let calls of this layout go the short way from now on: `auto` gave this one, which
        autograd does not record, to the operator's kernel.

        Args:
            arguments: of the operator. given: what its caller was given, in the same order.
        """
        if not self._asked:
            self._look()
        if self._admit is not None and not _functions():  # a mode would see what tensors are asked
            self._admit(*arguments, *given)

    def _look(self) -> None:
        from elsa_core.backends import cuda

        if not cuda.serves(self._operator):
            self._asked, self.admits = True, False
            return
        from elsa_core.backends.cuda import library

        with _LOCK:
            found = None if self._asked else library.load().short(self._operator)
            if found is not None:
                self._admit, self.serve = found[1], found[0]
            self._asked, self.admits = True, self._admit is not None


ATTENTION = Short("attention")
WINDOW_ATTENTION = Short("window_attention")
LINEAR = Short("linear")


def served(short: Short, *arguments: Any) -> Any:
    """The output of a call that was admitted; None of any other, and of one that something of
    PyTorch would see. For calls of which `calls.traced` does not hold, nor an autocast that would
    change them.

    arguments: what the caller was given, as the operator orders it.
    """
    if _functions() or _profiled() or (_records() and _required(*arguments)):
        return None
    return short.serve(*arguments)  # type: ignore[misc]


def product(arguments: tuple[Any, ...], backend: str) -> Tensor | None:
    """`served` of an eager linear layer, given as the operator's arguments. The kernels that are
    admitted are those of float32, which PyTorch's own take the place of where TF32 is allowed.
    """
    if backend != "auto" or _is_small(arguments) or _cast() or calls.traced():
        return None
    if _precision("cuda", "matmul") == "tf32":
        return None
    out: Tensor | None = served(LINEAR, *arguments)
    return out


def admit_product(arguments: tuple[Any, ...]) -> None:
    """`Short.admit` of an eager linear layer that a kernel served. Not of a small one, which
    kernels serve in CUDA graphs alone.
    """
    if not arguments[0].is_cuda or _is_small(arguments) or calls.traced():
        return
    if not calls.differentiates(*arguments):  # recorded calls come here each time
        LINEAR.admit(arguments, arguments)


def _is_small(arguments: tuple[Any, ...]) -> bool:
    """Whether a product is PyTorch's for its size or its dtype, but in CUDA graphs; or its size is
    a tracer's, see `is_large`.
    """
    input, weight = arguments[:2]
    if input.dtype != torch.float32 or weight.dim() != 2:
        return True
    return not is_large(input.numel() * weight.shape[0], torch.float32)


def is_large(work: Any, dtype: torch.dtype) -> bool:
    """Whether an eager linear layer of so many multiply-adds takes longer on a GPU than on the
    host. No of what a tracer gives for lengths: a comparison would be a guard in its program.
    """
    return type(work) is int and work >= routing.eager_least("linear", dtype)
