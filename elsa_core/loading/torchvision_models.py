"""torchvision: its classification models, their recipes and weights."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import nn

from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading import hub
from elsa_core.loading.library import Library, Size, imported
from elsa_core.loading.recipe import Preprocess, Recipe

# Of names of tensors: how the names of the models with such begin.
_PREFIXES = {"encoder.layers.encoder_layer_0.": "vit_", "features.1.0.": "swin_"}
_CLASSIFIERS = (
    *("heads.head.weight", "head.weight", "fc.weight", "classifier.weight"),
    "classifier.5.weight",  # of MaxViT
)


def _recipe(name: str, tag: str | None = None) -> Recipe:
    from torchvision.models import get_model_weights

    first = next(iter(get_model_weights(name)), None)
    preprocess = Preprocess(interpolation="bilinear")
    if first is not None:
        transform: Any = first.transforms()
        crop = int(transform.crop_size[0])
        preprocess = Preprocess(
            (3, crop, crop), tuple(transform.mean), tuple(transform.std),
            str(transform.interpolation.value), crop / transform.resize_size[0],
        )  # fmt: skip
    recipe = Recipe("torchvision", name, {}, None, preprocess)
    # constructors for 224 pixels whatever size the weights were trained at
    return recipe.at((224, 224)) if name.startswith(("vit_", "maxvit")) else recipe


def _build(recipe: Recipe) -> nn.Module:
    import torchvision

    args: Mapping[str, Any] = recipe.args
    if recipe.num_classes is not None:
        args = {**args, "num_classes": recipe.num_classes}
    if recipe.name not in TORCHVISION.names():
        raise ModelError(f"torchvision has no classification model {recipe.name!r}")
    builder = torchvision.models.get_model_builder(recipe.name)
    try:
        model: nn.Module = builder(weights=None, **args)
    except TypeError as error:
        if "multiple values" not in str(error):
            raise
        model = _with_fixed(inspect.unwrap(builder), args)
    return model


def _with_fixed(builder: Any, args: Mapping[str, Any]) -> nn.Module:
    """Build with `args` in the place of those that the builder fixes itself: `swin_t(**kwargs)`
    calls `_swin_transformer(window_size=[7, 7], ..., **kwargs)`. So the builder's code is run once
    with a recorder in that function's place, in globals of its own, and the function is called with
    what both gave."""
    known = builder.__globals__
    fixed: dict[str, Any] = {}
    names = [n for n in builder.__code__.co_names if isinstance(known.get(n), FunctionType)]
    if len(names) == 1:
        recorded = {names[0]: lambda *given, **named: fixed.update({} if given else named)}
        alone = FunctionType(builder.__code__, {**known, **recorded})
        alone.__kwdefaults__ = builder.__kwdefaults__
        alone()
    if not fixed:
        raise ModelError(f"torchvision's {builder.__name__} does not take {', '.join(args)}")
    # torchvision's Swin reads two sides here: one number is meant for both, as timm takes it
    sides = {
        key: [args[key]] * 2
        for key in ("patch_size", "window_size")
        if type(args.get(key)) is int and isinstance(fixed.get(key), list)
    }
    model: nn.Module = known[names[0]](**{**fixed, **args, **sides})
    return model


def _resized(recipe: Recipe, size: Size) -> Recipe:
    recipe = recipe.at(size)
    if recipe.name.startswith("vit_"):
        if size[0] != size[1]:
            raise ArgumentError(
                f"image_size (--img-size) must be square for torchvision's {recipe.name},"
                f" not {size}"
            )
        return recipe.with_args({"image_size": size[0]})
    maxvit = recipe.name.startswith("maxvit")
    return recipe.with_args({"input_size": list(size)}) if maxvit else recipe


def _published(recipe: Recipe) -> tuple[nn.Module, str]:
    from torchvision.models import get_model_weights

    weights = get_model_weights(recipe.name).DEFAULT
    hub.require_file(weights.url, need=f"the weights of torchvision:{recipe.name}")
    state = weights.get_state_dict(progress=False, check_hash=True)
    return _filled(recipe, state), f"torchvision {weights.name}"


def _filled(recipe: Recipe, state: Any) -> nn.Module:
    model: Any = _build(recipe)
    if hasattr(model, "image_size") and hasattr(model, "patch_size"):
        from torchvision.models.vision_transformer import interpolate_embeddings

        state = interpolate_embeddings(model.image_size, model.patch_size, dict(state))
    model.load_state_dict(state)
    filled: nn.Module = model
    return filled


TORCHVISION: Library = Library(
    name="torchvision",
    names=lambda: list((m := imported("torchvision", "torchvision").models).list_models(m)),
    kind="classification model",
    lookup=lambda text: (text, None) if text in TORCHVISION.names() else None,
    recipe=_recipe,
    build=_build,
    resized=_resized,
    published=_published,
    config_args=lambda cfg, preprocess: {},
    converted=lambda target, native, weights: _filled(target, weights.tensors),
    as_in=lambda recipe, shapes: (
        dataclasses.replace(
            recipe,
            num_classes=next((shapes[name][0] for name in _CLASSIFIERS if name in shapes), None),
        ),
    ),
    marks=lambda shapes: any(name.startswith(tuple(_PREFIXES)) for name in shapes),
    names_like=lambda shapes: [
        name
        for key, prefix in _PREFIXES.items()
        if any(tensor.startswith(key) for tensor in shapes)
        for name in TORCHVISION.names()
        if name.startswith(prefix)
    ],
)
