"""Configurations read as recipes: timm's hub layout, elsa's extension of it, and open_clip's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elsa_core.errors import ModelError
from elsa_core.loading import libraries
from elsa_core.loading.library import ConfigArgs
from elsa_core.loading.recipe import (
    ASSUMABLE,
    CLIP_MEAN,
    CLIP_STD,
    CROP_MODES,
    INTERPOLATIONS,
    MAX_IMAGE_SIZE,
    RESIZE_MODES,
    Preprocess,
    Recipe,
    check_blocks,
    checked_args,
)
from elsa_core.loading.stated import names_of

_UNSAID = re.compile(r"[a-z]\w{0,39}")
_MAX_UNSAID = 32
# A name becomes part of a file's name (the bundle that `export` writes by default), and timm and
# open_clip read "local-dir:..." and "hf-hub:..." as places to fetch from.
_NAME = re.compile(r"[\w.@+-]{1,120}")


def from_config(config: Mapping[str, Any], where: str) -> Recipe:
    """Read timm's hub layout (or elsa's extension of it) from config.json.

    Args:
        config: the parsed object.
        where: the file, for messages.

    Raises:
        ModelError: another kind of configuration, a name that is none, or a value of the wrong
            type.
    """
    if "model_cfg" in config:
        return from_open_clip_config(config, where)
    name = config.get("architecture")
    if not isinstance(name, str) or not name:
        kind = config.get("architectures") or config.get("model_type")
        hint = f"; it is of transformers ({str(kind)[:60]}): give its folder" if kind else ""
        raise ModelError(f"{where} names no architecture{hint}")
    _check_name(name, where)
    extension = config.get("elsa", {})
    library, implied = _library(extension, where)
    # Early timm releases kept everything at the top level.
    cfg = config.get("pretrained_cfg", config)
    if not isinstance(cfg, Mapping):
        raise ModelError(f"{where}: pretrained_cfg must be an object")
    num_classes = config.get("num_classes", cfg.get("num_classes"))
    if num_classes is not None and (type(num_classes) is not int or not 0 <= num_classes < 2**31):
        raise ModelError(f"{where}: num_classes must be a whole number >= 0")
    args = checked_args(config.get("model_args", {}), where)
    preprocess = replace(preprocess_of(cfg, where), assumed=_assumed(extension, cfg, where))
    for key, value in implied(cfg, preprocess).items():
        args.setdefault(key, value)
    return Recipe(
        library,
        name.partition(".")[0],
        args,
        num_classes,
        _with_size(preprocess, args, where),
        unsaid=_unsaid(extension, where),
        labels=names_of(config.get("label_names") or cfg.get("label_names")),
    )


def _library(extension: Any, where: str) -> tuple[str, ConfigArgs]:
    """Return the library that elsa's extension names, the first where it names none, and its
    `config_args`."""
    known = isinstance(extension, Mapping)
    name = extension.get("library", libraries.first().name) if known else None
    for library in libraries.LIBRARIES:
        if library.name == name and library.config_args is not None:
            return library.name, library.config_args
    raise ModelError(f"{where} names an unknown library {str(name)[:40]!r}")


def from_open_clip_config(config: Mapping[str, Any], where: str) -> Recipe:
    """Read open_clip_config.json; pretrained towers it may name are not fetched.

    Raises:
        ModelError: no towers in it, a name that is none, or a value of the wrong type.
    """
    model_cfg = config.get("model_cfg", config)
    if not isinstance(model_cfg, Mapping) or not all(
        isinstance(model_cfg.get(key), Mapping) for key in ("vision_cfg", "text_cfg")
    ):
        raise ModelError(f"{where} has no model_cfg with vision_cfg and text_cfg")
    for part in (model_cfg, *(each for each in model_cfg.values() if isinstance(each, Mapping))):
        check_blocks(part, where)
    given = config.get("preprocess_cfg") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{where}: preprocess_cfg must be an object")
    if given.get("interpolation") == "random":  # of training; open_clip evaluates with this one
        given = {**given, "interpolation": "bicubic"}
    size = model_cfg["vision_cfg"].get("image_size", 224)
    size = [size, size] if type(size) is int else size
    assumed = _assumed(config.get("elsa", {}), {**given, "crop_pct": 1.0}, where)
    given = {"mean": CLIP_MEAN, "std": CLIP_STD} | {k: v for k, v in given.items() if v is not None}
    modes = {word: mode for mode, word in RESIZE_MODES.items()}
    mode = given.get("resize_mode") or "shortest"
    if mode not in modes:
        raise ModelError(f"{where}: resize_mode must be one of {', '.join(modes)}")
    given |= {"crop_mode": modes[mode]}
    cfg = {**given, "input_size": [3, *size] if isinstance(size, list) else None, "crop_pct": 1.0}
    name = config.get("architecture") or "custom"
    for each in (name, model_cfg["vision_cfg"].get("timm_model_name") or name):
        _check_name(each, where)
    preprocess = replace(preprocess_of(cfg, where), assumed=assumed)
    unsaid = _unsaid(config.get("elsa", {}), where)
    return Recipe("open_clip", name, {}, 0, preprocess, None, dict(model_cfg), unsaid)


def _check_name(name: Any, where: str) -> None:
    """Refuse a name that could lead elsewhere as a path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ModelError(
            f"{where} names an architecture {str(name)[:60]!r}: a name has letters, digits, . _ - +"
        )


def preprocess_of(cfg: Mapping[str, Any], where: str) -> Preprocess:
    """Read input_size, mean, std, crop_pct, crop_mode and interpolation; defaults where not said.

    Raises:
        ModelError: a value that cannot be.
    """
    size = cfg.get("input_size") or list(Preprocess().input_size)
    if not (isinstance(size, (list, tuple)) and len(size) == 3 and all(map(_is_extent, size))):
        raise ModelError(
            f"{where}: input_size must be three whole numbers (C, H, W) from 1 to {MAX_IMAGE_SIZE}"
        )
    default = replace(Preprocess().with_channels(size[0]), input_size=tuple(size))
    crop = cfg.get("crop_pct", default.crop_pct)
    # Above 1 the image is smaller than the input and its border is black: timm's VOLO at 448.
    if not _within(crop, 0.05, 2.0):
        raise ModelError(f"{where}: crop_pct must be a number from 0.05 to 2")
    interpolation = cfg.get("interpolation", default.interpolation)
    if interpolation not in INTERPOLATIONS:
        raise ModelError(f"{where}: interpolation must be one of {', '.join(INTERPOLATIONS)}")
    mode = cfg.get("crop_mode") or default.crop_mode
    if mode not in CROP_MODES:
        raise ModelError(f"{where}: crop_mode must be one of {', '.join(CROP_MODES)}")
    mean = _per_channel(cfg, "mean", default.mean, -1e6, where)
    std = _per_channel(cfg, "std", default.std, 1e-6, where)
    return replace(
        default, mean=mean, std=std, interpolation=interpolation, crop_pct=float(crop),
        crop_mode=mode,
    )  # fmt: skip


def _assumed(extension: Any, cfg: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return what an earlier elsa assumed, and what the configuration leaves out."""
    noted = extension.get("assumed", []) if isinstance(extension, Mapping) else []
    if not isinstance(noted, list) or not all(key in ASSUMABLE for key in noted):
        raise ModelError(f"{where}: assumed must list some of {', '.join(ASSUMABLE)}")
    return tuple(key for key in ASSUMABLE if key in noted or cfg.get(key) is None)


def _unsaid(extension: Any, where: str) -> dict[str, Any]:
    """Return what an earlier elsa took from the architecture's name alone."""
    noted = extension.get("unsaid", {}) if isinstance(extension, Mapping) else {}
    values = noted.values() if isinstance(noted, Mapping) else ()
    counts = [n for value in values for n in (value if isinstance(value, list) else [value])]
    known = (
        isinstance(noted, Mapping)
        and len(noted) <= _MAX_UNSAID
        and all(isinstance(key, str) and _UNSAID.fullmatch(key) for key in noted)
    )
    if not known or not all(type(n) is int and 0 < n < 2**31 for n in counts):
        raise ModelError(f"{where}: unsaid must give numbers by the names of arguments")
    return dict(noted)


def _per_channel(
    cfg: Mapping[str, Any], key: str, default: tuple[float, ...], least: float, where: str
) -> tuple[float, ...]:
    """One number for each channel; a single one serves them all, as timm reads it."""
    values, count = cfg.get(key) or default, len(default)
    if not isinstance(values, (list, tuple)) or len(values) not in (1, count):
        raise ModelError(f"{where}: {key} must be {count} numbers, one for each channel")
    if not all(_within(value, least, 1e6) for value in values):
        raise ModelError(f"{where}: {key} must be numbers from {least:g} to 1e6")
    return tuple(float(value) for value in values) * (count // len(values))


def _with_size(preprocess: Preprocess, args: Mapping[str, Any], where: str) -> Preprocess:
    """An image size among the arguments describes the weights better than the published one."""
    size = args.get("img_size", args.get("image_size"))
    if size is None:
        return preprocess
    pair = (size, size) if type(size) is int else tuple(size) if isinstance(size, list) else ()
    if len(pair) != 2 or not all(map(_is_extent, pair)):
        raise ModelError(
            f"{where}: img_size must be one or two whole numbers from 1 to {MAX_IMAGE_SIZE}"
        )
    return replace(preprocess, input_size=(preprocess.input_size[0], *pair))


def _is_extent(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_IMAGE_SIZE


def _within(value: Any, least: float, most: float) -> bool:
    """True for a number in the range; NaN is in none."""
    return type(value) in (int, float) and least <= value <= most
