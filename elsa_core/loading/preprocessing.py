"""How images become inputs, where a weights file does not say it: assumed, said, or given.

One architecture is published with several normalisations (ViT with 0.5 and with ImageNet's), and
the tensors of a DeiT are those of a ViT, so that a file of tensors alone does not tell. Nor does it
for torchvision's ViTs, some of whose weights were trained on images resized in another way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from elsa_core.errors import ArgumentError
from elsa_core.loading import libraries
from elsa_core.loading.recipe import (
    ASSUMABLE,
    CROP_MODES,
    INTERPOLATIONS,
    Given,
    Preprocess,
    Recipe,
)
from elsa_core.loading.stated import stated as read

_FLAGS = {key: f"--{key.replace('_', '-')}" for key in ASSUMABLE}


def with_given(preprocess: Preprocess, given: Given) -> Preprocess:
    """Return the preprocessing with what the user has given.

    Raises:
        ArgumentError: a value that cannot be.
    """
    changes: dict[str, Any] = {}
    count = preprocess.input_size[0]
    if given.mean is not None:
        changes["mean"] = _channels("mean", given.mean, count, -1e6)
    if given.std is not None:
        changes["std"] = _channels("std", given.std, count, 1e-6)
    if given.crop_pct is not None:
        if not isinstance(given.crop_pct, int | float):
            raise TypeError(f"crop_pct must be a number, not {type(given.crop_pct).__name__}")
        if not 0.05 <= given.crop_pct <= 2:
            raise ArgumentError("crop_pct (--crop-pct) must be a number from 0.05 to 2")
        changes["crop_pct"] = float(given.crop_pct)
    if given.interpolation is not None:
        if given.interpolation not in INTERPOLATIONS:
            raise ArgumentError(
                f"interpolation (--interpolation) must be one of {', '.join(INTERPOLATIONS)}"
            )
        changes["interpolation"] = given.interpolation
    left = tuple(key for key in preprocess.assumed if key not in changes)
    return dataclasses.replace(preprocess, **changes, assumed=left)


def unknown(recipe: Recipe) -> Recipe:
    """Return the recipe with its preprocessing marked as assumed."""
    # open_clip crops nothing in evaluation.
    keys = tuple(key for key in ASSUMABLE if not recipe.two_towers or key != "crop_pct")
    return _marked(recipe, keys)


def known(recipe: Recipe) -> Recipe:
    """Return the recipe with nothing marked as assumed."""
    return _marked(recipe, ())


def _marked(recipe: Recipe, keys: tuple[str, ...]) -> Recipe:
    preprocess = dataclasses.replace(recipe.preprocess, assumed=keys)
    return dataclasses.replace(recipe, preprocess=preprocess)


def filled(recipe: Recipe, stated: Given) -> Recipe:
    """Return the recipe with what a weights file states in the place of what is assumed."""
    return dataclasses.replace(recipe, preprocess=_filled(recipe.preprocess, stated))


def _filled(preprocess: Preprocess, stated: Given) -> Preprocess:
    count = preprocess.input_size[0]
    said = {key: getattr(stated, key) for key in preprocess.assumed}
    for key in ("mean", "std"):
        if len(said.get(key) or ()) not in (1, count):
            said[key] = None
    return with_given(preprocess, Given(**said))


def of_model(model: Any, input_size: tuple[int, int, int], given: Given) -> Preprocess | None:
    """The preprocessing that a model object states, as timm's do in `pretrained_cfg`.

    What it does not state, or states for another number of channels, is marked as assumed.

    Args:
        model: any module.
        input_size: channels, height and width in pixels.
        given: what the user says.

    Returns:
        None where neither the model nor the user says anything.

    Raises:
        ArgumentError: a value of `given` that cannot be.
    """
    cfg = getattr(model, "pretrained_cfg", None)
    said = read(cfg).preprocess if isinstance(cfg, dict) else Given()
    if said == given == Given():
        return None
    usual = Preprocess(assumed=ASSUMABLE)
    if isinstance(cfg, dict) and cfg.get("crop_mode") in CROP_MODES:
        usual = dataclasses.replace(usual, crop_mode=cfg["crop_mode"])
    mean, std = _several("mean", said.mean or ()), _several("std", said.std or ())
    if mean and len(mean) == len(std):
        usual = dataclasses.replace(usual, mean=mean, std=std)
    usual = dataclasses.replace(usual.with_channels(input_size[0]), input_size=input_size)
    found = _filled(usual, said)
    noted = {*getattr(model, "elsa_assumed", ()), *found.assumed}
    found = dataclasses.replace(found, assumed=tuple(key for key in ASSUMABLE if key in noted))
    return with_given(found, given)


def line(recipe: Recipe, alike: Sequence[Recipe], where: str) -> str:
    """One line about what is assumed, and what else it could be; "" for nothing.

    Args:
        recipe: of the model.
        alike: others with the same tensors that compute the same.
        where: the weights.
    """
    mine = recipe.preprocess
    if not mine.assumed:
        return ""
    others = {
        name: other
        for each in (recipe, *alike)
        for name, other in libraries.of(each.library).preprocessings(each).items()
        if len(other.mean) == len(mine.mean)
    }
    differ = {k: o for k, o in others.items() if any(_differ(o, mine, key) for key in mine.assumed)}
    told = f"{where} does not say its preprocessing: {assumed_text(mine)} assumed"
    tag = ", or --arch with a tag" if differ and libraries.of(recipe.library).has_tags else ""
    advice = f"give {', '.join(_FLAGS[key] for key in mine.assumed)}{tag}"
    if not differ:
        return f"{told}, the defaults of {recipe.name}: {advice}"
    # The candidate that differs in most is the one that would be missed worst.
    name = max(differ, key=lambda n: sum(_differ(differ[n], mine, k) for k in mine.assumed))
    keys = [key for key in mine.assumed if _differ(differ[name], mine, key)]
    more = f" and {len(differ) - 1} more have others" if len(differ) > 1 else " has others"
    return (
        f"{told}, the defaults of {recipe.name}; {name}{more} ({_text(differ[name], keys)}):"
        f" {advice}"
    )


def assumed_text(given: Preprocess) -> str:
    """The values that are assumed, in words."""
    return _text(given, given.assumed)


def _differ(one: Preprocess, other: Preprocess, key: str) -> bool:
    return bool(getattr(one, key) != getattr(other, key))


def _text(given: Preprocess, keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {_shown(getattr(given, key))}" for key in keys)


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    same = len(set(value)) == 1
    return " ".join(f"{each:g}" for each in (value[:1] if same else value))


def _channels(
    key: str, given: float | Sequence[float], count: int, least: float
) -> tuple[float, ...]:
    values = _several(key, given)
    if len(values) not in (1, count):
        raise ArgumentError(f"{key} (--{key}) must be one number or {count}, one for each channel")
    if not all(least <= value <= 1e6 for value in values):
        raise ArgumentError(f"{key} (--{key}) must be numbers from {least:g} to 1e6")
    return values * (count // len(values))


def _several(key: str, given: float | Sequence[float]) -> tuple[float, ...]:
    values = [given] if isinstance(given, int | float) else list(given)
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError(f"{key} must be one number or one a channel, not {given!r}")
    return tuple(map(float, values))
