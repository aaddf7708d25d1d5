"""The architecture of a state dict, from the names and shapes of its tensors.

Candidates are built on the meta device, where a model costs milliseconds, first with one block to
sieve the hundreds of names of a family and then whole. What no shape shows (head count, activation,
rotary base) is compared by running the survivors: those that compute the same are one answer,
those that do not are an error that lists them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading import libraries
from elsa_core.loading.alike import groups
from elsa_core.loading.fit import differences, fitted, is_unused, matches, recipe_of, with_given
from elsa_core.loading.libraries import build_meta, label, resized
from elsa_core.loading.library import Library
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.shown import Shapes, Shown
from elsa_core.loading.spec import ModelSpec

_Args = Mapping[str, Any]
# Of names with the same block, how many are built to find the closest.
_COMPARED = 8
# Parts of names that attention has in the libraries that elsa reads, and in most others.
_ATTENTION = re.compile(r"attn|attention|qkv|q_proj|in_proj|query|to_q|relative_position|rel_pos")
# How the tensors of transformers' models begin.
_TRANSFORMERS = ("vit.", "encoder.layer.", "vision_model.")


@dataclasses.dataclass(frozen=True)
class Recognised:
    """The recipe that fits, and other names that fit and compute the same."""

    recipe: Recipe
    alike: tuple[Recipe, ...] = ()


def recognise(
    shapes: Shapes,
    where: str,
    image_size: tuple[int, int] | None = None,
    given: _Args | None = None,
) -> Recognised:
    """Find the architecture whose state dict has these names and shapes.

    Args:
        shapes: tensor shapes by name.
        where: the file, for messages.
        image_size: (height, width) in pixels, to settle a grid that is not square.
        given: arguments of the constructor that the user has typed.

    Raises:
        ModelError: none fits, or several fit that compute differently (they are listed).
    """
    search = _search(shapes, image_size, given or {})
    found = list(search.library.candidates(search)) if search.library.candidates else []
    if not found and _is_convolutional(shapes):
        raise ModelError(
            f"{where} has no attention: its {len(shapes)} tensors are convolutions, norms and"
            " linear layers, as of a ResNet; elsa has nothing to patch in it"
        )
    if not found and any(name.startswith(_TRANSFORMERS) for name in shapes):
        raise ModelError(f"{where}: its tensors have transformers' names: give its folder")
    if not found:
        first = f"{len(shapes)} tensors, the first is {next(iter(shapes))[:60]!r}"
        raise ModelError(
            f"{where}: no known architecture has these tensors ({first}){search.closest()};"
            " name it with arch (--arch) and what differs from it with --model-kwargs, or put its"
            " config.json beside the file"
        )
    same = groups(found)
    if len(same) > 1:
        listed = "; ".join(" = ".join(label(recipe) for recipe in group[:3]) for group in same)
        raise ModelError(
            f"{where} fits architectures that compute differently: {listed};"
            " choose with arch (--arch)"
        )
    best = sorted(same[0], key=_preference)
    return Recognised(best[0], tuple(best[1:]))


def fit_named(
    spec: ModelSpec,
    shapes: Shapes,
    image_size: tuple[int, int] | None = None,
    given: _Args | None = None,
) -> Recipe:
    """Fit one named architecture to the shapes, allowing for what they show of its arguments.

    Returns:
        The recipe that fits exactly, else the usual recipe: the library may convert the tensors.

    Raises:
        ArgumentError: `given` cannot be.
    """
    usual = recipe_of(spec, shapes, given)
    variants = libraries.of(usual.library).variants(usual, shapes)
    tries = [_with(usual, setting, given or {}) for setting in variants]
    fits = (fitted(recipe, shapes, image_size) for recipe in tries)
    fit = next((fit for fit in fits if fit is not None), None)
    return _pruned(fit or usual, shapes, usual.args)


def _pruned(recipe: Recipe, shapes: Shapes, kept: Iterable[str]) -> Recipe:
    """Return the recipe without the arguments that its name implies; the shapes still agree."""
    for key in sorted(set(recipe.args) - {*kept, "img_size"}):
        args = {k: v for k, v in recipe.args.items() if k != key}
        fewer = dataclasses.replace(recipe, args=args)
        with suppress(ElsaError):
            if matches(build_meta(fewer), shapes):
                recipe = fewer
    return recipe


def _with(recipe: Recipe, setting: Shown, given: _Args) -> Recipe:
    """Return the recipe with what the shapes show; what the user typed wins."""
    cfg = setting.model_cfg or recipe.model_cfg
    recipe = dataclasses.replace(recipe, args={**recipe.args, **setting.args}, model_cfg=cfg)
    recipe = recipe if setting.size is None else resized(recipe, setting.size)
    return with_given(recipe, given) if given else recipe


def _preference(recipe: Recipe) -> tuple[int, bool, int, str]:
    """Names of the fewest other arguments first, then of this image size, then the shortest."""
    usual = recipe_of(ModelSpec(recipe.library, recipe.name, recipe.name))
    return len(recipe.args), usual.size != recipe.size, len(recipe.name), recipe.name


def _is_convolutional(shapes: Shapes) -> bool:
    kernels = [s for s in shapes.values() if len(s) == 4 and max(s[2:]) > 1]
    return len(kernels) > 2 and not any(map(_ATTENTION.search, shapes))


def _search(shapes: Shapes, image_size: tuple[int, int] | None, given: _Args) -> Search:
    first, *others = libraries.LIBRARIES
    library = next((other for other in others if other.marks(shapes)), first)
    return Search(library, shapes, image_size, given)


@dataclasses.dataclass(frozen=True)
class Search:
    """What a library's candidates are found with.

    Attributes:
        library: whose names are tried.
        shapes: of the file's tensors, by name.
        image_size: (height, width) in pixels, to settle a grid that is not square.
        given: arguments of the constructor that the user has typed.
        misfits: how many tensors differ from those of the names that were tried, and those names.
    """

    library: Library
    shapes: Shapes
    image_size: tuple[int, int] | None
    given: _Args
    misfits: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)

    def recipe(self, name: str, setting: Shown | None = None) -> Recipe:
        """Return the recipe of a name as in the shapes, with what else they show."""
        usual = recipe_of(ModelSpec(self.library.name, name, name), self.shapes)
        return _with(usual, setting or Shown(), self.given)

    def fitted(self, recipes: Iterable[Recipe]) -> list[Recipe]:
        """Return those that fit, at the image size of the tensors."""
        fits = (fitted(recipe, self.shapes, self.image_size) for recipe in recipes)
        return [recipe for recipe in fits if recipe is not None]

    def pruned(self, recipes: Iterable[Recipe]) -> list[Recipe]:
        """Return the recipes without the arguments that their names imply."""
        return [_pruned(recipe, self.shapes, self.given) for recipe in recipes]

    def blocks_fit(self, attempts: Iterable[Recipe]) -> bool:
        """True where the tensors of a short model, the first that builds, are all there."""
        for attempt in attempts:
            try:
                model = build_meta(attempt)
            except ElsaError:
                continue
            count = _block_misfits(model, self.shapes)
            if count < len(model.state_dict()):
                self.misfits.append((count, len(attempt.name), attempt.name))
            return not count
        return False

    def closest(self) -> str:
        """The name whose tensors differ least, and in what, in words; "" where none is near."""
        least = min(self.misfits, default=(0, 0, ""))[0]
        names = dict.fromkeys(name for count, _, name in sorted(self.misfits) if count == least)
        found: list[tuple[int, Recipe]] = []
        for name in list(names)[:_COMPARED]:
            recipe = self.recipe(name)
            with suppress(ElsaError):
                found.append((sum(map(len, differences(build_meta(recipe), self.shapes))), recipe))
        if not found:
            return ""
        recipe = min(found, key=lambda pair: pair[0])[1]
        return f"; the closest is {label(recipe)} ({explain_misfit(recipe, self.shapes)})"


def _block_misfits(model: nn.Module, shapes: Shapes) -> int:
    """How many tensors of a short model are not there with these shapes; its grid may differ."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    blocks = re.compile(r"(.*\b(?:blocks|layers|stages))\.\d+\.")
    outside = {name for name in shapes if not blocks.match(name)}
    return sum(
        name not in own and not _of_grid(name) and not is_unused(name) for name in outside
    ) + sum(
        name not in shapes or (shapes[name] != shape and not _of_grid(name))
        for name, shape in own.items()
    )


def _of_grid(name: str) -> bool:
    """True for tensors whose shape depends on the image size, or on the depth (mixed rotary)."""
    leaf = name.rpartition(".")[2]
    return leaf in (
        *("pos_embed", "relative_position_bias_table", "rel_pos_h", "rel_pos_w"),
        *("relative_position_index", "attn_mask", "relative_coords_table", "freqs"),
    )


def explain_misfit(recipe: Recipe, shapes: Shapes) -> str:
    """Say in one line what differs between a recipe's tensors and these; "" for nothing."""
    model = build_meta(recipe)
    missing, unexpected, wrong = differences(model, shapes)
    parts: list[str] = []
    for what, names in (("missing", missing), ("unexpected", unexpected), ("other shape", wrong)):
        if names:
            parts.append(f"{len(names)} {what} ({_first(names)})")
    own = {**dict(model.named_buffers()), **model.state_dict()}
    if wrong and not missing and not unexpected:
        name = min(wrong)
        parts.append(f"{list(shapes[name])} in the file and {list(own[name].shape)} in the model")
    return ", ".join(parts)


def _first(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:2]) + (", ..." if len(listed) > 2 else "")
