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
    compute: Callable[[], Any]  # gives a tensor or a tuple of such
    tensors: tuple[Tensor | None, ...]  # parameters and buffers that it reads itself
    networks: tuple[nn.Module, ...] = ()  # submodules that it calls, whose tensors are read too
    # the function on a GPU, in eager calls and where a gradient is wanted; None for `compute`
    per_call: Callable[[], Any] | None = None
    keep: bool = True  # whether the result may be kept at all


class _Entry(NamedTuple):
    value: Any
    stamp: list[Any]
    memory: tuple[Tensor, ...]  # of the sources: no other tensor gets its address
    autocast: torch.dtype | None


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
        return ((learnt and derivation.per_call) or derivation.compute)()
    entry = KEPT.get(derivation.site)
    if entry is not None:
        sources = _sources(derivation)
        if sources is None or entry.stamp != _stamp(derivation, sources):
            drop(derivation.site)
        elif entry.autocast == _autocast(sources[0]) and _can_keep(sources):
            return entry.value
    return ((on_gpu and derivation.per_call) or derivation.compute)()


def keep(derivation: Derivation) -> list[Tensor]:
    """Keep the value until it is dropped or a write is noticed. Returns the tensors kept: none
    where the value may not be kept, and none that is a source."""
    drop(derivation.site)
    sources = _sources(derivation, gradients=True)
    if sources is None or not derivation.keep or not _can_keep(sources):
        return []
    stamp, memory = _stamp(derivation, sources), tuple(tensor.detach() for tensor in sources)
    with torch.inference_mode(False), torch.no_grad():
        value = derivation.compute()
    KEPT[derivation.site] = _Entry(value, stamp, memory, _autocast(sources[0]))
    own = {tensor.untyped_storage().data_ptr() for tensor in sources}
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return [t for t in tensors if t.untyped_storage().data_ptr() not in own]


def drop(site: nn.Module) -> bool:
    """Forget what is kept of a site; whether there was anything."""
    return KEPT.pop(site, None) is not None


_Module: Any = nn.Module  # untyped, as the classes of the libraries are that stand beside it


class Derives(_Module):  # type: ignore[misc]
    """What sites with a derivation inherit: training, loading and moving drop what is kept."""

    def train(self, mode: bool = True) -> Any:
        if mode:
            drop(self)
        return super().train(mode)

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        drop(self)
        super()._load_from_state_dict(*given, **named)

    def _apply(self, *given: Any, **named: Any) -> Any:
        drop(self)  # `to`, `half`, `cuda`
        return super()._apply(*given, **named)

    def elsa_derivation(self) -> Derivation | None:
        """What the site derives from its weights as it is now; None for nothing."""
        return None


def _sources(derivation: Derivation, *, gradients: bool = False) -> tuple[Tensor, ...] | None:
    """All tensors read; None where something is in training mode, a network must run for its hooks,
    or an optimizer may follow: unless `gradients`, where a gradient of one is wanted."""
    if derivation.site.training or derivation.attention.training:
        return None
    found = list(derivation.tensors)
    for network in derivation.networks:
        if torch.nn.modules.module._has_any_global_hook():
            return None
        for module in network.modules():
            if module.training or has_hooks(module):
                return None
            found += [*module._parameters.values(), *module._buffers.values()]
    tensors = tuple(tensor for tensor in found if tensor is not None)
    if not gradients and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    return tensors


def _stamp(derivation: Derivation, sources: tuple[Tensor, ...]) -> list[Any]:
    kinds = [type(part) for network in derivation.networks for part in network.modules()]
    versions = [(id(t), t.data_ptr(), t.is_inference() or t._version) for t in sources]
    return kinds + versions


def _can_keep(sources: tuple[Tensor, ...]) -> bool:
    # A fake or wrapped tensor belongs to a trace, and an inference tensor has no version.
    plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_inference() for t in sources)
    if not sources or not plain or sources[0].is_meta:
        return False
    return not (sources[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _autocast(tensor: Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
