"""The backends and what each has of each operator: the only module that knows their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from elsa_core import ops
from elsa_core import precision as precisions
from elsa_core.backends import cuda, onednn, portable, sdpa
from elsa_core.backends.support import Backend, Implementation, Request, Support
from elsa_core.base import calls
from elsa_core.dispatch import measured
from elsa_core.ops.factory import implement, implement_on_cuda, variant
from elsa_core.precision import dtype_name

PLAIN = "eager"  # plain PyTorch, which serves every operator that has a record


def _late(module: str, name: str) -> Callable[..., Any]:
    full = f"elsa_core.backends.{module}"
    found: list[ModuleType] = []

    def call(*arguments: Any) -> Any:
        if not found:  # not from `sys.modules`, where one lies that another thread still imports
            found.append(import_module(full))
        return getattr(found[0], name)(*arguments)

    return call


def _computes(words: Callable[[Request], str]) -> Callable[[Request], str]:
    """An arithmetic in words; that of half precision is the same on every backend."""

    def arithmetic(request: Request) -> str:
        if request.dtype not in (torch.float16, torch.bfloat16):
            return words(request)
        return f"{dtype_name(request.dtype)} products, float32 state and accumulation"

    return arithmetic


_of_pytorch = _computes(lambda request: f"PyTorch's {dtype_name(request.dtype)} matrix products")
_split = _computes(lambda request: precisions.PRECISIONS[request.precision].met_by)
_fma = _computes(lambda _: "float32 FMA")
_three_tf32 = "three TF32 products for each float32 product, float32 sums"
_of_tf32 = _computes(lambda given: "float32 FMA" if given.precision == "ieee" else _three_tf32)
_as_written = "plain PyTorch"
_chosen_by_pytorch = "scaled_dot_product_attention: the kernel that PyTorch chooses"
_whole_windows = "one window at a time, read from the projection's output as it lies"
_layers = "large products; PyTorch computes smaller ones, and those that would not gain"
_PLAIN_SCHEDULES: dict[str, Callable[..., str] | str] = {
    "attention": _late("eager", "schedule"),
    "sparse": "fold over tiles of 64 keys, every score computed",
    "varlen": "one sequence after another, each folded over key blocks",
}


def reference(record: ops.Operator) -> Implementation:
    """Plain PyTorch, which serves every operator that has a record."""
    backward = record.backward
    words = _PLAIN_SCHEDULES.get(record.kind, _as_written)
    return Implementation(
        _late("eager", "support"), record.eager, words, _of_pytorch,
        gradient=_late("eager", "support") if backward else None,
        backward=backward.reference if backward else None,
        partition=_late("eager", "partition") if record.name == "attention" else None,
    )  # fmt: skip


def _on(backend: str, module: str) -> Callable[[Request], Support]:
    """What a module of kernels answers, and then their backend, which may have to be built."""

    def support(request: Request) -> Support:
        answer: Support = _late(module, "support")(request)
        return _late(backend, "support")(request) if answer.ok else answer

    return support


def _whole(*arguments: Any) -> tuple[Tensor, None]:
    """By PyTorch's own operator, which has no lse to give, and draws what it drops for itself: the
    ninth argument of a call with dropout is a seed."""
    return sdpa.attention(*arguments[:8]), None


def _linear_by_triton(input: Tensor, weight: Tensor, *terms: Any) -> Tensor | None:
    _, activation, residual, scale, precision = terms
    alone = activation == "none" and residual is None and scale is None
    if alone and precision == "strict" and measured.product_by_pytorch(input, weight) is not None:
        return None
    from elsa_core.backends.triton.linear.gate import serve  # compilers know no `_late`

    return serve(input, weight, *terms)


def _gated_support(request: Request) -> Support:
    answer: Support = _late("triton.linear.gate", "support")(request)
    if answer.ok and not measured.product_rows("gated_linear", request.device, torch.float32):
        return Support(False, "was not measured to be faster on this GPU")
    return answer


def _gated_linear_by_triton(*arguments: Any) -> Tensor | None:
    input, weight = arguments[:2]
    if not measured.product_rows("gated_linear", input.device, torch.float32):
        return None
    graphed = calls.recorded() or torch.cuda.is_current_stream_capturing()
    least = 0 if graphed else measured.eager_least("linear", input.dtype)
    if least and input.numel() * weight.shape[0] < least:
        return None  # Python overhead bounds it
    from elsa_core.backends.triton.linear import gate

    return gate.serve_gated(*arguments)


def _native(record: ops.Operator, **more: Any) -> Implementation:
    named = partial(_late("native", "schedule"), record.name)
    words = _whole_windows if record.kind == "window" else named
    if record.backward:
        backward = _late("native_backward", f"{record.name}_backward")
        more = {"gradient": _on("native", "native_backward"), "backward": backward} | more
    return Implementation(_late("native", "support"), record.overload, words, _fma, **more)


_NATIVE = {
    "attention": _native(
        ops.ATTENTION, partition=_late("native", "partition"),
        state=_late("native", "attention_state"),
    ),
    "attention_dropout": _native(ops.ATTENTION_DROPOUT),
    "varlen_attention": _native(ops.VARLEN_ATTENTION),
    "window_attention": _native(ops.WINDOW_ATTENTION),
    "sparse_attention": _native(ops.SPARSE_ATTENTION),
    "entmax_attention": _native(
        ops.ENTMAX_ATTENTION, gradient=_late("native", "support")
    ),
}  # fmt: skip
# What computes an operator on CUDA devices: modules that are imported at the first call.
KERNELS_ON_CUDA = {
    "attention": _late("triton", "attention_forward"),
    "varlen_attention": _late("triton.attention.varlen", "varlen_attention"),
    "entmax_attention": _late("triton.attention.entmax", "entmax_forward"),
    "entmax_varlen_attention": _late("triton.attention.entmax", "entmax_varlen_forward"),
    "sparse_attention": _late("triton.attention.sparse", "sparse_attention"),
    "window_attention": _late("triton.window.planner", "window_attention"),
    "linear": _late("triton.linear.gate", "kernel"),
    "gated_linear": _late("triton.linear.gate", "gated_kernel"),
    "linear_backward": _late("triton.linear.gate", "backward"),
}
# Of these, what the CUDA library takes over where it is on: what layouts alone decide.
BY_LIBRARY = ("attention", "window_attention", "linear", "linear_backward")


def _triton_schedule(*arguments: Any) -> str:
    words: str = _late("triton", "schedule")(*arguments)
    return f"{words}; the CUDA library launches it" if cuda.serves("attention") else words


_by_triton = _late("triton", "support")
# Each is a call of `Implementation`: support, run, schedule, arithmetic, and what it has beside.
_TRITON = {
    "attention": Implementation(
        _by_triton, ops.ATTENTION.overload, _triton_schedule, _split,
        direct=cuda.direct(ops.ATTENTION.overload, KERNELS_ON_CUDA["attention"]),
        gradient=_on("triton", "triton.attention.backward_tiling"),
        backward=_late("triton.attention.backward", "measured_backward"),
        partition=_late("triton.attention.partition", "partition"),
        state=_late("triton", "attention_state"),
    ),
    "varlen_attention": Implementation(
        _by_triton, ops.VARLEN_ATTENTION.overload, _late("triton.attention.varlen", "schedule"),
        _split, gradient=_late("eager", "support"),  # by `elsa::varlen_attention_backward`
    ),
    "window_attention": Implementation(
        _by_triton, ops.WINDOW_ATTENTION.overload, _whole_windows, _split,
        direct=cuda.direct(ops.WINDOW_ATTENTION.overload, KERNELS_ON_CUDA["window_attention"]),
        gradient=_on("triton", "triton.window.backward"),
        backward=_late("triton.window.backward", "window_attention_backward"),
    ),
    **{
        record.name: Implementation(
            _on("triton", "triton.attention.entmax"), record.overload,
            "blocks of 64 queries; blocks of keys that can hold no weight are read once",
            _of_tf32, gradient=_on("triton", "triton.attention.entmax"),
            backward=_late("triton.attention.entmax", backward),
        )
        for record, backward in (
            (ops.ENTMAX_ATTENTION, "entmax_backward"),
            (ops.ENTMAX_VARLEN_ATTENTION, "entmax_varlen_backward"),
        )
    },
    "sparse_attention": Implementation(
        _on("triton", "triton.attention.sparse"), ops.SPARSE_ATTENTION.overload,
        _late("triton.attention.sparse", "schedule"), _of_tf32, asked=True,
    ),
    "linear": Implementation(
        _late("triton.linear.gate", "support"), ops.LINEAR.overload, _layers, _split,
        direct=_linear_by_triton,
    ),
    "gated_linear": Implementation(
        _gated_support, ops.GATED_LINEAR.overload, _layers, _split, direct=_gated_linear_by_triton
    ),
}  # fmt: skip
_PORTABLE = {
    "attention": Implementation(
        portable.support,
        variant(ops.ATTENTION, "attention_portable", portable.attention.attention, "CUDA"),
        portable.schedule, _fma, by_row=portable.measured_attention,
        gradient=_late("eager", "support"),  # by `elsa::attention_backward`, as all are
        asked=True,
        unasked=("ieee",),  # where Triton is not: plain PyTorch would be left
    ),
}  # fmt: skip
_ONEDNN = {
    "linear": Implementation(
        onednn.support, ops.LINEAR.overload, _layers, _fma, direct=onednn.serve
    ),
}  # fmt: skip
_SDPA = {
    "attention_dropout": Implementation(
        sdpa.support, _whole, _chosen_by_pytorch, _of_pytorch, takes=sdpa.takes, whole=True
    ),
    "attention": Implementation(
        sdpa.support, _whole, _chosen_by_pytorch, _of_pytorch, gradient=sdpa.gradient,
        backward=sdpa.backward, direct=sdpa.measured_attention, serves=sdpa.cudnn_serves,
        takes=sdpa.takes, whole=True,
    ),
    "varlen_attention": Implementation(
        # its forward would ask the host for the longest sequence
        lambda _: Support(False, "has kernels of the gradients alone"), None, _as_written,
        _of_pytorch, gradient=sdpa.varlen_gradient, backward=sdpa.varlen_backward,
    ),
}  # fmt: skip
_EAGER = {name: reference(record) for name, record in ops.RECORDS.items()}

BACKENDS: list[Backend] = [
    Backend("native", "cpu", _NATIVE, is_built=_late("native", "is_built")),
    Backend("triton", "cuda", _TRITON),
    Backend("portable", "cuda", _PORTABLE),
    Backend("onednn", "cpu", _ONEDNN),
    Backend("sdpa", None, _SDPA),
    Backend(PLAIN, None, _EAGER),
]

SHIPPED = frozenset(each.name for each in BACKENDS)  # whom the shipped table was measured with


for _operator, _kernel in KERNELS_ON_CUDA.items():
    # a bundle that was loaded before may have taken the key, for the layouts of its file alone
    taken = torch._C._dispatch_has_kernel_for_dispatch_key(f"elsa::{_operator}", "CUDA")
    if _operator in BY_LIBRARY and not taken:
        implement_on_cuda(_operator, cuda.until_ready(_kernel))
    else:
        implement(_operator, _kernel, "CUDA")
cuda.offer({name: KERNELS_ON_CUDA[name] for name in BY_LIBRARY})
