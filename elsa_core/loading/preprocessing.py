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
from elsa_core.loading.recipe import INTERPOLATIONS, Given, Preprocess, Recipe

KEYS = ("mean", "std", "crop_pct", "interpolation")
_FLAGS = "--mean, --std, --crop-pct, --interpolation"


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


def assumed(
    recipe: Recipe, alike: Sequence[Recipe], given: Given, where: str
) -> tuple[Recipe, str]:
    """Mark what the published candidates differ in, and the user does not give, as assumed.

    Args:
        recipe: the one that was chosen.
        alike: others with the same tensors that compute the same.
        given: what the user says.
        where: the file, for the line.

    Returns:
        The recipe, and one line about what is assumed and what else it could be; "" for nothing.
    """
    mine = recipe.preprocess
    others = {
        name: other
        for each in (recipe, *alike)
        for name, other in libraries.of(each.library).preprocessings(each).items()
        if len(other.mean) == len(mine.mean)
    }
    keys = tuple(
        key
        for key in KEYS
        if getattr(given, key) is None and any(_differ(o, mine, key) for o in others.values())
    )
    recipe = dataclasses.replace(recipe, preprocess=dataclasses.replace(mine, assumed=keys))
    return recipe, _line(where, recipe, others) if keys else ""


def _line(where: str, recipe: Recipe, others: dict[str, Preprocess]) -> str:
    mine = recipe.preprocess
    differ = {k: o for k, o in others.items() if any(_differ(o, mine, key) for key in mine.assumed)}
    # The candidate that differs in most is the one that would be missed worst.
    name = max(differ, key=lambda n: sum(_differ(differ[n], mine, k) for k in mine.assumed))
    keys = [key for key in mine.assumed if _differ(differ[name], mine, key)]
    more = f" and {len(differ) - 1} more have others" if len(differ) > 1 else " has others"
    tag = ", or --arch with a tag" if libraries.of(recipe.library).has_tags else ""
    return (
        f"{where} does not say its preprocessing: {_text(mine, mine.assumed)} assumed, as published"
        f" for {recipe.name}; {name}{more} ({_text(differ[name], keys)}): give {_FLAGS}{tag}"
    )


def _differ(one: Preprocess, other: Preprocess, key: str) -> bool:
    return bool(getattr(one, key) != getattr(other, key))


def _text(given: Preprocess, keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {_shown(getattr(given, key))}" for key in keys)


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    same = len(set(value)) == 1
    return " ".join(f"{each:g}" for each in (value[:1] if same else value))


def _channels(key: str, values: Sequence[float], count: int, least: float) -> tuple[float, ...]:
    if len(values) not in (1, count):
        raise ArgumentError(f"{key} (--{key}) must be one number or {count}, one for each channel")
    if not all(least <= value <= 1e6 for value in values):
        raise ArgumentError(f"{key} (--{key}) must be numbers from {least:g} to 1e6")
    return tuple(float(value) for value in values) * (count // len(values))
