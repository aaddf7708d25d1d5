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
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"


def _attention(keys: int, values: int, before: int, *given: Any, **_: Any) -> int:
    """The count of products with [..., D] of keys and [..., Dv] of values, where so many arguments
    stand before query, key and value: [B, H, N, D] or packed [T, H, D]."""
    query, key, value, starts_q, starts_k = given[before : before + 5]
    if query.dim() == 4:
        pairs = math.prod(query.shape[:3]) * key.shape[2]
    else:
        try:
            pairs = int((starts_q.diff() * starts_k.diff()).sum())
        except (NotImplementedError, RuntimeError):  # meta and fake tensors: equal lengths
            pairs = query.shape[0] * key.shape[0] // max(1, starts_q.shape[0] - 1)
        pairs *= query.shape[1]
    return int(2 * pairs * (keys * query.shape[-1] + values * value.shape[-1]))


def _window(products: int, before: int, *given: Any, **_: Any) -> int:
    qkv, window = given[before], given[before + 6]
    windows = math.prod(-(-n // w) for n, w in zip(qkv.shape[1:4], window, strict=True))
    pairs = qkv.shape[0] * windows * math.prod(window) ** 2
    return int(2 * products * pairs * (qkv.shape[4] // 3))


_OF_ATTENTION = ("attention", "attention_dropout", "varlen_attention")
_OF_ENTMAX = ("entmax_attention", "entmax_varlen_attention")
_FORWARD = partial(_attention, 1, 1, 0)
# The gradients of operators without an lse have one argument before the query, others two.
FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys((*_OF_ATTENTION, *_OF_ENTMAX, "sparse_attention"), _FORWARD),
    **{f"{name}_backward": partial(_attention, 3, 2, 2) for name in _OF_ATTENTION},
    **{f"{name}_backward": partial(_attention, 3, 2, 1) for name in _OF_ENTMAX},
    "attention_portable": _FORWARD,
    "gated_linear": lambda input, weight, *_, **__: 4 * input.numel() * weight.shape[0],
    "linear": lambda input, weight, *_, **__: 2 * input.numel() * weight.shape[0],
    "linear_backward": lambda slope, input, weight, _, needs, **__: (
        2 * slope.numel() * (weight.shape[-1] * needs[0] + input.shape[-1] * needs[1])
    ),
    "window_attention": partial(_window, 2, 0),
    "window_attention_backward": partial(_window, 5, 1),
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
