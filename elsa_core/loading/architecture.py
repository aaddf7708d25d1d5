"""What is known of a model that is not loaded: its modules, the sizes it takes, its files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from elsa_core.errors import TooLargeError
from elsa_core.loading.fromfile import weights_in
from elsa_core.loading.imagesize import with_image_size
from elsa_core.loading.libraries import build, build_meta, default_recipe
from elsa_core.loading.library import UninitialisedParameters
from elsa_core.loading.plan import PLAN_NAME
from elsa_core.loading.recognise import shallow
from elsa_core.loading.spec import CONFIG_NAMES, ModelSpec, parse
from elsa_core.loading.weights import is_index


def meta_model(name: str) -> nn.Module:
    """The architecture on the meta device: every module and shape, no memory."""
    return build_meta(default_recipe(parse(name)))


def small_model(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """The architecture with two blocks a stage where its library allows that, on the CPU, and its
    image size (C, H, W). It is whole where its depth cannot be cut, and where what is left holds no
    attention that can be patched. Parameters are allocated and not filled."""
    from elsa_core.patching import find_sites

    recipe = default_recipe(parse(name))
    with UninitialisedParameters():
        try:
            model, size = shallow(recipe)
        except Exception:  # its depth cannot be cut (csatv2 runs out of an iterator)
            model, size = build(recipe), recipe.size
        if not any(site.patchable for site in find_sites(model)):
            model, size = build(recipe), recipe.size
    return model, (recipe.preprocess.input_size[0], *size)


def check_sizes(spec: ModelSpec, sizes: Sequence[tuple[int, int]]) -> None:
    """ArgumentError for sizes that the model cannot run at, before anything is loaded. Weights
    files say what they are only once they are read; a size that needs too much memory is none of
    these."""
    if spec.path is not None or spec.source == "hub":
        return
    recipe = default_recipe(spec)
    for size in sizes:
        with contextlib.suppress(TooLargeError):
            with_image_size(recipe, size)


def files_of(spec: ModelSpec) -> list[Path]:
    """All files that a file or a saved directory is built from, weights first; none for a name."""
    if spec.path is None:
        return []
    weights = weights_in(spec.path) if spec.source == "directory" else spec.path
    shards = sorted(weights.parent.glob("*.safetensors")) if is_index(weights) else []
    beside = [weights.parent / name for name in (*CONFIG_NAMES, PLAN_NAME)]
    return [weights, *shards, *(path for path in beside if path.is_file())]
