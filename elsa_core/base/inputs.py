"""Inputs of a model: their sizes, generated images, and a caller's cases."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base.messages import first_line
from elsa_core.errors import ArgumentError

_DEFAULT_SIZE = 224
_MAX_SIDE = 2**20  # beyond it the image alone would not fit in any memory

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
    """Images [batch, *input_size] that need no files, in normalised pixels: `noise` is what a
    network sees of a busy photograph; `constant` gives equal tokens, so that the weights are nearly
    uniform; `bright patch` has one token unlike all others; `large` has eight times the usual
    amplitude. The global random state is neither used nor changed. `text`: (context length,
    vocabulary) for a model that takes image and text (CLIP): each case is then (images, token ids
    int64 [batch, context length]). ArgumentError: a size is not positive."""
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


def resolved_input_size(
    model: nn.Module, input_size: int | tuple[int, ...] | None
) -> tuple[int, int, int]:
    """(C, H, W) from what the caller gave, else from the model, else 224 x 224."""
    channels = _channels(model)
    if input_size is None:
        return (channels, *(_own_size(model) or (_DEFAULT_SIZE, _DEFAULT_SIZE)))
    sides = (input_size,) * 2 if isinstance(input_size, int) else tuple(input_size)
    if len(sides) == 2:
        sides = (channels, *sides)
    if len(sides) != 3 or not all(
        isinstance(side, int) and 0 < side <= _MAX_SIDE for side in sides
    ):
        raise ArgumentError(
            f"input_size={input_size!r} is no image size: give (channels, height, width) or a side"
        )
    return sides[0], sides[1], sides[2]


def _own_size(model: nn.Module) -> tuple[int, int] | None:
    sizes: list[Any] = []
    visual, trunk = getattr(model, "visual", None), getattr(model, "trunk", None)
    if isinstance(visual, nn.Module):
        sizes += [getattr(visual, "image_size", None), _own_size(visual)]
    if isinstance(trunk, nn.Module):
        sizes.append(_own_size(trunk))
    else:
        config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
        sizes += [
            getattr(getattr(model, "patch_embed", None), "img_size", None),
            tuple(config.get("input_size") or ())[1:] if isinstance(config, dict) else None,
            getattr(model, "image_size", None),
            *(getattr(module, "img_size", None) for module in model.modules()),
        ]
    for size in sizes:
        pair = (size, size) if type(size) is int else size
        if isinstance(pair, tuple | list) and [*map(type, pair)] == [int, int]:
            return pair[0], pair[1]
    return None


def _channels(model: nn.Module) -> int:
    config = getattr(model, "pretrained_cfg", None)
    config = config if isinstance(config, dict) else {}
    names = config.get("first_conv") or "patch_embed.proj"
    modules = dict(model.named_modules())
    for name in (names,) if isinstance(names, str) else names:
        if isinstance(modules.get(name), nn.Conv2d):
            return int(modules[name].in_channels)
    if config.get("input_size"):
        return int(config["input_size"][0])
    return next((m.in_channels for m in modules.values() if isinstance(m, nn.Conv2d)), 3)


def as_cases(inputs: ModelInput | Mapping[str, ModelInput]) -> dict[str, tuple[Any, ...]]:
    """The caller's inputs as named tuples of model arguments: TypeError for what is none,
    ArgumentError for a tensor that is empty, without a batch dim or not finite."""
    named = inputs if isinstance(inputs, Mapping) else {"input": inputs}
    cases: dict[str, tuple[Any, ...]] = {}
    for name, value in named.items():
        if not isinstance(value, Tensor | tuple):
            where = f"inputs[{name!r}]" if named is inputs else "inputs"
            given = type(value).__name__
            raise TypeError(f"{where} must be a torch.Tensor or a tuple with one, not {given}")
        cases[str(name)] = value if isinstance(value, tuple) else (value,)
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


def read_inputs(path: Path, model: nn.Module) -> tuple[Any, ...]:
    """The arguments of a model's `forward` in a file: a tensor, a sequence, or a dict by names; .pt
    (read without running code in it) or .npz (`arr_0`, ... of `numpy.savez(path, first, second)` in
    order). ArgumentError: no such file, another kind, or other names."""
    where = f"inputs (--inputs) {path}"
    try:
        if path.suffix == ".npz":
            import numpy as np

            with np.load(path, allow_pickle=False) as arrays:
                found: Any = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
            if all(name.startswith("arr_") for name in found):
                found = tuple(found.values())
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(found, Tensor):
            return (found,)
        if isinstance(found, tuple | list) and found:
            return tuple(found)
        if not isinstance(found, dict) or not found:
            raise ArgumentError(f"{where}: holds no tensor, sequence or dict")
        bound = inspect.signature(model.forward).bind(**found)
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(f"{where}: {first_line(error)}") from error
    last = list(bound.arguments)[-1]
    bound.apply_defaults()
    if by_name := [name for name in found if name in bound.kwargs]:
        raise ArgumentError(f"{where}: {', '.join(by_name)} cannot be given by place")
    return bound.args[: list(bound.arguments).index(last) + 1]
