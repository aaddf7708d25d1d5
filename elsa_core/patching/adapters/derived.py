"""Tensors that adapters derive from weights alone, and the one place that keeps them.

PyTorch counts only some of the writes to a tensor: fused optimizers, `.data` and numpy views leave
its version and its address as they are. So what is kept is used in two cases only:

- On a CPU, in eval mode, where no gradient is wanted: while every floating source equals the copy
  that was taken of it. A comparison costs up to 0.8% of a site at batch 1, deriving 0.2 to 15%
  (docs/decisions.md). An index is no weight; it is told
  apart by identity, version and address.
- After `elsa_core.freeze`, on any device: the caller has said that the weights do not change.
  Writes that PyTorch counts, training mode and a forward that wants gradients end it all the same.
  The halves of a layer's weight (`elsa_core.patching.adapters.halves`) are kept in this case alone.

Everything else derives per call: a GPU, where a comparison would wait for the device; a CUDA graph
under capture, so that its replays read the weights and no tensor that may be dropped; and a
recorded program (compiler, tracer, transform, dispatch mode), so that the derivation is a part of
it. The entries are held outside the modules: they are not copied, not pickled, and end with the
module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from elsa_core.base import calls
from elsa_core.patching.adapters.hooks import has_hooks


class Derivation(NamedTuple):
    """A function of weights alone, as one patched site asks for it.

    Attributes:
        site: the patched module.
        attention: the module that holds the weights, often the site itself.
        compute: the function of `attention`; its result is a tensor or a tuple of such.
        tensors: the parameters and buffers that it reads itself.
        networks: submodules that it calls; their parameters and buffers are read too.
        per_call: the function where nothing is kept and no gradient is wanted, and on a GPU where
            one is; None for `compute`.
        keep: whether the result may be kept at all.
    """

    site: nn.Module
    attention: nn.Module
    compute: Callable[[Any], Any]
    tensors: tuple[Tensor | None, ...]
    networks: tuple[nn.Module, ...] = ()
    per_call: Callable[[Any], Any] | None = None
    keep: bool = True


class _Source(NamedTuple):
    """A tensor as it was when something was derived from it."""

    tensor: Tensor
    memory: Tensor  # keeps the address taken, so that no other tensor can come to lie there
    version: int
    copy: Tensor | None  # None of an index, and where the caller has frozen the weights

    @classmethod
    def of(cls, tensor: Tensor, *, frozen: bool) -> _Source:
        memory = tensor.detach()
        copied = tensor.is_floating_point() and not frozen
        return cls(tensor, memory, tensor._version, memory.clone() if copied else None)

    def is_still(self, tensor: Tensor) -> bool:
        if self.copy is None:
            return (
                tensor is self.tensor
                and tensor._version == self.version
                and tensor.data_ptr() == self.memory.data_ptr()
            )
        # NaN equals nothing: such weights are derived from at each call.
        return (
            tensor.dtype == self.copy.dtype
            and tensor.is_cpu
            and tensor.shape == self.copy.shape
            and torch.equal(tensor, self.copy)
        )


class _Entry(NamedTuple):
    sources: tuple[_Source, ...]
    kinds: tuple[type, ...]  # of the networks' modules
    value: Any
    frozen: bool


# Of each site one value for each dtype that autocast derives in, at most: see `_autocast`.
_Entries = dict[torch.dtype | None, _Entry]


class DerivedTensors:
    """The values kept, by site. Bound: the sites alive, times the dtypes of autocast."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, _Entries] = weakref.WeakKeyDictionary()
        # What CUDA graphs read; bound: one value each time that a site is frozen and captured.
        self._captured: weakref.WeakKeyDictionary[nn.Module, dict[int, Any]]
        self._captured = weakref.WeakKeyDictionary()
        # Counts values kept and dropped: where it stands still, all that is kept is as it was.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keeps(self, site: nn.Module) -> bool:
        """Whether anything is kept of a site, whether it still holds or not."""
        return site in self._kept

    def keeps_nothing(self) -> bool:
        """Whether nothing is kept of any site. A compiler, which would guard what is kept of every
        other site, is told so.
        """
        if is_dynamo_compiling():
            return True
        return not self._kept.data  # type: ignore[attr-defined]  # without its __len__ in Python

    def kept(self, site: nn.Module) -> list[Any]:
        """The values kept of a site."""
        return [entry.value for entry in self._kept.get(site, {}).values()]

    def get(self, derivation: Derivation) -> Any:
        """The derivation's value for the weights as they are."""
        site, attention = derivation.site, derivation.attention
        sources = _sources(derivation)
        if sources is None or site.training or attention.training or _want_gradients(sources):
            self.drop(site)  # an optimizer may follow, whose writes PyTorch need not count
            return _derive(derivation)
        if not derivation.keep or not _can_keep(sources):
            return (derivation.per_call or derivation.compute)(attention)
        entry = self._valid(derivation, sources)
        if entry is None and not sources[0].is_cpu:
            return (derivation.per_call or derivation.compute)(attention)
        return (entry or self._keep(derivation, sources, frozen=False)).value

    def frozen(self, site: nn.Module, sources: tuple[Tensor, ...]) -> Any:
        """The value that `freeze` keeps of a site, while it holds; None if there is none.

        Nothing is derived here. What a CUDA graph reads under capture is held as long as the site:
        its replays find it there, and stay with the weights that were frozen.
        """
        if self.keeps_nothing():
            return None
        entries = self._kept.get(site)
        if not entries or calls.recorded():
            return None
        entry = next(iter(entries.values()))
        if not entry.frozen:
            return None
        if site.training or _want_gradients(sources) or not _fit(entry.sources, sources):
            self.drop(site)
            return None
        if sources[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.setdefault(site, {})[id(entry.value)] = entry.value
        return entry.value

    def freeze(self, derivation: Derivation) -> list[Tensor]:
        """Keep the value until it is dropped or a write is noticed.

        Returns the tensors kept: none where the value may not be kept, and none that is a source.
        """
        self.drop(derivation.site)
        sources = _sources(derivation)
        if sources is None or not derivation.keep or not _can_keep(sources):
            return []
        own = {tensor.untyped_storage().data_ptr() for tensor in sources}
        value = self._keep(derivation, sources, frozen=True).value
        return [t for t in _tensors_of(value) if t.untyped_storage().data_ptr() not in own]

    def drop(self, site: nn.Module) -> bool:
        """Forget what is kept of a site; whether there was anything."""
        found = self._kept.pop(site, None) is not None
        self.changes += found
        return found

    def frozen_of(self, site: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that `freeze` keeps of a site, and those that they were derived from."""
        entries = [e for e in self._kept.get(site, {}).values() if e.frozen]
        kept = [tensor for entry in entries for tensor in _tensors_of(entry.value)]
        return kept, [source.tensor for entry in entries for source in entry.sources]

    def _valid(self, derivation: Derivation, sources: tuple[Tensor, ...]) -> _Entry | None:
        entries = self._kept.get(derivation.site)
        if not entries:
            return None
        first = next(iter(entries.values()))
        if not _fit(first.sources, sources) or first.kinds != _kinds(derivation):
            self.drop(derivation.site)
            return None
        entry = entries.get(_autocast(sources[0]))
        if entry is None and first.frozen:  # frozen, and used under another dtype of autocast
            return self._keep(derivation, sources, frozen=True)
        return entry

    def _keep(self, derivation: Derivation, sources: tuple[Tensor, ...], *, frozen: bool) -> _Entry:
        # The copies first: a write by another thread must not lie between them and the value.
        taken = tuple(_Source.of(tensor, frozen=frozen) for tensor in sources)
        with torch.inference_mode(False), torch.no_grad():
            value = derivation.compute(derivation.attention)
            entry = _Entry(taken, _kinds(derivation), value, frozen)
        # A new dict: another thread may read the one that is kept.
        others = self._kept.get(derivation.site, {}) if frozen else {}
        self._kept[derivation.site] = {**others, _autocast(sources[0]): entry}
        self.changes += 1
        return entry


DERIVED = DerivedTensors()


def derived(derivation: Derivation) -> Any:
    """The derivation's value for the weights as they are, kept or computed: see the module."""
    if calls.recorded():
        return _derive(derivation)
    return DERIVED.get(derivation)


def _derive(derivation: Derivation) -> Any:
    """The value of one call in training, or of a recorded program.

    On a GPU the operator sums the gradient of a table in one order, where the gradient of PyTorch's
    indexing adds with atomics: other bits in each run.
    """
    attention = derivation.attention
    weight = next(attention.parameters(), None)
    learnt = weight is not None and weight.is_cuda and calls.wanted(weight=weight)
    return ((learnt and derivation.per_call) or derivation.compute)(attention)


_Module: Any = nn.Module  # untyped, as the classes of the libraries are that stand beside it


class Derives(_Module):  # type: ignore[misc]
    """What sites with a derivation inherit: training, loading and moving drop what is kept."""

    def train(self, mode: bool = True) -> Any:
        if mode:
            DERIVED.drop(self)
        return super().train(mode)

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        DERIVED.drop(self)
        super()._load_from_state_dict(*given, **named)

    def _apply(self, *given: Any, **named: Any) -> Any:
        DERIVED.drop(self)  # `to`, `half`, `cuda`
        return super()._apply(*given, **named)

    def elsa_derivation(self) -> Derivation | None:
        """What the site derives from its weights as it is now; None for nothing."""
        raise NotImplementedError


def _sources(derivation: Derivation) -> tuple[Tensor, ...] | None:
    """All tensors read; None where a network must run for its hooks, or is in training mode."""
    found = list(derivation.tensors)
    for network in derivation.networks:
        for module in network.modules():
            if module.training or has_hooks(module):
                return None
            found += module._parameters.values()
            found += module._buffers.values()
    if derivation.networks and torch.nn.modules.module._has_any_global_hook():
        return None
    return tuple(tensor for tensor in found if tensor is not None)


def _kinds(derivation: Derivation) -> tuple[type, ...]:
    return tuple(type(part) for network in derivation.networks for part in network.modules())


def _want_gradients(sources: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)


def _can_keep(sources: tuple[Tensor, ...]) -> bool:
    # A fake or wrapped tensor belongs to a trace, and an inference tensor has no version.
    plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_inference() for t in sources)
    if not sources or not plain or sources[0].is_meta:
        return False
    return not (sources[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _autocast(tensor: Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _fit(kept: tuple[_Source, ...], given: tuple[Tensor, ...]) -> bool:
    return len(kept) == len(given) and all(
        source.is_still(tensor) for source, tensor in zip(kept, given, strict=True)
    )


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a derived value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors_of(part)
