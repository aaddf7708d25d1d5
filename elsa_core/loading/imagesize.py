"""Another image size for a model: what is refused, and the sizes near by that would do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from elsa_core.base.messages import first_line, side
from elsa_core.base.reading import memory_bytes
from elsa_core.errors import ArgumentError, ModelError, TooLargeError
from elsa_core.loading import libraries
from elsa_core.loading.libraries import build_meta, default_recipe, patch_step
from elsa_core.loading.library import BUILD_ERRORS
from elsa_core.loading.recipe import MAX_IMAGE_SIZE, Recipe
from elsa_core.loading.spec import ModelSpec

MEMORY_SHARE = 0.8
# A block holds its input, a hidden layer and what that is made of at once.
ALIVE_ACTIVATIONS = 2
_SEARCH_STEPS = (32, 56, 64, 112, 224)


def checked_size(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width): one or two whole numbers of pixels in 1..MAX_IMAGE_SIZE."""
    where = "image_size (--img-size)"
    pair = (image_size,) * 2 if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or any(type(side) is not int for side in pair):
        raise ArgumentError(f"{where} must be one or two whole numbers, not {image_size!r}")
    if min(pair) < 1:
        raise ArgumentError(f"{where} must be positive, not {min(pair)}")
    if max(pair) > MAX_IMAGE_SIZE:
        raise ArgumentError(f"{where} {max(pair)} is beyond the limit of {MAX_IMAGE_SIZE} pixels")
    return pair[0], pair[1]


def with_image_size(recipe: Recipe, image_size: int | Sequence[int]) -> Recipe:
    """Return the recipe for another image size, known to run there on the meta device.
    ArgumentError names the nearest sizes that work."""
    size = checked_size(image_size)
    if size == recipe.size:
        return recipe
    resized = libraries.of(recipe.library).resized
    target, original = resized(recipe, size), build_meta(recipe)
    step = patch_step(original, recipe)
    if step is not None and (size[0] % step[0] or size[1] % step[1]):
        near = _neighbours(size[0], step[0]) if step[0] == step[1] else []
        what = f"is not a multiple of the patch size {side(step)} of {recipe.name}"
    else:
        found = problem(target)
        # A model that the meta device cannot run at its own size says nothing about this one.
        if found is None or problem(recipe, original) is not None:
            return target
        # Square sizes at which the model runs, of the finest grid that has any.
        runs = (
            [
                near
                for near in _neighbours(size[0], step)
                if near <= MAX_IMAGE_SIZE and problem(resized(recipe, (near, near))) is None
            ]
            for step in _SEARCH_STEPS
        )
        near = next(filter(None, runs), [recipe.size[0]])
        what = f"does not suit {recipe.name}: {found}"
    valid = f"; nearest valid: {' or '.join(map(str, near))}" if near else ""
    raise ArgumentError(f"image_size (--img-size) {side(size)} {what}{valid}")


def _neighbours(side: int, step: int) -> list[int]:
    """The multiples of `step` around `side`, without 0; `side` itself when it is one."""
    around = dict.fromkeys((side // step * step, -(-side // step) * step))
    return [near for near in around if near > 0]


def problem(recipe: Recipe, model: nn.Module | None = None) -> str | None:
    """Why the model cannot be built or run at the recipe's size, None when it can; `model`: on the
    meta device, where it is built already. TooLargeError: too much memory."""
    try:
        model = build_meta(recipe) if model is None else model
    except ModelError as error:
        return first_line(error)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    _check_memory(held, recipe)
    images = torch.empty(1, *recipe.preprocess.input_size, device="meta")
    tower: Any = model.visual if recipe.two_towers else model
    largest = 0

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, torch.Tensor):
            largest = max(largest, output.nbytes)

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            tower(images)
    except BUILD_ERRORS as error:
        return first_line(error)
    finally:
        for hook in hooks:
            hook.remove()
    _check_memory(held + images.nbytes + ALIVE_ACTIVATIONS * largest, recipe)
    return None


def _check_memory(needed: int, recipe: Recipe) -> None:
    present = memory_bytes()
    if present is not None and needed > MEMORY_SHARE * present:
        raise TooLargeError(
            f"image_size (--img-size) {side(recipe.size)} makes {recipe.name} need about"
            f" {needed / 2**30:.0f} GiB for one image; this machine has {present / 2**30:.0f} GiB"
        )


def check_sizes(spec: ModelSpec, sizes: Sequence[tuple[int, int]]) -> None:
    """ArgumentError for sizes that a named model cannot run at, before anything is loaded; a size
    that needs too much memory is none of these."""
    if spec.path is not None or spec.source == "hub":
        return
    recipe = default_recipe(spec)
    for size in sizes:
        with suppress(TooLargeError):
            with_image_size(recipe, size)
