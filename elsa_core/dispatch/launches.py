"""The cache of launches: warm eager calls on a GPU, from Python's objects to the launch in C++.

The first call of a layout runs through the operator, whose launches the CUDA library keeps as a
plan (`elsa_core.backends.cuda`). `admit` lets the next call of that layout find the plan ahead of
PyTorch's dispatcher, which takes longer than the launch (`csrc/cuda/python.cpp`). The key holds
shapes, strides, dtypes, alignments and all terms, so a hit needs no further check. Whoever drops
plans (`elsa_core.backends.cuda.forget`) empties the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import cuda
from elsa_core.base import calls
from elsa_core.base.messages import Progress

# By names of this module: every small call asks them.
_functions, _profiled = torch._C._len_torch_function_stack, torch._C._autograd._profiler_enabled
_records, _required = torch.is_grad_enabled, torch._C._any_requires_grad
_precision, _cast = torch._C._get_fp32_precision_getter, torch._C._is_any_autocast_enabled
_LOCK = threading.Lock()


@dataclass(slots=True)
class Launches:
    """The cached launches of one operator.

    Attributes:
        find: takes what the operator's public function was given, in the operator's order; gives
            the first result of a call in the cache, else None. None until a call was admitted.
    """

    _operator: str
    find: Callable[..., Tensor | None] | None = None
    _admit: Callable[..., Any] | None = None
    _looked: bool = False

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
    """A float32 linear layer, given as the operator's arguments, by a cached launch; None of any
    other call.
    """
    if LINEAR.find is None or arguments[0].dtype != torch.float32:  # at once on a CPU
        return None
    if _cast() or calls.traced() or is_seen(*arguments):
        return None
    # products of PyTorch that the user allowed TF32 stay PyTorch's
    return None if _precision("cuda", "matmul") == "tf32" else LINEAR.find(*arguments)


def compile_kernels(call: Callable[[], Any], tell: Progress | None = None) -> int:
    """Compile the GPU kernels that `call` needs and no earlier call did, side by side.

    The call runs once on this thread, without gradients and without these kernels: its results are
    of no use, and it must change nothing that lasts.

    Returns:
        How many kernels were missing; 0 without a GPU.
    """
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return 0
    from elsa_core.backends.triton.shared import ahead

    with torch.no_grad():
        return ahead.compile_kernels(call, tell)
