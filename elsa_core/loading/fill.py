"""A model built from a recipe and filled with the tensors of a file, every one as it is."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.base.messages import first_line, listed, quiet
from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading import libraries
from elsa_core.loading.building import BUILD_ERRORS
from elsa_core.loading.fit import changed, differences, matches
from elsa_core.loading.imagesize import with_image_size
from elsa_core.loading.libraries import build, build_meta, label
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.recognise import explain_misfit
from elsa_core.loading.weights import Weights

# How much more than a model's numbers a file may hold, and be read: another tower, a decoder.
_FAR = 4
_FEW = 2**24
_ADVICE = "name the architecture it was made for (--arch, --model-kwargs KEY=VALUE)"
# Arguments of constructors that change the shape of position tensors or of the patch embedding.
_RESAMPLING = frozenset(("img_size", "window_size", "patch_size"))

Size = tuple[int, int] | None


def apply(
    recipe: Recipe, weights: Weights, image_size: Size, dtype: torch.dtype, given: Mapping[str, Any]
) -> tuple[nn.Module, Recipe, tuple[str, ...]]:
    """Build the model and put the weights in place, resized where the image size differs.

    Shapes are compared on the meta device first: a configuration that asks for more memory than
    the file has weights is refused before anything is allocated. Afterwards every tensor of the
    file must be in the model as it is, apart from those that another image size, window or patch
    size was asked to change, and from a classifier that `num_classes=0` drops.

    Returns:
        The model, its recipe, and notes about what was asked to change or to be dropped.

    Raises:
        ModelError: the tensors do not fit the architecture, would be resampled or dropped, or are
            whole numbers where it has weights.
        ArgumentError: the image size does not suit the model.
    """
    target = recipe if image_size is None else with_image_size(recipe, image_size)
    weights, dropped = _headless(recipe, weights) if drops_classifier(given) else (weights, [])
    misfit = f"{weights.path} does not fit {label(recipe)}"
    plain = build_meta(target)
    exact = matches(plain, weights.shapes)
    if not exact:
        _check_scale(plain, weights, recipe, misfit)
    _check_floating(plain, weights, recipe)
    try:
        with quiet():
            model = _filled(target, weights) if exact else _convert(target, recipe, weights)
    except ElsaError:
        raise
    except BUILD_ERRORS as error:
        why = explain_misfit(recipe, weights.shapes)
        raise ModelError(f"{misfit}: {why or first_line(error)}; {_ADVICE}") from error
    asked = _asked(target, recipe, plain, weights, given)
    resized = bool(asked) or target.size != recipe.size
    # A model that is not what the file holds: a proof about it would prove nothing.
    if found := changed(model, weights.tensors, asked, resized=resized):
        name = next(iter(found))
        more = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
        raise ModelError(f"{misfit} as it is: {name[:120]} {found[name]}{more}; {_ADVICE}")
    notes = [f"resampled as asked: {listed(asked)}"] if asked else []
    if dropped:
        notes.append(f"dropped as asked (num_classes=0): {listed(dropped)}")
    return model.eval().to(dtype=dtype), target, tuple(notes)


def drops_classifier(given: Mapping[str, Any]) -> bool:
    """True where the user has typed `num_classes=0`."""
    count = given.get("num_classes")
    return type(count) is int and count == 0


def _headless(recipe: Recipe, weights: Weights) -> tuple[Weights, list[str]]:
    """Return the weights without the tensors that only a model with a classifier has."""
    with_one = build_meta(dataclasses.replace(recipe, num_classes=2)).state_dict().keys()
    names = with_one - build_meta(recipe).state_dict().keys()
    shapes = {name: shape for name, shape in weights.shapes.items() if name not in names}

    def read() -> dict[str, Tensor]:
        return {name: weights.tensors[name] for name in shapes}

    kept = dataclasses.replace(weights, shapes=shapes, read=read)
    return kept, sorted(names & weights.shapes.keys())


def _filled(recipe: Recipe, weights: Weights) -> nn.Module:
    """Build a model and give it tensors of its own names and shapes."""
    kinds = {tensor.dtype for tensor in weights.tensors.values()}
    # Rounding float64 weights is left to the dtype that was asked for.
    dtype = torch.float64 if torch.float64 in kinds else torch.float32
    model = build(recipe).to(dtype=dtype)
    own = model.state_dict().keys()
    kept = {name: tensor for name, tensor in weights.tensors.items() if name in own}
    model.load_state_dict(kept, strict=False)
    return model


def _convert(target: Recipe, recipe: Recipe, weights: Weights) -> nn.Module:
    """Let the library read the file its own way: renamed tensors, resized position embeddings."""
    converted = libraries.of(target.library).converted
    if converted is not None:
        return converted(target, recipe, weights)
    model = build(target)
    model.load_state_dict(dict(weights.tensors))
    return model


def _asked(
    target: Recipe, recipe: Recipe, plain: nn.Module, weights: Weights, given: Mapping[str, Any]
) -> list[str]:
    """Return the tensors whose shape the user's image size, window or patch size changes."""
    if _RESAMPLING.intersection(given):
        return sorted(differences(plain, weights.shapes)[2])
    if target.size == recipe.size:
        return []
    native = {name: tensor.shape for name, tensor in build_meta(recipe).state_dict().items()}
    resized = plain.state_dict().items()
    return sorted(n for n, t in resized if n in weights.shapes and native.get(n) != t.shape)


def _check_floating(model: nn.Module, weights: Weights, recipe: Recipe) -> None:
    """Whole numbers where the model has weights would be read as weights."""
    for name, own in model.state_dict().items():
        given = weights.tensors.get(name)
        if given is not None and own.is_floating_point() and not given.is_floating_point():
            kind = str(given.dtype).removeprefix("torch.")
            raise ModelError(
                f"{weights.path}: tensor {name[:120]!r} is {kind}, and {label(recipe)} has a"
                " floating one; quantised weights are not supported"
            )


def _check_scale(model: nn.Module, weights: Weights, recipe: Recipe, misfit: str) -> None:
    """A model far larger than its file, far smaller, or with no tensor of it, cannot be meant."""
    shapes = weights.shapes
    missing, unexpected, _ = differences(model, shapes)
    total = len(shapes)
    if len(unexpected) == total or len(missing) > max(8, 4 * total):
        # A model beside parts of its own, such as a classifier on a backbone.
        part, count = Counter(name.partition(".")[0] for name in shapes).most_common(1)[0]
        other = 1 < count < total and not hasattr(model, part)
        hint = f"; --weights {part} takes {count} of its tensors" if other else ""
        raise ModelError(f"{misfit}: {explain_misfit(recipe, shapes)}{hint}")
    there, here = sum(map(math.prod, shapes.values())), sum(t.numel() for t in model.parameters())
    if there > _FAR * here + _FEW:
        raise ModelError(f"{misfit}: {there} numbers in the file and {here} in the model")
