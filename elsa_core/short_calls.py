"""Calls of planned layouts past PyTorch's dispatcher, which takes longer than their launch.

A call that the library served for `auto` is admitted with its layout: the next one of it goes from
Python's objects to the launch in C++ (`csrc/cuda/python.cpp`), where nothing of PyTorch would see
it anyway: no autograd, tracer, mode, transform, autocast or profiler. Its arguments need no second
check: shapes, strides, dtypes and all terms are a part of the layout. Who forgets plans (see
`elsa_core.backends.cuda.forget`) forgets what was admitted. Linear layers in half precision go to
cuBLASLt so (`csrc/cuda/blas.cpp`), which needs no plan: the first call of a kind is PyTorch's.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elsa_core import calls, routing
from elsa_core.messages import first_line
from elsa_core.operators.linear import ACTIVATIONS, epilogue
from elsa_core.routing.measured import HALF_DEPTH

# By names of this module: every small call asks them.
_functions, _profiled = torch._C._len_torch_function_stack, torch._C._autograd._profiler_enabled
_records, _required = torch.is_grad_enabled, torch._C._any_requires_grad
_precision, _cast = torch._C._get_fp32_precision_getter, torch._C._is_any_autocast_enabled
# Whether the user allowed PyTorch's float16 products sums of float16, which are faster.
_in_half = torch._C._get_cublas_allow_fp16_accumulation
_tuned = getattr(torch._C, "_cuda_tunableop_is_enabled", bool)  # by PyTorch's TunableOp
_LOCK = threading.Lock()
_LOG = logging.getLogger("elsa")
# Layouts of small products that were tried and not admitted since: what was wrong may pass (memory,
# a launch hook), or not.
_TRIED: dict[Any, int] = {}
_MOST_TRIES, _MOST_KINDS = 3, 4096
_HALF = (torch.float16, torch.bfloat16)


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
        self.ready()
        if self._admit is not None and not _functions():  # a mode would see what tensors are asked
            self._admit(*arguments, *given)

    def ready(self) -> bool:
        """Look for the short way, if nobody has yet; whether there is one."""
        if not self._asked:
            self._look()
        return self.admits

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
    """`served` of an eager linear layer, given as the operator's arguments. In float32: of a large
    one that was admitted, and of a small one as `small_product`. In half precision `cublas_product`
    of any. None of others.
    """
    input, weight = arguments[:2]
    if backend != "auto" or weight.dim() != 2:
        return None
    if input.dtype in _HALF:
        asks = input.is_cuda and arguments[6] == "strict" and weight.shape[1] > HALF_DEPTH
        return cublas_product(*arguments) if asks and _is_unseen() else None
    if input.dtype != torch.float32:
        return None
    if not is_large(input.numel() * weight.shape[0], torch.float32):
        way = small_way(input) if arguments[6] == "strict" else None
        return None if way is None else way(*arguments)
    if LINEAR.serve is None or _cast() or calls.traced() or _takes_tf32():
        return None
    out: Tensor | None = served(LINEAR, *arguments)
    return out


def admit_product(arguments: tuple[Any, ...]) -> None:
    """`Short.admit` of a large eager linear layer that a kernel served."""
    input, weight = arguments[:2]
    if not input.is_cuda or input.dtype != torch.float32 or weight.dim() != 2 or calls.traced():
        return
    # recorded calls come here each time
    large = is_large(input.numel() * weight.shape[0], torch.float32)
    if large and not calls.differentiates(*arguments):
        LINEAR.admit(arguments, arguments)


def is_large(work: Any, dtype: torch.dtype) -> bool:
    """Whether an eager linear layer of so many multiply-adds takes longer on a GPU than on the
    host. No of what a tracer gives for lengths: a comparison would be a guard in its program.
    """
    return type(work) is int and work >= routing.eager_least("linear", dtype)


def small_way(x: Tensor) -> Callable[..., Tensor | None] | None:
    """`small_product`, where the shipped table gives eager linear layers of x that wait for the
    host to elsa's kernels; None where something of PyTorch would see them (autograd, a tracer, a
    mode, autocast, a profiler), in CUDA graphs, which do not wait, and where float32 products may
    take TF32. Asked once for several layers.
    """
    if not x.is_cuda or _records() or not LINEAR.admits:
        return None
    most = routing.eager_products(x.device, x.dtype)
    if not most or not _is_unseen() or (x.dtype == torch.float32 and _takes_tf32()):
        return None
    return _between(routing.eager_rows(x.device, x.dtype), most)


def _is_unseen() -> bool:
    """Whether nothing of PyTorch would see a linear layer, no CUDA graph records it, and it is this
    package's.
    """
    if calls.traced() or _records() or _functions() or _profiled() or _cast():
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    return _by_shipped(routing.switched())


@functools.lru_cache(maxsize=8)
def _between(rows: int, most: int) -> Callable[..., Tensor | None]:
    """`small_product` of layers of so many rows at least and multiply-adds at most, who would ask
    about others in each call; `cublas_product` of others in half precision.
    """

    def small(x: Tensor, weight: Tensor, *terms: Any) -> Tensor | None:
        elements, sizes = x.numel(), weight.shape
        within = rows * sizes[-1] <= elements and elements * sizes[0] <= most
        out = small_product(x, weight, *terms) if within else None
        return cublas_product(x, weight, *terms) if out is None and x.dtype in _HALF else out

    return small


@functools.lru_cache(maxsize=8)
def _by_shipped(switched: object) -> bool:
    """Whether no backend was registered ahead of this package's kernels."""
    offered = (each for each in routing.BACKENDS if "linear" in each.operators)
    return next(each.name for each in offered if each.device == "cuda") in routing.SHIPPED


def small_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "none",
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    precision: str = "strict",
    halves: Tensor | None = None,
    powers: Tensor | None = None,
) -> Tensor | None:
    """`elsa::linear` past the dispatcher, of calls that `small_way` holds for; the first call of a
    kind loads the kernel. None where the call is PyTorch's, since nothing serves it.

    Through PyTorch the product, the activation and the sum would be three calls, which take the
    host longer than the device.
    """
    given = (x, weight, bias, activation, residual, scale, precision, halves, powers)
    out = None if LINEAR.serve is None else LINEAR.serve(*given)
    return _first_product(given) if out is None else out


def cublas_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "none",
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    *_: Any,
) -> Tensor | None:
    """A linear layer in half precision by the library that computes PyTorch's, cuBLASLt, of calls
    that `small_way` holds for: PyTorch asks it for an algorithm in each call, which takes the host
    longer than the rest. None where the call is PyTorch's.
    """
    multiply = _multiply()
    if multiply is None or _in_half() or _tuned():
        return None
    plain = activation == "none" and scale is None
    if not plain and (activation not in ACTIVATIONS or not _fits(x, weight, bias, residual, scale)):
        return None
    out: Tensor | None = multiply(x, weight, bias, residual if plain else None)
    return out if out is None or plain else epilogue(out, activation, residual, scale)


@functools.cache
def _multiply() -> Callable[..., Tensor | None] | None:
    if not LINEAR.ready():
        return None
    from elsa_core.backends.cuda import library

    return library.load().multiply()


def _first_product(given: tuple[Any, ...]) -> Tensor | None:
    """By the operator, whose kernel is loaded and admitted; None where that was tried before."""
    x, weight, *terms = given
    if not all(_is_plain(t) for t in given if isinstance(t, Tensor)):
        return None
    kind = (calls.forgotten(), *map(_layout, given))
    tries = _TRIED.get(kind, 0)
    if tries >= _MOST_TRIES or not _fits(x, weight, terms[0], *terms[2:4]):
        return None
    bare = terms[1] == "none" and terms[2] is None and terms[3] is None
    if bare and routing.product_by_pytorch(x, weight):
        return None
    if len(_TRIED) >= _MOST_KINDS:
        _TRIED.clear()
    _TRIED[kind] = tries + 1
    if not LINEAR.ready():  # else the operator's first call is Python's, and no layout is planned
        return None
    try:
        out: Tensor = torch.ops.elsa.linear.default(*given)
        if not tries:  # PyTorch's is loaded for a CUDA graph, which may record that
            functional.linear(x, weight, terms[0])
    except Exception as error:  # of compilers, memory, Triton: PyTorch needs none of it
        _LOG.info("linear layers of such calls stay PyTorch's: %s", first_line(error))
        return None
    LINEAR.admit(given, given)
    return out


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has strides, and is of no class that may know PyTorch's operators alone."""
    own = type(tensor) in (Tensor, nn.Parameter)
    return own and tensor.layout is torch.strided and not tensor.is_nested


def _layout(value: Any) -> Any:
    """What tells calls of the operator apart."""
    if not isinstance(value, Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16


def _fits(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
) -> bool:
    """Whether the operator computes what PyTorch would."""
    terms = [t for t in (weight, bias, residual, scale) if t is not None]
    if any(t.dtype != x.dtype or t.device != x.device for t in terms) or weight.dim() != 2:
        return False
    columns, depth = weight.shape
    if x.dim() < 1 or x.shape[-1] != depth:
        return False
    if residual is not None and residual.shape != (*x.shape[:-1], columns):
        return False
    if any(t is not None and t.shape != (columns,) for t in (bias, scale)):
        return False
    return x.numel() * columns > 0


def _takes_tf32() -> bool:
    """Whether float32 products of PyTorch on a GPU may be rounded to TF32."""
    return bool(_precision("cuda", "matmul") == "tf32")
