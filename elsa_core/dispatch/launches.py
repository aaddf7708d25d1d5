"""The cache of launches: warm eager calls on a GPU, from Python's objects to the launch in C++.

The first call of a layout runs through the operator, whose launches the CUDA library keeps as a
plan (`elsa_core.backends.cuda`). `admit` lets the next call of that layout find the plan ahead of
PyTorch's dispatcher, which takes longer than the launch (`csrc/cuda/python.cpp`). The key holds
shapes, strides, dtypes, alignments and all terms, so a hit needs no further check. Whoever drops
plans (`elsa_core.backends.cuda.forget`) empties the cache.

Half-precision linear layers need no plan: cuBLASLt computes them (`csrc/cuda/blas.cpp`), as it does
for PyTorch, which asks it for an algorithm in each call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import cuda
from elsa_core.base import calls
from elsa_core.base.limits import HALF_DEPTH
from elsa_core.base.switches import switched
from elsa_core.dispatch.table import BACKENDS, SHIPPED
from elsa_core.ops.linear.record import ACTIVATIONS, epilogue

# By names of this module: every small call asks them.
_functions, _profiled = torch._C._len_torch_function_stack, torch._C._autograd._profiler_enabled
_records, _required = torch.is_grad_enabled, torch._C._any_requires_grad
_precision, _cast = torch._C._get_fp32_precision_getter, torch._C._is_any_autocast_enabled
# Whether the user allowed PyTorch's float16 products sums of float16, which are faster.
_in_half = torch._C._get_cublas_allow_fp16_accumulation
_tuned = getattr(torch._C, "_cuda_tunableop_is_enabled", bool)  # by PyTorch's TunableOp
_LOCK = threading.Lock()
_HALF = (torch.float16, torch.bfloat16)


class Launches:
    """The cached launches of one operator.

    Attributes:
        find: takes what the operator's public function was given, in the operator's order; gives
            the first result of a call in the cache, else None. None until a call was admitted.
    """

    __slots__ = ("_admit", "_looked", "_operator", "find")

    def __init__(self, operator: str):
        self._operator, self._looked = operator, False
        self.find: Callable[..., Tensor | None] | None = None
        self._admit: Callable[..., Any] | None = None

    def admit(self, arguments: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """Put a call into the cache that `auto` gave to the operator's kernel.

        Args:
            arguments: of the operator. given: those of the public function, in the same order.
        """
        if self.works() and not _functions():  # a mode would see what tensors are asked
            self._admit(*arguments, *given)  # type: ignore[misc]

    def works(self) -> bool:
        """Whether this process has such a cache."""
        if not self._looked:
            if cuda.serves(self._operator):
                from elsa_core.backends.cuda import library

                with _LOCK:
                    found = None if self._looked else library.load().short(self._operator)
                    if found is not None:
                        self._admit, self.find = found[1], found[0]
            self._looked = True
        return self._admit is not None


ATTENTION = Launches("attention")
WINDOW_ATTENTION = Launches("window_attention")
LINEAR = Launches("linear")


def is_seen(*given: Any) -> bool:
    """Whether something of PyTorch would see a call: a mode, a profiler, autograd. Calls of which
    `calls.traced` does not hold ask this ahead of `Launches.find`.
    """
    return bool(_functions() or _profiled() or (_records() and _required(*given)))


def find_linear(arguments: tuple[Any, ...]) -> Tensor | None:
    """A linear layer, given as the operator's arguments, by a cached launch, or by cuBLASLt in half
    precision; None of any other call.
    """
    x = arguments[0]
    single = x.dtype == torch.float32
    if LINEAR.find is None if single else not x.is_cuda:  # at once on a CPU
        return None
    if _cast() or calls.traced():
        return None
    if single:
        # products of PyTorch that the user allowed TF32 stay PyTorch's
        if _precision("cuda", "matmul") == "tf32" or is_seen(*arguments):
            return None
        return LINEAR.find(*arguments)  # type: ignore[misc]
    if x.dtype in _HALF and arguments[6] == "strict" and arguments[1].shape[-1] > HALF_DEPTH:
        return _by_cublas(*arguments[:6])
    return None


def _by_cublas(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    scale: Tensor | None,
) -> Tensor | None:  # fmt: skip
    if _records() or is_seen() or not x.is_cuda or weight.dim() != 2:
        return None
    # a graph's replay must not share cuBLASLt's workspace with eager calls
    if torch.cuda.is_current_stream_capturing() or not _is_shipped(switched()):
        return None
    multiply = _multiply()
    if multiply is None or _in_half() or _tuned():
        return None
    plain = activation == "none" and scale is None
    if not plain and activation not in ACTIVATIONS:
        return None
    out: Tensor | None = multiply(x, weight, bias, residual if plain else None)
    return out if out is None or plain else epilogue(out, activation, residual, scale)


@functools.cache
def _multiply() -> Callable[..., Tensor | None] | None:
    if not LINEAR.works():
        return None
    from elsa_core.backends.cuda import library

    return library.load().multiply()


@functools.lru_cache(maxsize=8)
def _is_shipped(switched: object) -> bool:
    """Whether no backend was registered ahead of this package's kernels."""
    offered = (each for each in BACKENDS if "linear" in each.operators)
    return next(each.name for each in offered if each.device == "cuda") in SHIPPED
