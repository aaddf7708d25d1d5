"""`load`: any model that a user can name, ready to run; `load_model` says also what it is."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from elsa_core.base.inputs import generated_inputs, resolved_input_size, text_shape
from elsa_core.base.reading import read_json
from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.loading import hub, libraries, preprocessing, unsaid
from elsa_core.loading.building import checked_device
from elsa_core.loading.configuration import from_config
from elsa_core.loading.fill import apply, drops_classifier
from elsa_core.loading.fit import with_given
from elsa_core.loading.fromfile import choose_recipe, read_weights, refuse_links, weights_in
from elsa_core.loading.imagesize import checked_size, with_image_size
from elsa_core.loading.libraries import build, classes, default_recipe, explicit
from elsa_core.loading.plan import PLAN_NAME, apply_plan, read_plan
from elsa_core.loading.published import build_published
from elsa_core.loading.python_models import build_own
from elsa_core.loading.recipe import Given, Preprocess, Recipe, checked_args
from elsa_core.loading.spec import CONFIG_NAMES, ModelSpec, parse
from elsa_core.loading.transformers_models import (
    LIBRARY,
    PROCESSORS,
    is_transformers,
    open_folder,
)

if TYPE_CHECKING:
    from elsa_core.patching import PatchReport

_SAVED_FROM = ", saved from "


@dataclass
class Loaded:
    """A model in eval mode, and what is known of it.

    Attributes:
        model: on the device and in the dtype that were asked for.
        spec: what the user named.
        name: the architecture, as its library calls it.
        input_size: channels, height and width of its images in pixels.
        mean: per channel, on images scaled to 0..1; likewise `std`.
        interpolation: how images are resized ("bicubic", ...).
        crop_pct: the share of the resized image that the centre crop keeps.
        crop_mode: "center", "squash" (both sides are resized) or "border", as timm has them.
        num_classes: outputs of the classifier, 0 where the model ends in features.
        weights: where the weights come from, in words: "random (seed 0)".
        notes: lines for the user: an alias that was completed, an architecture that was recognised.
        warnings: lines that the user should act on: a preprocessing that had to be assumed, which
            of several weights was taken.
        recipe: how to build the model again.
        report: what was patched, for a directory that was saved patched; otherwise None.
        tower: "image" or "text" where `model` is one tower of the CLIP that was loaded.
        alike: other architectures with the same tensors that compute the same.
        example: the model's arguments, where it does not take images of `input_size`.
        example_size: of its one input without the batch, where that is no image.
    """

    model: nn.Module
    spec: ModelSpec
    name: str
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    num_classes: int
    weights: str
    notes: tuple[str, ...]
    recipe: Recipe
    report: PatchReport | None = None
    tower: str | None = None
    warnings: tuple[str, ...] = ()
    alike: tuple[Recipe, ...] = ()
    example: tuple[Any, ...] | None = None
    example_size: tuple[int, ...] | None = None

    @property
    def is_watched(self) -> bool:
        """Whether its attention is found by a run, on `example_inputs()`."""
        return self.is_given or self.recipe.library in libraries.NAMELESS

    @property
    def is_given(self) -> bool:
        """Whether the user has said what the model runs on."""
        return self.example is not None or self.example_size is not None

    @property
    def crop_mode(self) -> str:
        return self.recipe.preprocess.crop_mode

    @property
    def unsaid(self) -> str:
        """One line about what the architecture's name says alone, and no tensor; "" for nothing."""
        return unsaid.line(self.recipe)

    def example_inputs(self, batch_size: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
        """Return random inputs for `model(*inputs)`, on the model's device.

        Images are [batch, channels, height, width] of normalised noise in the model's dtype. A
        CLIP gets token ids too, int64 [batch, context length]: start, words, end, padding. Or
        `example`, where there is one.
        """
        if self.example is not None:
            return self.example
        held = next(self.model.parameters(), torch.empty(0))
        if self.example_size is not None:
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn((batch_size, *self.example_size), generator=generator)
            return (noise.to(held.device, held.dtype),)
        case = generated_inputs(
            self.input_size,
            batch_size,
            seed=seed,
            dtype=held.dtype,
            device=held.device,
            text=self._text_shape(),
        )["noise"]
        return case if isinstance(case, tuple) else (case,)

    def _text_shape(self) -> tuple[int, int] | None:
        """Context length and vocabulary of a CLIP, None for a model of images alone."""
        if self.recipe.model_cfg is None:
            return None
        text: Any = self.recipe.model_cfg.get("text_cfg", {})
        return text_shape(self.model) or (
            int(text.get("context_length", 77)),
            int(text.get("vocab_size", 49408)),
        )


def load(
    spec: str | os.PathLike[str] | ModelSpec,
    *,
    image_size: int | Sequence[int] | None = None,
    pretrained: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    arch: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    weights: str | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    crop_pct: float | None = None,
    interpolation: str | None = None,
) -> nn.Module:
    """Load a model in eval mode; see `load_model`, whose arguments these are.

    What had to be assumed (a preprocessing that the file does not state, which of several weights
    was taken) comes as a `UserWarning`.

    Args:
        mean: one number or one a channel, on images scaled to 0..1; likewise `std`. Default: what
            the weights' source says.
        crop_pct: the share of the resized image that the centre crop keeps.
        interpolation: how images are resized ("bicubic", ...).

    Returns:
        The model. Its `pretrained_cfg` holds input_size, mean, std, crop_pct and interpolation, as
        timm's models have them, and label_names where they are known; its `elsa_assumed` names
        those that the weights' source does not state. A directory that was saved patched gives a
        patched model; `open_clip:NAME` the whole CLIP, both towers.
    """
    loaded = load_model(
        spec,
        image_size=image_size,
        pretrained=pretrained,
        device=device,
        dtype=dtype,
        seed=seed,
        arch=arch,
        model_kwargs=model_kwargs,
        preprocess=Given(mean, std, crop_pct, interpolation),
        weights=weights,
    )
    for line in loaded.warnings:
        warnings.warn(line, stacklevel=2)
    return loaded.model


def load_model(
    spec: str | os.PathLike[str] | ModelSpec,
    *,
    image_size: int | Sequence[int] | None = None,
    pretrained: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    arch: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    preprocess: Given | None = None,
    weights: str | None = None,
) -> Loaded:
    """Load a model and say what it is.

    Args:
        spec: MODEL as typed (see `spec.parse`), or parsed.
        image_size: pixels, one number or (height, width); default: the checkpoint's own. Position
            embeddings are resized the way the model's library does.
        pretrained: published weights, from the cache or the network; for a file they are its own.
        device: where the model goes.
        dtype: of the parameters; floating.
        seed: of random weights. The caller's random state is neither used nor changed.
        arch: the architecture of a weights file, where it cannot be recognised.
        model_kwargs: arguments of the library's constructor (`window_size=8`), as timm's
            `--model-kwargs`. For a file they say what it was made with, that tensors of another
            window, patch or image size are to be resampled, and with `num_classes=0` that its
            classifier is to be dropped.
        preprocess: mean, std, crop_pct and interpolation where the model's own are not meant.
        weights: which weights of a file that holds several: a key of the checkpoint
            ("state_dict_ema", "teacher") or the beginning of tensors' names ("model").
            Default: averaged ones first, then a teacher's.

    Raises:
        TypeError: an argument of a wrong type.
        ModelError: unknown name, unreadable or unsupported file, tensors that do not fit or that
            the library would resample or drop.
        ArgumentError: an image size, device, dtype, arch, model_kwargs or preprocess that cannot
            be.
        UnavailableError: a library, the device or the network is missing.
    """
    parsed = spec if isinstance(spec, ModelSpec) else parse(spec)
    asked = Given() if preprocess is None else preprocess
    for name, value, kind, word in (
        ("dtype", dtype, torch.dtype, "a torch.dtype"),
        ("seed", seed, SupportsIndex, "a whole number"),
        ("preprocess", asked, Given, "an elsa_core.loading.Given"),
        ("pretrained", pretrained, bool, "True or False"),
        ("weights", weights, str | None, "text"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {word}, not {type(value).__name__}")
    if isinstance(image_size, str) or not isinstance(image_size, int | Sequence | None):
        raise TypeError(
            f"image_size must be one or two whole numbers, not {type(image_size).__name__}"
        )
    size = None if image_size is None else checked_size(image_size)
    target = checked_device(device)
    if not dtype.is_floating_point:
        raise ArgumentError(f"dtype must be a floating one, not {dtype}")
    if arch is not None and parsed.path is None:
        raise ArgumentError(f"arch (--arch) is for weights files; {parsed.given!r} is a name")
    if weights is not None and parsed.path is None:
        raise ArgumentError(f"weights (--weights) is for weights files; {parsed.given!r} is a name")
    given = checked_args(model_kwargs or {}, "model_kwargs (--model-kwargs)", ArgumentError)
    with torch.random.fork_rng(devices=[]):
        # The generator itself: torch.manual_seed would seed the caller's GPUs as well.
        torch.default_generator.manual_seed(seed)
        if parsed.source in libraries.names():
            loaded = _from_library(parsed, size, pretrained, seed, given)
        elif parsed.source == "python":
            loaded = _from_python(parsed, size, pretrained, seed, given)
        elif parsed.source == "hub":
            loaded = _from_hub(parsed, size, pretrained, dtype, seed, given)
        else:
            loaded = _from_file(parsed, size, arch, dtype, given, weights)
    loaded = _preprocessed(loaded, asked)
    loaded.model = loaded.model.eval().to(device=target, dtype=dtype)
    if loaded.recipe.library != "python":
        loaded.recipe.describe(loaded.model)
    if parsed.source == "directory":
        _apply_plan(loaded)
    return loaded


def _preprocessed(loaded: Loaded, given: Given) -> Loaded:
    """Put what the user says of the preprocessing in the place of the model's own."""
    preprocess = preprocessing.with_given(loaded.recipe.preprocess, given)
    recipe = dataclasses.replace(loaded.recipe, preprocess=preprocess)
    drawn = loaded.weights.startswith("random")
    line = "" if drawn else preprocessing.line(recipe, loaded.alike, loaded.spec.name)
    return dataclasses.replace(
        loaded,
        warnings=(*loaded.warnings, *([line] if line else [])),
        mean=preprocess.mean,
        std=preprocess.std,
        interpolation=preprocess.interpolation,
        crop_pct=preprocess.crop_pct,
        recipe=recipe,
    )


def _from_library(
    spec: ModelSpec,
    size: tuple[int, int] | None,
    pretrained: bool,
    seed: int,
    given: Mapping[str, Any],
) -> Loaded:
    recipe = default_recipe(spec)
    recipe = with_given(recipe, given) if given else recipe
    if size is not None:
        recipe = with_image_size(recipe, size)
    notes = () if spec.alias is None else (spec.alias,)
    if pretrained:
        model, weights = build_published(recipe)
    else:
        model, weights = build(recipe), f"random (seed {seed})"
    return _loaded(model, spec, recipe, weights, notes)


def _from_python(
    spec: ModelSpec,
    size: tuple[int, int] | None,
    pretrained: bool,
    seed: int,
    given: Mapping[str, Any],
) -> Loaded:
    """A model that the user's own code makes."""
    if pretrained:
        raise ArgumentError("pretrained (--pretrained) is not for python:, whose factory loads it")
    model = build_own(spec.name, given)
    recipe = Recipe("python", spec.name, given)
    recipe = replace(recipe, preprocess=Preprocess(resolved_input_size(model, size)))
    module = spec.name.partition(":")[0]
    notes = (f"{module} is your own code: it was imported and run",)
    return _loaded(model, spec, recipe, f"random (seed {seed}) or of the factory", notes)


def _from_hub(
    spec: ModelSpec,
    size: tuple[int, int] | None,
    pretrained: bool,
    dtype: torch.dtype,
    seed: int,
    given: Mapping[str, Any],
) -> Loaded:
    """A repository of the hub: its configuration, and its weights where they are asked for."""
    config = hub.fetch(
        spec.name, CONFIG_NAMES[::-1], need=f"the configuration and weights of {spec.name}"
    )
    content = read_json(config)
    if is_transformers(content):
        return _transformers_from_hub(spec, config.parent, content, size, pretrained)
    recipe = from_config(content, str(config))
    recipe = with_given(recipe, given) if given else recipe
    if not pretrained:
        recipe = recipe if size is None else with_image_size(recipe, size)
        return _loaded(build(recipe), spec, recipe, f"random (seed {seed})", ())
    names = libraries.of(recipe.library).hub_files
    path = hub.fetch(spec.name, names, need=f"the weights of {spec.name}")
    weights = read_weights(path)
    recipe = preprocessing.filled(recipe, weights.stated.preprocess)
    model, recipe, notes = apply(recipe, weights, size, dtype, given)
    return _loaded(model, spec, recipe, f"pretrained ({spec.name})", notes)


def _transformers_from_hub(
    spec: ModelSpec,
    folder: Path,
    config: Mapping[str, Any],
    size: tuple[int, int] | None,
    pretrained: bool,
) -> Loaded:
    """A repository of transformers: what is fetched lies in one folder, as `save_pretrained` has
    it."""
    if not pretrained:
        raise ArgumentError(f"{spec.given} is of {LIBRARY}: add --pretrained to fetch its weights")
    hub.fetch(spec.name, hub.TIMM_WEIGHTS, need=f"the weights of {spec.name}")
    with suppress(ModelError, UnavailableError):
        hub.fetch(spec.name, PROCESSORS, need=f"the preprocessing of {spec.name}")
    loaded = _from_transformers(spec, folder, config, size)
    return dataclasses.replace(loaded, weights=f"pretrained ({spec.name})")


def _from_file(
    spec: ModelSpec,
    size: tuple[int, int] | None,
    arch: str | None,
    dtype: torch.dtype,
    given: Mapping[str, Any],
    key: str | None,
) -> Loaded:
    assert spec.path is not None
    directory = spec.source == "directory"
    if directory:
        refuse_links(spec.path)
        config = spec.path / CONFIG_NAMES[0]
        content = read_json(config) if config.is_file() else {}
        if is_transformers(content):
            if arch is not None or key is not None or given:
                raise ArgumentError(
                    f"arch, weights and model_kwargs are not for {spec.given}, which {LIBRARY} "
                    "describes"
                )
            return _from_transformers(spec, spec.path, content, size)
    path = weights_in(spec.path) if directory else spec.path
    weights = read_weights(path, key)
    # A classifier that is to be dropped tells the architecture like any other tensor.
    headless = drops_classifier(given)
    kept = {key: value for key, value in given.items() if not headless or key != "num_classes"}
    choice = choose_recipe(weights, arch, size, config_required=directory, given=kept)
    chosen = choice.recipe
    if not choice.described:
        chosen = preprocessing.unknown(chosen)
    chosen = preprocessing.filled(chosen, weights.stated.preprocess)
    if choice.tagged:
        chosen = preprocessing.known(chosen)
    if weights.stated.labels and not chosen.labels:
        chosen = dataclasses.replace(chosen, labels=weights.stated.labels)
    if not choice.described or arch is not None:
        chosen = unsaid.with_unsaid(chosen, weights.shapes, given)
    if headless:
        chosen = with_given(chosen, {"num_classes": 0})
    model, recipe, changed = apply(chosen, weights, size, dtype, given)
    origin = weights.metadata.get("elsa_weights")
    # What was saved twice comes from where it came from first.
    first = "" if origin is None else origin.rpartition(_SAVED_FROM)[2][:200]
    text = f"{path}{_SAVED_FROM}{first}" if first else f"{path}"
    notes = (*choice.notes, *changed)
    loaded = _loaded(model, spec, recipe, text, notes)
    return dataclasses.replace(loaded, warnings=weights.notes, alike=choice.alike)


def _from_transformers(
    spec: ModelSpec, folder: Path, config: Mapping[str, Any], size: tuple[int, int] | None
) -> Loaded:
    model, recipe, notes, said = open_folder(folder, config, size)
    loaded = _loaded(model, spec, recipe, str(folder), tuple(notes))
    return dataclasses.replace(loaded, warnings=tuple(said))


def _apply_plan(loaded: Loaded) -> None:
    assert loaded.spec.path is not None
    path = loaded.spec.path / PLAN_NAME
    if os.path.lexists(path):
        example = loaded.example_inputs() if loaded.is_watched else None
        loaded.report = apply_plan(loaded.model, read_plan(path), path, example)


def _loaded(
    model: nn.Module, spec: ModelSpec, recipe: Recipe, weights: str, notes: tuple[str, ...]
) -> Loaded:
    num_classes = classes(model, recipe)
    given = recipe.preprocess
    return Loaded(
        model=model,
        spec=spec,
        name=recipe.name,
        input_size=given.input_size,
        mean=given.mean,
        std=given.std,
        interpolation=given.interpolation,
        crop_pct=given.crop_pct,
        num_classes=num_classes,
        weights=weights,
        notes=notes,
        recipe=explicit(recipe, num_classes),
    )
