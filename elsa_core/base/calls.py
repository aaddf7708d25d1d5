"""Calls of operators with less to pass through, where the result is the same.

An operator with a formula for its gradient has an autograd kernel in Python, which every call
outside inference mode passes through and which costs as much as the rest of a small call.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

NO_TENSOR_SCALE = "scale must be a number, not a tensor: multiply query by it to learn it"
# Every small call asks these: by names of this module, since those of torch's are looked up in
# tables that a small call finds in no cache.
_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack
_batched = torch._C._functorch.is_legacy_batchedtensor
# Whether a CUDA graph records the current stream. Only for calls of CUDA tensors.
capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)
_DERIVATIVES = (TransformType.Grad, TransformType.Jvp)
# Checks of arguments hold for a trace too. PyTorch leaves out the warnings of its own modules so.
warnings.filterwarnings(
    "ignore",
    category=torch.jit.TracerWarning,  # type: ignore[attr-defined]  # public, not in its __all__
    module="elsa_core",
)


def traced() -> bool:
    """Whether a compiler, tracer, transform or dispatch mode is active in this thread. Then what is
    called must be what is written, and Python must not branch on lengths."""
    return (
        is_dynamo_compiling()  # first: a constant for it; others compile within a dispatch mode
        or _modes() != 0
        or _tracing() is not None
        or _transforms() is not None
        or forward_ad._current_level >= 0
    )


def place(tensor: Tensor) -> str:
    """Where a tensor lies, "cuda:1" say: what choices are kept by, constants for compilers."""
    device = tensor.device
    return device.type if device.index is None else f"{device.type}:{device.index}"


def recorded() -> bool:
    """As `traced`, but for the modes that only observe."""
    # a constant for the compiler, which need not know of observers
    return (
        is_compiling()
        or (
            _modes() != 0
            and not all(
                getattr(mode, "elsa_observes", False) for mode in _get_current_dispatch_mode_stack()
            )
        )
        or _tracing() is not None
        or _transforms() is not None
        or forward_ad._current_level >= 0
    )


def by_operator(*grads: Tensor | None) -> bool:
    """Whether a backward has to call its operator: a second derivative may be asked for, a
    compiler, tracer, transform or mode is active, or the gradients are a batch of them
    (`is_grads_batched`), which has no memory."""
    if torch.is_grad_enabled() or traced():
        return True
    return any(t is not None and _batched(t) for t in grads)


def exporting_onnx() -> bool:
    """Whether `torch.onnx.export` is tracing: then calls are written in operations it knows."""
    onnx = sys.modules.get("torch.onnx")  # it takes a tenth of a second to import
    return onnx is not None and bool(onnx.is_in_onnx_export())


def is_exporting() -> bool:
    """Whether `torch.export` is recording; a compiler says yes of whatever it traces."""
    return torch.compiler.is_exporting()


def exporting() -> bool:
    """Whether `torch.export` or `torch.jit.trace` records a graph for other processes."""
    return is_exporting() or (not is_compiling() and _tracing() is not None)


@dataclass
class Products:
    """How recorded programs write `elsa.linear` on a CPU; see `products`."""

    kept: bool
    asked: bool = False  # whether a program holds such a call


_PRODUCTS: ContextVar[Products | None] = ContextVar("elsa_products", default=None)


@contextmanager
def products(kept: bool) -> Iterator[Products]:
    """For the length of a `with` block: how this thread's recorded programs write `elsa.linear` on
    a CPU. `kept`: as `elsa::linear`, of which ONNX has a node. Else, and without a block, as
    PyTorch's operators: no library holds a CPU's kernel of elsa's."""
    token = _PRODUCTS.set(block := Products(kept))
    try:
        yield block
    finally:
        _PRODUCTS.reset(token)


def keeps_products() -> bool:
    """Whether the program that is recorded now holds a call of `elsa.linear` as its operator: not
    within a transform, whose derivatives and batches are of PyTorch's operators."""
    block = _PRODUCTS.get()
    if block is None or transformed():
        return False
    block.asked = True
    return block.kept


def differentiates(*arguments: Any) -> bool:
    """Whether autograd would record a call of these arguments."""
    if not torch.is_grad_enabled():
        return False
    if is_compiling():  # PyTorch 2.11 cannot trace the question below
        return any(isinstance(t, Tensor) and t.requires_grad for t in arguments)
    return torch._C._any_requires_grad(*arguments)


def wanted(**arguments: Tensor | None) -> tuple[str, ...]:
    """The names of the arguments that reverse mode wants a gradient of; none in a traced
    program."""
    if not torch.is_grad_enabled() or exporting():
        return ()
    return tuple(name for name, t in arguments.items() if t is not None and t.requires_grad)


def differentiates_otherwise() -> bool:
    """Whether forward-mode AD or a derivative of `torch.func` is at work: operators have no
    formulas for it, so that a call has to be made of PyTorch's own."""
    transforms = torch._C._functorch.get_interpreter_stack()  # None where there is none
    if transforms and any(t.key() in _DERIVATIVES for t in transforms):
        return True
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether forward-mode AD or a transform of `torch.func` is at work, vmap included."""
    return _transforms() is not None or forward_ad._current_level >= 0


def below_autograd(operator: Any, *arguments: Any) -> Any:
    """Call an operator where none of `traced` is active and autograd would not record it."""
    if torch.is_inference_mode_enabled():  # already below it
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


# Constants for the compiler, which writes no ONNX, records no such program, and guards its graphs
# on the transforms at work.
for _constant in (
    exporting_onnx, is_exporting, keeps_products, differentiates_otherwise, transformed,
):  # fmt: skip
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def plain_multihead() -> Iterator[None]:
    """Keep nn.MultiheadAttention from its fused operator, which no exporter knows."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
