"""A model from a weights file: which architecture, at which size, and every tensor as it is."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elsa_core.base.messages import first_line, listed, quiet, side
from elsa_core.base.reading import parse_json, read_json
from elsa_core.errors import ArgumentError, ElsaError, ModelError
from elsa_core.loading import libraries
from elsa_core.loading.configuration import from_config
from elsa_core.loading.fit import (
    changed,
    differences,
    explain_misfit,
    with_image_size,
    with_kwargs,
)
from elsa_core.loading.libraries import build, build_meta, label
from elsa_core.loading.library import BUILD_ERRORS
from elsa_core.loading.plan import PLAN_NAME
from elsa_core.loading.recipe import SIZES, Recipe, checked_args
from elsa_core.loading.recognise import fit_named, recognise
from elsa_core.loading.spec import CONFIG_NAMES, ModelSpec, parse
from elsa_core.loading.weights import INDEX_SUFFIX, Weights

CONFIG_METADATA = "elsa_config"
_WEIGHTS_NAMES = (
    *("model.safetensors", "open_clip_model.safetensors", "open_clip_pytorch_model.safetensors"),
    *("pytorch_model.bin", "open_clip_pytorch_model.bin", "pytorch_model.pth", "model.pth"),
)
# How much more than a model's numbers a file may hold, and be read: another tower, a decoder.
_FAR = 4
_FEW = 2**24
_ADVICE = "name the architecture it was made for (--arch, --model-kwargs KEY=VALUE)"
# Arguments of constructors that change the shape of position tensors or of the patch embedding.
_RESAMPLING = frozenset((*SIZES, "window_size", "patch_size"))

Size = tuple[int, int] | None


def weights_in(directory: Path) -> Path:
    """Return the weights file of a model directory."""
    for name in _WEIGHTS_NAMES:
        if (directory / name).is_file():
            return directory / name
    for pattern in (f"*{INDEX_SUFFIX}", "*.safetensors"):
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
    what = "several .safetensors files, none named" if found else "no weights file, such as"
    raise ModelError(f"{directory} holds {what} model.safetensors")


def files_of(spec: ModelSpec) -> list[Path]:
    """All files that a file or a saved directory is built from, weights first; none for a name."""
    if spec.path is None:
        return []
    weights = weights_in(spec.path) if spec.source == "directory" else spec.path
    indexed = weights.name.lower().endswith(INDEX_SUFFIX)
    shards = sorted(weights.parent.glob("*.safetensors")) if indexed else []
    beside = [weights.parent / name for name in (*CONFIG_NAMES, PLAN_NAME)]
    return [weights, *shards, *(path for path in beside if path.is_file())]


@dataclass(frozen=True)
class Choice:
    """What a weights file is, with lines for the user about its architecture."""

    recipe: Recipe  # at the size of the tensors
    notes: tuple[str, ...] = ()
    described: bool = False  # a configuration says the preprocessing, or what of it is assumed
    tagged: bool = False  # the name is that of published weights, whose preprocessing is known


def choose_recipe(
    weights: Weights,
    arch: str | None,
    image_size: Size,
    given: Mapping[str, Any],
    *,
    config_required: bool,
) -> Choice:
    """Find the architecture: `arch` (--arch), the file's metadata, a config beside it, or the
    shapes. `image_size` settles a grid that is not square; `given` are the constructor's arguments
    as typed; `config_required` refuses a directory without a configuration."""
    shapes = weights.shapes
    if arch is not None:
        spec = parse(arch)
        if spec.source not in libraries.names():
            raise ArgumentError(f"arch (--arch) must name an architecture, not {arch!r}")
        recipe = fit_named(spec, shapes, image_size, given)
        told = _told(recipe, given, ", as the tensors' shapes say")
        notes = (f"architecture {label(recipe)}{told}",) if told else ()
        return Choice(recipe, notes, tagged=spec.tag is not None)
    embedded = weights.metadata.get(CONFIG_METADATA)
    if embedded is not None and not config_required:
        where = f"{weights.path} (metadata {CONFIG_METADATA})"
        recipe = from_config(parse_json(embedded, where), where)
        return Choice(with_kwargs(recipe, given), described=True)
    recorded = None if config_required else _recorded(weights, image_size, given)
    problem: ModelError | None = None
    for path in (weights.path.parent / name for name in CONFIG_NAMES):
        if path.is_file():
            try:
                beside = from_config(read_json(path), str(path))
            except ModelError as error:
                problem = problem or error
                continue
            if recorded is None or recorded.recipe.name == beside.name:
                return Choice(with_kwargs(beside, given), described=True)
            break
    if config_required:
        raise problem or ModelError(f"{weights.path.parent} holds no configuration")
    if recorded is not None:
        return recorded
    recipe, alike = recognise(shapes, str(weights.path), image_size, given)
    names = ", ".join(map(label, alike[:3]))
    also = f" (the same computation as {names})" if names else ""
    told = _told(recipe, given)
    note = f"architecture {label(recipe)}{told}, recognised from names and shapes{also}"
    return Choice(recipe, (note,))


def _recorded(weights: Weights, image_size: Size, given: Mapping[str, Any]) -> Choice | None:
    for name in weights.stated.architectures:
        with suppress(ElsaError):
            spec = parse(name)
            if spec.source in libraries.names() and spec.alias is None:
                said = checked_args(weights.stated.args, f"{weights.path} (model_args)")
                recipe = fit_named(spec, weights.shapes, image_size, {**said, **given})
                told = _told(recipe, given, ", as the tensors' shapes say")
                note = f"architecture {label(recipe)}, from the file's metadata{told}"
                return Choice(recipe, (note,), tagged=spec.tag is not None)
    return None


def _told(recipe: Recipe, given: Mapping[str, Any], source: str = "") -> str:
    """The arguments that the shapes say and no flag gave, and the image size where it is neither
    the name's nor typed (not every shape tells it); "" for nothing."""
    apart = {*given, *SIZES, "in_chans"}
    args = ", ".join(f"{key}={value}" for key, value in recipe.args.items() if key not in apart)
    pixels = ""
    if not recipe.two_towers and not given.keys() & SIZES:
        usual = libraries.of(recipe.library).recipe(recipe.name, recipe.tag)
        pixels = "" if recipe.size == usual.size else f" at {side(recipe.size)} pixels"
    comma = "," if source and pixels else ""
    return f" with {args}{source}{comma}{pixels}" if args else pixels


def apply(
    recipe: Recipe, weights: Weights, image_size: Size, dtype: torch.dtype, given: Mapping[str, Any]
) -> tuple[nn.Module, Recipe, tuple[str, ...]]:
    """Build the model and put the weights in place, resized where the image size differs; the
    model, its recipe, and notes about what was asked to change or to be dropped. Shapes are
    compared on the meta device first: a configuration that asks for more memory than the file has
    weights is refused before anything is allocated. Afterwards every tensor of the file must be in
    the model as it is, apart from those that another image size, window or patch size was asked to
    change, and from a classifier that `num_classes=0` drops."""
    target = recipe if image_size is None else with_image_size(recipe, image_size)
    misfit = f"{weights.path} does not fit {label(recipe)}"
    plain = build_meta(target)
    dropped: list[str] = []
    if given.get("num_classes") == 0:
        with_one = build_meta(dataclasses.replace(recipe, num_classes=2)).state_dict().keys()
        extra = with_one - build_meta(recipe).state_dict().keys()
        dropped = sorted(extra & weights.shapes.keys())
        whole, shapes = weights, {n: s for n, s in weights.shapes.items() if n not in extra}
        weights = dataclasses.replace(
            weights, shapes=shapes, read=lambda: {name: whole.tensors[name] for name in shapes}
        )
    exact = not any(differences(plain, weights.shapes))
    if not exact:
        _check_scale(plain, weights, recipe, misfit)
    for name, own in plain.state_dict().items():
        held = weights.tensors.get(name)
        if held is not None and own.is_floating_point() and not held.is_floating_point():
            kind = str(held.dtype).removeprefix("torch.")
            raise ModelError(
                f"{weights.path}: tensor {name[:120]!r} is {kind}, and {label(recipe)} has a"
                " floating one; quantised weights are not supported"
            )
    try:
        with quiet():
            # The library reads its own files: renamed tensors, resized position embeddings.
            converted = None if exact else libraries.of(target.library).converted
            if converted is not None:
                model = converted(target, recipe, weights)
            else:
                model = _filled(target, weights, strict=not exact)
    except ElsaError:
        raise
    except BUILD_ERRORS as error:
        why = explain_misfit(recipe, weights.shapes)
        raise ModelError(f"{misfit}: {why or first_line(error)}; {_ADVICE}") from error
    asked: list[str] = []
    if _RESAMPLING.intersection(given):
        asked = sorted(differences(plain, weights.shapes)[2])
    elif target.size != recipe.size:
        before, after = (
            {name: tensor.shape for name, tensor in model.state_dict().items()}
            for model in (build_meta(recipe), plain)
        )
        asked = sorted(n for n in after.keys() & weights.shapes if after[n] != before.get(n))
    resized = bool(asked) or target.size != recipe.size
    # A model that is not what the file holds: a proof about it would prove nothing.
    if found := changed(model, weights.tensors, asked, resized=resized):
        name = next(iter(found))
        more = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
        raise ModelError(f"{misfit} as it is: {name[:120]} {found[name]}{more}; {_ADVICE}")
    notes = [("resampled as asked", asked), ("dropped as asked (num_classes=0)", dropped)]
    told = tuple(f"{what}: {listed(names)}" for what, names in notes if names)
    return model.eval().to(dtype=dtype), target, told


def _filled(recipe: Recipe, weights: Weights, strict: bool) -> nn.Module:
    kinds = {tensor.dtype for tensor in weights.tensors.values()}
    # Rounding float64 weights is left to the dtype that was asked for.
    dtype = torch.float64 if torch.float64 in kinds else torch.float32
    model = build(recipe).to(dtype=dtype)
    own = model.state_dict().keys()
    kept = {name: tensor for name, tensor in weights.tensors.items() if name in own}
    model.load_state_dict(kept, strict=strict)
    return model


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
