"""Configurations read as recipes: timm's hub layout, elsa's extension of it, and open_clip's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elsa_core.errors import ModelError
from elsa_core.loading import libraries
from elsa_core.loading.recipe import (
    ASSUMABLE,
    CLIP_MEAN,
    CLIP_STD,
    MAX_IMAGE_SIZE,
    RESIZE_MODES,
    Preprocess,
    Recipe,
    check_blocks,
    checked_args,
    pair_of,
    required_pair,
)
from elsa_core.loading.stated import names_of

_UNSAID = re.compile(r"[a-z]\w{0,39}")
_MAX_UNSAID = 32
# A name becomes part of a file's name (the bundle that `export` writes by default), and timm and
# open_clip read "local-dir:..." and "hf-hub:..." as places to fetch from.
_NAME = re.compile(r"[\w.@+-]{1,120}")


def from_config(config: Mapping[str, Any], where: str) -> Recipe:
    """Read timm's hub layout (or elsa's extension of it) from config.json, or open_clip's
    towers."""
    if "model_cfg" in config:
        return from_open_clip_config(config, where)
    name = config.get("architecture")
    if not isinstance(name, str) or not name:
        kind = config.get("architectures") or config.get("model_type")
        hint = f"; it is of transformers ({str(kind)[:60]}): give its folder" if kind else ""
        raise ModelError(f"{where} names no architecture{hint}")
    _check_name(name, where)
    extension = config.get("elsa", {})
    usual = libraries.LIBRARIES[0].name
    library = extension.get("library", usual) if isinstance(extension, Mapping) else None
    implied = next((x.config_args for x in libraries.LIBRARIES if x.name == library), None)
    if implied is None:
        raise ModelError(f"{where} names an unknown library {str(library)[:40]!r}")
    # Early timm releases kept everything at the top level.
    cfg = config.get("pretrained_cfg", config)
    if not isinstance(cfg, Mapping):
        raise ModelError(f"{where}: pretrained_cfg must be an object")
    num_classes = config.get("num_classes", cfg.get("num_classes"))
    if num_classes is not None and (type(num_classes) is not int or not 0 <= num_classes < 2**31):
        raise ModelError(f"{where}: num_classes must be a whole number >= 0")
    args = checked_args(config.get("model_args", {}), where)
    assumed, unsaid = _noted(extension, cfg, where)
    preprocess = replace(preprocess_of(cfg, where), assumed=assumed)
    args = {**implied(cfg, preprocess), **args}
    # An image size among the arguments describes the weights better than the published one.
    size = args.get("img_size", args.get("image_size"))
    if size is not None:
        pair = required_pair(size, f"{where}: img_size", ModelError)
        preprocess = replace(preprocess, input_size=(preprocess.input_size[0], *pair))
    return Recipe(
        str(library),
        name.partition(".")[0],
        args,
        num_classes,
        preprocess,
        unsaid=unsaid,
        labels=names_of(config.get("label_names") or cfg.get("label_names")),
    )


def from_open_clip_config(config: Mapping[str, Any], where: str) -> Recipe:
    """Read open_clip_config.json; pretrained towers it may name are not fetched."""
    model_cfg = config.get("model_cfg", config)
    if not isinstance(model_cfg, Mapping) or not all(
        isinstance(model_cfg.get(key), Mapping) for key in ("vision_cfg", "text_cfg")
    ):
        raise ModelError(f"{where} has no model_cfg with vision_cfg and text_cfg")
    check_blocks(model_cfg, where)
    given = config.get("preprocess_cfg") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{where}: preprocess_cfg must be an object")
    if given.get("interpolation") == "random":  # of training; open_clip evaluates with this one
        given = {**given, "interpolation": "bicubic"}
    assumed, unsaid = _noted(config.get("elsa", {}), {**given, "crop_pct": 1.0}, where)
    mode = RESIZE_MODES.get(str(given.get("resize_mode") or "shortest"))
    if mode is None:
        raise ModelError(f"{where}: resize_mode must be one of {', '.join(RESIZE_MODES)}")
    size = model_cfg["vision_cfg"].get("image_size", 224)
    size = [size, size] if type(size) is int else size
    said = {"mean": CLIP_MEAN, "std": CLIP_STD, **{k: v for k, v in given.items() if v is not None}}
    said |= {"crop_mode": mode, "crop_pct": 1.0}
    said["input_size"] = [3, *size] if isinstance(size, list) else None
    name = config.get("architecture") or "custom"
    for each in (name, model_cfg["vision_cfg"].get("timm_model_name") or name):
        _check_name(each, where)
    preprocess = replace(preprocess_of(said, where), assumed=assumed)
    return Recipe("open_clip", name, {}, 0, preprocess, None, dict(model_cfg), unsaid)


def preprocess_of(cfg: Mapping[str, Any], where: str) -> Preprocess:
    """Read the fields of a preprocessing; defaults where they are not said."""
    size = cfg.get("input_size") or list(Preprocess().input_size)
    good = isinstance(size, (list, tuple)) and len(size) == 3 and all(map(pair_of, size))
    if not good or any(isinstance(extent, (list, tuple)) for extent in size):
        raise ModelError(
            f"{where}: input_size must be three whole numbers (C, H, W) from 1 to {MAX_IMAGE_SIZE}"
        )
    default = replace(Preprocess().with_channels(size[0]), input_size=tuple(size))
    said = {key: cfg.get(key) or None for key in ("mean", "std", "crop_mode")}
    said |= {key: cfg.get(key) for key in ("crop_pct", "interpolation")}
    return default.with_said(said, lambda key: f"{where}: {key}", ModelError)


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ModelError(
            f"{where} names an architecture {str(name)[:60]!r}: a name has letters, digits, . _ - +"
        )


def _noted(
    extension: Any, cfg: Mapping[str, Any], where: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What elsa's extension notes: the fields that are assumed, and what a name alone says."""
    extension = extension if isinstance(extension, Mapping) else {}
    noted, unsaid = extension.get("assumed", []), extension.get("unsaid", {})
    if not isinstance(noted, list) or not all(key in ASSUMABLE for key in noted):
        raise ModelError(f"{where}: assumed must list some of {', '.join(ASSUMABLE)}")
    assumed = tuple(key for key in ASSUMABLE if key in noted or cfg.get(key) is None)
    if isinstance(unsaid, Mapping) and len(unsaid) <= _MAX_UNSAID:
        counts = [v if isinstance(v, list) else [v] for v in unsaid.values()]
        if all(type(n) is int and 0 < n < 2**31 for each in counts for n in each) and all(
            isinstance(key, str) and _UNSAID.fullmatch(key) for key in unsaid
        ):
            return assumed, dict(unsaid)
    raise ModelError(f"{where}: unsaid must give numbers by the names of arguments")
