"""`load`: any model that a user can name, ready to run; `load_model` says also what it is."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from elsa_core.base.inputs import generated_inputs, resolved_input_size, text_shape
from elsa_core.base.messages import first_line
from elsa_core.base.reading import read_json
from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.loading import hub, libraries
from elsa_core.loading.configuration import from_config
from elsa_core.loading.fit import with_image_size, with_kwargs
from elsa_core.loading.fromfile import apply, choose_recipe, weights_in
from elsa_core.loading.libraries import build, build_published, classes
from elsa_core.loading.plan import PLAN_NAME, apply_plan, read_plan
from elsa_core.loading.recipe import (
    ASSUMABLE,
    FLAGS,
    SIZES,
    Given,
    Preprocess,
    Recipe,
    assumed_text,
    checked_args,
    required_pair,
    with_given,
)
from elsa_core.loading.recognise import with_unsaid
from elsa_core.loading.spec import CONFIG_NAMES, ModelSpec, parse
from elsa_core.loading.stated import filled
from elsa_core.loading.transformers_models import (
    LIBRARY,
    PROCESSORS,
    is_transformers,
    open_folder,
)
from elsa_core.loading.weights import read_weights

if TYPE_CHECKING:
    from elsa_core.patching import PatchReport

_SAVED_FROM = ", saved from "
Size = tuple[int, int] | None


@dataclass
class Loaded:
    """A model in eval mode, and what is known of it."""

    model: nn.Module  # on the device and in the dtype that were asked for
    spec: ModelSpec
    recipe: Recipe  # how to build the model again
    weights: str  # where they come from, in words: "random (seed 0)"
    notes: tuple[str, ...] = ()  # for the user: an alias, an architecture that was recognised
    report: PatchReport | None = None  # of a directory that was saved patched
    tower: str | None = None  # "image" or "text" where `model` is one tower of a CLIP
    num_classes: int = 0  # outputs of the classifier, 0 where the model ends in features
    # What the user should act on: a preprocessing that is assumed, which of several weights.
    warnings: tuple[str, ...] = ()
    example: tuple[Any, ...] | None = None  # its arguments, where it takes no images
    example_size: tuple[int, ...] | None = None  # of its one input without the batch, likewise

    @property
    def is_watched(self) -> bool:
        """Whether its attention is found by a run, on `example_inputs()`."""
        return self.is_given or self.recipe.library in libraries.NAMELESS

    @property
    def is_given(self) -> bool:
        """Whether the user has said what the model runs on."""
        return self.example is not None or self.example_size is not None

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def preprocess(self) -> Preprocess:
        """How an image becomes an input."""
        return self.recipe.preprocess

    @property
    def input_size(self) -> tuple[int, int, int]:
        """(C, H, W) in pixels."""
        return self.recipe.preprocess.input_size

    @property
    def unsaid(self) -> str:
        """One line about what the architecture's name says alone, and no tensor; "" for nothing."""
        values = ", ".join(
            f"{word}={'/'.join(map(str, value)) if isinstance(value, list) else value}"
            for word, value in self.recipe.unsaid.items()
        )
        return values and f"assumed: {values} from {self.name} (not in the file)"

    @property
    def weight(self) -> Tensor:
        """A floating one, which tells device and dtype; an empty tensor where there is none."""
        floating = (weight for weight in self.model.parameters() if weight.is_floating_point())
        return next(floating, torch.empty(0))

    def example_inputs(self, batch_size: int = 1, seed: int = 0) -> tuple[Tensor, ...]:
        """Return random inputs for `model(*inputs)`, on the model's device: normalised noise
        [batch, C, H, W] in its dtype, for a CLIP token ids too, int64 [batch, context length]; or
        `example`."""
        if self.example is not None:
            return self.example
        held = self.weight
        if self.example_size is not None:
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn((batch_size, *self.example_size), generator=generator)
            return (noise.to(held.device, held.dtype),)
        shape = None  # context length and vocabulary of a CLIP
        if self.recipe.model_cfg is not None:
            text: Any = self.recipe.model_cfg.get("text_cfg", {})
            usual = int(text.get("context_length", 77)), int(text.get("vocab_size", 49408))
            shape = text_shape(self.model) or usual
        case = generated_inputs(
            self.input_size, batch_size, seed=seed, dtype=held.dtype, device=held.device,
            text=shape,
        )["noise"]  # fmt: skip
        return case if isinstance(case, tuple) else (case,)


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
    """Load a model in eval mode.

    What had to be assumed (a preprocessing that the file does not state, which of several weights
    was taken) comes as a `UserWarning`.

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
        weights: which weights of a file that holds several: a key of the checkpoint
            ("state_dict_ema", "teacher") or the beginning of tensors' names ("model").
            Default: averaged ones first, then a teacher's.
        mean: one number or one a channel, on images scaled to 0..1; likewise `std`. Default: what
            the weights' source says.
        crop_pct: the share of the resized image that the centre crop keeps.
        interpolation: how images are resized ("bicubic", ...).

    Returns:
        The model. Its `pretrained_cfg` holds input_size, mean, std, crop_pct and interpolation, as
        timm's models have them, and label_names where they are known; its `elsa_assumed` names
        those that the weights' source does not state. A directory that was saved patched gives a
        patched model; `open_clip:NAME` the whole CLIP, both towers.

    Raises:
        TypeError: an argument of a wrong type.
        ModelError: unknown name, unreadable or unsupported file, tensors that do not fit or that
            the library would resample or drop.
        ArgumentError: an image size, device, dtype, arch, model_kwargs or preprocessing that cannot
            be.
        UnavailableError: a library, the device or the network is missing.
    """
    loaded = load_model(
        spec, image_size=image_size, pretrained=pretrained, device=device, dtype=dtype, seed=seed,
        arch=arch, model_kwargs=model_kwargs, weights=weights,
        preprocess=Given(mean, std, crop_pct, interpolation),
    )  # fmt: skip
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
    """Load a model and say what it is; arguments and errors as `load`, but for `preprocess`: mean,
    std, crop_pct and interpolation where the model's own are not meant."""
    parsed = spec if isinstance(spec, ModelSpec) else parse(spec)
    asked = Given() if preprocess is None else preprocess
    typed: tuple[tuple[str, Any, Any, str], ...] = (
        ("dtype", dtype, torch.dtype, "a torch.dtype"),
        ("seed", seed, SupportsIndex, "a whole number"),
        ("preprocess", asked, Given, "an elsa_core.loading.Given"),
        ("pretrained", pretrained, bool, "True or False"),
        ("weights", weights, str | None, "text"),
        ("device", device, str | int | torch.device, "text or a torch.device"),
        ("image_size", image_size, int | tuple | list | None, "one or two whole numbers"),
    )
    for name, value, kind, word in typed:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {word}, not {type(value).__name__}")
    where = "image_size (--img-size)"
    size = None if image_size is None else required_pair(image_size, where, ArgumentError)
    target = _checked_device(device)
    if not dtype.is_floating_point:
        raise ArgumentError(f"dtype must be a floating one, not {dtype}")
    flag = "arch" if arch is not None else "weights" if weights is not None else None
    if flag and parsed.path is None:
        raise ArgumentError(f"{flag} (--{flag}) is for weights files; {parsed.given!r} is a name")
    given = checked_args(model_kwargs or {}, "model_kwargs (--model-kwargs)", ArgumentError)
    with torch.random.fork_rng(devices=[]):
        # The generator itself: torch.manual_seed would seed the caller's GPUs as well.
        torch.default_generator.manual_seed(seed)
        drawn = f"random (seed {seed})"
        if parsed.source in libraries.names():
            loaded = _from_library(parsed, size, pretrained, drawn, given)
        elif parsed.source == "python":
            loaded = _from_python(parsed, size, pretrained, drawn, given)
        elif parsed.source == "hub":
            loaded = _from_hub(parsed, size, pretrained, dtype, drawn, given)
        else:
            try:
                loaded = _from_file(parsed, size, arch, dtype, given, weights)
            except OSError as error:  # such as a link that leads nowhere
                raise ModelError(f"{parsed.name} cannot be read: {error}") from error
    stated = with_given(loaded.preprocess, asked)
    recipe = dataclasses.replace(loaded.recipe, preprocess=stated)
    # with no size left to the library's default, which a tag can change
    args = {**libraries.of(recipe.library).resized(recipe, recipe.size).args, **recipe.args}
    count = classes(loaded.model, recipe)
    loaded.recipe = dataclasses.replace(recipe, args=args, num_classes=count)
    loaded.num_classes = count
    if stated.assumed and not loaded.weights.startswith("random"):
        flags = ", ".join(FLAGS[key] for key in stated.assumed)
        tag = ", or --arch with a tag" if libraries.of(recipe.library).tags else ""
        line = (
            f"{parsed.name} does not say its preprocessing: {assumed_text(stated)} assumed, the"
            f" defaults of {recipe.name}: give {flags}{tag}"
        )
        loaded.warnings = (*loaded.warnings, line)
    loaded.model = loaded.model.eval().to(device=target, dtype=dtype)
    if parsed.source != "python":
        loaded.recipe.describe(loaded.model)
    plan = parsed.path / PLAN_NAME if parsed.path and parsed.source == "directory" else None
    if plan is not None and os.path.lexists(plan):
        example = loaded.example_inputs() if loaded.is_watched else None
        loaded.report = apply_plan(loaded.model, read_plan(plan), plan, example)
    return loaded


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        line = first_line(error)
        raise ArgumentError(f"device (--device) {device!r} is unknown: {line}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UnavailableError("device cuda is not available here: use --device cpu")
        if found.index is not None and found.index >= count:
            raise UnavailableError(f"device {found} is not there: this machine has {count}")
    elif found.type == "meta":
        raise ArgumentError("device (--device) meta holds no weights: use cpu or cuda")
    elif found.type != "cpu":
        try:
            torch.empty(0, device=found)
        except (AssertionError, ImportError, RuntimeError) as error:  # each device has its own
            line = f"device {found} is not available here: use --device cpu ({first_line(error)})"
            raise UnavailableError(line) from None
    return found


def _from_library(
    spec: ModelSpec, size: Size, pretrained: bool, drawn: str, given: Mapping[str, Any]
) -> Loaded:
    recipe = with_kwargs(libraries.of(spec.source).recipe(spec.name, spec.tag), given)
    if size is not None:
        recipe = with_image_size(recipe, size)
    model, weights = build_published(recipe) if pretrained else (build(recipe), drawn)
    return Loaded(model, spec, recipe, weights, () if spec.alias is None else (spec.alias,))


def _from_python(
    spec: ModelSpec, size: Size, pretrained: bool, drawn: str, given: Mapping[str, Any]
) -> Loaded:
    if pretrained:
        raise ArgumentError("pretrained (--pretrained) is not for python:, whose factory loads it")
    name = spec.name
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ModelError(f"python:{name}: give python:PACKAGE.MODULE:FACTORY")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # as `python -m` has it
    step = f"cannot import {module}:"
    try:
        with redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                if not hasattr(found, part):
                    raise ModelError(f"python:{name}: {module} has no {attribute}")
                found = getattr(found, part)
            if not callable(found):
                kind = type(found).__name__
                raise ModelError(f"python:{name}: {attribute} is no factory, but a {kind}")
            step = f"{attribute} raised"
            model = found(**given)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"python:{name}: {step} {said}") from error
    finally:
        with suppress(ValueError):
            sys.path.remove(here)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"python:{name}: {attribute} gives a {type(model).__name__}, no torch.nn.Module"
        )
    preprocess = Preprocess(resolved_input_size(model, size))
    recipe = Recipe("python", name, given, preprocess=preprocess)
    notes = (f"{module} is your own code: it was imported and run",)
    return Loaded(model.eval(), spec, recipe, f"{drawn} or of the factory", notes)


def _from_hub(
    spec: ModelSpec, size: Size, pretrained: bool, dtype: torch.dtype, drawn: str,
    given: Mapping[str, Any],
) -> Loaded:  # fmt: skip
    need, told = f"the weights of {spec.name}", f"pretrained ({spec.name})"
    config = hub.fetch(
        spec.name, CONFIG_NAMES[::-1], need=f"the configuration and weights of {spec.name}"
    )
    content = read_json(config)
    if is_transformers(content):
        # What is fetched lies in one folder, as `save_pretrained` has it.
        if not pretrained:
            raise ArgumentError(
                f"{spec.given} is of {LIBRARY}: add --pretrained to fetch its weights"
            )
        if given:
            raise ArgumentError(f"model_kwargs are not for {spec.given}, which {LIBRARY} describes")
        hub.fetch(spec.name, hub.TIMM_WEIGHTS, need=need)
        with suppress(ModelError, UnavailableError):
            hub.fetch(spec.name, PROCESSORS, need=f"the preprocessing of {spec.name}")
        # again: the weights may be of a later revision than the configuration in the cache
        config = hub.fetch(spec.name, CONFIG_NAMES[:1], need=need)
        model, recipe, notes, said = open_folder(config.parent, read_json(config), size)
        return Loaded(model, spec, recipe, told, notes, warnings=said)
    recipe = with_kwargs(from_config(content, str(config)), given)
    if not pretrained:
        recipe = recipe if size is None else with_image_size(recipe, size)
        return Loaded(build(recipe), spec, recipe, drawn)
    weights = read_weights(hub.fetch(spec.name, libraries.of(recipe.library).hub_files, need=need))
    stated = filled(recipe.preprocess, weights.stated.preprocess)
    recipe = dataclasses.replace(recipe, preprocess=stated)
    model, recipe, notes = apply(recipe, weights, size, dtype, given)
    return Loaded(model, spec, recipe, told, notes)


def _from_file(
    spec: ModelSpec, size: Size, arch: str | None, dtype: torch.dtype, given: Mapping[str, Any],
    key: str | None,
) -> Loaded:  # fmt: skip
    assert spec.path is not None
    path, directory = spec.path, spec.source == "directory"
    if directory:
        link = next((each for each in sorted(path.iterdir()) if each.is_symlink()), None)
        # The hub's cache holds links; in a bundle one leads to what it does not hold.
        if link is not None and (path / "manifest.json").exists():
            raise ModelError(f"{link} is a link, which a bundle does not hold: refused")
        config = path / CONFIG_NAMES[0]
        content = read_json(config) if config.is_file() else {}
        if is_transformers(content):
            if arch is not None or key is not None or given:
                raise ArgumentError(
                    f"arch, weights and model_kwargs are not for {spec.given}, which {LIBRARY} "
                    "describes"
                )
            model, recipe, notes, said = open_folder(path, content, size)
            return Loaded(model, spec, recipe, str(path), notes, warnings=said)
        path = weights_in(path)
    weights = read_weights(path, key)
    # Tensors of another size than the typed one are resampled, not taken at their own.
    for word in SIZES:
        if size is None and word in given:
            where = f"model_kwargs (--model-kwargs): {word}"
            size = required_pair(given[word], where, ArgumentError)
    # A classifier that is to be dropped tells the architecture like any other tensor.
    headless = given.get("num_classes") == 0
    kept = {key: value for key, value in given.items() if not headless or key != "num_classes"}
    choice = choose_recipe(weights, arch, size, kept, config_required=directory)
    chosen = choice.recipe
    stated = chosen.preprocess
    if not choice.described:
        # open_clip crops nothing in evaluation
        keys = tuple(key for key in ASSUMABLE if not chosen.two_towers or key != "crop_pct")
        stated = dataclasses.replace(stated, assumed=keys)
    stated = filled(stated, weights.stated.preprocess)
    if choice.tagged:
        stated = dataclasses.replace(stated, assumed=())
    labels = chosen.labels or weights.stated.labels
    chosen = dataclasses.replace(chosen, preprocess=stated, labels=labels)
    if not choice.described or arch is not None:
        chosen = with_unsaid(chosen, weights.shapes, given)
    if headless:
        chosen = with_kwargs(chosen, {"num_classes": given["num_classes"]})  # refuses 0.0
    model, recipe, changed = apply(chosen, weights, size, dtype, given)
    # What was saved twice comes from where it came from first.
    first = weights.metadata.get("elsa_weights", "").rpartition(_SAVED_FROM)[2][:200]
    text = f"{path}{_SAVED_FROM}{first}" if first else f"{path}"
    notes = (*choice.notes, *changed)
    return Loaded(model, spec, recipe, text, notes, warnings=weights.notes)
