"""Samples near a value, each with other roundings, and weights that hide no term."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def moved(value: Any, seed: int, move: Callable[[Tensor, Tensor], Tensor], draw: Any = None) -> Any:
    """The same nested value, each floating tensor replaced by what `move` makes of it and of random
    numbers of its shape, normal ones or those of `draw`; in its dtype."""
    draw = partial(draw or torch.randn, generator=torch.Generator().manual_seed(seed))
    return pytree.tree_map_only(
        Tensor,
        lambda leaf: (
            move(leaf, draw(leaf.shape).to(leaf.device)).to(leaf.dtype)
            if leaf.is_floating_point()
            else leaf
        ),
        value,
    )


def nearby(case: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """The case with its floating tensors moved by 1.6%: another sample of the same roundings."""
    return tuple(
        moved(item, seed, lambda leaf, noise: (  # by the root of its mean square
            leaf + 2.0**-6 * noise * leaf.double().square().mean().sqrt().clamp_min(2.0**-6)
        ))
        for item in case
    )  # fmt: skip


def jittered(value: Any, seed: int) -> Any:
    """The same nested value, each number of its floating tensors moved by 1.6% of itself.

    Another sample of all roundings: which tokens are large, and what is zero or infinite, stays.
    """
    return moved(value, seed, lambda leaf, noise: leaf.double() * (1 + 2.0**-6 * noise))


def nudged(value: Any, seed: int) -> Any:
    """The same nested value, its floating tensors rounded once more at random.

    Each number moves by one ulp with probability 1/12, which has the variance of a rounding to
    nearest. What a model makes of it is another sample of the model's own rounding error.
    """

    def nudge(leaf: Tensor, draw: Tensor) -> Tensor:
        sign = (draw < 1 / 24).double() - (draw > 23 / 24).double()
        # A significand in [1, 2) times 1 + 0.75 eps rounds to its neighbour.
        return leaf.double() * (1.0 + 0.75 * torch.finfo(leaf.dtype).eps * sign)

    return moved(value, seed, nudge, torch.rand)


def random_weight(
    name: str, like: Tensor, generator: torch.Generator, spread: float = 1.0
) -> Tensor:
    """A random parameter that keeps activations near one: gains near one (`name` tells them from
    biases), no bias at zero. `spread` below 1 makes all but the gains smaller."""
    noise = torch.randn(like.shape, generator=generator)
    fan_in = like[0].numel() if like.ndim > 1 else 1
    gain = like.ndim < 2 and name.rpartition(".")[2] in ("weight", "gamma", "scale")
    width = fan_in**-0.5 if like.ndim > 1 else 0.1
    return float(gain) + spread * width * noise


def zeros_filled(*modules: nn.Module) -> list[nn.Module]:
    """Copies of a module, and of the same one in float64, over the same weights, but with random
    ones for those that are all zero; none where no weight is. A last gain of zero hides everything
    that a module computes; a bias of zeros hides itself."""
    generator = torch.Generator().manual_seed(0)
    values = {
        name: random_weight(name, weight, generator).to(weight)
        for name, weight in modules[0].named_parameters()
        if weight.is_floating_point() and weight.numel() and not bool(weight.any())
    }
    return [with_weights(module, values) for module in modules if values]


def with_weights(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module over the same weights, but for these parameters by name."""
    weights = dict(module.named_parameters())
    shared = [*module.buffers(), *(w for name, w in weights.items() if name not in values)]
    twin = copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
    with torch.no_grad():
        for name, value in values.items():
            twin.get_parameter(name).copy_(value)
    twin.train()  # until they train, some models keep what they made of a table of biases
    twin.eval()  # LeViT's returns nothing
    return twin
