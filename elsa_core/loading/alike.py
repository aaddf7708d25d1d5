"""Do two recipes with the same tensors compute the same? Answered by running them.

What no shape shows (head count, activation, rotary base) changes the output: candidates are built
small, filled with the same numbers and run on the same image.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import torch
from torch import nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading.fit import same_shapes
from elsa_core.loading.libraries import (
    BUILD_ERRORS,
    UninitialisedParameters,
    build,
    build_meta,
    default_recipe,
    resized,
)
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.spec import ModelSpec

_PROBE_SEED = 20_240_131
# Candidates whose depth cannot be cut and that are larger than this are not run to be compared.
_MAX_PROBE_PARAMETERS = 500_000_000


def label(recipe: Recipe) -> str:
    """Return the name as a user would type it for MODEL or --arch."""
    return recipe.name if recipe.library == "timm" else f"{recipe.library}:{recipe.name}"


def groups(recipes: list[Recipe]) -> list[list[Recipe]]:
    """Group recipes by what they compute: equal outputs on equal weights and input."""
    if len(recipes) == 1:
        return [recipes]
    found: list[tuple[str, nn.Module, torch.Tensor, list[Recipe]]] = []
    for recipe in recipes:
        settings, core = _core(recipe)
        try:
            model, output = _probe(core)
        except ElsaError:
            # Not comparable: on its own, which makes the answer ambiguous rather than wrong.
            settings, model, output = label(recipe), nn.Identity(), torch.empty(0)
        for known, other, expected, members in found:
            same = known == settings and same_shapes(other, model)
            if same and torch.equal(output, expected):
                members.append(recipe)
                break
        else:
            found.append((settings, model, output, [recipe]))
    return [members for *_, members in found]


def _core(recipe: Recipe) -> tuple[str, Recipe]:
    """Return what has to be run to compare a recipe, and the settings that are compared as text.

    A CLIP around a timm tower is that tower, whose depth can be cut, and a text tower that its
    configuration describes in full.
    """
    cfg: Any = recipe.model_cfg
    if recipe.library != "open_clip" or "timm_model_name" not in cfg["vision_cfg"]:
        return "", recipe
    vision = dict(cfg["vision_cfg"])
    name = vision.pop("timm_model_name")
    text = {k: v for k, v in cfg["text_cfg"].items() if "tokenizer" not in k}
    settings = json.dumps([{**cfg, "vision_cfg": vision, "text_cfg": text}], sort_keys=True)
    return settings, default_recipe(ModelSpec("timm", name, name))


def _probe(recipe: Recipe) -> tuple[nn.Module, torch.Tensor]:
    """Run a shallow version on fixed weights and a fixed image; float32, on the CPU."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with UninitialisedParameters():
            model = shallow(recipe)
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        largest = max(tensor.numel() for tensor in model.parameters())
        noise = 0.1 * torch.randn(largest, generator=generator)
        for tensor in model.parameters():
            offset = 1.0 if tensor.ndim == 1 else 0.0
            tensor.copy_(offset + noise[: tensor.numel()].view(tensor.shape))
        size = getattr(model, "probe_size", recipe.size)
        images = torch.randn(1, recipe.preprocess.input_size[0], *size, generator=generator)
        if recipe.library != "open_clip":
            return model, model(images)
        cfg: Any = recipe.model_cfg
        tokens = torch.arange(1, cfg["text_cfg"].get("context_length", 77) + 1) % 50
        features = (model.encode_image(images), model.encode_text(tokens[None]))  # type: ignore[operator]
        return model, torch.cat([feature.flatten() for feature in features])


def shallow(recipe: Recipe) -> nn.Module:
    """Build the recipe with two blocks and a small grid where its library allows that."""
    if recipe.library == "open_clip":
        cfg: Any = recipe.model_cfg
        vision, text = dict(cfg["vision_cfg"]), dict(cfg["text_cfg"], vocab_size=64)
        if isinstance(vision.get("layers"), int):
            vision["layers"] = 2
        text["layers"] = 2
        cut = {**cfg, "vision_cfg": vision, "text_cfg": text}
        return build(dataclasses.replace(recipe, model_cfg=cut))
    if recipe.library == "timm":
        stages = len(recipe.args.get("depths", [0] * 4))
        for short in ({"depth": 2}, {"depths": [2] * stages}):
            attempt = dataclasses.replace(recipe, args={**recipe.args, **short})
            small = _small(attempt)
            for candidate in (small, attempt):
                try:
                    model = build(candidate)
                except (ElsaError, *BUILD_ERRORS):
                    continue
                model.probe_size = candidate.size  # type: ignore[assignment]
                return model
    if sum(p.numel() for p in build_meta(recipe).parameters()) > _MAX_PROBE_PARAMETERS:
        raise ModelError(f"{label(recipe)} is too large to be compared with similar models")
    return build(recipe)


def _small(recipe: Recipe) -> Recipe:
    """Return the recipe at four patches a side (global attention) where that is smaller."""
    said = re.search(r"_patch(\d+)", recipe.name)
    patch = recipe.args.get("patch_size", int(said.group(1)) if said else None)
    side = 4 * patch if isinstance(patch, int) else recipe.size[0]
    return resized(recipe, (side, side)) if "depth" in recipe.args else recipe
