"""Inputs of a model for `check`: generated images, a caller's cases, and samples near them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core.errors import ArgumentError

ModelInput = Tensor | tuple[Any, ...]


def generated_inputs(
    input_size: Sequence[int],
    batch_size: int,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    text: tuple[int, int] | None = None,
) -> dict[str, ModelInput]:
    """Images that need no files, in normalised pixels: [batch, C, H, W] each.

    `noise` is what a network sees of a busy photograph; `constant` gives equal tokens, so that
    the weights are nearly uniform; `bright patch` has one token unlike all others; `large` has
    eight times the usual amplitude. The global random state is neither used nor changed.

    Args:
        input_size: (C, H, W).
        batch_size: Images in each case.
        text: (context length, vocabulary) for a model that takes image and text (CLIP): each case
            is then (images, token ids int64 [batch, context length]).

    Raises:
        ArgumentError: A size is not positive.
    """
    if len(input_size) != 3 or min(input_size) < 1 or batch_size < 1:
        raise ArgumentError(
            f"input_size={tuple(input_size)}, batch_size={batch_size}: expected (C, H, W) and a "
            f"batch size, all positive"
        )
    channels, height, width = input_size
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, channels, height, width)
    noise = torch.randn(shape, generator=generator)
    levels = torch.linspace(-1.0, 1.0, batch_size).view(batch_size, 1, 1, 1)
    bright = 0.05 * torch.randn(shape, generator=generator)
    rows, columns = max(1, height // 8), max(1, width // 8)
    top, left = (height - rows) // 2, (width - columns) // 2
    bright[:, :, top : top + rows, left : left + columns] += 10.0
    images = {
        "noise": noise,
        "constant": levels.expand(shape).contiguous(),
        "bright patch": bright,
        "large": 8.0 * torch.randn(shape, generator=generator),
    }
    cases: dict[str, ModelInput] = {}
    for name, values in images.items():
        image = values.to(device=device, dtype=dtype)
        tokens = _token_ids(batch_size, text, generator).to(device) if text else None
        cases[name] = image if tokens is None else (image, tokens)
    return cases


def _token_ids(batch: int, text: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Captions as CLIP's tokeniser gives them: start, words, end (the largest id), zeros."""
    length, vocabulary = text
    ids = torch.randint(1, max(2, vocabulary - 2), (batch, length), generator=generator)
    ids[:, 0] = vocabulary - 2
    for row in range(batch):
        end = length - 1 - (row * length // 3) % max(1, length - 1)
        ids[row, end] = vocabulary - 1
        ids[row, end + 1 :] = 0
    return ids


def text_shape(model: nn.Module) -> tuple[int, int] | None:
    """(context length, vocabulary) of a model that takes image and text, else None."""
    length, vocabulary = (getattr(model, name, None) for name in ("context_length", "vocab_size"))
    if isinstance(length, int) and isinstance(vocabulary, int):
        return length, vocabulary
    return None


def as_cases(inputs: ModelInput | Mapping[str, ModelInput]) -> dict[str, tuple[Any, ...]]:
    """The caller's inputs as named tuples of model arguments."""
    named = inputs if isinstance(inputs, Mapping) else {"input": inputs}
    cases = {
        str(name): value if isinstance(value, tuple) else (value,) for name, value in named.items()
    }
    for name, value in cases.items():
        tensors = [item for item in value if isinstance(item, Tensor)]
        if not tensors or min(item.numel() for item in tensors) == 0:
            raise ArgumentError(
                f"inputs[{name!r}]: expected a tensor or a tuple of tensors, none of them empty"
            )
        if not any(item.ndim for item in tensors):
            raise ArgumentError(f"inputs[{name!r}]: no tensor in it has a batch dim")
        if not all(bool(item.isfinite().all()) for item in tensors):
            raise ArgumentError(f"inputs[{name!r}]: holds NaN or infinite values")
    if not cases:
        raise ArgumentError("inputs: no case given; pass a tensor, a tuple or a mapping of them")
    return cases


def chunks(case: tuple[Any, ...], size: int) -> Iterator[tuple[Any, ...]]:
    """A case cut along its batch (dim 0 of its first tensor); other values go with every chunk."""
    batch = next(item.shape[0] for item in case if isinstance(item, Tensor) and item.ndim)
    for start in range(0, batch, size):
        yield tuple(
            item[start : start + size]
            if isinstance(item, Tensor) and item.ndim and item.shape[0] == batch
            else item
            for item in case
        )


def nearby(case: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """The case with its floating tensors moved by 1.6%: another sample of the same roundings."""

    def move(tensor: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        rms = tensor.float().square().mean().sqrt().clamp_min(2.0**-6).to(tensor.dtype)
        return tensor + 2.0**-6 * rms * noise

    return tuple(
        move(item) if isinstance(item, Tensor) and item.is_floating_point() else item
        for item in case
    )


def jittered(value: Any, seed: int) -> Any:
    """The same nested value, each number of its floating tensors moved by 1.6% of itself.

    Another sample of all roundings: which tokens are large, and what is zero or infinite, stays.
    """
    generator = torch.Generator().manual_seed(seed)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        noise = torch.randn(leaf.shape, generator=generator).to(leaf.device)
        return (leaf.double() * (1.0 + 2.0**-6 * noise)).to(leaf.dtype)

    return pytree.tree_map(move, value)


def nudged(value: Any, seed: int) -> Any:
    """The same nested value, its floating tensors rounded once more at random.

    Each number moves by one ulp with probability 1/12, which has the variance of a rounding to
    nearest. What a model makes of it is another sample of the model's own rounding error.
    """
    generator = torch.Generator().manual_seed(seed)

    def nudge(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        draw = torch.rand(leaf.shape, generator=generator).to(leaf.device)
        sign = (draw < 1 / 24).double() - (draw > 23 / 24).double()
        # A significand in [1, 2) times 1 + 0.75 eps rounds to its neighbour.
        return (leaf.double() * (1.0 + 0.75 * torch.finfo(leaf.dtype).eps * sign)).to(leaf.dtype)

    return pytree.tree_map(nudge, value)


def random_weight(
    name: str, like: Tensor, generator: torch.Generator, spread: float = 1.0
) -> Tensor:
    """A random parameter that keeps activations near one: gains near one, no bias at zero.

    `name` tells gains from biases; `spread` below 1 makes all of them smaller but the gains.
    """
    noise = torch.randn(like.shape, generator=generator)
    fan_in = like[0].numel() if like.ndim > 1 else 1
    gain = like.ndim < 2 and name.rpartition(".")[2] in ("weight", "gamma", "scale")
    width = fan_in**-0.5 if like.ndim > 1 else 0.1
    return float(gain) + spread * width * noise
