"""Does a recipe fit what it is to be: an image size, the arguments that were typed, the tensors of
a file? And does a loaded model hold every one of those, unchanged?

Libraries convert older files as they load them: they rename, reshape, transpose and join tensors,
which keeps every number, and they resample and drop some, which does not.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base.messages import first_line, side
from elsa_core.base.reading import too_small_memory
from elsa_core.errors import ArgumentError, ElsaError, ModelError, TooLargeError
from elsa_core.loading import libraries
from elsa_core.loading.libraries import build_meta, patch_step
from elsa_core.loading.library import BUILD_ERRORS
from elsa_core.loading.names import Shapes
from elsa_core.loading.recipe import MAX_IMAGE_SIZE, SIZES, Recipe, required_pair
from elsa_core.loading.spec import ModelSpec

# Buffers that older releases stored and that are computed from window and image size.
is_computed = re.compile(
    r"(.*\.)?(relative_position_index|attn_mask|relative_coords_table|position_ids"
    r"|relative_coordinates_log|freqs_cos|freqs_sin)"
).fullmatch
# Read in pre-training alone, in the original files of DINOv2 and DINOv3; the periods of rotary
# positions and the mask of the key's bias are constants.
is_unused = re.compile(r"mask_token|local_cls_norm\..*|(.*\.)?(periods|bias_mask)").fullmatch
_CLASS_OFFSETS = 3  # BEiT's table: token to class, class to token, class to class
# A block holds its input, a hidden layer and what that is made of at once.
ALIVE_ACTIVATIONS = 2
_SEARCH_STEPS = (32, 56, 64, 112, 224)


def with_image_size(recipe: Recipe, image_size: int | Sequence[int]) -> Recipe:
    """Return the recipe for another image size, known to run there on the meta device.
    ArgumentError names the nearest sizes that work."""
    size = required_pair(image_size, "image_size (--img-size)", ArgumentError)
    if size == recipe.size:
        return recipe
    resized = libraries.of(recipe.library).resized
    target, original = resized(recipe, size), build_meta(recipe)
    step = patch_step(original, recipe)
    misses = step is not None and any(n % by for n, by in zip(size, step, strict=True))
    if step is not None and misses:
        steps: tuple[int, ...] = step[:1] if step[0] == step[1] else ()
        what = f"is not a multiple of the patch size {side(step)} of {recipe.name}"
    else:
        found = problem(target)
        # A model that the meta device cannot run at its own size says nothing about this one.
        if found is None or problem(recipe, original) is not None:
            return target
        steps = _SEARCH_STEPS
        what = f"does not suit {recipe.name}: {found}"
    # Square sizes at which the model runs, of the finest grid that has any.
    near: list[int] = []
    for grid in steps:
        around = dict.fromkeys((size[0] // grid * grid, -(-size[0] // grid) * grid))
        near = [n for n in around if 0 < n <= MAX_IMAGE_SIZE]
        if not misses:
            near = [n for n in near if problem(resized(recipe, (n, n))) is None]
        if near:
            break
    valid = " or ".join(map(str, near)) or side(recipe.size)
    raise ArgumentError(f"image_size (--img-size) {side(size)} {what}; nearest valid: {valid}")


def problem(recipe: Recipe, model: nn.Module | None = None) -> str | None:
    """Why the model cannot be built or run at the recipe's size, None when it can; `model`: on the
    meta device, where it is built already. TooLargeError: too much memory."""
    try:
        model = build_meta(recipe) if model is None else model
    except ModelError as error:
        return first_line(error)
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    images = torch.empty(1, *recipe.preprocess.input_size, device="meta")
    tower: Any = model.visual if recipe.two_towers else model
    found, bytes_of_outputs = None, [0]
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output: bytes_of_outputs.append(getattr(output, "nbytes", 0))
        )
        for module in model.modules()
    ]
    try:
        with torch.no_grad():
            tower(images)
        needed += images.nbytes + ALIVE_ACTIVATIONS * max(bytes_of_outputs)
    except BUILD_ERRORS as error:
        found = first_line(error)
    finally:
        for hook in hooks:
            hook.remove()
    if present := too_small_memory(needed):
        raise TooLargeError(
            f"image_size (--img-size) {side(recipe.size)} makes {recipe.name} need about"
            f" {needed / 2**30:.0f} GiB for one image; this machine has {present / 2**30:.0f} GiB"
        )
    return found


def check_sizes(spec: ModelSpec, sizes: Sequence[tuple[int, int]]) -> None:
    """ArgumentError for sizes that a named model cannot run at, before anything is loaded; a size
    that needs too much memory is none of these."""
    if spec.source not in libraries.names():
        return
    recipe = libraries.of(spec.source).recipe(spec.name, spec.tag)
    for size in sizes:
        with suppress(TooLargeError):
            with_image_size(recipe, size)


def with_kwargs(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the constructor's arguments that a user typed; a CLIP takes none."""
    if not given:
        return recipe
    where = "model_kwargs (--model-kwargs)"
    if recipe.two_towers:
        takers = [each.name for each in libraries.LIBRARIES if each.config_args is not None]
        raise ArgumentError(
            f"{where} are for {', '.join(takers[:-1])} and {takers[-1]}; {recipe.library}'s"
            f" {recipe.name} is described by an open_clip_config.json"
        )
    # Keywords that the recipe holds elsewhere than among the constructor's.
    count, sizes = given.get("num_classes"), [key for key in SIZES if key in given]
    apart = ("num_classes", *SIZES)
    recipe = recipe.with_args({key: value for key, value in given.items() if key not in apart})
    if "num_classes" in given:
        if type(count) is not int or not 0 <= count < 2**31:
            raise ArgumentError(f"{where}: num_classes must be >= 0")
        recipe = dataclasses.replace(recipe, num_classes=count)
    if type(given.get("in_chans")) is int and given["in_chans"] > 0:
        preprocess = recipe.preprocess.with_channels(given["in_chans"])
        recipe = dataclasses.replace(recipe, preprocess=preprocess)
    if len(sizes) > 1:
        raise ArgumentError(f"{where}: {' and '.join(sizes)} are one size: give one of them")
    for key in sizes:
        pair = required_pair(given[key], f"{where}: {key}", ArgumentError)
        recipe = libraries.of(recipe.library).resized(recipe, pair)
    return recipe


def fitted(
    recipe: Recipe, shapes: Shapes, image_size: tuple[int, int] | None = None
) -> Recipe | None:
    """Return the recipe at the image size of the tensors when every name and shape then agrees."""
    try:
        model = build_meta(recipe)
        if not any(differences(model, shapes)):
            return recipe
        step = patch_step(model, recipe)
        if step is None:
            return None
        usual = None if image_size is None else (image_size[0] // step[0], image_size[1] // step[1])
        grid = _grid(recipe, shapes, model, usual)
        size = None if grid is None else (grid[0] * step[0], grid[1] * step[1])
        if size is None or size == recipe.size or max(size) > MAX_IMAGE_SIZE:
            return None
        recipe = libraries.of(recipe.library).resized(recipe, size)
        return None if any(differences(build_meta(recipe), shapes)) else recipe
    except ElsaError:
        return None


def differences(model: nn.Module, shapes: Shapes) -> tuple[set[str], set[str], set[str]]:
    """Return the names that are missing, that are unexpected, and that have another shape. Buffers
    that older releases stored may be missing; where both have them their shapes count, because they
    tell window and image size."""
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


def explain_misfit(recipe: Recipe, shapes: Shapes) -> str:
    """Say in one line what differs between a recipe's tensors and these; "" for nothing."""
    model = build_meta(recipe)
    missing, unexpected, wrong = differences(model, shapes)
    parts: list[str] = []
    for what, names in (("missing", missing), ("unexpected", unexpected), ("other shape", wrong)):
        if names:
            listed = ", ".join(sorted(names)[:2]) + (", ..." if len(names) > 2 else "")
            parts.append(f"{len(names)} {what} ({listed})")
    own = {**dict(model.named_buffers()), **model.state_dict()}
    if wrong and not missing and not unexpected:
        name = min(wrong)
        parts.append(f"{list(shapes[name])} in the file and {list(own[name].shape)} in the model")
    return ", ".join(parts)


def _grid(
    recipe: Recipe, shapes: Shapes, model: nn.Module, given: tuple[int, int] | None
) -> tuple[int, int] | None:
    for name, tensor in model.state_dict().items():
        leaf = name.rpartition(".")[2]
        there = shapes.get(name)
        if there is None or len(there) != tensor.ndim:
            continue
        # The text tower of CLIP has position embeddings too; they say nothing about images.
        visual = not recipe.two_towers or name.startswith("visual.")
        if leaf in ("pos_embed", "positional_embedding", "pos_embedding") and visual:
            if tensor.ndim == 4:
                return there[1], there[2]
            tower: Any = getattr(model, "visual", model)
            embed = getattr(getattr(tower, "trunk", tower), "patch_embed", None)
            usual = getattr(embed, "grid_size", None) or getattr(tower, "grid_size", None)
            patches = math.isqrt(tensor.shape[-2]) ** 2 if usual is None else math.prod(usual)
            found = there[-2] - (tensor.shape[-2] - patches)
            if given is not None and given[0] * given[1] == found:
                return given
            side = math.isqrt(max(found, 0))
            return (side, side) if side and side * side == found else None
        if leaf == "relative_position_bias_table" and not name.startswith(("layers", "stages")):
            # a row for each offset in a g x g grid, and BEiT's of the class token
            for offsets in (there[0], there[0] - _CLASS_OFFSETS):
                side = math.isqrt(max(offsets, 0))
                if side % 2 and side * side == offsets:
                    return (side + 1) // 2, (side + 1) // 2
            return None
    return None


def changed(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    asked: Collection[str] = (),
    *,
    resized: bool = False,
) -> dict[str, str]:
    """Return the tensors of a file that the model does not hold as they are, with what happened.
    `asked` was to change by another size or window; `resized`: other buffers are computed."""
    state = model.state_dict()
    own = {**dict(model.named_buffers()), **state}
    left: dict[str, Tensor] = {}
    taken: set[str] = set()
    found: dict[str, str] = {}
    for name, tensor in _converted(state, tensors).items():
        held = own.get(name)
        if is_computed(name):
            # Two releases computed it, each with its own rounding; for another size it differs.
            if held is not None and not resized:
                same = held.shape == tensor.shape
                if not (same and torch.allclose(held.double(), tensor.double(), 1e-4, 1e-4)):
                    found[name] = "is not what the model computes"
        elif name in asked or (
            held is not None
            and held.shape == tensor.shape
            and torch.equal(held, tensor.to(held.dtype))
        ):
            taken.add(name)
        elif not is_unused(name):
            left[name] = tensor
    if left:
        for name in _lost(left, [t for name, t in state.items() if name not in taken]):
            held, what = own.get(name), "dropped"
            if held is not None:
                shape = "x".join(map(str, held.shape)) or "one number"
                same = held.shape == tensors[name].shape
                what = "changed" if same else f"resampled to {shape}"
            found[name] = f"would be {what}"
    shapes = {name: "x".join(map(str, tensors[name].shape)) or "one number" for name in found}
    return {name: f"({shapes[name]}) {what}" for name, what in found.items()}


def _converted(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with what timm adds up or masks as it reads DINO's original files."""
    found = dict(tensors)
    places, first = found.get("pos_embed"), found.get("cls_token")
    registers = "register_tokens" in found and "reg_token" in own
    if registers and first is not None and places is not None and places.ndim == 3:
        # timm adds the class token's position once, and keeps the patches' alone.
        found["cls_token"] = first + places[:, 0]
        found["pos_embed"] = places[:, 1:]
    for name, bias in tensors.items():
        if name.endswith("qkv.bias") and f"{name}_mask" in tensors and bias.shape[0] % 3 == 0:
            width = bias.shape[0] // 3
            found[name] = torch.cat([bias[:width], 0 * bias[:width], bias[2 * width :]])
    return found


def _lost(left: Mapping[str, Tensor], rest: list[Tensor]) -> list[str]:
    """Return the names of the tensors whose numbers are not among the rest's, whatever shape."""
    names, pool = [], list(rest)
    for name, tensor in left.items():
        if name.endswith("bias") and not tensor.count_nonzero():
            continue  # nothing is added without it
        for place, held in enumerate(pool):
            if held.numel() == tensor.numel():
                cast = tensor.to(held.dtype)
                turned = (cast, cast.t()) if cast.ndim == 2 else (cast,)
                # equal numbers in another shape, or transposed
                if any(torch.equal(held.flatten(), each.flatten()) for each in turned):
                    pool.pop(place)
                    break
        else:
            names.append(name)
    if names and pool:
        # Joined (q, k and v into qkv) or split: the same numbers, zeros that are added apart.
        dtype = pool[0].dtype
        one = torch.cat([left[name].flatten().to(dtype) for name in names])
        other = torch.cat([tensor.flatten().to(dtype) for tensor in pool])
        one, other = (values[values != 0].sort().values for values in (one, other))
        if torch.equal(one, other):
            return []
    return names
