"""Which architecture a weights file is of, and at which size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsa_core.base.messages import side
from elsa_core.base.reading import parse_json, read_json
from elsa_core.errors import ArgumentError, ElsaError, ModelError
from elsa_core.loading import libraries
from elsa_core.loading.checkpoint import read_checkpoint
from elsa_core.loading.configuration import from_config
from elsa_core.loading.fit import with_given
from elsa_core.loading.libraries import default_recipe, label
from elsa_core.loading.recipe import Recipe, checked_args
from elsa_core.loading.recognise import fit_named, recognise
from elsa_core.loading.spec import CONFIG_NAMES, ModelSpec, parse
from elsa_core.loading.weights import (
    INDEX_SUFFIX,
    Weights,
    is_index,
    read_safetensors,
    read_sharded,
)

CONFIG_METADATA = "elsa_config"
_WEIGHTS_NAMES = (
    *("model.safetensors", "open_clip_model.safetensors", "open_clip_pytorch_model.safetensors"),
    *("pytorch_model.bin", "open_clip_pytorch_model.bin", "pytorch_model.pth", "model.pth"),
)
_SIZES = frozenset(("img_size", "image_size", "input_size"))

Size = tuple[int, int] | None


def read_weights(path: Path, key: str | None = None) -> Weights:
    """Read a .safetensors file, an index of several, or a PyTorch checkpoint.

    `key` says which of several weights to take (--weights).
    """
    if is_index(path):
        return read_sharded(path, key)
    safe = path.suffix.lower() == ".safetensors"
    return read_safetensors(path, key) if safe else read_checkpoint(path, key)


def weights_in(directory: Path) -> Path:
    """Return the weights file of a model directory; ModelError where there is none, or several
    with no usual name."""
    for name in _WEIGHTS_NAMES:
        if (directory / name).is_file():
            return directory / name
    for pattern in (f"*{INDEX_SUFFIX}", "*.safetensors"):
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
    what = "several .safetensors files, none named" if found else "no weights file, such as"
    raise ModelError(f"{directory} holds {what} model.safetensors")


def refuse_links(directory: Path) -> None:
    """Refuse a bundle in which a file is a link: it leads to what the bundle does not hold."""
    if not (directory / "manifest.json").exists():
        return  # the hub's cache holds links
    link = next((path for path in sorted(directory.iterdir()) if path.is_symlink()), None)
    if link is not None:
        raise ModelError(f"{link} is a link, which a bundle does not hold: refused")


@dataclass(frozen=True)
class Choice:
    """What a weights file is.

    Attributes:
        recipe: at the size of the tensors.
        notes: lines for the user about the architecture.
        alike: other recipes that fit and compute the same; they may preprocess otherwise.
        described: a configuration says the preprocessing, or what of it is assumed.
        tagged: the name is that of published weights, whose preprocessing is known.
    """

    recipe: Recipe
    notes: tuple[str, ...] = ()
    alike: tuple[Recipe, ...] = ()
    described: bool = False
    tagged: bool = False


def choose_recipe(
    weights: Weights,
    arch: str | None,
    image_size: Size,
    given: Mapping[str, Any],
    *,
    config_required: bool,
) -> Choice:
    """Find the architecture: `arch`, the file's metadata, a config beside it, or the shapes.

    Args:
        weights: of the file.
        arch: as typed (--arch).
        image_size: (height, width) in pixels, to settle a grid that is not square.
        given: arguments of the constructor as typed (--model-kwargs).
        config_required: refuse a directory without a configuration.

    Raises:
        ModelError: unknown, ambiguous, or a configuration that cannot be read.
        ArgumentError: `arch` is no library's name, or `given` cannot be.
    """
    shapes = weights.shapes
    if arch is not None:
        spec = parse(arch)
        if spec.source not in libraries.names():
            raise ArgumentError(f"arch (--arch) must name an architecture, not {arch!r}")
        recipe = fit_named(spec, shapes, image_size, given)
        told = _told(recipe, given, ", as the tensors' shapes say")
        notes = (f"architecture {label(recipe)}{told}",) if told else ()
        return Choice(recipe, notes, tagged=libraries.of(recipe.library).says_preprocessing(arch))
    embedded = weights.metadata.get(CONFIG_METADATA)
    if embedded is not None and not config_required:
        where = f"{weights.path} (metadata {CONFIG_METADATA})"
        recipe = from_config(parse_json(embedded, where), where)
        return Choice(with_given(recipe, given), described=True)
    stated = () if config_required else weights.stated.architectures
    tried = (_recorded(name, weights, image_size, given) for name in stated)
    recorded = next((choice for choice in tried if choice is not None), None)
    problem: ModelError | None = None
    for path in (weights.path.parent / name for name in CONFIG_NAMES):
        if path.is_file():
            try:
                beside = from_config(read_json(path), str(path))
            except ModelError as error:
                problem = problem or error
                continue
            if recorded is None or recorded.recipe.name == beside.name:
                return Choice(with_given(beside, given), described=True)
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
    return Choice(recipe, (note,), alike)


def _recorded(
    name: str, weights: Weights, image_size: Size, given: Mapping[str, Any]
) -> Choice | None:
    """The architecture that a file names; None where trainers record another kind of name, such as
    a class, so that the shapes say more."""
    try:
        spec = parse(name)
        if spec.source not in libraries.names() or spec.alias is not None:
            return None
        said = checked_args(weights.stated.args, f"{weights.path} (model_args)")
        recipe = fit_named(spec, weights.shapes, image_size, {**said, **given})
    except ElsaError:
        return None
    told = _told(recipe, given, ", as the tensors' shapes say")
    note = f"architecture {label(recipe)}, from the file's metadata{told}"
    return Choice(recipe, (note,), tagged=libraries.of(recipe.library).says_preprocessing(name))


def _told(recipe: Recipe, given: Mapping[str, Any], source: str = "") -> str:
    """The arguments that the shapes say and no flag gave, and the image size where it is neither
    the name's nor typed (not every shape tells it); "" for nothing."""
    apart = {*given, *_SIZES, "in_chans"}
    args = ", ".join(f"{key}={value}" for key, value in recipe.args.items() if key not in apart)
    pixels = ""
    if not recipe.two_towers and not _SIZES & set(given):
        usual = default_recipe(ModelSpec(recipe.library, recipe.name, recipe.name, recipe.tag))
        pixels = "" if recipe.size == usual.size else f" at {side(recipe.size)} pixels"
    comma = "," if source and pixels else ""
    return f" with {args}{source}{comma}{pixels}" if args else pixels
