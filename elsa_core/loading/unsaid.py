"""What an architecture's name says and no tensor of a file shows: heads, some windows.

The heads of a plain ViT lie inside the width of its projections, and a SwinV2 without its buffers
has the same tensors at any window. Such values are taken from the name, and said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from elsa_core.errors import ElsaError
from elsa_core.loading import libraries
from elsa_core.loading.fit import differences
from elsa_core.loading.libraries import build_meta
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.shown import Shapes

# Arguments of constructors that say the heads.
_HEADS = frozenset(("num_heads", "heads", "num_heads_inner", "num_heads_outer"))


def with_unsaid(recipe: Recipe, shapes: Shapes, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe with `unsaid`: the values that fit the tensors as well as others would.
    What the user has typed (`given`) is said."""
    try:
        model = build_meta(recipe)
    except ElsaError:
        return recipe  # building it says why
    found: dict[str, Any] = {}
    modules = list(model.modules())
    if recipe.two_towers:
        image = list(model.get_submodule("visual").modules())
        found["image_heads"] = _heads_of_torch(image)
        found["text_heads"] = _heads_of_torch(m for m in modules if m not in set(image))
    else:
        # Heads and windows as the modules hold them, which some constructors derive.
        if not _HEADS & set(given):
            heads: Any = _heads_of_torch(modules)
            if libraries.of(recipe.library).takes_heads:
                heads = _runs(getattr(module, "num_heads", None) for module in modules)
                # What its constructor does not take cannot be compared, and counts as not shown.
                if _others_fit(recipe, "num_heads", heads, model, shapes) is False:
                    heads = None
            found["heads"] = heads
        if "window_size" not in given:
            # The largest side; stages smaller than a window have smaller ones.
            sides: list[Any] = [getattr(module, "window_size", None) for module in modules]
            flat = [n for each in sides for n in (each if _several(each) else (each,))]
            window = max((n for n in flat if type(n) is int), default=None)
            if _others_fit(recipe, "window_size", window, model, shapes):
                found["window"] = window
    unsaid = {word: value for word, value in found.items() if value}
    return dataclasses.replace(recipe, unsaid=unsaid)


def line(recipe: Recipe) -> str:
    """One line about what the recipe's name says alone; "" for nothing."""
    if not recipe.unsaid:
        return ""
    values = ", ".join(
        f"{word}={'/'.join(map(str, value)) if _several(value) else value}"
        for word, value in recipe.unsaid.items()
    )
    return f"assumed: {values} from {recipe.name} (not in the file)"


def _others_fit(
    recipe: Recipe, key: str, value: Any, model: nn.Module, shapes: Shapes
) -> bool | None:
    """True where the tensors fit as well with twice or half the value; None where the constructor
    takes no other."""
    usual = differences(model, shapes)
    answer = None
    values = value if isinstance(value, list) else [value] if value else []
    for others in ([2 * n for n in values], [n // 2 for n in values]):
        if not others or not all(others):
            continue
        trial = recipe.with_args({key: others if isinstance(value, list) else others[0]})
        try:
            if differences(build_meta(trial), shapes) == usual:
                return True
            answer = False
        except ElsaError:
            continue
    return answer


def _runs(counts: Iterable[Any]) -> int | list[int] | None:
    """The whole numbers in order, each once where it repeats; a single one alone."""
    found = [count for count in counts if type(count) is int]
    runs = [n for i, n in enumerate(found) if i == 0 or found[i - 1] != n]
    return runs[0] if len(runs) == 1 else runs or None


def _heads_of_torch(modules: Iterable[nn.Module]) -> int | None:
    """The heads of PyTorch's attention, whose tensors never show them."""
    return next((m.num_heads for m in modules if isinstance(m, nn.MultiheadAttention)), None)


def _several(value: Any) -> bool:
    return isinstance(value, (list, tuple))
