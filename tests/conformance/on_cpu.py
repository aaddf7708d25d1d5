"""Kernels of a GPU that serve CPU tensors in a process of their own: Triton's by its interpreter,
the portable ones compiled as C++.

The public functions, the operators and autograd are the product's; only the home of the backend
differs. `serves` says which cases it must serve there. TRITON_INTERPRET must be set before Triton
is imported: `python -m tests.conformance.draw --table --on-cpu triton`.
"""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.support import Support

from . import fence, judge, portable_cpu
from .cases import CASES, Case

BACKENDS = ("triton", "portable")
MODES = ("infer", "train")
# Operators whose gradients are Triton's kernels.
_TRAINED = ("attention", "window_attention", "entmax_attention", "entmax_varlen_attention")


def serves(backend: str, case: Case, mode: str) -> bool:
    """Whether the kernels of a GPU must serve a case on the CPU."""
    operator, dtype, precision = case.operator, case.dtype, case.precision
    if mode not in MODES or operator == "dropout" or case.name.startswith("many"):
        return False
    if backend == "portable":
        own = operator == "attention" and (dtype, mode) == ("float32", "infer")
        return own and precision != "turbo"
    if dtype in ("bfloat16", "float64"):  # the interpreter's products of bfloat16 are wrong
        return False
    if mode == "train" and (operator not in _TRAINED or precision == "ieee"):
        return False
    if mode == "train" and (getattr(case, "mask", None) or "").startswith("nan"):
        return False  # open fault: the query's gradient is 0 times what a hidden key holds
    if operator == "window_attention" and mode == "train":  # plain PyTorch recomputes others
        return math.prod(case.window) <= 64 and case.dim <= 64
    if operator.startswith("entmax") or operator == "sparsity":
        widest = max(case.dim, case.value_dim or 0)
        return widest <= (64 if dtype == "float32" else 128) and precision != "turbo"
    return True


def rows(backend: str, operator: str) -> list[tuple[Case, str, str]]:
    """Every case and mode that a backend must serve on the CPU."""
    return [
        (case, mode, backend)
        for case in CASES[operator]
        for mode in MODES
        if serves(backend, case, mode)
    ]


def install(backend: str) -> None:
    """Let a backend serve this process's CPU tensors."""
    from elsa_core import dispatch
    from elsa_core.dispatch import table

    gpu = next(each for each in table.BACKENDS if each.name == backend)
    here = {
        name: replace(
            each, support=lambda _: Support(True), direct=_direct(name),
            schedule=lambda *_: "on the CPU",
        )
        for name, each in gpu.operators.items()
    }  # fmt: skip
    dispatch.unregister(backend)
    dispatch.register(replace(gpu, device="cpu", operators=here))
    judge.CALLS, judge.spoilt_memory = 1, nullcontext  # the fence fills what is allocated
    kernels = _triton() if backend == "triton" else portable_cpu.kernels()
    for name, kernel in kernels.items():
        _LIBRARY.impl(name, _fenced(kernel), "CPU", allow_override=True)


def _direct(name: str) -> Callable[..., Any] | None:
    """What serves a layer; other operators are called through PyTorch's dispatcher."""
    layers = ("linear", "gated_linear")
    return getattr(torch.ops.elsa, name).default if name in layers else None


def _triton() -> dict[str, Callable[..., Any]]:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from elsa_core.backends.triton.attention import backward, entmax
    from elsa_core.backends.triton.attention import schedules as chains
    from elsa_core.backends.triton.window import backward as windows
    from elsa_core.dispatch import table
    from elsa_core.dispatch.gradients import _with_mask

    chains.CHAIN_TILES = 1  # a fresh state after each tile: no row here has 1024 of them
    forward = (
        "attention", "varlen_attention", "entmax_attention", "entmax_varlen_attention",
        "sparse_attention", "window_attention", "linear",
    )  # fmt: skip
    return {name: table.KERNELS_ON_CUDA[name] for name in forward} | {
        "gated_linear": _gated,
        "attention_backward": backward.attention_backward,
        "window_attention_backward": windows.window_attention_backward,
        "entmax_attention_backward": lambda *a: _with_mask(entmax.entmax_backward(*a), a),
        "entmax_varlen_attention_backward": entmax.entmax_varlen_backward,
    }  # fmt: skip


def _gated(input: Tensor, *rest: Any) -> Tensor:
    from elsa_core.backends.triton.linear import gated
    from elsa_core.ops.linear.record import plain_gated as plain

    found = gated.gated_linear(input, *rest) if input.dtype == torch.float32 else None
    return plain(input, *rest[:5]) if found is None else found


def _fenced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Buffers of a call are NaN before it, and what lies behind them is as before after it."""

    def call(*arguments: Any) -> Any:
        with fence.fenced() as said:
            found = kernel(*arguments)
        assert found is not None, "the kernels declined the call"
        assert said["intact"], "a buffer, or what lies behind it, was written past its end"
        return found

    return call


_LIBRARY = torch.library.Library("elsa", "IMPL")
