"""A named architecture fitted to tensors: classifier, channels and image size from the shapes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from elsa_core.errors import ArgumentError, ElsaError
from elsa_core.loading import libraries
from elsa_core.loading.libraries import build_meta, default_recipe, patch_step, resized
from elsa_core.loading.recipe import MAX_IMAGE_SIZE, Recipe
from elsa_core.loading.shown import Shapes, table_grid
from elsa_core.loading.spec import ModelSpec

# Keywords of the user that the recipe holds elsewhere than among the constructor's.
_OF_RECIPE = ("num_classes", "img_size")

# Buffers that older releases stored and that are computed from the image size.
_COMPUTED = re.compile(
    r"(.*\.)?(relative_position_index|attn_mask|relative_coords_table|position_ids"
    r"|relative_coordinates_log|freqs_cos|freqs_sin)"
)
# Read in pre-training alone, in the original files of DINOv2 and DINOv3; the periods of rotary
# positions and the mask of the key's bias are constants.
_UNUSED = re.compile(r"mask_token|local_cls_norm\..*|(.*\.)?(periods|bias_mask)")


def recipe_of(
    spec: ModelSpec, shapes: Shapes | None = None, given: Mapping[str, Any] | None = None
) -> Recipe:
    """Return the library's recipe, with classifier and channels as in the shapes (when given).

    Args:
        spec: of a library.
        shapes: tensor shapes by name.
        given: arguments of the constructor that the user has typed (--model-kwargs); they win.

    Raises:
        ArgumentError: the library takes no such arguments.
    """
    recipe = default_recipe(spec)
    if shapes is not None:
        recipe = libraries.of(recipe.library).as_in(recipe, shapes)
    return with_given(recipe, given) if given else recipe


def with_given(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the constructor's arguments that a user typed.

    Raises:
        ArgumentError: a CLIP, whose towers a configuration describes, or a value that cannot be.
    """
    libraries.refuse_arguments(recipe)
    args = {**recipe.args, **{k: v for k, v in given.items() if k not in _OF_RECIPE}}
    recipe = dataclasses.replace(recipe, args=args)
    if "num_classes" in given:
        if type(given["num_classes"]) is not int or not 0 <= given["num_classes"] < 2**31:
            raise ArgumentError("model_kwargs (--model-kwargs): num_classes must be >= 0")
        recipe = dataclasses.replace(recipe, num_classes=given["num_classes"])
    if type(given.get("in_chans")) is int and given["in_chans"] > 0:
        preprocess = recipe.preprocess.with_channels(given["in_chans"])
        recipe = dataclasses.replace(recipe, preprocess=preprocess)
    if "img_size" in given:
        size = given["img_size"]
        pair = (size, size) if type(size) is int else tuple(size) if _is_list(size) else ()
        if len(pair) != 2 or not all(type(n) is int and 0 < n <= MAX_IMAGE_SIZE for n in pair):
            raise ArgumentError(
                "model_kwargs (--model-kwargs): img_size must be one or two whole numbers from 1"
                f" to {MAX_IMAGE_SIZE}"
            )
        recipe = resized(recipe, (pair[0], pair[1]))
    return recipe


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def fitted(
    recipe: Recipe, shapes: Shapes, image_size: tuple[int, int] | None = None
) -> Recipe | None:
    """Return the recipe at the image size of the tensors when every name and shape then agrees."""
    try:
        model = build_meta(recipe)
        if matches(model, shapes):
            return recipe
        size = _image_size(model, recipe, shapes, image_size)
        if size is None or size == recipe.size or max(size) > MAX_IMAGE_SIZE:
            return None
        recipe = resized(recipe, size)
        return recipe if matches(build_meta(recipe), shapes) else None
    except ElsaError:
        return None


def differences(model: nn.Module, shapes: Shapes) -> tuple[set[str], set[str], set[str]]:
    """Return the names that are missing, that are unexpected, and that have another shape.

    Buffers that older releases stored may be missing; where both have them their shapes count,
    because they tell window and image size.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    computed = {
        name: tuple(tensor.shape)
        for name, tensor in model.named_buffers()
        if is_computed(name) and name in shapes
    }
    missing = {name for name in own if name not in shapes and not is_computed(name)}
    unexpected = {
        name for name in shapes if name not in own and not is_computed(name) and not is_unused(name)
    }
    there = own | computed
    wrong = {name for name, shape in there.items() if name in shapes and shapes[name] != shape}
    return missing, unexpected, wrong


def is_computed(name: str) -> bool:
    """True for the name of a buffer that is computed from window and image size."""
    return _COMPUTED.fullmatch(name) is not None


def is_unused(name: str) -> bool:
    """True for the name of a tensor that no model reads once it is trained."""
    return _UNUSED.fullmatch(name) is not None


def matches(model: nn.Module, shapes: Shapes) -> bool:
    """True when names and shapes agree, buffers that are computed apart."""
    return not any(differences(model, shapes))


def same_shapes(one: nn.Module, other: nn.Module) -> bool:
    """True when two models have parameters of the same names and shapes."""
    first, second = (
        {name: tensor.shape for name, tensor in model.named_parameters()} for model in (one, other)
    )
    return first == second


def _image_size(
    model: nn.Module, recipe: Recipe, shapes: Shapes, given: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Recover the image size from position tensors; None where they do not tell one."""
    tower: Any = getattr(model, "visual", model)
    step = patch_step(model, recipe)
    if step is None:
        return None
    grid = _grid(tower, recipe, shapes, model, None if given is None else
                 (given[0] // step[0], given[1] // step[1]))  # fmt: skip
    return None if grid is None else (grid[0] * step[0], grid[1] * step[1])


def _grid(
    tower: Any, recipe: Recipe, shapes: Shapes, model: nn.Module, given: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the patches (rows, columns) that the tensors were made for."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in own.items():
        leaf = name.rpartition(".")[2]
        there = shapes.get(name)
        if there is None or len(there) != len(shape):
            continue
        if leaf in ("pos_embed", "positional_embedding", "pos_embedding") and _visual(name, recipe):
            if len(shape) == 4:
                return there[1], there[2]
            tokens, usual = there[-2], shape[-2]
            patches = _usual_patches(tower, recipe, usual)
            return _square(tokens - (usual - patches), given)
        if leaf == "relative_position_bias_table" and not name.startswith(("layers", "stages")):
            side = table_grid(there[0])
            return None if side is None else (side, side)
    return None


def _visual(name: str, recipe: Recipe) -> bool:
    """The text tower of CLIP has position embeddings too; they say nothing about images."""
    return not recipe.two_towers or name.startswith("visual.")


def _usual_patches(tower: Any, recipe: Recipe, tokens: int) -> int:
    """Return how many of the position tokens at the recipe's own size are patches."""
    trunk = getattr(tower, "trunk", tower)
    grid = getattr(getattr(trunk, "patch_embed", None), "grid_size", None)
    grid = grid or getattr(tower, "grid_size", None)
    if grid is not None:
        return int(grid[0] * grid[1])
    return math.isqrt(tokens) ** 2


def _square(patches: int, given: tuple[int, int] | None) -> tuple[int, int] | None:
    if given is not None and given[0] * given[1] == patches:
        return given
    side = math.isqrt(max(patches, 0))
    return (side, side) if side and side * side == patches else None
