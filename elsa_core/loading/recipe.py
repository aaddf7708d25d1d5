"""A recipe: everything needed to build a model again, as plain data, and its form as config.json.

The files are those the libraries themselves read: timm's hub layout (`architecture`,
`num_classes`, `model_args`, `pretrained_cfg`) and open_clip's (`model_cfg`, `preprocess_cfg`), so
that a saved directory also opens with `timm.create_model("local-dir:...")`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elsa_core.errors import ArgumentError, ElsaError, ModelError

# 16 384 pixels are 2^20 tokens at patch 16: one float32 image is 3 GiB.
MAX_IMAGE_SIZE = 16_384
# Shapes are compared before memory is taken, but every block is an object already then.
MAX_BLOCKS = 1000
_BLOCKS = re.compile("depth|layers|block|stages")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
# As timm has them: shorter side resized and the centre cropped; both sides resized; longer side
# resized and the rest filled.
CROP_MODES = ("center", "squash", "border")
RESIZE_MODES = {"shortest": "center", "squash": "squash", "longest": "border"}  # open_clip's words
SIZES = ("img_size", "image_size", "input_size")  # how the libraries' constructors call it
ASSUMABLE = ("mean", "std", "crop_pct", "interpolation")
FLAGS = {key: f"--{key.replace('_', '-')}" for key in ASSUMABLE}
MAX_LABELS = 100_000
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
    `assumed` names the fields that the weights' source does not say."""

    input_size: tuple[int, int, int] = (3, 224, 224)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # ImageNet's, as its std
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    assumed: tuple[str, ...] = ()
    crop_mode: str = "center"

    @property
    def transform(self) -> dict[str, Any]:
        """The arguments of `elsa_core.base.images.reader`."""
        return {key: value for key, value in vars(self).items() if key != "assumed"}

    def with_channels(self, count: int) -> Preprocess:
        """Return the same for images of `count` channels, each treated as the average one was."""
        size = (count, *self.input_size[1:])
        if count == len(self.mean):
            return replace(self, input_size=size)
        mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
        return replace(self, input_size=size, mean=(mean,) * count, std=(std,) * count)

    def with_said(
        self, said: Mapping[str, Any], named: Callable[[str], str], error: type[ElsaError]
    ) -> Preprocess:
        """Return the same with the values of `said` that are not None; `named` is what the message
        of an error calls a field."""
        found = {key: value for key, value in said.items() if value is not None}
        count = self.input_size[0]
        # Above 1 the image is smaller than the input and its border is black: VOLO at 448.
        bounds = {"mean": (-1e6, 1e6), "std": (1e-6, 1e6), "crop_pct": (0.05, 2.0)}
        for key, (least, most) in bounds.items():
            if key not in found:
                continue
            one = key == "crop_pct"
            values = [found[key]] if one else found[key]
            if not isinstance(values, (list, tuple)) or len(values) not in (1, count):
                raise error(f"{named(key)} must be {count} numbers or one for all")
            numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in values)
            if not numbers or not all(least <= n <= most for n in values):
                what = "a number" if one else "numbers"
                raise error(f"{named(key)} must be {what} from {least:g} to {most:g}")
            several = tuple(map(float, values)) * (count // len(values))
            found[key] = several[0] if one else several
        for key, known in (("interpolation", INTERPOLATIONS), ("crop_mode", CROP_MODES)):
            if key in found and found[key] not in known:
                raise error(f"{named(key)} must be one of {', '.join(known)}")
        return replace(self, **found)


@dataclass(frozen=True)
class Given:
    """What the user says of the preprocessing; mean and std are one number or one a channel."""

    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None


def with_given(preprocess: Preprocess, given: Given) -> Preprocess:
    """Return the preprocessing with what the user has given."""
    said = {key: getattr(given, key) for key in ASSUMABLE}
    for key, value in said.items():
        one = [value] if value is None or isinstance(value, int | float) else list(value)
        if key != "interpolation" and not all(isinstance(v, int | float | None) for v in one):
            raise TypeError(f"{key} must be a number, or one a channel, not {value!r}")
        if key in ("mean", "std") and value is not None:
            said[key] = one
    left = tuple(key for key in preprocess.assumed if said[key] is None)
    found = preprocess.with_said(said, lambda key: f"{key} ({FLAGS[key]})", ArgumentError)
    return replace(found, assumed=left)


def assumed_text(given: Preprocess) -> str:
    """The values that are assumed, in words."""
    words = []
    for key in given.assumed:
        value = getattr(given, key)
        values = value if isinstance(value, tuple) else (value,)
        values = values[:1] if len(set(values)) == 1 else values
        shown = " ".join(v if isinstance(v, str) else f"{v:g}" for v in values)
        words.append(f"{key} {shown}")
    return ", ".join(words)


@dataclass(frozen=True)
class Recipe:
    """How to build one model."""

    library: str  # who builds it, a name of `libraries`
    name: str  # the architecture's name there; for open_clip may be a free label
    args: Mapping[str, Any] = field(default_factory=dict)  # of the constructor, JSON-ready
    num_classes: int | None = None  # 0 for no classifier; None for the library's default
    preprocess: Preprocess = field(default_factory=Preprocess)
    tag: str | None = None  # the published weights whose defaults apply (timm)
    model_cfg: Mapping[str, Any] | None = None  # of both towers, as open_clip writes it
    # What the name says and the weights' source does not: "heads", "window", and other arguments.
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()  # names of the classes in order

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
        given = replace(self.preprocess, input_size=(self.preprocess.input_size[0], *size))
        return replace(self, preprocess=given)

    def with_args(self, args: Mapping[str, Any]) -> Recipe:
        """Return the same with these arguments beside and over its own."""
        return replace(self, args={**self.args, **args})

    def describe(self, model: Any) -> None:
        """Put preprocessing and class names where timm has them on a model, and what is assumed."""
        known = getattr(model, "pretrained_cfg", None)
        model.elsa_assumed = self.preprocess.assumed
        labels = {"label_names": self.labels} if self.labels else {}
        known = known if isinstance(known, dict) else {}
        model.pretrained_cfg = {**known, **self.preprocess.transform, **labels}

    def to_config(self) -> dict[str, Any]:
        """Return config.json: timm's hub layout, with the library named under `elsa`."""
        if self.two_towers:
            return {"architecture": self.name, **self.to_open_clip_config()}
        said = self.preprocess.transform
        return {
            "architecture": self.name,
            "num_classes": self.num_classes,
            **({"label_names": list(self.labels)} if self.labels else {}),
            "model_args": dict(self.args),
            "pretrained_cfg": {
                "tag": self.tag or "",
                "custom_load": False,
                "fixed_input_size": "img_size" in self.args,
                "num_classes": self.num_classes,
                **{k: list(v) if isinstance(v, tuple) else v for k, v in said.items()},
            },
            "elsa": {
                "library": self.library,
                "assumed": list(self.preprocess.assumed),
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
                "resize_mode": next(w for w, m in RESIZE_MODES.items() if m == given.crop_mode),
            },
            "elsa": {"assumed": list(given.assumed), "unsaid": dict(self.unsaid)},
        }


def pair_of(size: Any) -> tuple[int, int] | None:
    """(height, width) of one or two whole numbers of pixels; None for what is no image size."""
    pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    good = len(pair) == 2 and all(type(n) is int and 0 < n <= MAX_IMAGE_SIZE for n in pair)
    return (pair[0], pair[1]) if good else None


def required_pair(size: Any, where: str, error: type[ElsaError]) -> tuple[int, int]:
    """`pair_of`, where an error of that class refuses what is no image size."""
    pair = pair_of(size)
    if pair is None:
        raise error(
            f"{where} must be one or two whole numbers from 1 to {MAX_IMAGE_SIZE},"
            f" not {str(size)[:60]}"
        )
    return pair


def checked_args(args: Any, where: str, error: type[ElsaError] = ModelError) -> dict[str, Any]:
    """Return constructor arguments from outside: plain values, none that fetch or read anything."""
    if not isinstance(args, Mapping):
        raise error(f"{where}: model_args must be an object")
    for key, value in args.items():
        if key in _FORBIDDEN_ARGS or not isinstance(key, str) or not key.isidentifier():
            raise error(f"{where}: model_args must not set {str(key)[:60]!r}")
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, (bool, int, float, str, type(None))) for each in values):
            raise error(f"{where}: model_args[{key[:60]!r}] must be a plain value or a list")
    check_blocks(args, where, error)
    return dict(args)


def check_blocks(args: Mapping[str, Any], where: str, error: type[ElsaError] = ModelError) -> None:
    """Refuse a depth that takes minutes to build even without memory, here or one level below."""
    for part in (args, *(each for each in args.values() if isinstance(each, Mapping))):
        for key, value in part.items():
            counts = value if isinstance(value, list) else [value]
            if _BLOCKS.search(str(key)) and any(type(n) is int and n > MAX_BLOCKS for n in counts):
                raise error(f"{where}: {key[:60]!r} is beyond the limit of {MAX_BLOCKS} blocks")
