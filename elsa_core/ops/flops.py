"""How many floating point operations `torch.utils.flop_counter` counts for an operator.

As PyTorch counts its own: two for each multiply-add of the products, whatever a mask, a causal
limit or a threshold leaves out, and five products for the gradients of attention. So a patched
model has the count of its original.

`torch.utils.flop_counter` imports triton, so that the formulas are given to it once somebody else
imports it.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_COUNTER = "torch.utils.flop_counter"
# products of channels of keys and of values
_FORWARD, _GRADIENTS = (1, 1), (3, 2)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, *, products: tuple[int, int] = _FORWARD
) -> int:
    """[B, Hq, Nq, D], [B, Hkv, Nk, D] and [B, Hkv, Nk, Dv]."""
    pairs = math.prod(query.shape[:3]) * key.shape[2]
    return 2 * pairs * (products[0] * query.shape[3] + products[1] * value.shape[3])


def _packed(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor,
    *, products: tuple[int, int] = _FORWARD,
) -> int:  # fmt: skip
    """[T, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]; without data sequences are as long as each other."""
    try:
        pairs = int((starts_q.diff() * starts_k.diff()).sum())
    except (NotImplementedError, RuntimeError):  # meta and fake tensors
        pairs = query.shape[0] * key.shape[0] // max(1, starts_q.shape[0] - 1)
    return (
        2 * pairs * query.shape[1] * (products[0] * query.shape[2] + products[1] * value.shape[2])
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _dense(query, key, value)


def _attention_backward(_: Tensor, __: Tensor, *given: Any, **___: Any) -> int:
    return _dense(*given[:3], products=_GRADIENTS)


def _entmax_backward(_: Tensor, *given: Any, **__: Any) -> int:
    return _dense(*given[:3], products=_GRADIENTS)


def _varlen(*given: Any, **_: Any) -> int:
    return _packed(*given[:5])


def _varlen_backward(_: Tensor, __: Tensor, *given: Any, **___: Any) -> int:
    return _packed(*given[:5], products=_GRADIENTS)


def _entmax_varlen_backward(_: Tensor, *given: Any, **__: Any) -> int:
    return _packed(*given[:5], products=_GRADIENTS)


def _window(qkv: Tensor, *given: Any, products: int = 2, **_: Any) -> int:
    window: Sequence[int] = given[5]
    windows = math.prod(-(-n // w) for n, w in zip(qkv.shape[1:4], window, strict=True))
    tokens = math.prod(window)
    return 2 * products * qkv.shape[0] * windows * tokens**2 * (qkv.shape[4] // 3)


def _window_backward(_: Tensor, *given: Any, **__: Any) -> int:
    return _window(*given, products=sum(_GRADIENTS))


def _linear(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * input.numel() * weight.shape[0]


def _gated_linear(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _linear(input, weight)


def _linear_backward(
    grad_out: Tensor, input: Tensor, weight: Tensor, _: str, needs: Sequence[bool], **__: Any
) -> int:
    depths = [t.shape[-1] for t, wanted in ((weight, needs[0]), (input, needs[1])) if wanted]
    return 2 * grad_out.numel() * sum(depths)


FORMULAS: dict[str, Callable[..., int]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_dropout": _attention,
    "attention_dropout_backward": _attention_backward,
    "attention_portable": _attention,
    "entmax_attention": _attention,
    "entmax_attention_backward": _entmax_backward,
    "entmax_varlen_attention": _varlen,
    "entmax_varlen_attention_backward": _entmax_varlen_backward,
    "gated_linear": _gated_linear,
    "linear": _linear,
    "linear_backward": _linear_backward,
    "sparse_attention": _attention,
    "varlen_attention": _varlen,
    "varlen_attention_backward": _varlen_backward,
    "window_attention": _window,
    "window_attention_backward": _window_backward,
}


def _register(counter: ModuleType) -> None:
    for name, formula in FORMULAS.items():
        base = name.removesuffix("_backward")
        twin = f"{base}_eager" + name.removeprefix(base)
        for each in (name, twin):
            packet = getattr(torch.ops.elsa, each, None)
            if packet is not None and packet not in counter.flop_registry:
                counter.register_flop_formula(packet, get_raw=True)(formula)


class _AtImport(MetaPathFinder, Loader):
    """Registers the formulas once PyTorch's counter is imported."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _COUNTER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register(module)


def offer() -> None:
    """Give PyTorch's counter the formulas: now, or when it is imported."""
    known = sys.modules.get(_COUNTER)
    if known is not None:
        _register(known)
    else:
        sys.meta_path.insert(0, _AtImport())
