"""timm: its names, recipes, weights, and what the tensors of a file show of its architectures."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from torch import nn

from elsa_core.errors import ModelError
from elsa_core.loading import hub
from elsa_core.loading.library import Library, Size, imported
from elsa_core.loading.names import Shapes
from elsa_core.loading.recipe import Preprocess, Recipe
from elsa_core.loading.weights import Weights, check_file

# timm modules of plain transformers; a part of a tensor name that only theirs have, or none.
_VIT_MODULES = {
    "patch_embed.backbone.": ("vision_transformer_hybrid",),
    "shared_rel_pos.": ("vision_transformer_relpos",),
    ".rel_pos": ("vision_transformer_relpos", "vision_transformer_sam"),
    "neck.": ("vision_transformer_sam",),
    "": ("vision_transformer", "deit", "eva", "beit"),
}
# Short names whose shortest continuation is a variant: the model that papers call so.
PLAIN = {
    "vit": "vit_base_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
    "vit_large": "vit_large_patch16_224",
    "swin": "swin_tiny_patch4_window7_224",
    "swinv2": "swinv2_tiny_window8_256",
    "maxvit_tiny": "maxvit_tiny_tf_224",
}
_PATCH = re.compile(r"_patch(\d+)")
_STAGE = re.compile(r"(layers|stages)\.\d")
_SWIN_MODULES = {
    "relative_position_bias_table": "swin_transformer",
    "cpb_mlp.0.weight": "swin_transformer_v2",
    "meta_mlp.fc1.weight": "swin_transformer_v2_cr",
}


def _lookup(text: str) -> tuple[str, str | None] | None:
    """The name itself, the plain model of a family, the shortest name that continues the text at an
    underscore (the first of equals), or an old name of another model."""
    arch, _, tag = text.partition(".")
    names = TIMM.names()
    name: str | None = arch if arch in names else PLAIN.get(arch)
    if name is None and arch:
        fitting = [name for name in names if name.startswith(arch.rstrip("_") + "_")]
        name = min(fitting, key=lambda name: (len(name), name), default=None)
    if name is None and imported("timm", "timm").is_model(arch):
        name = arch
    return None if name is None else (name, tag or None)


def recipe(name: str, tag: str | None = None) -> Recipe:
    """Return the recipe that timm itself follows for this name."""
    from timm.models import get_pretrained_cfg

    cfg = get_pretrained_cfg(f"{name}.{tag}" if tag else name)
    if cfg is None:
        return Recipe("timm", name, tag=tag)
    preprocess = Preprocess(
        tuple(cfg.input_size), tuple(cfg.mean), tuple(cfg.std), cfg.interpolation, cfg.crop_pct,
        crop_mode=cfg.crop_mode,
    )  # fmt: skip
    return Recipe("timm", name, {}, None, preprocess, tag or cfg.tag or None)


def _build(recipe: Recipe, name: str | None = None, **pretrained: Any) -> nn.Module:
    """The model of a recipe; by default with random weights, and its tag's defaults."""
    import timm

    if not timm.is_model(recipe.name):
        raise ModelError(f"this timm ({timm.__version__}) has no model {recipe.name!r}")
    args = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.args.items()}
    if recipe.num_classes is not None:
        args["num_classes"] = recipe.num_classes
    name = name or (f"{recipe.name}.{recipe.tag}" if recipe.tag else recipe.name)
    model: nn.Module = timm.create_model(name, **{"pretrained": False, **pretrained, **args})
    return model


def _resized(recipe: Recipe, size: Size) -> Recipe:
    from timm.models import get_pretrained_cfg

    recipe = recipe.at(size)
    fixed = getattr(get_pretrained_cfg(recipe.name), "fixed_input_size", False)
    if fixed or "img_size" in recipe.args:
        return recipe.with_args({"img_size": list(size)})
    return recipe


def _shallow(recipe: Recipe) -> list[Recipe]:
    said = _PATCH.search(recipe.name)
    patch = recipe.args.get("patch_size", int(said[1]) if said else None)
    side = 4 * patch if isinstance(patch, int) else recipe.size[0]
    plain = recipe.with_args({"depth": 2})
    staged = recipe.with_args({"depths": [2] * len(recipe.args.get("depths", [0] * 4))})
    return [_resized(plain, (side, side)), plain, staged]


def _published(recipe: Recipe) -> tuple[nn.Module, str]:
    import timm
    from timm.models import get_pretrained_cfg

    name = f"{recipe.name}.{recipe.tag}" if recipe.tag else recipe.name
    cfg = get_pretrained_cfg(name)
    if cfg is None or not cfg.has_weights:
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{recipe.name}.*")]
        known = f"; it has weights named {', '.join(tags)}" if tags else ""
        raise ModelError(f"no weights are published for {name}: leave out --pretrained{known}")
    need = f"the weights of {name}"
    overlay: dict[str, Any] = {}
    origin = cfg.hf_hub_id or cfg.url
    if cfg.hf_hub_id:
        wanted = (cfg.hf_hub_filename,) if cfg.hf_hub_filename else hub.TIMM_WEIGHTS
        path = hub.fetch(cfg.hf_hub_id, wanted, need=need)
        check_file(path)
        overlay = {"file": str(path), "custom_load": bool(cfg.custom_load)}
    else:
        hub.require_file(cfg.url, need=need)
    return _build(recipe, pretrained=True, pretrained_cfg_overlay=overlay), str(origin)


def _converted(target: Recipe, native: Recipe, weights: Weights) -> nn.Module:
    from timm.models import get_pretrained_cfg

    published = get_pretrained_cfg(native.name)
    cfg: dict[str, Any] = published.to_dict(remove_source=True) if published is not None else {}
    cfg.pop("label_offset", None)
    cfg.update(state_dict=dict(weights.tensors), custom_load=False)
    cfg["input_size"] = native.preprocess.input_size
    if native.num_classes is not None:
        cfg["num_classes"] = native.num_classes
    return _build(target, target.name, pretrained=True, pretrained_cfg=cfg)


def _as_in(recipe: Recipe, shapes: Shapes) -> list[Recipe]:
    from timm.models import get_pretrained_cfg

    cfg = get_pretrained_cfg(recipe.name)
    classifier = cfg.classifier if cfg is not None else "head"
    first = classifier[0] if isinstance(classifier, (tuple, list)) else classifier
    head = shapes.get(f"{first}.weight")
    stem = shapes.get(f"{cfg.first_conv if cfg is not None else ''}.weight", ())
    recipe = dataclasses.replace(recipe, num_classes=head[0] if head else 0)
    if len(stem) == 4 and stem[1] != recipe.preprocess.input_size[0]:
        preprocess = recipe.preprocess.with_channels(stem[1])
        recipe = dataclasses.replace(recipe, preprocess=preprocess).with_args({"in_chans": stem[1]})
    found = [recipe]
    if "fc_norm.weight" in shapes and "norm.weight" not in shapes:
        found.append(recipe.with_args({"global_pool": "avg"}))
        if "cls_token" not in shapes:
            found.append(recipe.with_args({"global_pool": "avg", "class_token": False}))
    return found


def _names_like(shapes: Shapes) -> list[str]:
    import timm

    swin = next(
        (module for key, module in _SWIN_MODULES.items()
         if f"layers.0.blocks.0.attn.{key}" in shapes or f"stages.0.blocks.0.attn.{key}" in shapes),
        None,
    )  # fmt: skip
    if swin is None and not any(name.startswith("blocks.0.") for name in shapes):
        return []
    vit = next(found for part, found in _VIT_MODULES.items() if any(part in key for key in shapes))
    modules = (swin,) if swin is not None else vit
    sides = shapes.get("patch_embed.proj.weight", ())[2:3]
    names = [name for module in modules for name in timm.list_models(module=module)]
    said = [_PATCH.search(name) for name in names]
    return [n for n, p in zip(names, said, strict=True) if p is None or int(p[1]) in sides]


TIMM = Library(
    name="timm",
    names=lambda: list(imported("timm", "timm").list_models()),
    lookup=_lookup,
    hub_owner="timm",
    tags=lambda name: [
        full.partition(".")[2] for full in imported("timm", "timm").list_pretrained(f"{name}.*")
    ],
    recipe=recipe,
    build=_build,
    resized=_resized,
    takes_any_size=lambda recipe: (
        not getattr(
            imported("timm", "timm").get_pretrained_cfg(recipe.name), "fixed_input_size", False
        )
    ),
    shallow=_shallow,
    published=_published,
    config_args=lambda cfg, seen: {
        **({"img_size": [*seen.input_size[1:]]} if cfg.get("fixed_input_size") is True else {}),
        **({"in_chans": seen.input_size[0]} if seen.input_size[0] != 3 else {}),
    },
    config_keys=("classifier", "first_conv"),
    converted=_converted,
    as_in=_as_in,
    names_like=_names_like,
    one_block=lambda recipe, shapes: recipe.with_args(
        {"depths": [1] * len(stages)}
        if (stages := {key.split(".")[1] for key in shapes if _STAGE.match(key)})
        else {"depth": 1}
    ),
)
