"""The libraries whose models are loaded, and what is asked of any; nothing here reads weights.

Every build uses the caller's default device (`torch.device("meta")` builds shapes alone) and the
caller's random state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.loading.library import BUILD_ERRORS, Library, UninitialisedParameters
from elsa_core.loading.open_clip_models import OPEN_CLIP
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.timm_models import TIMM
from elsa_core.loading.torchvision_models import TORCHVISION

# The names of the first need no prefix; the tensors of a file are its own where no other's marks
# are among them.
LIBRARIES = (TIMM, OPEN_CLIP, TORCHVISION)
# Of models that no name builds: the user's own code, and folders of transformers. Where attention
# happens in them is seen as they run.
NAMELESS = ("python", "transformers")


def names() -> tuple[str, ...]:
    """The names of the libraries, in order."""
    return tuple(library.name for library in LIBRARIES)


def of(name: str) -> Library:
    """The library of this name, as a recipe has it; ModelError where there is none."""
    for library in LIBRARIES:
        if library.name == name:
            return library
    if name not in NAMELESS:
        raise ModelError(f"no library is named {name[:40]!r}: elsa knows {', '.join(names())}")
    return Library(name=name, names=list, lookup=lambda name: None,
                   recipe=lambda model, tag: Recipe(name, model), build=None)  # fmt: skip


def build(recipe: Recipe) -> nn.Module:
    """Build the model with random weights, in eval mode; ModelError where its library cannot."""
    builder = of(recipe.library).build
    if builder is None:
        raise ModelError(f"{recipe.name} of {recipe.library} is not built by its name")
    try:
        with quiet():
            return builder(recipe).eval()
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


def build_published(recipe: Recipe) -> tuple[nn.Module, str]:
    """Build the model with its published weights, and name them."""
    published = of(recipe.library).published
    if published is None:
        raise ModelError(f"{recipe.library} publishes no weights: leave out --pretrained")
    try:
        with quiet():
            model, origin = published(recipe)
    except ElsaError:
        raise
    except OSError as error:
        raise UnavailableError(
            f"the weights of {recipe.name} cannot be fetched: {first_line(error)};"
            " leave out --pretrained for random weights"
        ) from error
    except BUILD_ERRORS as error:
        raise ModelError(
            f"the published weights of {recipe.name} do not load: {first_line(error)}"
        ) from error
    return model.eval(), f"pretrained ({origin})"


def patch_step(model: nn.Module, recipe: Recipe) -> tuple[int, int] | None:
    """Return the pixels (height, width) that an input must be a multiple of, None if unknown."""
    if of(recipe.library).takes_any_size(recipe):
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


def classes(model: nn.Module, recipe: Recipe) -> int:
    """Return the outputs of the model's classifier; 0 when it ends in features."""
    if recipe.two_towers:
        return 0
    known = getattr(model, "num_classes", recipe.num_classes)
    if isinstance(known, int):
        return known
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1].out_features if linear else 0


def label(recipe: Recipe) -> str:
    """Return the name as a user would type it for MODEL or --arch."""
    plain = recipe.library == LIBRARIES[0].name
    return recipe.name if plain else f"{recipe.library}:{recipe.name}"
