"""The architecture of a state dict, from the names and shapes of its tensors.

Candidates are built on the meta device, where a model costs milliseconds, first with one block to
sieve the hundreds of names of a family and then whole. What no shape shows (head count, activation,
rotary base) is compared by running the survivors: those that compute the same are one answer,
those that do not are an error that lists them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading.fit import (
    Shapes,
    depth_of,
    differences,
    fitted,
    recipe_of,
    same_shapes,
)
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

# timm modules of plain transformers; a part of a tensor name that only theirs have, or none.
_VIT_MODULES = {
    "patch_embed.backbone.": ("vision_transformer_hybrid",),
    ".rel_pos": ("vision_transformer_relpos", "vision_transformer_sam"),
    "neck.": ("vision_transformer_sam",),
    "": ("vision_transformer", "deit", "eva", "beit"),
}
_SWIN_MODULES = {
    "relative_position_bias_table": "swin_transformer",
    "cpb_mlp.0.weight": "swin_transformer_v2",
    "meta_mlp.fc1.weight": "swin_transformer_v2_cr",
}
_TORCHVISION_PREFIXES = {"encoder.layers.encoder_layer_0.": "vit_", "features.1.0.": "swin_"}
_PROBE_SEED = 20_240_131
# Candidates whose depth cannot be cut and that are larger than this are not run to be compared.
_MAX_PROBE_PARAMETERS = 500_000_000


@dataclasses.dataclass(frozen=True)
class Recognised:
    """The recipe that fits, and other names that fit and compute the same."""

    recipe: Recipe
    alike: tuple[str, ...] = ()


def recognise(shapes: Shapes, where: str, image_size: tuple[int, int] | None = None) -> Recognised:
    """Find the architecture whose state dict has these names and shapes.

    Args:
        shapes: tensor shapes by name.
        where: the file, for messages.
        image_size: (height, width) in pixels, to settle a grid that is not square.

    Raises:
        ModelError: none fits, or several fit that compute differently (they are listed).
    """
    found = list(_candidates(shapes, image_size))
    if not found:
        raise ModelError(
            f"{where}: no known architecture has these tensors{_look(shapes)};"
            " name it with arch (--arch), or put its config.json beside the file"
        )
    groups = _groups(found)
    if len(groups) > 1:
        listed = "; ".join(" = ".join(label(recipe) for recipe in group[:3]) for group in groups)
        raise ModelError(
            f"{where} fits architectures that compute differently: {listed};"
            " choose with arch (--arch)"
        )
    best = sorted(groups[0], key=_preference)
    return Recognised(best[0], tuple(label(recipe) for recipe in best[1:]))


def fit_named(spec: ModelSpec, shapes: Shapes, image_size: tuple[int, int] | None = None) -> Recipe:
    """Fit one named architecture to the shapes, allowing for another depth, pooling and size.

    Returns:
        The recipe that fits exactly, else the usual recipe: the library may convert the tensors.
    """
    usual = recipe_of(spec, shapes)
    for extra in _variants(shapes):
        for depth in ({}, {"depth": depth_of(shapes)}):
            recipe = dataclasses.replace(usual, args={**usual.args, **extra, **depth})
            fit = fitted(recipe, shapes, image_size)
            if fit is not None:
                return fit
            if usual.library != "timm":
                return usual
    return usual


def label(recipe: Recipe) -> str:
    """Return the name as a user would type it for MODEL or --arch."""
    return recipe.name if recipe.library == "timm" else f"{recipe.library}:{recipe.name}"


def _preference(recipe: Recipe) -> tuple[bool, int, str]:
    """Names published for this very image size first, then the shortest."""
    usual = recipe_of(ModelSpec(recipe.library, recipe.name, recipe.name))
    return usual.size != recipe.size, len(recipe.name), recipe.name


def _look(shapes: Shapes) -> str:
    if any(name.startswith(("vit.", "encoder.layer.", "vision_model.")) for name in shapes):
        return " (the names are those of transformers, which elsa does not read)"
    first = next(iter(shapes))
    return f" ({len(shapes)} tensors, the first is {first[:60]!r})"


def _candidates(shapes: Shapes, image_size: tuple[int, int] | None) -> Iterator[Recipe]:
    if any(name.startswith("visual.") for name in shapes):
        yield from _open_clip(shapes, image_size)
        return
    for key, prefix in _TORCHVISION_PREFIXES.items():
        if any(name.startswith(key) for name in shapes):
            yield from _torchvision(shapes, prefix, image_size)
            return
    yield from _timm(shapes, image_size)


# --- timm --------------------------------------------------------------------------------------


def _timm(shapes: Shapes, image_size: tuple[int, int] | None) -> list[Recipe]:
    """The timm names that fit exactly; failing those, the ones that fit at another depth."""
    names = list(_timm_names(shapes))
    for extra in _variants(shapes):
        sieved = [recipe for name in names if (recipe := _sieve(name, shapes, extra)) is not None]
        exact = [r for recipe in sieved if (r := fitted(recipe, shapes, image_size)) is not None]
        if exact:
            return exact
        depth = depth_of(shapes)
        other = [
            dataclasses.replace(recipe, args={**recipe.args, "depth": depth}) for recipe in sieved
        ]
        loose = [r for recipe in other if (r := fitted(recipe, shapes, image_size)) is not None]
        if loose:
            return loose
    return []


def _timm_names(shapes: Shapes) -> Iterator[str]:
    """The names of the families whose tensors look like these, without those of another patch."""
    import timm

    swin = next(
        (module for key, module in _SWIN_MODULES.items()
         if f"layers.0.blocks.0.attn.{key}" in shapes or f"stages.0.blocks.0.attn.{key}" in shapes),
        None,
    )  # fmt: skip
    if swin is None and not any(name.startswith("blocks.0.") for name in shapes):
        return
    patch = shapes.get("patch_embed.proj.weight", ())
    vit = next(found for part, found in _VIT_MODULES.items() if any(part in key for key in shapes))
    for module in (swin,) if swin is not None else vit:
        for name in timm.list_models(module=module):
            said = re.search(r"_patch(\d+)", name)
            if said is None or len(patch) != 4 or int(said.group(1)) == patch[2]:
                yield name


def _variants(shapes: Shapes) -> list[dict[str, Any]]:
    """Common fine-tuning changes that rename tensors: the pooling, and no class token."""
    variants: list[dict[str, Any]] = [{}]
    if "fc_norm.weight" in shapes and "norm.weight" not in shapes:
        variants.append({"global_pool": "avg"})
        if "cls_token" not in shapes:
            variants.append({"global_pool": "avg", "class_token": False})
    return variants


def _sieve(name: str, shapes: Shapes, extra: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of `name` when a model of one block already fits, else None."""
    recipe = recipe_of(ModelSpec("timm", name, name), shapes)
    recipe = dataclasses.replace(recipe, args={**recipe.args, **extra})
    stages = len({key.split(".")[1] for key in shapes if re.match(r"(layers|stages)\.\d", key)})
    short = {"depths": [1] * stages} if stages else {"depth": 1}
    small = dataclasses.replace(recipe, args={**recipe.args, **short})
    for attempt in (
        small,
        dataclasses.replace(small, args={**recipe.args, "depth": depth_of(shapes)}),
    ):
        try:
            model = build_meta(attempt)
        except ElsaError:
            continue
        return recipe if _block_fits(model, shapes) else None
    return None


def _block_fits(model: nn.Module, shapes: Shapes) -> bool:
    """All tensors of a short model are there with these shapes; its grid may differ."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    blocks = re.compile(r"(.*\b(?:blocks|layers|stages))\.\d+\.")
    outside = {name for name in shapes if not blocks.match(name)}
    if any(name not in own for name in outside if not _of_grid(name)):
        return False
    return all(
        name in shapes and (shapes[name] == shape or _of_grid(name)) for name, shape in own.items()
    )


def _of_grid(name: str) -> bool:
    """True for tensors whose shape depends on the image size, or on the depth (mixed rotary)."""
    leaf = name.rpartition(".")[2]
    return leaf in (
        *("pos_embed", "relative_position_bias_table", "rel_pos_h", "rel_pos_w"),
        *("relative_position_index", "attn_mask", "relative_coords_table", "freqs"),
    )


# --- torchvision and open_clip -----------------------------------------------------------------


def _torchvision(
    shapes: Shapes, prefix: str, image_size: tuple[int, int] | None
) -> Iterator[Recipe]:
    try:
        import torchvision
    except ImportError:
        return
    for name in torchvision.models.list_models(module=torchvision.models):
        if name.startswith(prefix):
            recipe = recipe_of(ModelSpec("torchvision", name, name), shapes)
            fit = fitted(recipe, shapes, image_size)
            if fit is not None:
                yield fit


def _open_clip(shapes: Shapes, image_size: tuple[int, int] | None) -> Iterator[Recipe]:
    try:
        import open_clip
    except ImportError:
        return
    for name in open_clip.list_models():
        recipe = recipe_of(ModelSpec("open_clip", name, name))
        if _open_clip_plausible(recipe.model_cfg or {}, shapes):
            fit = fitted(recipe, shapes, image_size)
            if fit is not None:
                yield fit


def _open_clip_plausible(cfg: Mapping[str, Any], shapes: Shapes) -> bool:
    """Compare the numbers of a configuration with the shapes before anything is built."""
    vision, text = cfg["vision_cfg"], cfg["text_cfg"]
    if text.get("hf_model_name"):
        return False
    if ("timm_model_name" in vision) != any(name.startswith("visual.trunk.") for name in shapes):
        return False
    for name in ("token_embedding.weight", "text.token_embedding.weight"):
        if name in shapes and shapes[name] != (text.get("vocab_size"), text.get("width")):
            return False
    stem = shapes.get("visual.conv1.weight")
    width, patch = vision.get("width"), vision.get("patch_size")
    return stem is None or patch is None or stem == (width, 3, patch, patch)


# --- what the shapes do not show ---------------------------------------------------------------


def _groups(recipes: list[Recipe]) -> list[list[Recipe]]:
    """Group recipes by what they compute: equal outputs on equal weights and input."""
    if len(recipes) == 1:
        return [recipes]
    groups: list[tuple[str, nn.Module, torch.Tensor, list[Recipe]]] = []
    for recipe in recipes:
        settings, core = _core(recipe)
        try:
            model, output = _probe(core)
        except ElsaError:
            # Not comparable: on its own, which makes the answer ambiguous rather than wrong.
            settings, model, output = label(recipe), nn.Identity(), torch.empty(0)
        for known, other, expected, members in groups:
            same = known == settings and same_shapes(other, model)
            if same and torch.equal(output, expected):
                members.append(recipe)
                break
        else:
            groups.append((settings, model, output, [recipe]))
    return [members for *_, members in groups]


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
        for short in ({"depth": 2}, {"depths": [2] * 4}):
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
        raise ModelError(f"{label(recipe)} is too large to be compared with its like")
    return build(recipe)


def _small(recipe: Recipe) -> Recipe:
    """Return the recipe at four patches a side (global attention) where that is smaller."""
    said = re.search(r"_patch(\d+)", recipe.name)
    side = 4 * int(said.group(1)) if said else recipe.size[0]
    return resized(recipe, (side, side)) if "depth" in recipe.args else recipe


def explain_misfit(recipe: Recipe, shapes: Shapes) -> str:
    """Say in one line what differs between a recipe's tensors and these; "" for nothing."""
    missing, unexpected, wrong = differences(build_meta(recipe), shapes)
    parts: list[str] = []
    for what, names in (("missing", missing), ("unexpected", unexpected), ("other shape", wrong)):
        if names:
            parts.append(f"{len(names)} {what} ({_first(names)})")
    return ", ".join(parts)


def _first(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:2]) + (", ..." if len(listed) > 2 else "")
