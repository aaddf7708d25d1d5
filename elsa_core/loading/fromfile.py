"""A model from a weights file: which architecture, at which size, and the tensors put in place."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elsa_core.errors import ArgumentError, ElsaError, ModelError
from elsa_core.loading.fit import Shapes, differences, matches
from elsa_core.loading.imagesize import with_image_size
from elsa_core.loading.libraries import (
    BUILD_ERRORS,
    build,
    build_meta,
    load_open_clip,
    timm_args,
)
from elsa_core.loading.published import torchvision_resized
from elsa_core.loading.recipe import Recipe, from_config, parse_json, read_json
from elsa_core.loading.recognise import explain_misfit, fit_named, label, recognise
from elsa_core.loading.shards import INDEX_SUFFIX, is_index, read_sharded
from elsa_core.loading.spec import CONFIG_NAMES, parse
from elsa_core.loading.weights import Weights, read_checkpoint, read_safetensors
from elsa_core.messages import first_line, quiet

CONFIG_METADATA = "elsa_config"
_WEIGHTS_NAMES = (
    *("model.safetensors", "open_clip_model.safetensors", "open_clip_pytorch_model.safetensors"),
    *("pytorch_model.bin", "open_clip_pytorch_model.bin", "pytorch_model.pth", "model.pth"),
)

Size = tuple[int, int] | None


def read_weights(path: Path) -> Weights:
    """Read a .safetensors file, an index of several, or a PyTorch checkpoint.

    Raises:
        ModelError: the file is malformed, needs pickle, or holds NaN or infinity.
    """
    if is_index(path):
        return read_sharded(path)
    safe = path.suffix.lower() == ".safetensors"
    return read_safetensors(path) if safe else read_checkpoint(path)


def weights_in(directory: Path) -> Path:
    """Return the weights file of a model directory.

    Raises:
        ModelError: none, or several with no usual name.
    """
    for name in _WEIGHTS_NAMES:
        if (directory / name).is_file():
            return directory / name
    indices = sorted(directory.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) == 1:
        return indices[0]
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    what = "several .safetensors files, none named" if others else "no weights file, such as"
    raise ModelError(f"{directory} holds {what} model.safetensors")


def choose_recipe(
    weights: Weights, arch: str | None, image_size: Size, *, config_required: bool = False
) -> tuple[Recipe, tuple[str, ...]]:
    """Find the architecture: `arch`, the file's metadata, a config beside it, or the shapes.

    Returns:
        The recipe at the size of the tensors, and notes for the user.

    Raises:
        ModelError: unknown, ambiguous, or a configuration that cannot be read.
        ArgumentError: `arch` is no library's name.
    """
    shapes = weights.shapes
    if arch is not None:
        return named_recipe(arch, shapes, image_size), ()
    embedded = weights.metadata.get(CONFIG_METADATA)
    if embedded is not None and not config_required:
        where = f"{weights.path} (metadata {CONFIG_METADATA})"
        return from_config(parse_json(embedded, where), where), ()
    recorded = weights.metadata.get("architecture")
    if recorded is not None and not config_required:
        try:
            recipe = named_recipe(recorded, shapes, image_size)
        except ElsaError:
            pass  # older trainers record the class, not a name: the shapes say more
        else:
            return recipe, (f"architecture {label(recipe)}, from the file's metadata",)
    recipe_beside, problem = _config_beside(weights.path.parent)
    if recipe_beside is not None:
        return recipe_beside, ()
    if config_required:
        raise problem or ModelError(f"{weights.path.parent} holds no configuration")
    found = recognise(shapes, str(weights.path), image_size)
    also = f" (the same computation as {', '.join(found.alike[:3])})" if found.alike else ""
    note = f"architecture {label(found.recipe)}, recognised from names and shapes{also}"
    return found.recipe, (note,)


def named_recipe(arch: str, shapes: Shapes, image_size: Size) -> Recipe:
    """Return the recipe of a name, with classifier, depth and image size as in the shapes.

    Raises:
        ArgumentError: the name is a file, a directory or a hub id.
        ModelError: unknown name.
    """
    spec = parse(arch)
    if spec.source not in ("timm", "open_clip", "torchvision"):
        raise ArgumentError(f"arch (--arch) must name an architecture, not {arch!r}")
    return fit_named(spec, shapes, image_size)


def _config_beside(directory: Path) -> tuple[Recipe | None, ModelError | None]:
    """Return the recipe of the first readable configuration, or why there is none."""
    problem: ModelError | None = None
    for name in CONFIG_NAMES:
        path = directory / name
        if path.is_file():
            try:
                return from_config(read_json(path), str(path)), None
            except ModelError as error:
                problem = problem or error
    return None, problem


def apply(
    recipe: Recipe, weights: Weights, image_size: Size, dtype: torch.dtype
) -> tuple[nn.Module, Recipe]:
    """Build the model and put the weights in place, resized where the image size differs.

    Shapes are compared on the meta device first: a configuration that asks for more memory than
    the file has weights is refused before anything is allocated.

    Raises:
        ModelError: the tensors do not fit the architecture, or are whole numbers where it has
            weights.
        ArgumentError: the image size does not suit the model.
    """
    target = recipe if image_size is None else with_image_size(recipe, image_size)
    shapes = weights.shapes
    plain = build_meta(target)
    _check_floating(plain, weights, recipe)
    if matches(plain, shapes):
        model = build(target).to(dtype=dtype)
        own = model.state_dict().keys()
        kept = {name: tensor for name, tensor in weights.tensors.items() if name in own}
        model.load_state_dict(kept, strict=False)
        return model, target
    _check_scale(plain, shapes, weights.path, recipe)
    try:
        with quiet(), _one_file(weights) as file:
            model = _convert(target, recipe, weights, file)
    except BUILD_ERRORS as error:
        why = explain_misfit(recipe, shapes)
        raise ModelError(
            f"{weights.path} does not fit {label(recipe)}: {why or first_line(error)}"
        ) from error
    return model.eval().to(dtype=dtype), target


def _check_floating(model: nn.Module, weights: Weights, recipe: Recipe) -> None:
    """Whole numbers where the model has weights would be read as weights."""
    for name, own in model.state_dict().items():
        given = weights.tensors.get(name)
        if given is not None and own.is_floating_point() and not given.is_floating_point():
            kind = str(given.dtype).removeprefix("torch.")
            raise ModelError(
                f"{weights.path}: tensor {name[:120]!r} is {kind}, and {label(recipe)} has a"
                " floating one; quantised weights are not supported"
            )


def _check_scale(model: nn.Module, shapes: Shapes, path: Path, recipe: Recipe) -> None:
    """A model far larger than its file, or with no tensor of it, cannot be meant."""
    missing, unexpected, _ = differences(model, shapes)
    total = len(shapes)
    if len(unexpected) == total or len(missing) > max(8, 4 * total):
        raise ModelError(f"{path} does not fit {label(recipe)}: {explain_misfit(recipe, shapes)}")


@contextmanager
def _one_file(weights: Weights) -> Iterator[Path]:
    """The file of the weights; shards are joined into one that vanishes afterwards."""
    if not is_index(weights.path):
        yield weights.path
        return
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="elsa-shards-") as scratch:
        path = Path(scratch) / "model.safetensors"
        save_file({name: t.contiguous() for name, t in weights.tensors.items()}, path)
        yield path


def _convert(target: Recipe, recipe: Recipe, weights: Weights, file: Path) -> nn.Module:
    """Let the library read the file its own way: renamed tensors, resized position embeddings."""
    if target.library == "open_clip":
        return load_open_clip(target, recipe, str(file))
    if target.library == "torchvision":
        model = build(target)
        model.load_state_dict(torchvision_resized(model, weights.tensors))
        return model
    import timm
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(recipe.name)
    cfg: dict[str, Any] = published.to_dict(remove_source=True) if published is not None else {}
    cfg.pop("label_offset", None)
    cfg.update(file=str(file), custom_load=False)
    cfg["input_size"] = recipe.preprocess.input_size
    if recipe.num_classes is not None:
        cfg["num_classes"] = recipe.num_classes
    converted: nn.Module = timm.create_model(
        target.name, pretrained=True, pretrained_cfg=cfg, **timm_args(target)
    )
    return converted
