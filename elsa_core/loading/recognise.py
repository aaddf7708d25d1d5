"""The architecture of a state dict, from the names and shapes of its tensors.

Candidates are built on the meta device, where a model costs milliseconds, first with one block to
sieve the hundreds of names of a family and then whole. What no shape shows (head count, activation,
rotary base) is compared by running the survivors: those that compute the same are one answer,
those that do not are an error that lists them. A model of other arguments than a name's is not
recognised: the error names the closest.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading import libraries
from elsa_core.loading.fit import differences, explain_misfit, fitted, is_unused, with_kwargs
from elsa_core.loading.libraries import build, build_meta, label
from elsa_core.loading.library import BUILD_ERRORS, Library, UninitialisedParameters
from elsa_core.loading.names import Shapes
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.spec import ModelSpec, parse

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
    *("pos_embed", "pos_embedding", "positional_embedding", "relative_position_bias_table"),
    *("rel_pos_h", "rel_pos_w", "relative_position_index", "attn_mask", "relative_coords_table"),
    "freqs",
)
# Arguments of constructors that say the heads.
_HEADS = frozenset(("num_heads", "heads", "num_heads_inner", "num_heads_outer"))


def recognise(
    shapes: Shapes, where: str, image_size: tuple[int, int] | None, given: _Args
) -> tuple[Recipe, tuple[Recipe, ...]]:
    """Find the architecture whose state dict has these names and shapes, and other names that fit
    and compute the same. `where` is the file, for messages; `image_size` settles a grid that is not
    square; `given` are the constructor's arguments as typed. ModelError: none fits, or several that
    compute differently."""
    first, *others = libraries.LIBRARIES
    library = next((other for other in others if other.marks(shapes)), first)
    names = library.names_like(shapes)
    found: list[Recipe] = []
    near: list[tuple[int, int, str]] = []  # how many tensors of a block differ, and the name
    usual = [library.as_in(library.recipe(name, None), shapes) for name in names]
    for variant in zip(*usual, strict=True):
        for name, plain in zip(names, variant, strict=True):
            recipe = with_kwargs(plain, given)
            count = _misfits(library, recipe, shapes)
            fit = fitted(recipe, shapes, image_size) if count == 0 else None
            if fit is not None:
                found.append(fit)
            elif count is not None:
                near.append((count, len(name), name))
        if found:
            break
    if not found:
        raise _unknown(library, shapes, where, given, near)
    same = _groups(found)
    if len(same) > 1:
        listed = "; ".join(" = ".join(label(recipe) for recipe in group[:3]) for group in same)
        raise ModelError(
            f"{where} fits architectures that compute differently: {listed};"
            " choose with arch (--arch)"
        )
    resized = {each.name: each.size != library.recipe(each.name, None).size for each in found}
    best = sorted(
        same[0], key=lambda each: (len(each.args), resized[each.name], len(each.name), each.name)
    )
    return best[0], tuple(best[1:])


def _misfits(library: Library, recipe: Recipe, shapes: Shapes) -> int | None:
    """How many tensors of the recipe with one block the file has not, or in another shape that no
    grid explains, and the other way round outside of blocks; None where none is alike."""
    for attempt in (library.one_block(recipe, shapes), recipe):
        with suppress(ElsaError):
            model = build_meta(attempt)
            break
    else:
        return None
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    free = {n for n in (*own, *shapes) if n.rpartition(".")[2] in _OF_GRID}
    count = sum(
        name not in own and name not in free and not is_unused(name)
        for name in shapes
        if not _BLOCKS.match(name)
    ) + sum(
        name not in shapes or (shapes[name] != shape and name not in free)
        for name, shape in own.items()
    )
    return count if count < len(own) else None


def _unknown(
    library: Library, shapes: Shapes, where: str, given: _Args, near: list[tuple[int, int, str]]
) -> ModelError:
    kernels = [s for s in shapes.values() if len(s) == 4 and max(s[2:]) > 1]
    if len(kernels) > 2 and not any(map(_ATTENTION.search, shapes)):
        return ModelError(
            f"{where} has no attention: its {len(shapes)} tensors are convolutions, norms and"
            " linear layers, as of a ResNet; elsa has nothing to patch in it"
        )
    if any(name.startswith(_TRANSFORMERS) for name in shapes):
        return ModelError(f"{where}: its tensors have transformers' names: give its folder")
    near = sorted(set(near))
    found: list[tuple[int, Recipe]] = []
    for name in [name for count, _, name in near if count == near[0][0]][:_COMPARED]:
        recipe = with_kwargs(library.as_in(library.recipe(name, None), shapes)[0], given)
        with suppress(ElsaError):
            found.append((sum(map(len, differences(build_meta(recipe), shapes))), recipe))
    closest = ""
    if found:
        recipe = min(found, key=lambda pair: pair[0])[1]
        closest = f"; the closest is {label(recipe)} ({explain_misfit(recipe, shapes)})"
    return ModelError(
        f"{where}: no known architecture has these tensors ({len(shapes)} tensors, the first is"
        f" {next(iter(shapes))[:60]!r}){closest};"
        " name it with arch (--arch) and what differs from it with --model-kwargs, or put its"
        " config.json beside the file"
    )


def fit_named(
    spec: ModelSpec, shapes: Shapes, image_size: tuple[int, int] | None, given: _Args
) -> Recipe:
    """Fit one named architecture to the shapes; the usual recipe where it does not fit exactly: the
    library may convert the tensors."""
    library = libraries.of(spec.source)
    usual = library.as_in(library.recipe(spec.name, spec.tag), shapes)
    fits = (fitted(with_kwargs(recipe, given), shapes, image_size) for recipe in usual)
    return next((fit for fit in fits if fit is not None), None) or with_kwargs(usual[0], given)


def _groups(recipes: list[Recipe]) -> list[list[Recipe]]:
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
    """Build the recipe with two blocks and a small grid where that can be; and its image size."""
    attempts = libraries.of(recipe.library).shallow(recipe)
    if recipe.two_towers and attempts:
        return build(attempts[0]), recipe.size
    for attempt in attempts:
        with suppress(ElsaError, *BUILD_ERRORS):
            return build(attempt), attempt.size
    if sum(p.numel() for p in build_meta(recipe).parameters()) > _MAX_PROBE_PARAMETERS:
        raise ModelError(f"{label(recipe)} is too large to be compared with similar models")
    return build(recipe), recipe.size


def meta_model(name: str) -> nn.Module:
    """The architecture on the meta device: every module and shape, no memory."""
    spec = parse(name)
    return build_meta(libraries.of(spec.source).recipe(spec.name, spec.tag))


def small_model(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """The architecture with two blocks a stage where that can be and leaves attention, on the CPU,
    and its image size (C, H, W). Parameters are allocated and not filled."""
    from elsa_core.patching import find_sites

    spec = parse(name)
    recipe = libraries.of(spec.source).recipe(spec.name, spec.tag)
    with UninitialisedParameters():
        try:
            model, size = shallow(recipe)
        except Exception:  # its depth cannot be cut (csatv2 runs out of an iterator)
            model, size = build(recipe), recipe.size
        if not any(site.patchable for site in find_sites(model)):
            model, size = build(recipe), recipe.size
    return model, (recipe.preprocess.input_size[0], *size)


def with_unsaid(recipe: Recipe, shapes: Shapes, given: _Args) -> Recipe:
    """Return the recipe with `unsaid`: heads and windows that its name says and that fit the
    tensors no better than others would. The heads of a plain ViT lie inside the width of its
    projections, and a SwinV2 without its buffers has the same tensors at any window. What was typed
    (`given`) is said."""
    try:
        model = build_meta(recipe)
    except ElsaError:
        return recipe  # building it says why
    if recipe.two_towers:
        attention = [
            (name, module.num_heads)
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention)
        ]
        towers = {
            "image_heads": [n for name, n in attention if name.startswith("visual.")],
            "text_heads": [n for name, n in attention if not name.startswith("visual.")],
        }
        found: dict[str, Any] = {word: heads[0] for word, heads in towers.items() if heads}
        return dataclasses.replace(recipe, unsaid=found)
    found, usual = {}, differences(model, shapes)
    # As the modules hold them, since some constructors derive them: the heads in order, each once
    # where it repeats; of windows the largest, since a stage smaller than it has a smaller one.
    modules = [*model.modules()]
    heads = [n for each in modules if type(n := getattr(each, "num_heads", None)) is int]
    heads = [n for i, n in enumerate(heads) if i == 0 or heads[i - 1] != n]
    if heads and not _HEADS & set(given):
        value = heads if heads[1:] else heads[0]
        # What its constructor does not take cannot be compared, and counts as not shown.
        if _others_fit(recipe, "num_heads", value, usual, shapes) is not False:
            found["heads"] = value
    held = [getattr(each, "window_size", None) for each in modules]
    sides = [s if isinstance(s, (list, tuple)) else (s,) for s in held]
    window = max((n for each in sides for n in each if type(n) is int), default=0)
    said = not window or "window_size" in given
    if not said and _others_fit(recipe, "window_size", window, usual, shapes):
        found["window"] = window
    return dataclasses.replace(recipe, unsaid=found)


def _others_fit(
    recipe: Recipe, key: str, value: int | list[int], usual: Any, shapes: Shapes
) -> bool | None:
    """True where the tensors differ in the same (`usual`) with twice or half the value; None where
    the constructor takes no other."""
    answer = None
    several = value if isinstance(value, list) else [value]
    for others in ([2 * n for n in several], [n // 2 for n in several]):
        if not all(others):
            continue
        trial = recipe.with_args({key: others if isinstance(value, list) else others[0]})
        with suppress(ElsaError):
            if differences(build_meta(trial), shapes) == usual:
                return True
            answer = False
    return answer
