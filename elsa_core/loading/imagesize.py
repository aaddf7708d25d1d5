"""Another image size for a model: what is refused, and the sizes near by that would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from elsa_core.base.messages import first_line, side
from elsa_core.base.reading import memory_bytes
from elsa_core.errors import ArgumentError, ModelError, TooLargeError
from elsa_core.loading.libraries import build_meta, patch_step, resized
from elsa_core.loading.library import BUILD_ERRORS
from elsa_core.loading.recipe import MAX_IMAGE_SIZE, Recipe

MEMORY_SHARE = 0.8
# A block holds its input, a hidden layer and what that is made of at once.
ALIVE_ACTIVATIONS = 2
_SEARCH_STEPS = (32, 56, 64, 112, 224)


def checked_size(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width): one or two whole numbers of pixels in 1..MAX_IMAGE_SIZE."""
    where = "image_size (--img-size)"
    pair: tuple[Any, ...] = (image_size, image_size)
    if isinstance(image_size, Sequence) and not isinstance(image_size, str):
        pair = tuple(image_size)
    if len(pair) != 2 or any(type(side) is not int for side in pair):
        raise ArgumentError(f"{where} must be one or two whole numbers, not {image_size!r}")
    if min(pair) < 1:
        raise ArgumentError(f"{where} must be positive, not {min(pair)}")
    if max(pair) > MAX_IMAGE_SIZE:
        raise ArgumentError(f"{where} {max(pair)} is beyond the limit of {MAX_IMAGE_SIZE} pixels")
    return pair[0], pair[1]


def with_image_size(recipe: Recipe, image_size: int | Sequence[int]) -> Recipe:
    """Return the recipe for another image size, known to build and to run there on the meta device.

    ArgumentError: a size that the patches do not divide, that the model cannot run at, or that
    needs more memory than the machine has; it names the nearest sizes that work.
    """
    size = checked_size(image_size)
    if size == recipe.size:
        return recipe
    original = build_meta(recipe)
    step = patch_step(original, recipe)
    if step is not None and (size[0] % step[0] or size[1] % step[1]):
        near = _near(_neighbours(size[0], step[0]) if step[0] == step[1] else [])
        raise ArgumentError(
            f"image_size (--img-size) {side(size)} is not a multiple of the patch size"
            f" {side(step)} of {recipe.name}{near}"
        )
    target = resized(recipe, size)
    found = problem(target)
    # A model that the meta device cannot run at its own size says nothing about this one.
    if found is not None and problem(recipe, original) is None:
        # Square sizes at which the model runs, of the finest grid that has any.
        runs = (
            [
                near
                for near in _neighbours(size[0], step)
                if near <= MAX_IMAGE_SIZE and problem(resized(recipe, (near, near))) is None
            ]
            for step in _SEARCH_STEPS
        )
        near = _near(next(filter(None, runs), [recipe.size[0]]))
        raise ArgumentError(
            f"image_size (--img-size) {side(size)} does not suit {recipe.name}: {found}{near}"
        )
    return target


def problem(recipe: Recipe, model: nn.Module | None = None) -> str | None:
    """Why the model cannot be built or run at the recipe's size, None when it can.

    `model`: on the meta device, where it is built already. TooLargeError where it needs more memory
    than the machine has.
    """
    try:
        model = build_meta(recipe) if model is None else model
    except ModelError as error:
        return first_line(error)
    _check_memory(_bytes([*model.parameters(), *model.buffers()]), recipe)
    images = torch.empty(1, *recipe.preprocess.input_size, device="meta")
    tower: Any = model.visual if recipe.two_towers else model
    largest = 0

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, torch.Tensor):
            largest = max(largest, _bytes([output]))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            tower(images)
    except BUILD_ERRORS as error:
        return first_line(error)
    finally:
        for hook in hooks:
            hook.remove()
    held = _bytes([*model.parameters(), *model.buffers(), images])
    _check_memory(held + ALIVE_ACTIVATIONS * largest, recipe)
    return None


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _check_memory(needed: int, recipe: Recipe) -> None:
    """Refuse a size at which the model and one image exceed the machine's memory."""
    present = memory_bytes()
    if present is not None and needed > MEMORY_SHARE * present:
        raise TooLargeError(
            f"image_size (--img-size) {side(recipe.size)} makes {recipe.name} need about"
            f" {needed / 2**30:.0f} GiB for one image; this machine has {present / 2**30:.0f} GiB"
        )


def _neighbours(side: int, step: int) -> list[int]:
    """The multiples of `step` around `side`, without 0; `side` itself when it is one."""
    around = dict.fromkeys((side // step * step, -(-side // step) * step))
    return [near for near in around if near > 0]


def _near(sizes: Sequence[int]) -> str:
    return f"; nearest valid: {' or '.join(map(str, sizes))}" if sizes else ""
