"""open_clip: CLIPs of two towers, which a configuration describes instead of arguments."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from elsa_core.base.files import scratch
from elsa_core.base.messages import first_line
from elsa_core.errors import ModelError, UnavailableError
from elsa_core.loading import hub, timm_models
from elsa_core.loading.library import Library, Size, imported
from elsa_core.loading.names import Shapes
from elsa_core.loading.recipe import CLIP_MEAN, CLIP_STD, RESIZE_MODES, Preprocess, Recipe
from elsa_core.loading.weights import Weights, check_file, separate


def _lookup(text: str) -> tuple[str, str | None] | None:
    names, (name, _, tag) = OPEN_CLIP.names(), text.rpartition("/")
    # OpenAI writes ViT-B/32 where open_clip writes ViT-B-32.
    found = ((text.replace("/", "-"), None), (name.replace("/", "-"), tag or None))
    return next((each for each in found if each[0] in names), None)


def _recipe(name: str, tag: str | None = None) -> Recipe:
    import open_clip

    cfg = open_clip.get_model_config(name)
    size = cfg["vision_cfg"].get("image_size", 224)
    pair = (size, size) if isinstance(size, int) else tuple(size)
    known: Mapping[str, Any] = open_clip.get_pretrained_cfg(name, tag) if tag else {}
    preprocess = Preprocess(
        (3, *pair), tuple(known.get("mean") or CLIP_MEAN), tuple(known.get("std") or CLIP_STD),
        known.get("interpolation") or "bicubic", 1.0,
        crop_mode=RESIZE_MODES.get(known.get("resize_mode") or "shortest", "center"),
    )  # fmt: skip
    return Recipe("open_clip", name, {}, 0, preprocess, tag, cfg)


def _build(recipe: Recipe) -> nn.Module:
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
    visual: Any = model.visual
    if hasattr(visual, "set_input_size"):
        # open_clip does not pass the size on to a tower of timm
        embed = getattr(getattr(visual, "trunk", None), "patch_embed", None)
        if tuple(getattr(embed, "img_size", None) or visual.image_size) != recipe.size:
            visual.set_input_size(recipe.size)
    return model


def _resized(recipe: Recipe, size: Size) -> Recipe:
    recipe = recipe.at(size)
    if recipe.model_cfg is None:
        return recipe
    square = size[0] if size[0] == size[1] else list(size)
    vision = {**recipe.model_cfg["vision_cfg"], "image_size": square}
    return dataclasses.replace(recipe, model_cfg={**recipe.model_cfg, "vision_cfg": vision})


def _shallow(recipe: Recipe) -> list[Recipe]:
    cfg: Any = recipe.model_cfg
    vision, text = dict(cfg["vision_cfg"]), dict(cfg["text_cfg"], vocab_size=64, layers=2)
    if isinstance(vision.get("layers"), int):
        vision["layers"] = 2
    return [dataclasses.replace(recipe, model_cfg={**cfg, "vision_cfg": vision, "text_cfg": text})]


def _core(recipe: Recipe) -> tuple[str, Recipe]:
    """A CLIP around a timm tower is that tower, and the rest of its configuration."""
    cfg: Any = recipe.model_cfg
    if "timm_model_name" not in cfg["vision_cfg"]:
        return "", recipe
    vision = dict(cfg["vision_cfg"])
    name = vision.pop("timm_model_name")
    text = {k: v for k, v in cfg["text_cfg"].items() if "tokenizer" not in k}
    settings = json.dumps([{**cfg, "vision_cfg": vision, "text_cfg": text}], sort_keys=True)
    return settings, timm_models.recipe(name)


def _published(recipe: Recipe) -> tuple[nn.Module, str]:
    import open_clip

    if recipe.tag is None:
        tags = open_clip.list_pretrained_tags_by_model(recipe.name)
        some = ", ".join(f"open_clip:{recipe.name}/{tag}" for tag in tags[:4])
        raise ModelError(f"name the weights of open_clip:{recipe.name}: {some or 'none exist'}")
    cfg = open_clip.get_pretrained_cfg(recipe.name, recipe.tag)
    model_cfg = recipe.model_cfg or {}
    if bool(cfg.get("quick_gelu")) != bool(model_cfg.get("quick_gelu")):
        other = "" if model_cfg.get("quick_gelu") else "-quickgelu"
        raise ModelError(
            f"the weights {recipe.tag} were trained with another activation than {recipe.name}:"
            f" use open_clip:{recipe.name.removesuffix('-quickgelu')}{other}/{recipe.tag}"
        )
    need = f"the weights of open_clip:{recipe.name}/{recipe.tag}"
    location = cfg.get("hf_hub", "")
    if location:
        repository, _, file = location.rpartition("/")
        wanted = (file,) if file else hub.OPEN_CLIP_WEIGHTS
        safe = tuple(Path(name).with_suffix(".safetensors").name for name in wanted)
        path = hub.fetch(repository, tuple(dict.fromkeys((*safe, *wanted))), need=need)
    else:
        hub.require_file(cfg.get("url", ""), need=need, folder=Path.home() / ".cache" / "clip")
        path = Path(open_clip.download_pretrained(cfg))
    check_file(path)
    usual = _recipe(recipe.name, recipe.tag)
    return _load(recipe, usual, path), f"{recipe.name}/{recipe.tag}"


def _load(target: Recipe, native: Recipe, path: str | Path) -> nn.Module:
    """Build a CLIP and let open_clip read its checkpoint, at the size of `native`: it resizes its
    own towers as it reads, and timm a timm tower afterwards."""
    import open_clip

    timm_tower = "timm_model_name" in (native.model_cfg or {})["vision_cfg"]
    model = _build(native if timm_tower else target)
    open_clip.load_checkpoint(model, str(path))
    if timm_tower and target.size != native.size:
        tower: Any = model.visual
        tower.set_input_size(target.size)
    return model


def _converted(target: Recipe, native: Recipe, weights: Weights) -> nn.Module:
    """open_clip reads files alone: one of the tensors under their plain names."""
    from safetensors.torch import save_file

    with scratch("elsa-weights-") as folder:
        path = folder / "model.safetensors"
        save_file(separate(weights.tensors), path)
        return _load(target, native, path)


def _names_like(shapes: Shapes) -> list[str]:
    names = OPEN_CLIP.names()
    import open_clip

    trunk = any(name.startswith("visual.trunk.") for name in shapes)
    tokens = {shapes.get(f"{part}token_embedding.weight") for part in ("", "text.")} - {None}
    stem = shapes.get("visual.conv1.weight")
    found = []
    for name in names:
        cfg: Any = open_clip.get_model_config(name)
        vision, text = cfg["vision_cfg"], cfg["text_cfg"]
        width, patch = vision.get("width"), vision.get("patch_size")
        if (
            not text.get("hf_model_name")
            and ("timm_model_name" in vision) == trunk
            and tokens <= {(text.get("vocab_size"), text.get("width"))}
            and (stem is None or patch is None or stem == (width, 3, patch, patch))
        ):
            found.append(name)
    return found


OPEN_CLIP = Library(
    name="open_clip",
    names=lambda: list(imported("open_clip", "open_clip_torch").list_models()),
    lookup=_lookup,
    takes_hub_ids=True,
    tags=lambda name: imported("open_clip", "open_clip_torch").list_pretrained_tags_by_model(name),
    recipe=_recipe,
    build=_build,
    resized=_resized,
    shallow=_shallow,
    core=_core,
    published=_published,
    hub_files=hub.OPEN_CLIP_WEIGHTS,
    converted=_converted,
    marks=lambda shapes: any(name.startswith("visual.") for name in shapes),
    names_like=_names_like,
)
