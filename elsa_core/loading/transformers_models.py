"""A folder of transformers' `save_pretrained`: the model, its preprocessing, its class names."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elsa_core.base.messages import first_line, listed, quiet
from elsa_core.base.reading import read_json
from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading.configuration import preprocess_of
from elsa_core.loading.fromfile import weights_in
from elsa_core.loading.library import BUILD_ERRORS, UninitialisedParameters, imported
from elsa_core.loading.recipe import ASSUMABLE, Preprocess, Recipe, check_blocks, pair_of
from elsa_core.loading.stated import names_of
from elsa_core.loading.weights import check_numbers, read_weights

LIBRARY = "transformers"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# Pillow's numbers of the methods.
_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_UNNAMED = re.compile(r"LABEL_\d+")
# What a model may have more than its file: position tables and poolers that are computed or unused.
_SPARE = 2**24


def is_transformers(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of transformers."""
    return isinstance(config.get("model_type"), str) and not {"architecture", "model_cfg"} & set(
        config
    )


def open_folder(
    folder: Path, config: Mapping[str, Any], size: tuple[int, int] | None
) -> tuple[nn.Module, Recipe, tuple[str, ...], tuple[str, ...]]:
    """Build the model that a folder with this config.json holds; no code of the folder runs. The
    model, its recipe, notes, and warnings."""
    where = str(folder / "config.json")
    check_blocks(config, where)
    weights = read_weights(weights_in(folder))
    cls, named = _class(config, where)
    notes = [] if cls.__name__ == named else [f"{cls.__name__}, the image tower of {named}"]
    model, lost, left = _filled(cls, folder, sum(map(math.prod, weights.shapes.values())))
    if left and not notes:
        raise ModelError(f"{weights.path} does not fit {named}: {listed(left)} unexpected")
    if needed := [name for name in lost if ".pooler." not in f".{name}"]:
        raise ModelError(f"{weights.path} does not fit {named}: {listed(needed)} missing")
    said = [f"{weights.path} lacks {listed(lost)}: RANDOM in the model"] if lost else []
    check_numbers(weights.path, model.state_dict())
    preprocess, more = _preprocess(folder, model.config)
    classes = cls.__name__.endswith("ForImageClassification")
    labels = names_of(config.get("id2label")) if classes else ()
    labels = () if any(map(_UNNAMED.fullmatch, labels)) else labels
    count = int(model.config.num_labels) if classes else 0
    if classes:
        model.num_classes = count  # timm's name, which a bundle's labels are counted by
    recipe = Recipe(LIBRARY, cls.__name__, {}, count, preprocess, labels=labels)
    recipe = recipe if size is None else recipe.at(size)
    return model, recipe, tuple(notes), (*said, *more)


def write_folder(model: Any, directory: Path, source: Path | None) -> None:
    """Write a model as its `save_pretrained` does, and the processor of `source`."""
    from elsa_core.patching import original

    with quiet(), _no_bars(), original(model):
        model.save_pretrained(directory, max_shard_size="1TB")
    for name in PROCESSORS:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _class(config: Mapping[str, Any], where: str) -> tuple[Any, str]:
    transformers = imported(LIBRARY, LIBRARY)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    named: Any = getattr(transformers, name, None)
    if not isinstance(named, type) or not issubclass(named, transformers.PreTrainedModel):
        raise ModelError(
            f"{where}: transformers {transformers.__version__} has no model "
            f"{(name or config['model_type'])[:60]!r}; save the model with save_pretrained"
        )
    towers = (
        f"{name.removesuffix('Model')}Vision{end}" for end in ("ModelWithProjection", "Model")
    )
    for cls in (named, *(getattr(transformers, tower, None) for tower in towers)):
        if getattr(cls, "main_input_name", "") == "pixel_values":
            return cls, name
    takes = getattr(named, "main_input_name", "other inputs")
    raise ModelError(
        f"{where}: {name} takes {takes}, not images; load it with transformers and call "
        "elsa_core.patch(model, example)"
    )


def _filled(cls: Any, folder: Path, numbers: int) -> tuple[Any, list[str], list[str]]:
    try:
        with quiet(), _no_bars():
            config = cls.config_class.from_pretrained(folder, local_files_only=True)
            with torch.device("meta"), UninitialisedParameters():
                held = sum(p.numel() for p in cls(config).parameters())
            if held > 2 * numbers + _SPARE:
                raise ModelError(
                    f"{folder}: {cls.__name__} has {held} numbers and its file {numbers}"
                )
            model, told = cls.from_pretrained(
                folder, config=config, local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except ElsaError:
        raise
    except BUILD_ERRORS as error:
        raise ModelError(
            f"{folder} does not load as {cls.__name__}: {first_line(error)}"
        ) from error
    wrong = sorted(str(each[0]) for each in told["mismatched_keys"])
    if wrong:
        raise ModelError(f"{folder} does not fit {cls.__name__}: {listed(wrong)} of another shape")
    return model.eval(), sorted(told["missing_keys"]), sorted(told["unexpected_keys"])


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _preprocess(folder: Path, config: Any) -> tuple[Preprocess, list[str]]:
    vision = getattr(config, "vision_config", config)
    channels, own = getattr(vision, "num_channels", 3), getattr(vision, "image_size", None)
    count = channels if type(channels) is int else 3
    size = _pair(own) or (224, 224)
    usual = replace(Preprocess().with_channels(count), input_size=(count, *size))
    path = next((folder / name for name in PROCESSORS if (folder / name).is_file()), None)
    given = {} if path is None else read_json(path)
    given = given.get("image_processor", given)
    if not isinstance(given, Mapping) or not given:
        return replace(usual, assumed=ASSUMABLE), []
    target, share, mode, lines = _sizes(given, size)
    cfg: dict[str, Any] = {"input_size": [count, *target], "crop_pct": share}
    method = given.get("resample")
    if type(method) is int and 0 <= method < len(_RESAMPLE):
        cfg["interpolation"] = _RESAMPLE[method]
    cfg["mean"], cfg["std"] = [0.0] * count, [1.0] * count
    if given.get("do_normalize", True):
        cfg["mean"], cfg["std"] = given.get("image_mean"), given.get("image_std")
    found = preprocess_of({k: v for k, v in cfg.items() if v is not None}, str(path))
    # An image is multiplied by this factor: 1 / 255 gives 0..1.
    factor = given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1.0
    good = isinstance(factor, (int, float)) and 1e-6 <= factor <= 1e6
    scale = 255.0 * factor if good else 1.0
    if abs(scale - 1.0) > 1e-6:
        mean, std = (tuple(value / scale for value in each) for each in (found.mean, found.std))
        found = replace(found, mean=mean, std=std)
    missing = tuple(key for key in ASSUMABLE if cfg.get(key) is None)
    return replace(found, crop_mode=mode, assumed=missing), lines


def _sizes(
    given: Mapping[str, Any], own: tuple[int, int]
) -> tuple[tuple[int, int], float, str, list[str]]:
    """Input (height, width), crop_pct, the crop mode, and lines about what they leave out."""
    size, crop = given.get("size"), given.get("crop_size")
    cropped = given.get("do_center_crop", crop is not None) and _pair(crop) is not None
    if not given.get("do_resize", True):
        line = "the processor does not resize images: a bundle resizes them to the input"
        return (_pair(crop) if cropped else None) or own, 1.0, "center", [line]
    if isinstance(size, Mapping) and "longest_edge" in size and "shortest_edge" not in size:
        target = _pair(given.get("pad_size")) or _pair(size["longest_edge"]) or own
        line = "the processor pads images at the right and at the bottom: a bundle on all sides"
        return target, 1.0, "border", [line]
    resized = _pair(size) or own
    edge = isinstance(size, int) or (isinstance(size, Mapping) and "shortest_edge" in size)
    target = (_pair(crop) or own) if cropped else resized
    share = target[0] / resized[0] if cropped else 1.0
    if int(target[0] / share) < resized[0]:
        share = math.nextafter(share, 0.0)
    return target, share, "center" if edge else "squash", []


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = edge if edge is not None else [size.get("height"), size.get("width")]
    return pair_of(size)
