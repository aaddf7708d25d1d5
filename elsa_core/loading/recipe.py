"""A recipe: everything needed to build a model again, as plain data, and its form as config.json.

The files are those the libraries themselves read: timm's hub layout (`architecture`,
`num_classes`, `model_args`, `pretrained_cfg`) and open_clip's (`model_cfg`, `preprocess_cfg`), so
that a saved directory also opens with `timm.create_model("local-dir:...")`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elsa_core.errors import ElsaError, ModelError

# 16 384 pixels are 2^20 tokens at patch 16: one float32 image is 3 GiB.
MAX_IMAGE_SIZE = 16_384
# Shapes are compared before memory is taken, but every block is an object already then.
MAX_BLOCKS = 1000
BLOCKS = re.compile("depth|layers|block|stages")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
# As timm has them: shorter side resized and the centre cropped; both sides resized; longer side
# resized and the rest filled.
CROP_MODES = ("center", "squash", "border")
RESIZE_MODES = {"center": "shortest", "squash": "squash", "border": "longest"}  # open_clip's words
ASSUMABLE = ("mean", "std", "crop_pct", "interpolation")
MAX_LABELS = 100_000
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
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
    crop_mode: str = "center"

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

    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None


@dataclass(frozen=True)
class Recipe:
    """How to build one model.

    Attributes:
        library: who builds it, a name of `libraries`.
        name: the architecture's name there; for open_clip may be a free label.
        args: keyword arguments of the constructor, JSON-ready.
        num_classes: outputs of the classifier; 0 for none; None for the library's default.
        preprocess: the input.
        tag: the published weights whose defaults apply (timm), or None.
        model_cfg: the configuration of both towers, as open_clip writes it; None elsewhere.
        unsaid: what the name says and the weights' source does not: "heads", "window", and other
            arguments of the constructor by name.
        labels: names of the classes in order; empty where they are not known.
    """

    library: str
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    num_classes: int | None = None
    preprocess: Preprocess = field(default_factory=Preprocess)
    tag: str | None = None
    model_cfg: Mapping[str, Any] | None = None
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the input in pixels."""
        return self.preprocess.input_size[1], self.preprocess.input_size[2]

    @property
    def two_towers(self) -> bool:
        """True for a CLIP: a configuration describes its image and text towers."""
        return self.model_cfg is not None

    def at(self, size: tuple[int, int]) -> Recipe:
        """Return the same for inputs of (height, width) pixels; the arguments are left."""
        input_size = (self.preprocess.input_size[0], *size)
        return replace(self, preprocess=replace(self.preprocess, input_size=input_size))

    def describe(self, model: Any) -> None:
        """Put the preprocessing and the class names where timm keeps them on a model, and what of
        it is assumed beside them."""
        known = getattr(model, "pretrained_cfg", None)
        given = self.preprocess
        model.pretrained_cfg = {
            **(known if isinstance(known, dict) else {}),
            "input_size": given.input_size,
            "mean": given.mean,
            "std": given.std,
            "crop_pct": given.crop_pct,
            "interpolation": given.interpolation,
            "crop_mode": given.crop_mode,
            **({"label_names": self.labels} if self.labels else {}),
        }
        model.elsa_assumed = given.assumed

    def to_config(self) -> dict[str, Any]:
        """Return config.json: timm's hub layout, with the library named under `elsa`."""
        given = self.preprocess
        if self.two_towers:
            return {"architecture": self.name, **self.to_open_clip_config()}
        return {
            "architecture": self.name,
            "num_classes": self.num_classes,
            **({"label_names": list(self.labels)} if self.labels else {}),
            "model_args": dict(self.args),
            "pretrained_cfg": {
                "tag": self.tag or "",
                "custom_load": False,
                "input_size": list(given.input_size),
                "fixed_input_size": "img_size" in self.args,
                "interpolation": given.interpolation,
                "crop_pct": given.crop_pct,
                "crop_mode": given.crop_mode,
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
                "resize_mode": RESIZE_MODES[given.crop_mode],
            },
            "elsa": {"assumed": list(given.assumed), "unsaid": dict(self.unsaid)},
        }


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
    check_blocks(args, where, error)
    return dict(args)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


def check_blocks(args: Mapping[str, Any], where: str, error: type[ElsaError] = ModelError) -> None:
    """Refuse a depth that takes minutes to build even without memory."""
    for key, value in args.items():
        counts = value if isinstance(value, list) else [value]
        if BLOCKS.search(str(key)) and any(type(n) is int and n > MAX_BLOCKS for n in counts):
            raise error(f"{where}: {key[:60]!r} is beyond the limit of {MAX_BLOCKS} blocks")
