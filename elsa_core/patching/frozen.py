"""`freeze`, `unfreeze` and `refresh`: what patched sites keep of tensors derived from weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from elsa_core.errors import ArgumentError, NothingPatchedError
from elsa_core.patching import adapters
from elsa_core.patching.adapters import derived
from elsa_core.patching.sites import plain_model


@dataclass(frozen=True)
class FreezeReport:
    """What `freeze` keeps: `tensors` that are derived from the weights of so many patched `sites`,
    and the `nbytes` of their memory, on the model's device."""

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

    For inference with weights that do not change: it saves SwinV2's position network and gathered
    tables of biases in every eager forward. A write that PyTorch does not count (a fused optimizer,
    `.data`, a numpy view) is not followed any more.

    These end it, for the sites that they reach: `model.train()`, `load_state_dict`, a forward that
    trains or wants gradients of these weights, a write that PyTorch counts, moving or casting a
    layer, `unfreeze` and `unpatch`. CUDA graphs, compiled and exported programs derive in every
    run.

    Args:
        model: patched, in eval mode, any dtype and device. Copies and pickles of it are not frozen.

    Returns:
        How many tensors are kept, and their memory.

    Raises:
        TypeError: `model` is no `nn.Module`.
        NothingPatchedError: no site of the model is patched.
        ArgumentError: a patched site is in training mode.
    """
    model = plain_model(model)
    patched = {path: m for path, m in model.named_modules() if adapters.patched_class(m)}
    if not patched:
        raise NothingPatchedError(
            f"freeze: no site of {type(model).__name__} is patched; call patch first"
        )
    training = next((path for path, site in patched.items() if site.training), None)
    if training is not None:
        raise ArgumentError(
            f"freeze: {training or 'the model'} is in training mode: call model.eval() first"
        )
    sites: list[Any] = [site for site in patched.values() if hasattr(site, "elsa_derivation")]
    derivations = filter(None, [site.elsa_derivation() for site in sites])
    kept = [derived.keep(derivation) for derivation in derivations]
    tensors = [tensor for of_site in kept for tensor in of_site]
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return FreezeReport(sum(bool(of_site) for of_site in kept), len(tensors), nbytes)


def unfreeze(model: nn.Module) -> int:
    """End `freeze`: as `refresh`."""
    return refresh(model)


def refresh(model: nn.Module) -> int:
    """Drop every tensor that was derived from weights; the next forward derives them again.

    Returns:
        The sites of which tensors had been kept.

    Raises:
        TypeError: `model` is no `nn.Module`.
    """
    modules = plain_model(model).modules()
    return sum(derived.KEPT.pop(module, None) is not None for module in modules)
