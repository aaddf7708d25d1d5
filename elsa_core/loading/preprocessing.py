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
from elsa_core.loading.recipe import ASSUMABLE, CROP_MODES, Given, Preprocess, Recipe
from elsa_core.loading.stated import stated as read

_FLAGS = {key: f"--{key.replace('_', '-')}" for key in ASSUMABLE}


def with_given(preprocess: Preprocess, given: Given) -> Preprocess:
    """Return the preprocessing with what the user has given."""
    said = {key: getattr(given, key) for key in ASSUMABLE}
    for key, value in said.items():
        one = [value] if value is None or isinstance(value, int | float) else list(value)
        if key != "interpolation" and not all(isinstance(v, int | float | None) for v in one):
            raise TypeError(f"{key} must be a number, or one a channel, not {value!r}")
        if key in ("mean", "std") and value is not None:
            said[key] = one
    left = tuple(key for key in preprocess.assumed if said[key] is None)
    found = preprocess.with_said(said, lambda key: f"{key} ({_FLAGS[key]})", ArgumentError)
    return dataclasses.replace(found, assumed=left)


def unknown(recipe: Recipe) -> Recipe:
    """Return the recipe with its preprocessing marked as assumed."""
    # open_clip crops nothing in evaluation.
    keys = tuple(key for key in ASSUMABLE if not recipe.two_towers or key != "crop_pct")
    return recipe.with_preprocess(assumed=keys)


def filled(preprocess: Preprocess, stated: Given) -> Preprocess:
    """Return the preprocessing with what a weights file states in the place of what is assumed."""
    said = {key: getattr(stated, key) for key in preprocess.assumed}
    for key in ("mean", "std"):
        if len(said.get(key) or ()) not in (1, preprocess.input_size[0]):
            said[key] = None
    return with_given(preprocess, Given(**said))


def of_model(model: Any, input_size: tuple[int, int, int], given: Given) -> Preprocess | None:
    """The preprocessing that a model object states, as timm's do in `pretrained_cfg`; None where
    neither the model nor the user (`given`) says anything. What it does not state, or states for
    another number of channels than that of `input_size` (C, H, W), is marked as assumed."""
    cfg = getattr(model, "pretrained_cfg", None)
    said = read(cfg).preprocess if isinstance(cfg, dict) else Given()
    if said == given == Given():
        return None
    usual = Preprocess(assumed=ASSUMABLE)
    if isinstance(cfg, dict) and cfg.get("crop_mode") in CROP_MODES:
        usual = dataclasses.replace(usual, crop_mode=cfg["crop_mode"])
    mean, std = tuple(said.mean or ()), tuple(said.std or ())  # type: ignore[arg-type]
    if mean and len(mean) == len(std):
        usual = dataclasses.replace(usual, mean=mean, std=std)
    usual = dataclasses.replace(usual.with_channels(input_size[0]), input_size=input_size)
    found = filled(usual, said)
    noted = {*getattr(model, "elsa_assumed", ()), *found.assumed}
    found = dataclasses.replace(found, assumed=tuple(key for key in ASSUMABLE if key in noted))
    return with_given(found, given)


def line(recipe: Recipe, alike: Sequence[Recipe], where: str) -> str:
    """One line about what is assumed of the weights `where`, and what else it could be, by the
    recipe and others that compute the same; "" for nothing."""
    mine = recipe.preprocess
    if not mine.assumed:
        return ""
    differ = {}  # which keys of the preprocessings of other published weights
    others = {}
    for each in (recipe, *alike):
        for name, other in libraries.of(each.library).preprocessings(each).items():
            keys = [key for key in mine.assumed if getattr(other, key) != getattr(mine, key)]
            if keys and len(other.mean) == len(mine.mean):
                differ[name], others[name] = keys, other
    told = (
        f"{where} does not say its preprocessing: {assumed_text(mine)} assumed, the defaults of"
        f" {recipe.name}"
    )
    advice = f"give {', '.join(_FLAGS[key] for key in mine.assumed)}"
    if not differ:
        return f"{told}: {advice}"
    if libraries.of(recipe.library).has_tags:
        advice += ", or --arch with a tag"
    # The candidate that differs in most is the one that would be missed worst.
    name = max(differ, key=lambda name: len(differ[name]))
    more = f" and {len(differ) - 1} more have others" if len(differ) > 1 else " has others"
    return f"{told}; {name}{more} ({_text(others[name], differ[name])}): {advice}"


def assumed_text(given: Preprocess) -> str:
    """The values that are assumed, in words."""
    return _text(given, given.assumed)


def _text(given: Preprocess, keys: Sequence[str]) -> str:
    words = []
    for key in keys:
        value = getattr(given, key)
        values = value if isinstance(value, tuple) else (value,)
        values = values[:1] if len(set(values)) == 1 else values
        shown = " ".join(v if isinstance(v, str) else f"{v:g}" for v in values)
        words.append(f"{key} {shown}")
    return ", ".join(words)
