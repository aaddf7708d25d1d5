"""Whether the output of a model shows what its sites compute, and a copy in which it does.

Many models start with a head or a last gain of zeros: their output is the same whatever the sites
give, and its error of zero proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.patching import entry, is_layer, original, shared_copy
from elsa_core.proof.compare import floating_outputs
from elsa_core.proof.samples import moved, random_weight
from elsa_core.proof.sides import Given, own, watched


def depends(model: nn.Module, sites: Mapping[str, nn.Module], given: Given) -> bool:
    """Whether the original's output changes with what the attention sites give (without any, the
    patched layers); True where it does not run. The model is patched, in eval mode."""
    attention = [site for site in sites.values() if not is_layer(site)]

    def run() -> Any:
        args, kwargs = own(given)
        return floating_outputs(model(*args, **kwargs))

    try:
        with original(model), ExitStack() as hooks:
            before = run()
            for site in attention or sites.values():
                hooks.enter_context(watched(site, entry(site), _disturbed))
            after = run()
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        return True  # the check itself says why
    return any(not torch.equal(value, after[name]) for name, value in before.items())


def filled(model: nn.Module, oracle: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Copies over the same weights, but with random ones for those that are all zero, or None where
    none is. The second one is `oracle`, the same in float64."""
    places: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.is_floating_point() and weight.numel() and not bool(weight.any()):
            places.setdefault(id(weight), []).append(name)
    if not places:
        return None
    twins = shared_copy(model), shared_copy(oracle)
    generator = torch.Generator().manual_seed(0)
    for names in places.values():
        like = model.get_parameter(names[0]).detach()
        value = random_weight(names[0], like, generator).to(like)
        for twin, dtype in zip(twins, (like.dtype, torch.float64), strict=True):
            weight = nn.Parameter(value.to(dtype))
            for name in names:
                path, _, leaf = name.rpartition(".")
                twin.get_submodule(path)._parameters[leaf] = weight
    return twins


def _disturbed(_module: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any) -> Any:
    """Noise of the size of the output, or of one where that is zero, added to it."""

    def disturb(leaf: Tensor, noise: Tensor) -> Tensor:
        size = leaf.detach().float().square().mean().sqrt().to(leaf.dtype)
        return leaf + noise.to(leaf) * torch.where(size > 0, size, torch.ones_like(size))

    return moved(output, 0, disturb)
