"""What an architecture's name says and no tensor of a file shows: heads, some windows.

The heads of a plain ViT lie inside the width of its projections, and a SwinV2 without its buffers
has the same tensors at any window. Such values are taken from the name, and said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
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

    Args:
        recipe: of an architecture that was named or recognised.
        shapes: of the file's tensors, by name.
        given: arguments of the constructor that the user has typed; they are said.
    """
    try:
        model = build_meta(recipe)
    except ElsaError:
        return recipe  # building it says why
    found: dict[str, int | list[int]]
    if recipe.two_towers:
        found = {
            f"{tower}_heads": heads
            for tower, modules in _towers(model).items()
            if (heads := _heads_of_torch(modules))
        }
    else:
        found = _of_modules(recipe, model, shapes, given)
    return dataclasses.replace(recipe, unsaid=found)


def _of_modules(
    recipe: Recipe, model: nn.Module, shapes: Shapes, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Heads and windows as the modules hold them, which some constructors derive."""
    if _HEADS & set(given):
        heads = None
    elif libraries.of(recipe.library).takes_heads:
        heads = _heads(model)
        # What its constructor does not take cannot be compared, and counts as not shown.
        heads = None if _others_fit(recipe, "num_heads", heads, model, shapes) is False else heads
    else:
        heads = _heads_of_torch(model.modules())
    window = None if "window_size" in given else _window(model)
    if not _others_fit(recipe, "window_size", window, model, shapes):
        window = None
    found = {"heads": heads, "window": window}
    return {word: value for word, value in found.items() if value}


def line(recipe: Recipe) -> str:
    """One line about what the recipe's name says alone; "" for nothing."""
    if not recipe.unsaid:
        return ""
    values = ", ".join(f"{word}={_text(value)}" for word, value in recipe.unsaid.items())
    return f"assumed: {values} from {recipe.name} (not in the file)"


def _others_fit(
    recipe: Recipe, key: str, value: int | list[int] | None, model: nn.Module, shapes: Shapes
) -> bool | None:
    """True where the tensors fit as well with another value; None where the constructor takes no
    other."""
    usual = differences(model, shapes)
    answer = None
    for other in _others(value) if value else ():
        trial = dataclasses.replace(recipe, args={**recipe.args, key: other})
        try:
            if differences(build_meta(trial), shapes) == usual:
                return True
            answer = False
        except ElsaError:
            continue
    return answer


def _others(value: int | list[int]) -> Iterator[int | list[int]]:
    values = value if isinstance(value, list) else [value]
    for others in ([2 * n for n in values], [n // 2 for n in values]):
        if all(others):
            yield others if isinstance(value, list) else others[0]


def _heads(model: nn.Module) -> int | list[int] | None:
    """The heads of the attention modules, in order, each number once where it repeats."""
    counts: list[Any] = [getattr(module, "num_heads", None) for module in model.modules()]
    found = [count for count in counts if type(count) is int]
    runs = [n for i, n in enumerate(found) if i == 0 or found[i - 1] != n]
    return runs[0] if len(runs) == 1 else runs or None


def _window(model: nn.Module) -> int | None:
    """The largest side of a window; stages smaller than a window have smaller ones."""
    found = [getattr(module, "window_size", None) for module in model.modules()]
    sides = [n for each in found for n in (each if isinstance(each, (tuple, list)) else (each,))]
    return max((n for n in sides if type(n) is int), default=None)


def _heads_of_torch(modules: Any) -> int | None:
    """The heads of PyTorch's attention, whose tensors never show them."""
    found = (m.num_heads for m in modules if isinstance(m, nn.MultiheadAttention))
    return next(found, None)


def _towers(model: nn.Module) -> dict[str, list[nn.Module]]:
    image = list(model.get_submodule("visual").modules())
    seen = set(map(id, image))
    return {"image": image, "text": [m for m in model.modules() if id(m) not in seen]}


def _text(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
