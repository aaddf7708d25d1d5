"""What a file says of its model beside the tensors: architecture, preprocessing, class names.

Read are timm's training checkpoints (`arch`, `args`), Lightning's `hyper_parameters`, and the
metadata of .safetensors files. What cannot be read counts as not stated.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from elsa_core.loading.recipe import (
    ASSUMABLE,
    CROP_MODES,
    INTERPOLATIONS,
    MAX_LABELS,
    Given,
    Preprocess,
    with_given,
)

_SECTIONS = (
    *("pretrained_cfg", "data_config", "args", "hyper_parameters", "hparams"),
    *("config", "cfg", "model_config", "data_preprocessor", "preprocess_cfg"),
)
_ARCHITECTURE = ("arch", "architecture", "model_name", "model", "backbone")
_LABELS = ("label_names", "class_names", "classes", "class_to_idx", "labels")
_DEEPEST = 3
_LONGEST = 100_000  # characters of one text that is parsed
_LONGEST_LITERAL = 1000  # Python's parser recurses


@dataclass(frozen=True)
class Stated:
    """What a file says of its model."""

    architectures: tuple[str, ...] = ()  # names that may be its own, the likeliest first
    args: Mapping[str, Any] = field(default_factory=dict)  # of the constructor
    preprocess: Given = field(default_factory=Given)  # mean and std on a 0..1 scale
    labels: tuple[str, ...] = ()  # names of the classes in order


def stated(content: Any) -> Stated:
    """Return what a checkpoint's content, or a configuration, says beside the tensors."""
    sections = list(_sections(content))
    names = [section.get(key) for section in sections for key in _ARCHITECTURE]
    mean = _numbers(_first(sections, "mean", "image_mean", "img_mean"))
    std = _numbers(_first(sections, "std", "image_std", "img_std"))
    std = None if std is None or min(std) < 1e-6 else std
    # Values of 0..1 have a mean of 1 at most and deviate by 0.5: what is above 2 is on 0..255.
    if max((*(mean or ()), *(std or ())), default=0.0) > 2:
        std = None if std is None else tuple(value / 255 for value in std)
        mean = None if mean is None else tuple(value / 255 for value in mean)
    crop, method = _first(sections, "crop_pct"), _first(sections, "interpolation")
    crop = crop if type(crop) in (int, float) and 0.05 <= crop <= 2 else None
    method = method if isinstance(method, str) and method in INTERPOLATIONS else None
    args: dict[str, Any] = {}
    for key in ("model_args", "model_kwargs"):
        given = _first(sections, key)
        args |= given if isinstance(given, Mapping) else {}
    pool = _first(sections, "gp")  # of timm's training script
    args |= {"global_pool": pool} if isinstance(pool, str) and pool else {}
    labels = next((found for key in _LABELS if (found := names_of(_first(sections, key)))), ())
    found = tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name))
    return Stated(found, args, Given(mean, std, crop, method), labels)


def names_of(value: Any) -> tuple[str, ...]:
    """Return names of classes in order, of a list, `id2label` or `class_to_idx`; () for others."""
    if isinstance(value, Mapping):
        by_name = all(type(number) is int for number in value.values())
        named = {}
        for key, other in value.items():
            number, name = (other, key) if by_name else (key, other)
            if isinstance(number, str) and number.isdecimal() and len(number) < 10:
                number = int(number)
            if type(number) is not int or not 0 <= number < MAX_LABELS:
                return ()
            named[number] = name
        if not value or len(named) < len(value):
            return ()
        value = [named.get(number, "") for number in range(max(named) + 1)]
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_LABELS:
        return ()
    if not all(isinstance(name, str) for name in value):
        return ()
    return tuple(" ".join(name[:200].split()) for name in value)


def filled(preprocess: Preprocess, said: Given) -> Preprocess:
    """Return the preprocessing with what a weights file states in the place of what is assumed."""
    stated = {key: getattr(said, key) for key in preprocess.assumed}
    for key in ("mean", "std"):
        if len(stated.get(key) or ()) not in (1, preprocess.input_size[0]):
            stated[key] = None
    return with_given(preprocess, Given(**stated))


def of_model(model: Any, input_size: tuple[int, int, int], given: Given) -> Preprocess | None:
    """The preprocessing that a model object states in `pretrained_cfg`; None where neither it nor
    the user (`given`) says anything. What is not stated for `input_size` is marked as assumed."""
    cfg = getattr(model, "pretrained_cfg", None)
    said = stated(cfg).preprocess if isinstance(cfg, dict) else Given()
    if said == given == Given():
        return None
    usual = Preprocess(assumed=ASSUMABLE)
    if isinstance(cfg, dict) and cfg.get("crop_mode") in CROP_MODES:
        usual = replace(usual, crop_mode=cfg["crop_mode"])
    mean, std = tuple(said.mean or ()), tuple(said.std or ())  # type: ignore[arg-type]
    if mean and len(mean) == len(std):
        usual = replace(usual, mean=mean, std=std)
    usual = replace(usual.with_channels(input_size[0]), input_size=input_size)
    found = filled(usual, said)
    noted = {*getattr(model, "elsa_assumed", ()), *found.assumed}
    found = replace(found, assumed=tuple(key for key in ASSUMABLE if key in noted))
    return with_given(found, given)


def _sections(content: Any, depth: int = 0) -> Iterator[Mapping[Any, Any]]:
    content = vars(content) if isinstance(content, argparse.Namespace) else content
    if not isinstance(content, Mapping) or depth > _DEEPEST:
        return
    yield content
    for key in _SECTIONS:
        yield from _sections(content.get(key), depth + 1)


def _first(sections: list[Mapping[Any, Any]], *keys: str) -> Any:
    """The first of the keys that a section says; None and "" say nothing."""
    said = (section.get(key) for section in sections for key in keys)
    return next((v for v in said if v is not None and not (isinstance(v, str) and not v)), None)


def _numbers(value: Any) -> tuple[float, ...] | None:
    if isinstance(value, Tensor):
        try:
            value = value.flatten().tolist() if value.numel() <= MAX_LABELS else None
        except RuntimeError:  # it is sparse, nested, quantised, or on the meta device
            return None
    value = [value] if type(value) in (int, float) else value
    if not isinstance(value, (list, tuple)) or not value:
        return None
    good = all(type(n) in (int, float) and abs(n) < 1e6 for n in value)
    return tuple(float(n) for n in value) if good else None


def parsed(text: str) -> Any:
    """What a text in the metadata of a .safetensors file says: JSON, a literal, numbers, itself."""
    if len(text) > _LONGEST:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text) if len(text) <= _LONGEST_LITERAL else text
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    try:
        return [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        return text
