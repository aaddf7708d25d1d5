"""Do two recipes with the same tensors compute the same? Answered by running them.

What no shape shows (head count, activation, rotary base) changes the output: candidates are built
small, filled with the same numbers and run on the same image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading import libraries
from elsa_core.loading.building import BUILD_ERRORS, UninitialisedParameters
from elsa_core.loading.fit import same_shapes
from elsa_core.loading.libraries import build, build_meta, label
from elsa_core.loading.recipe import Recipe

_PROBE_SEED = 20_240_131
# Candidates whose depth cannot be cut and that are larger than this are not run to be compared.
_MAX_PROBE_PARAMETERS = 500_000_000


def groups(recipes: list[Recipe]) -> list[list[Recipe]]:
    """Group recipes by what they compute: equal outputs on equal weights and input."""
    if len(recipes) == 1:
        return [recipes]
    found: list[tuple[str, nn.Module, torch.Tensor, list[Recipe]]] = []
    for recipe in recipes:
        settings, core = libraries.of(recipe.library).core(recipe)
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
        if not recipe.two_towers:
            return model, model(images)
        cfg: Any = recipe.model_cfg
        tokens = torch.arange(1, cfg["text_cfg"].get("context_length", 77) + 1) % 50
        features = (model.encode_image(images), model.encode_text(tokens[None]))  # type: ignore[operator]
        return model, torch.cat([feature.flatten() for feature in features])


def shallow(recipe: Recipe) -> nn.Module:
    """Build the recipe with two blocks and a small grid where its library allows that."""
    attempts = libraries.of(recipe.library).shallow(recipe)
    if recipe.two_towers and attempts:
        return build(attempts[0])
    for attempt in attempts:
        try:
            model = build(attempt)
        except (ElsaError, *BUILD_ERRORS):
            continue
        model.probe_size = attempt.size  # type: ignore[assignment]
        return model
    if sum(p.numel() for p in build_meta(recipe).parameters()) > _MAX_PROBE_PARAMETERS:
        raise ModelError(f"{label(recipe)} is too large to be compared with similar models")
    return build(recipe)
