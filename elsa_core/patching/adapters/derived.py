"""Tensors that adapters derive from weights alone: computed in each call, or kept by `freeze`.

PyTorch counts only some of the writes to a tensor: a value is kept only after `elsa_core.freeze`.
Writes that are counted, training mode and a forward that wants gradients end it all the same. A
CUDA graph under capture and a recorded program derive. What is kept lies outside the modules: it is
not copied, not pickled, and ends with the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elsa_core.base import calls
from elsa_core.patching.adapters.hooks import has_hooks


class Derivation(NamedTuple):
    """A function of weights alone, as one patched site asks for it."""

    site: nn.Module  # the patched module
    attention: nn.Module  # that holds the weights, often the site itself
    # gives a tensor or a tuple of such; of a table of biases the dense ones where it is given True,
    # as it is but on a GPU, in eager calls and where a gradient is wanted
    compute: Callable[[bool], Any]
    tensors: tuple[Tensor | None, ...]  # parameters and buffers that it reads itself
    networks: tuple[nn.Module, ...] = ()  # submodules that it calls, whose tensors are read too


class _Entry(NamedTuple):
    value: Any
    stamp: list[Any]
    memory: tuple[Tensor, ...]  # of the sources: no other tensor gets its address
    autocast: torch.dtype | bool  # its dtype, or False


KEPT: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()


def derived(derivation: Derivation) -> Any:
    """The derivation's value for the weights as they are, kept or computed: see the module."""
    weight = next((t for t in derivation.tensors if t is not None), None)
    if weight is None:
        weight = next(derivation.attention.parameters(), None)
    # on the meta device are listed the calls of a GPU, for its kernel packs
    on_gpu = weight is not None and (weight.is_cuda or weight.is_meta)
    if calls.recorded():
        # on a GPU the operator sums a table's gradient in one order, PyTorch's indexing by atomics
        learnt = on_gpu and calls.wanted(weight=next(derivation.attention.parameters(), None))
        return derivation.compute(not learnt)
    entry = KEPT.get(derivation.site)
    if entry is not None:
        sources, stamp = _sources(derivation)
        captured = on_gpu and torch.cuda.is_current_stream_capturing()
        if entry.stamp != stamp:
            KEPT.pop(derivation.site, None)
        elif not captured:
            kind = sources[0].device.type
            autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
            if entry.autocast == autocast:
                return entry.value
    return derivation.compute(not on_gpu)


def keep(derivation: Derivation) -> list[Tensor]:
    """Keep the value until it is dropped or a write is noticed. Returns the tensors kept: none
    where the value may not be kept, and none that is a source."""
    KEPT.pop(derivation.site, None)
    sources, stamp = _sources(derivation, gradients=True)
    # A fake or wrapped tensor belongs to a trace, and an inference tensor has no version.
    plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_inference() for t in sources)
    if not sources or not plain or sources[0].is_meta:
        return []
    if sources[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    memory = tuple(tensor.detach() for tensor in sources)
    with torch.inference_mode(False), torch.no_grad():
        value = derivation.compute(True)
    own = {tensor.untyped_storage().data_ptr() for tensor in sources}
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    kept = [t for t in tensors if t.untyped_storage().data_ptr() not in own]
    if kept:
        kind = sources[0].device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        KEPT[derivation.site] = _Entry(value, stamp, memory, autocast)
    return kept


_Module: Any = nn.Module  # untyped, as the classes of the libraries are that stand beside it


class Derives(_Module):  # type: ignore[misc]
    """What sites with a derivation inherit: training, loading and moving drop what is kept."""

    def train(self, mode: bool = True) -> Any:
        if mode:
            KEPT.pop(self, None)
        return super().train(mode)

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        KEPT.pop(self, None)
        super()._load_from_state_dict(*given, **named)

    def _apply(self, *given: Any, **named: Any) -> Any:
        KEPT.pop(self, None)  # `to`, `half`, `cuda`
        return super()._apply(*given, **named)


def _sources(
    derivation: Derivation, *, gradients: bool = False
) -> tuple[tuple[Tensor, ...], list[Any]]:
    """All tensors read, and a stamp of their values; none where something is in training mode, a
    network must run for its hooks, or an optimizer may follow: unless `gradients`, where a gradient
    of one is wanted."""
    found: list[Tensor | None] = list(derivation.tensors)
    stamp: list[Any] = []
    parts = [module for network in derivation.networks for module in network.modules()]
    kept = not any(m.training for m in (derivation.site, derivation.attention, *parts))
    if not kept or (parts and torch.nn.modules.module._has_any_global_hook()):
        return (), []
    for module in parts:
        if has_hooks(module):
            return (), []
        stamp.append(type(module))
        found += [*module._parameters.values(), *module._buffers.values()]
    tensors = tuple(tensor for tensor in found if tensor is not None)
    if not gradients and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return (), []
    stamp += [(id(t), t.data_ptr(), t.is_inference() or t._version) for t in tensors]
    return tensors, stamp
