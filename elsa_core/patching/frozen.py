"""`freeze`, `unfreeze` and `refresh`: what patched sites keep of tensors derived from weights.

Some sites use functions of weights alone: the bias that SwinV2's position network computes, a
table of relative positions read for every pair of tokens, the halves of a float32 weight that
tensor cores multiply. `elsa_core.patching.adapters.derived`
says when such a tensor is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from elsa_core.errors import ArgumentError, NothingPatchedError
from elsa_core.patching import adapters
from elsa_core.patching.adapters.derived import DERIVED, Derivation
from elsa_core.patching.rewrite import patched_sites
from elsa_core.patching.sites import plain_model


@dataclass(frozen=True)
class FreezeReport:
    """What `freeze` keeps.

    Attributes:
        sites: patched sites, and layers within them, for which derived tensors are kept.
        tensors: how many there are.
        nbytes: their memory in bytes, on the model's device.
    """

    sites: int
    tensors: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.sites:
            return "nothing to keep: no patched site derives a tensor from weights alone"
        return (
            f"{self.tensors} tensors derived from the weights of {self.sites} sites are kept: "
            f"{self.nbytes / 2**20:.2f} MiB"
        )


def freeze(model: nn.Module) -> FreezeReport:
    """Derive what patched sites derive from weights alone, once, and keep it.

    For inference with weights that do not change. It saves a GPU the derivation in every forward:
    the position network of SwinV2, gathered tables of biases, the halves of float32 weights. The
    halves take as much memory as the weights. It saves a CPU the comparison that shows that nothing
    was written. Without it no write is missed; after it, a write that PyTorch does not
    count (a fused optimizer, `.data`, a numpy view) is.

    These end it, for the sites that they reach: `model.train()`, `load_state_dict`, a forward that
    trains or wants gradients of these weights, a write that PyTorch counts, moving or casting a
    layer, `unfreeze` and `unpatch`. A CUDA graph records the derivation itself, so that its replays
    follow the weights. One that was captured frozen reads the kept halves of a layer's weight:
    capture again after the weights have changed, as `graphed` does.
    Compiled and exported programs derive in every run.

    Args:
        model: patched, in eval mode, any dtype and device. Copies and pickles of it are not frozen.

    Returns:
        How many tensors are kept, and their memory.

    Raises:
        TypeError: `model` is no `nn.Module`.
        NothingPatchedError: no site of the model is patched.
        ArgumentError: a patched site is in training mode.
    """
    kept = [DERIVED.freeze(derivation) for derivation in _derivations(model)]
    tensors = [tensor for of_site in kept for tensor in of_site]
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return FreezeReport(sum(bool(of_site) for of_site in kept), len(tensors), nbytes)


def unfreeze(model: nn.Module) -> int:
    """End `freeze`: what is derived follows the weights again, whoever writes them.

    Returns:
        The sites of which tensors had been kept.

    Raises:
        TypeError: `model` is no `nn.Module`.
    """
    return refresh(model)


def refresh(model: nn.Module) -> int:
    """Drop every tensor that was derived from weights; the next forward derives them again.

    Returns:
        The sites of which tensors had been kept.

    Raises:
        TypeError: `model` is no `nn.Module`.
    """
    return sum(DERIVED.drop(module) for module in plain_model(model).modules())


class FrozenState:
    """What `freeze` keeps of some modules now; `holds` says later whether that is still so.

    Attributes:
        tensors: kept, which a CUDA graph may read.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = [DERIVED.frozen_of(module) for module in modules]
        self.tensors = [tensor for kept, _ in found for tensor in kept]
        self._sources = [tensor for _, sources in found for tensor in sources]
        self._changes, self._versions = DERIVED.changes, self._now()

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self._sources]

    def holds(self) -> bool:
        """Whether nothing was kept or dropped since, and no source written that PyTorch counts."""
        return DERIVED.changes == self._changes and self._now() == self._versions


def _derivations(model: nn.Module) -> Iterator[Derivation]:
    model = plain_model(model)
    layers = {path: m for path, m in model.named_modules() if adapters.is_patched(m)}
    sites = patched_sites(model) or layers  # a model may have linear layers alone
    if not sites:
        raise NothingPatchedError(
            f"freeze: no site of {type(model).__name__} is patched; call patch first"
        )
    training = next((path for path, site in sites.items() if site.training), None)
    if training is not None:
        raise ArgumentError(
            f"freeze: {training or 'the model'} is in training mode: call model.eval() first"
        )
    for module in model.modules():  # also the layers within an MLP, which are no sites
        derive = getattr(module, "elsa_derivation", None)
        derivation: Derivation | None = None if derive is None else derive()
        if derivation is not None:
            yield derivation
