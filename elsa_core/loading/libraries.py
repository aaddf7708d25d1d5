"""Models of timm, open_clip and torchvision, built from recipes; nothing here reads weights.

Every build uses the caller's default device (`torch.device("meta")` builds shapes alone) and the
caller's random state.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.loading.recipe import CLIP_MEAN, CLIP_STD, Preprocess, Recipe
from elsa_core.loading.spec import ModelSpec
from elsa_core.messages import first_line, quiet

# What a constructor raises for a recipe that it cannot follow.
BUILD_ERRORS = (
    AssertionError, AttributeError, ArithmeticError, ImportError, IndexError, KeyError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def default_recipe(spec: ModelSpec) -> Recipe:
    """Return the recipe that the library itself follows for this name.

    Args:
        spec: of source "timm", "open_clip" or "torchvision".

    Raises:
        UnavailableError: the library is not installed.
    """
    if spec.source == "open_clip":
        return _open_clip_recipe(spec)
    if spec.source == "torchvision":
        return _torchvision_recipe(spec)
    return _timm_recipe(spec)


def build(recipe: Recipe) -> nn.Module:
    """Build the model with fresh random weights, in eval mode.

    Raises:
        ModelError: the library does not know the name or cannot follow the arguments.
        UnavailableError: the library, or one that this model needs, is not installed or offline.
    """
    builders = {"timm": _build_timm, "open_clip": _build_open_clip}
    try:
        with quiet():
            return builders.get(recipe.library, _build_torchvision)(recipe).eval()
    except ElsaError:
        raise
    except ImportError as error:
        raise UnavailableError(f"{recipe.name} needs a package: {first_line(error)}") from None
    except BUILD_ERRORS as error:
        raise ModelError(
            f"{recipe.library} cannot build {recipe.name}: {first_line(error)}"
        ) from error


def build_meta(recipe: Recipe) -> nn.Module:
    """Build shapes without memory, on the meta device."""
    with torch.device("meta"), UninitialisedParameters():
        return build(recipe)


class UninitialisedParameters(TorchFunctionMode):
    """Skips initialisers, which are most of the time of a build: for shapes, or before a fill.

    Parameters are left as allocated and meta tensors as they are; buffers elsewhere are computed.
    """

    SKIPPED = frozenset(
        (
            *("add_", "bernoulli_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "mul_"),
            *("normal_", "sub_", "uniform_", "zero_"),
            # of torch.nn.init, which pass themselves with their arguments by name
            *("constant_", "kaiming_normal_", "kaiming_uniform_"),
        )
    )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in self.SKIPPED:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, nn.Parameter) or getattr(tensor, "is_meta", False):
                return tensor
        return func(*args, **(kwargs or {}))


def resized(recipe: Recipe, size: tuple[int, int]) -> Recipe:
    """Return the recipe for inputs of (height, width) pixels, the way its library takes sizes.

    A model that takes any size keeps its arguments and gets the new input size alone.
    """
    preprocess = dataclasses.replace(
        recipe.preprocess, input_size=(recipe.preprocess.input_size[0], *size)
    )
    args, model_cfg = dict(recipe.args), recipe.model_cfg
    if recipe.library == "open_clip" and model_cfg is not None:
        square = size[0] if size[0] == size[1] else list(size)
        vision = {**model_cfg["vision_cfg"], "image_size": square}
        model_cfg = {**model_cfg, "vision_cfg": vision}
    elif recipe.library == "timm" and ("img_size" in args or fixed_size(recipe)):
        args["img_size"] = list(size)
    elif recipe.library == "torchvision" and recipe.name.startswith("vit_"):
        args["image_size"] = size[0]
    elif recipe.library == "torchvision" and recipe.name.startswith("maxvit"):
        args["input_size"] = list(size)
    return dataclasses.replace(recipe, args=args, preprocess=preprocess, model_cfg=model_cfg)


def fixed_size(recipe: Recipe) -> bool:
    """True for a timm model that is built for one input size."""
    from timm.models import get_pretrained_cfg

    cfg = get_pretrained_cfg(recipe.name)
    return bool(cfg is not None and cfg.fixed_input_size)


def patch_step(model: nn.Module, recipe: Recipe) -> tuple[int, int] | None:
    """Return the pixels (height, width) that an input must be a multiple of, None if unknown."""
    if recipe.library == "timm" and not fixed_size(recipe):
        return None
    tower: Any = getattr(model, "visual", model)
    tower = getattr(tower, "trunk", tower)
    embed = getattr(tower, "patch_embed", None)
    if getattr(embed, "dynamic_img_pad", False):
        return None
    ratio = getattr(embed, "feat_ratio", None)
    step = ratio(as_scalar=False) if callable(ratio) else None
    if step is None:
        step = getattr(tower, "patch_size", None) or getattr(embed, "patch_size", None)
    if isinstance(step, int):
        return step, step
    return (int(step[0]), int(step[1])) if isinstance(step, (tuple, list)) else None


# --- timm --------------------------------------------------------------------------------------


def _timm_recipe(spec: ModelSpec) -> Recipe:
    from timm.models import get_pretrained_cfg

    cfg = get_pretrained_cfg(f"{spec.name}.{spec.tag}" if spec.tag else spec.name)
    if cfg is None:
        return Recipe("timm", spec.name, tag=spec.tag)
    preprocess = Preprocess(
        tuple(cfg.input_size), tuple(cfg.mean), tuple(cfg.std), cfg.interpolation, cfg.crop_pct
    )
    return Recipe("timm", spec.name, {}, None, preprocess, spec.tag or cfg.tag or None)


def timm_name(recipe: Recipe) -> str:
    """Return the name that timm looks up: with the tag, whose configuration sets the defaults."""
    return f"{recipe.name}.{recipe.tag}" if recipe.tag else recipe.name


def timm_args(recipe: Recipe) -> dict[str, Any]:
    """Return the keyword arguments of `timm.create_model`, lists as the tuples timm expects."""
    args = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.args.items()}
    if recipe.num_classes is not None:
        args["num_classes"] = recipe.num_classes
    return args


def _build_timm(recipe: Recipe) -> nn.Module:
    import timm

    if not timm.is_model(recipe.name):
        raise ModelError(f"this timm ({timm.__version__}) has no model {recipe.name!r}")
    model: nn.Module = timm.create_model(timm_name(recipe), pretrained=False, **timm_args(recipe))
    return model


# --- open_clip ---------------------------------------------------------------------------------


def _open_clip_recipe(spec: ModelSpec) -> Recipe:
    import open_clip

    cfg = open_clip.get_model_config(spec.name)
    size = cfg["vision_cfg"].get("image_size", 224)
    pair = (size, size) if isinstance(size, int) else tuple(size)
    tag = open_clip.get_pretrained_cfg(spec.name, spec.tag) if spec.tag else {}
    preprocess = Preprocess(
        (3, *pair),
        tuple(tag.get("mean") or CLIP_MEAN),
        tuple(tag.get("std") or CLIP_STD),
        tag.get("interpolation") or "bicubic",
        1.0,
    )
    return Recipe("open_clip", spec.name, {}, 0, preprocess, spec.tag, cfg)


def _build_open_clip(recipe: Recipe) -> nn.Module:
    from open_clip.coca_model import CoCa
    from open_clip.model import CLIP, CustomTextCLIP

    cfg: dict[str, Any] = copy.deepcopy(dict(recipe.model_cfg or {}))
    vision, text = cfg["vision_cfg"], cfg["text_cfg"]
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    hub_text = text.get("hf_model_name")
    if hub_text:
        text["hf_model_pretrained"] = False
    custom = cfg.pop("custom_text", False) or bool(hub_text)
    kind = (CoCa if "multimodal_cfg" in cfg else CustomTextCLIP) if custom else CLIP
    try:
        model: nn.Module = kind(**cfg)
    except (OSError, ImportError, RuntimeError) as error:
        if hub_text is None:
            raise
        raise UnavailableError(
            f"{recipe.name} has a text tower from the hub ({hub_text}), which needs transformers"
            f" and the network: {first_line(error)}"
        ) from None
    if isinstance(model, CoCa):
        # The one weight that open_clip leaves as the memory was found: garbage, at times NaN.
        projection = model.text_decoder.text_projection
        nn.init.normal_(projection, std=projection.shape[0] ** -0.5)
    set_size = getattr(model.visual, "set_input_size", None)
    if set_size is not None and tuple(_timm_tower_size(model.visual)) != recipe.size:
        set_size(recipe.size)
    return model


def load_open_clip(target: Recipe, native: Recipe, path: str) -> nn.Module:
    """Build a CLIP and let open_clip read its checkpoint; `native` is at the checkpoint's size.

    open_clip resizes the position embedding of its own towers as it reads, and lets timm resize
    that of a timm tower afterwards.
    """
    import open_clip

    timm_tower = "timm_model_name" in (native.model_cfg or {})["vision_cfg"]
    model = build(native if timm_tower else target)
    open_clip.load_checkpoint(model, path)
    if timm_tower and target.size != native.size:
        tower: Any = model.visual
        tower.set_input_size(target.size)
    return model


def _timm_tower_size(visual: Any) -> tuple[int, ...]:
    """Return the size that a timm tower was built for; open_clip does not pass it on."""
    embed = getattr(getattr(visual, "trunk", None), "patch_embed", None)
    size = getattr(embed, "img_size", None)
    return tuple(size) if size is not None else tuple(visual.image_size)


# --- torchvision -------------------------------------------------------------------------------


def _torchvision_recipe(spec: ModelSpec) -> Recipe:
    from torchvision.models import get_model_weights

    first = next(iter(get_model_weights(spec.name)), None)
    if first is None:
        preprocess = Preprocess(interpolation="bilinear")
    else:
        preprocess = torchvision_preprocess(first)
        if spec.name.startswith(("vit_", "maxvit")):
            # their constructors are for 224 pixels whatever size the weights were trained at
            preprocess = dataclasses.replace(preprocess, input_size=(3, 224, 224))
    return Recipe("torchvision", spec.name, {}, None, preprocess)


def torchvision_preprocess(weights: Any) -> Preprocess:
    """Return what a member of torchvision's weights enums says of its images."""
    transform = weights.transforms()
    crop = int(transform.crop_size[0])
    return Preprocess(
        (3, crop, crop),
        tuple(transform.mean),
        tuple(transform.std),
        str(transform.interpolation.value),
        crop / transform.resize_size[0],
    )


def _build_torchvision(recipe: Recipe) -> nn.Module:
    import torchvision

    args: Mapping[str, Any] = recipe.args
    if recipe.num_classes is not None:
        args = {**args, "num_classes": recipe.num_classes}
    if recipe.name not in torchvision.models.list_models(module=torchvision.models):
        raise ModelError(f"torchvision has no classification model {recipe.name!r}")
    builder = torchvision.models.get_model_builder(recipe.name)
    try:
        model: nn.Module = builder(weights=None, **args)
    except TypeError as error:
        if "multiple values" not in str(error):
            raise
        model = _with_fixed(inspect.unwrap(builder), args)
    return model


def _with_fixed(builder: Callable[..., nn.Module], args: Mapping[str, Any]) -> nn.Module:
    """Build with `args` in the place of those that the builder fixes itself.

    `swin_t(**kwargs)` calls `_swin_transformer(window_size=[7, 7], ..., **kwargs)`, which refuses
    a window_size of the caller as given twice. So the builder's code is run once with a recorder in
    that function's place, in globals of its own, and the function is called with what both gave.

    Raises:
        ModelError: the builder fixes its arguments in another way.
    """
    known, fixed = builder.__globals__, {}
    names = [n for n in builder.__code__.co_names if isinstance(known.get(n), FunctionType)]

    def record(*positional: Any, **arguments: Any) -> None:
        fixed.update({} if positional else arguments)

    if len(names) == 1:
        alone = FunctionType(builder.__code__, {**known, names[0]: record})
        alone.__kwdefaults__ = builder.__kwdefaults__
        alone()
    if not fixed:
        raise ModelError(f"torchvision's {builder.__name__} does not take {', '.join(args)}")
    # torchvision's Swin reads two sides here: one number is meant for both, as timm takes it
    sides = {
        key: [args[key]] * 2
        for key in ("patch_size", "window_size")
        if type(args.get(key)) is int and isinstance(fixed.get(key), list)
    }
    model: nn.Module = known[names[0]](**{**fixed, **args, **sides})
    return model


def classes(model: nn.Module, recipe: Recipe) -> int:
    """Return the outputs of the model's classifier; 0 when it ends in features."""
    if recipe.library == "open_clip":
        return 0
    known = getattr(model, "num_classes", recipe.num_classes)
    if isinstance(known, int):
        return known
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1].out_features if linear else 0


def explicit(recipe: Recipe, num_classes: int) -> Recipe:
    """Return the recipe with nothing left to the library's defaults, which a tag can change."""
    args = dict(recipe.args)
    if recipe.library == "timm" and fixed_size(recipe):
        args.setdefault("img_size", list(recipe.size))
    return dataclasses.replace(recipe, args=args, num_classes=num_classes)
