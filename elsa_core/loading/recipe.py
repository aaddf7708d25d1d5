"""A recipe: everything needed to build a model again, as plain data, and its form as config.json.

The files are those the libraries themselves read: timm's hub layout (`architecture`,
`num_classes`, `model_args`, `pretrained_cfg`) and open_clip's (`model_cfg`, `preprocess_cfg`), so
that a saved directory also opens with `timm.create_model("local-dir:...")`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elsa_core.errors import ElsaError, ModelError

Library = Literal["timm", "open_clip", "torchvision"]

# 16 384 pixels are 2^20 tokens at patch 16: one float32 image is 3 GiB.
MAX_IMAGE_SIZE = 16_384
# Shapes are compared before memory is taken, but every block is an object already then.
MAX_BLOCKS = 1000
BLOCKS = re.compile("depth|layers|block|stages")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_UNSAID = re.compile(r"[a-z]\w{0,39}")
_MAX_UNSAID = 32
_ASSUMABLE = ("mean", "std", "crop_pct", "interpolation")
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# A name becomes part of a file's name (the bundle that `export` writes by default), and timm and
# open_clip read "local-dir:..." and "hf-hub:..." as places to fetch from.
_NAME = re.compile(r"[\w.@+-]{1,120}")
# Keywords of the factories that fetch, read or place something instead of describing the model.
_FORBIDDEN_ARGS = frozenset(
    (
        *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict"),
        *("checkpoint_path", "cache_dir", "device", "dtype", "weights", "progress"),
        *("features_only", "scriptable", "exportable", "no_jit"),
    )
)


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes an input: size in pixels (C, H, W), mean and std on a 0..1 scale.

    `assumed` names the fields that the weights' source does not say and that could be others.
    """

    input_size: tuple[int, int, int] = (3, 224, 224)
    mean: tuple[float, ...] = _IMAGENET_MEAN
    std: tuple[float, ...] = _IMAGENET_STD
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    assumed: tuple[str, ...] = ()

    def with_channels(self, count: int) -> Preprocess:
        """Return the same for images of `count` channels, each treated as the average one was."""
        size = (count, *self.input_size[1:])
        if count == len(self.mean):
            return replace(self, input_size=size)
        mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
        return replace(self, input_size=size, mean=(mean,) * count, std=(std,) * count)


@dataclass(frozen=True)
class Given:
    """What the user says of the preprocessing; None is left to the model.

    mean and std are one number or one a channel, on images scaled to 0..1.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None


@dataclass(frozen=True)
class Recipe:
    """How to build one model.

    Attributes:
        library: who builds it.
        name: the architecture's name there; for open_clip may be a free label.
        args: keyword arguments of the constructor, JSON-ready.
        num_classes: outputs of the classifier; 0 for none; None for the library's default.
        preprocess: the input.
        tag: the published weights whose defaults apply (timm), or None.
        model_cfg: open_clip's configuration of both towers; None elsewhere.
        unsaid: what the name says and the weights' source does not: "heads", "window", and other
            arguments of the constructor by name.
    """

    library: Library
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    num_classes: int | None = None
    preprocess: Preprocess = field(default_factory=Preprocess)
    tag: str | None = None
    model_cfg: Mapping[str, Any] | None = None
    unsaid: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the input in pixels."""
        return self.preprocess.input_size[1], self.preprocess.input_size[2]

    def to_config(self) -> dict[str, Any]:
        """Return config.json: timm's hub layout, with the library named under `elsa`."""
        given = self.preprocess
        if self.library == "open_clip":
            return {"architecture": self.name, **self.to_open_clip_config()}
        return {
            "architecture": self.name,
            "num_classes": self.num_classes,
            "model_args": dict(self.args),
            "pretrained_cfg": {
                "tag": self.tag or "",
                "custom_load": False,
                "input_size": list(given.input_size),
                "fixed_input_size": "img_size" in self.args,
                "interpolation": given.interpolation,
                "crop_pct": given.crop_pct,
                "mean": list(given.mean),
                "std": list(given.std),
                "num_classes": self.num_classes,
            },
            "elsa": {
                "library": self.library,
                "assumed": list(given.assumed),
                "unsaid": dict(self.unsaid),
            },
        }

    def to_open_clip_config(self) -> dict[str, Any]:
        """Return open_clip_config.json, which open_clip's own `local-dir:` reads."""
        given = self.preprocess
        return {
            "model_cfg": dict(self.model_cfg or {}),
            "preprocess_cfg": {
                "size": list(self.size),
                "mode": "RGB",
                "mean": list(given.mean),
                "std": list(given.std),
                "interpolation": given.interpolation,
                "resize_mode": "shortest",
            },
            "elsa": {"assumed": list(given.assumed), "unsaid": dict(self.unsaid)},
        }


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
        what = f"a transformers configuration ({str(kind)[:60]})" if kind else "no timm one"
        raise ModelError(
            f"{where} names no architecture: it is {what}; elsa reads timm's and open_clip's"
        )
    _check_name(name, where)
    extension = config.get("elsa", {})
    library = extension.get("library", "timm") if isinstance(extension, Mapping) else None
    if library not in ("timm", "torchvision"):
        raise ModelError(f"{where} names an unknown library {str(library)[:40]!r}")
    # Early timm releases kept everything at the top level.
    cfg = config.get("pretrained_cfg", config)
    if not isinstance(cfg, Mapping):
        raise ModelError(f"{where}: pretrained_cfg must be an object")
    num_classes = config.get("num_classes", cfg.get("num_classes"))
    if num_classes is not None and (type(num_classes) is not int or not 0 <= num_classes < 2**31):
        raise ModelError(f"{where}: num_classes must be a whole number >= 0")
    args = checked_args(config.get("model_args", {}), where)
    preprocess = replace(_preprocess(cfg, where), assumed=_assumed(extension, cfg, where))
    if cfg.get("fixed_input_size") is True and library == "timm":
        args.setdefault("img_size", list(preprocess.input_size[1:]))
    if library == "timm" and preprocess.input_size[0] != 3:
        args.setdefault("in_chans", preprocess.input_size[0])
    return Recipe(
        library,
        name.partition(".")[0],
        args,
        num_classes,
        _with_size(preprocess, args, where),
        unsaid=_unsaid(extension, where),
    )


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
        _check_blocks(part, where)
    given = config.get("preprocess_cfg") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{where}: preprocess_cfg must be an object")
    if given.get("interpolation") == "random":  # of training; open_clip evaluates with this one
        given = {**given, "interpolation": "bicubic"}
    size = model_cfg["vision_cfg"].get("image_size", 224)
    size = [size, size] if type(size) is int else size
    assumed = _assumed(config.get("elsa", {}), {**given, "crop_pct": 1.0}, where)
    given = {"mean": CLIP_MEAN, "std": CLIP_STD} | {k: v for k, v in given.items() if v is not None}
    cfg = {**given, "input_size": [3, *size] if isinstance(size, list) else None, "crop_pct": 1.0}
    name = config.get("architecture") or "custom"
    for each in (name, model_cfg["vision_cfg"].get("timm_model_name") or name):
        _check_name(each, where)
    preprocess = replace(_preprocess(cfg, where), assumed=assumed)
    unsaid = _unsaid(config.get("elsa", {}), where)
    return Recipe("open_clip", name, {}, 0, preprocess, None, dict(model_cfg), unsaid)


def _check_name(name: Any, where: str) -> None:
    """Refuse a name that could lead elsewhere as a path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ModelError(
            f"{where} names an architecture {str(name)[:60]!r}: a name has letters, digits, . _ - +"
        )


def checked_args(args: Any, where: str, error: type[ElsaError] = ModelError) -> dict[str, Any]:
    """Return constructor arguments from outside: plain values, none that fetch or read anything.

    Raises:
        ElsaError: of class `error`: not a mapping, a forbidden keyword, another kind of value.
    """
    if not isinstance(args, Mapping):
        raise error(f"{where}: model_args must be an object")
    for key, value in args.items():
        if key in _FORBIDDEN_ARGS or not isinstance(key, str) or not key.isidentifier():
            raise error(f"{where}: model_args must not set {str(key)[:60]!r}")
        plain = all(map(_is_plain, value)) if isinstance(value, list) else _is_plain(value)
        if not plain:
            raise error(f"{where}: model_args[{key[:60]!r}] must be a plain value or a list")
    _check_blocks(args, where, error)
    return dict(args)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


def _check_blocks(args: Mapping[str, Any], where: str, error: type[ElsaError] = ModelError) -> None:
    """Refuse a depth that takes minutes to build even without memory."""
    for key, value in args.items():
        counts = value if isinstance(value, list) else [value]
        if BLOCKS.search(str(key)) and any(type(n) is int and n > MAX_BLOCKS for n in counts):
            raise error(f"{where}: {key[:60]!r} is beyond the limit of {MAX_BLOCKS} blocks")


def _preprocess(cfg: Mapping[str, Any], where: str) -> Preprocess:
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
    mean = _per_channel(cfg, "mean", default.mean, -1e6, where)
    std = _per_channel(cfg, "std", default.std, 1e-6, where)
    return replace(default, mean=mean, std=std, interpolation=interpolation, crop_pct=float(crop))


def _assumed(extension: Any, cfg: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return what an earlier elsa assumed, and what the configuration leaves out."""
    noted = extension.get("assumed", []) if isinstance(extension, Mapping) else []
    if not isinstance(noted, list) or not all(key in _ASSUMABLE for key in noted):
        raise ModelError(f"{where}: assumed must list some of {', '.join(_ASSUMABLE)}")
    return tuple(key for key in _ASSUMABLE if key in noted or cfg.get(key) is None)


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
