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

import torch
from torch import nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading import libraries
from elsa_core.loading.fit import differences, fitted, is_unused, matches, with_given
from elsa_core.loading.libraries import build, build_meta, default_recipe, label, resized
from elsa_core.loading.library import BUILD_ERRORS, Library, UninitialisedParameters
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.shown import Shapes, Shown
from elsa_core.loading.spec import ModelSpec

_Args = Mapping[str, Any]
# Of names with the same block, how many are built to find the closest.
_COMPARED = 8
_PROBE_SEED = 20_240_131
# Candidates whose depth cannot be cut and that are larger than this are not run to be compared.
_MAX_PROBE_PARAMETERS = 500_000_000
# Parts of names that attention has in the libraries that elsa reads, and in most others.
_ATTENTION = re.compile(r"attn|attention|qkv|q_proj|in_proj|query|to_q|relative_position|rel_pos")
# How the tensors of transformers' models begin.
_TRANSFORMERS = ("vit.", "encoder.layer.", "vision_model.")
_BLOCKS = re.compile(r"(.*\b(?:blocks|layers|stages))\.\d+\.")
# Tensors whose shape depends on the image size, or on the depth (mixed rotary).
_OF_GRID = (
    *("pos_embed", "relative_position_bias_table", "rel_pos_h", "rel_pos_w"),
    *("relative_position_index", "attn_mask", "relative_coords_table", "freqs"),
)


def recognise(
    shapes: Shapes, where: str, image_size: tuple[int, int] | None, given: _Args
) -> tuple[Recipe, tuple[Recipe, ...]]:
    """Find the architecture whose state dict has these names and shapes: its recipe, and other
    names that fit and compute the same.

    `where` is the file, for messages; `image_size` settles a grid that is not square; `given` are
    the constructor's arguments as typed. ModelError: none fits, or several that compute
    differently.
    """
    first, *others = libraries.LIBRARIES
    library = next((other for other in others if other.marks(shapes)), first)
    search = Search(library, shapes, image_size, given)
    found = list(library.candidates(search)) if library.candidates else []
    if not found:
        kernels = [s for s in shapes.values() if len(s) == 4 and max(s[2:]) > 1]
        if len(kernels) > 2 and not any(map(_ATTENTION.search, shapes)):
            raise ModelError(
                f"{where} has no attention: its {len(shapes)} tensors are convolutions, norms and"
                " linear layers, as of a ResNet; elsa has nothing to patch in it"
            )
        if any(name.startswith(_TRANSFORMERS) for name in shapes):
            raise ModelError(f"{where}: its tensors have transformers' names: give its folder")
        raise ModelError(
            f"{where}: no known architecture has these tensors ({len(shapes)} tensors, the first is"
            f" {next(iter(shapes))[:60]!r}){search.closest()};"
            " name it with arch (--arch) and what differs from it with --model-kwargs, or put its"
            " config.json beside the file"
        )
    same = _groups(found)
    if len(same) > 1:
        listed = "; ".join(" = ".join(label(recipe) for recipe in group[:3]) for group in same)
        raise ModelError(
            f"{where} fits architectures that compute differently: {listed};"
            " choose with arch (--arch)"
        )
    best = sorted(same[0], key=_preference)
    return best[0], tuple(best[1:])


def fit_named(
    spec: ModelSpec, shapes: Shapes, image_size: tuple[int, int] | None, given: _Args
) -> Recipe:
    """Fit one named architecture to the shapes, allowing for what they show of its arguments; the
    usual recipe where none fits exactly: the library may convert the tensors."""
    usual = with_given(_as_in(spec, shapes), given)
    variants = libraries.of(usual.library).variants(shapes)
    fits = (fitted(_with(usual, setting, given), shapes, image_size) for setting in variants)
    fit = next((fit for fit in fits if fit is not None), None)
    return _pruned(fit or usual, shapes, usual.args)


def _as_in(spec: ModelSpec, shapes: Shapes) -> Recipe:
    """The library's recipe, with classifier and channels as in the shapes."""
    recipe = default_recipe(spec)
    return libraries.of(recipe.library).as_in(recipe, shapes)


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
    recipe = recipe.with_args(setting.args)
    recipe = recipe if setting.size is None else resized(recipe, setting.size)
    return with_given(recipe, given)


def _preference(recipe: Recipe) -> tuple[int, bool, int, str]:
    """Names of the fewest other arguments first, then of this image size, then the shortest."""
    usual = default_recipe(ModelSpec(recipe.library, recipe.name, recipe.name))
    return len(recipe.args), usual.size != recipe.size, len(recipe.name), recipe.name


@dataclasses.dataclass(frozen=True)
class Search:
    """What a library's candidates are found with."""

    library: Library
    shapes: Shapes
    image_size: tuple[int, int] | None
    given: _Args
    # how many tensors differ from those of the names that were tried, and those names
    misfits: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)

    def recipe(self, name: str, setting: Shown | None = None) -> Recipe:
        """Return the recipe of a name as in the shapes, with what else they show."""
        usual = _as_in(ModelSpec(self.library.name, name, name), self.shapes)
        return _with(usual, setting or Shown(), self.given)

    def fitted(self, recipes: Iterable[Recipe]) -> list[Recipe]:
        """Return those that fit, at the image size of the tensors."""
        fits = (fitted(recipe, self.shapes, self.image_size) for recipe in recipes)
        return [recipe for recipe in fits if recipe is not None]

    def pruned(self, recipes: Iterable[Recipe]) -> list[Recipe]:
        """Return the recipes without the arguments that their names imply."""
        return [_pruned(recipe, self.shapes, self.given) for recipe in recipes]

    def blocks_fit(self, attempts: Iterable[Recipe]) -> bool:
        """True where the tensors of a short model, the first that builds, are all there; those
        whose shape depends on the grid may differ in it."""
        for attempt in attempts:
            try:
                model = build_meta(attempt)
            except ElsaError:
                continue
            own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            free = {n for n in (*own, *self.shapes) if n.rpartition(".")[2] in _OF_GRID}
            count = sum(
                name not in own and name not in free and not is_unused(name)
                for name in self.shapes
                if not _BLOCKS.match(name)
            ) + sum(
                name not in self.shapes or (self.shapes[name] != shape and name not in free)
                for name, shape in own.items()
            )
            if count < len(own):
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


# --- do recipes with the same tensors compute the same? ------------------------------------------


def _groups(recipes: list[Recipe]) -> list[list[Recipe]]:
    """Group recipes by what they compute: equal outputs on equal weights and input."""
    if len(recipes) == 1:
        return [recipes]
    found: list[tuple[Any, torch.Tensor, list[Recipe]]] = []
    for recipe in recipes:
        settings, core = libraries.of(recipe.library).core(recipe)
        try:
            model, output = _probe(core)
            kind: Any = settings, {name: t.shape for name, t in model.named_parameters()}
        except ElsaError:
            # Not comparable: on its own, which makes the answer ambiguous rather than wrong.
            kind, output = label(recipe), torch.empty(0)
        for known, expected, members in found:
            if known == kind and torch.equal(output, expected):
                members.append(recipe)
                break
        else:
            found.append((kind, output, [recipe]))
    return [members for *_, members in found]


def _probe(recipe: Recipe) -> tuple[nn.Module, torch.Tensor]:
    """Run a shallow version on fixed weights and a fixed image; float32, on the CPU."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with UninitialisedParameters():
            model, size = shallow(recipe)
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        largest = max(tensor.numel() for tensor in model.parameters())
        noise = 0.1 * torch.randn(largest, generator=generator)
        for tensor in model.parameters():
            offset = 1.0 if tensor.ndim == 1 else 0.0
            tensor.copy_(offset + noise[: tensor.numel()].view(tensor.shape))
        images = torch.randn(1, recipe.preprocess.input_size[0], *size, generator=generator)
        if not recipe.two_towers:
            return model, model(images)
        cfg: Any = recipe.model_cfg
        tokens = torch.arange(1, cfg["text_cfg"].get("context_length", 77) + 1) % 50
        features = (model.encode_image(images), model.encode_text(tokens[None]))  # type: ignore[operator]
        return model, torch.cat([feature.flatten() for feature in features])


def shallow(recipe: Recipe) -> tuple[nn.Module, tuple[int, int]]:
    """Build the recipe with two blocks and a small grid where its library allows that; the model
    and its image size."""
    attempts = libraries.of(recipe.library).shallow(recipe)
    if recipe.two_towers and attempts:
        return build(attempts[0]), recipe.size
    for attempt in attempts:
        with suppress(ElsaError, *BUILD_ERRORS):
            return build(attempt), attempt.size
    if sum(p.numel() for p in build_meta(recipe).parameters()) > _MAX_PROBE_PARAMETERS:
        raise ModelError(f"{label(recipe)} is too large to be compared with similar models")
    return build(recipe), recipe.size
