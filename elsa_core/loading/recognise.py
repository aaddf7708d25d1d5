"""The architecture of a state dict, from the names and shapes of its tensors.

Candidates are built on the meta device, where a model costs milliseconds, first with one block to
sieve the hundreds of names of a family and then whole. What no shape shows (head count, activation,
rotary base) is compared by running the survivors: those that compute the same are one answer,
those that do not are an error that lists them.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.loading.adapted import SECONDS, adapted
from elsa_core.loading.alike import groups, label
from elsa_core.loading.fit import differences, fitted, is_unused, matches, recipe_of, with_given
from elsa_core.loading.libraries import build_meta, resized
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.shown import Shapes, Shown, depth_of, shown
from elsa_core.loading.spec import ModelSpec

# timm modules of plain transformers; a part of a tensor name that only theirs have, or none.
_VIT_MODULES = {
    "patch_embed.backbone.": ("vision_transformer_hybrid",),
    "shared_rel_pos.": ("vision_transformer_relpos",),
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
_Args = Mapping[str, Any]
# Parts of names that attention has in the libraries that elsa reads, and in most others.
_ATTENTION = re.compile(r"attn|attention|qkv|q_proj|in_proj|query|to_q|relative_position|rel_pos")


@dataclasses.dataclass(frozen=True)
class Recognised:
    """The recipe that fits, and other names that fit and compute the same."""

    recipe: Recipe
    alike: tuple[Recipe, ...] = ()


def recognise(
    shapes: Shapes,
    where: str,
    image_size: tuple[int, int] | None = None,
    given: _Args | None = None,
) -> Recognised:
    """Find the architecture whose state dict has these names and shapes.

    Args:
        shapes: tensor shapes by name.
        where: the file, for messages.
        image_size: (height, width) in pixels, to settle a grid that is not square.
        given: arguments of the constructor that the user has typed.

    Raises:
        ModelError: none fits, or several fit that compute differently (they are listed).
    """
    found = list(_candidates(shapes, image_size, given or {}))
    if not found and _is_convolutional(shapes):
        raise ModelError(
            f"{where} has no attention: its {len(shapes)} tensors are convolutions, norms and"
            " linear layers, as of a ResNet; elsa has nothing to patch in it"
        )
    if not found:
        raise ModelError(
            f"{where}: no known architecture has these tensors{_look(shapes)}; name it with arch"
            " (--arch) and what differs from it with --model-kwargs, or put its config.json"
            " beside the file"
        )
    same = groups(found)
    if len(same) > 1:
        listed = "; ".join(" = ".join(label(recipe) for recipe in group[:3]) for group in same)
        raise ModelError(
            f"{where} fits architectures that compute differently: {listed};"
            " choose with arch (--arch)"
        )
    best = sorted(same[0], key=_preference)
    return Recognised(best[0], tuple(best[1:]))


def fit_named(
    spec: ModelSpec,
    shapes: Shapes,
    image_size: tuple[int, int] | None = None,
    given: _Args | None = None,
) -> Recipe:
    """Fit one named architecture to the shapes, allowing for what they show of its arguments.

    Returns:
        The recipe that fits exactly, else the usual recipe: the library may convert the tensors.

    Raises:
        ArgumentError: `given` cannot be.
        ModelError: another width would fit, with heads that no tensor shows.
    """
    usual = recipe_of(spec, shapes, given)
    if usual.library == "open_clip":
        tries = [usual, *_with_config(usual, shapes)]
    elif usual.library == "timm":
        tries = [
            _with(usual, {**extra, **setting.args}, setting.size, given or {})
            for extra in _variants(shapes)
            for setting in (Shown(), *shown(shapes))
        ]
    else:
        tries = [usual]
    fits = (fitted(recipe, shapes, image_size) for recipe in tries)
    fit = next((fit for fit in fits if fit is not None), None)
    if fit is None and usual.library != "open_clip":
        fit = adapted(usual, shapes, image_size, given or {})
    return _pruned(fit or usual, shapes, usual.args)


def _pruned(recipe: Recipe, shapes: Shapes, kept: Iterable[str]) -> Recipe:
    """Return the recipe without the arguments that its name implies; the shapes still agree."""
    for key in sorted(set(recipe.args) - {*kept, "img_size"}):
        args = {k: v for k, v in recipe.args.items() if k != key}
        fewer = dataclasses.replace(recipe, args=args)
        with suppress(ElsaError):
            if matches(build_meta(fewer), shapes):
                recipe = fewer
    return recipe


def _with(recipe: Recipe, args: _Args, size: tuple[int, int] | None, given: _Args) -> Recipe:
    """Return the recipe with further arguments and another size; what the user typed wins."""
    recipe = dataclasses.replace(recipe, args={**recipe.args, **args})
    recipe = recipe if size is None else resized(recipe, size)
    return with_given(recipe, given) if given else recipe


def _preference(recipe: Recipe) -> tuple[int, bool, int, str]:
    """Names of the fewest other arguments first, then of this image size, then the shortest."""
    usual = recipe_of(ModelSpec(recipe.library, recipe.name, recipe.name))
    return len(recipe.args), usual.size != recipe.size, len(recipe.name), recipe.name


def _look(shapes: Shapes) -> str:
    if any(name.startswith(("vit.", "encoder.layer.", "vision_model.")) for name in shapes):
        return " (the names are those of transformers, which elsa does not read)"
    first = next(iter(shapes))
    return f" ({len(shapes)} tensors, the first is {first[:60]!r})"


def _is_convolutional(shapes: Shapes) -> bool:
    kernels = [s for s in shapes.values() if len(s) == 4 and max(s[2:]) > 1]
    return len(kernels) > 2 and not any(map(_ATTENTION.search, shapes))


def _candidates(
    shapes: Shapes, image_size: tuple[int, int] | None, given: _Args
) -> Iterator[Recipe]:
    if any(name.startswith("visual.") for name in shapes):
        yield from _open_clip(shapes, image_size, given)
        return
    for key, prefix in _TORCHVISION_PREFIXES.items():
        if any(name.startswith(key) for name in shapes):
            yield from _torchvision(shapes, prefix, image_size, given)
            return
    yield from _timm(shapes, image_size, given)


# --- timm --------------------------------------------------------------------------------------


def _timm(shapes: Shapes, image_size: tuple[int, int] | None, given: _Args) -> list[Recipe]:
    """The timm names that fit as they are; failing those, the ones that fit with what shows."""
    names = _timm_names(shapes)
    stem = shapes.get("patch_embed.proj.weight", ())
    usual = [n for n in names if _said_patch(n) in (None, *stem[2:3])]
    for extra in _variants(shapes):
        for setting in (Shown(), *shown(shapes)):
            args = {**extra, **setting.args}
            pool = _one_a_kind(names) if "patch_size" in args else usual
            sieved = (_sieve(name, shapes, args, setting.size, given) for name in pool)
            fits = (fitted(r, shapes, image_size) for r in sieved if r is not None)
            found = [recipe for recipe in fits if recipe is not None]
            if found:
                return [_pruned(recipe, shapes, given) for recipe in found]
    return []


def _said_patch(name: str) -> int | None:
    said = re.search(r"_patch(\d+)", name)
    return int(said.group(1)) if said else None


def _one_a_kind(names: Iterable[str]) -> list[str]:
    """One name for each that differs in patch, window and image size alone."""
    kinds = {re.sub(r"_(patch|window)?\d+(?=_|$)", "", name): name for name in sorted(names)[::-1]}
    return list(kinds.values())


def _timm_names(shapes: Shapes) -> list[str]:
    """The names of the families whose tensors look like these."""
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
    return [name for module in modules for name in timm.list_models(module=module)]


def _variants(shapes: Shapes) -> list[dict[str, Any]]:
    """Common fine-tuning changes that rename tensors: the pooling, and no class token."""
    variants: list[dict[str, Any]] = [{}]
    if "fc_norm.weight" in shapes and "norm.weight" not in shapes:
        variants.append({"global_pool": "avg"})
        if "cls_token" not in shapes:
            variants.append({"global_pool": "avg", "class_token": False})
    return variants


def _sieve(
    name: str, shapes: Shapes, args: _Args, size: tuple[int, int] | None, given: _Args
) -> Recipe | None:
    """Return the recipe of `name` when a model of one block already fits, else None."""
    recipe = _with(recipe_of(ModelSpec("timm", name, name), shapes), args, size, given)
    stages = len({key.split(".")[1] for key in shapes if re.match(r"(layers|stages)\.\d", key)})
    short: dict[str, Any] = {"depths": [1] * stages} if stages else {"depth": 1}
    if "global_attn_indexes" in recipe.args:
        short["global_attn_indexes"] = [i for i in recipe.args["global_attn_indexes"] if i < 1]
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
    if any(name not in own for name in outside if not _of_grid(name) and not is_unused(name)):
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
    shapes: Shapes, prefix: str, image_size: tuple[int, int] | None, given: _Args
) -> Iterator[Recipe]:
    try:
        import torchvision
    except ImportError:
        return
    names = torchvision.models.list_models(module=torchvision.models)
    recipes = [
        recipe_of(ModelSpec("torchvision", name, name), shapes, given)
        for name in names
        if name.startswith(prefix)
    ]
    found = [fit for r in recipes if (fit := fitted(r, shapes, image_size)) is not None]
    if not found:
        # Widths stay those of a name, which says the heads of a ViT.
        until = time.thread_time() + 2 * SECONDS
        other = (adapted(r, shapes, image_size, given, named=False, until=until) for r in recipes)
        found = [_pruned(fit, shapes, given) for fit in other if fit is not None]
        fewest = min((len(fit.args) for fit in found), default=0)
        found = [fit for fit in found if len(fit.args) == fewest]
    yield from found


def _open_clip(
    shapes: Shapes, image_size: tuple[int, int] | None, given: _Args
) -> Iterator[Recipe]:
    try:
        import open_clip
    except ImportError:
        return
    recipes = [
        recipe_of(ModelSpec("open_clip", name, name), None, given)
        for name in open_clip.list_models()
    ]
    usual = [r for r in recipes if _open_clip_plausible(r.model_cfg or {}, shapes)]
    found = [fit for r in usual if (fit := fitted(r, shapes, image_size)) is not None]
    if not found:
        # Names that differ in what the shapes show become one and the same here.
        other = {str(r.model_cfg): r for each in recipes for r in _with_config(each, shapes)}
        found = [f for r in other.values() if (f := fitted(r, shapes, image_size)) is not None]
    yield from found


def _with_config(recipe: Recipe, shapes: Shapes) -> list[Recipe]:
    """Return a CLIP's recipe with depths, patch, vocabulary and context as in the shapes."""
    cfg: Any = recipe.model_cfg
    stem = shapes.get("visual.conv1.weight", ())
    words = shapes.get("token_embedding.weight", ())
    context = shapes.get("positional_embedding", ())
    vision, text = cfg["vision_cfg"], cfg["text_cfg"]
    plain = isinstance(vision.get("layers"), int) and len(stem) == 4 and len(words) == 2
    if not plain or (vision.get("width"), text.get("width")) != (stem[0], words[1]):
        return []
    blocks = {
        side: {k.split(".resblocks.")[1].split(".")[0] for k in shapes if k.startswith(f"{side}.")}
        for side in ("visual.transformer.resblocks", "transformer.resblocks")
    }
    vision = {
        **vision,
        "patch_size": stem[2],
        "layers": len(blocks["visual.transformer.resblocks"]),
    }
    text = {**text, "vocab_size": words[0], "layers": len(blocks["transformer.resblocks"])}
    if len(context) == 2:
        text["context_length"] = context[0]
    cfg = {**cfg, "vision_cfg": vision, "text_cfg": text}
    return [dataclasses.replace(recipe, model_cfg=cfg)]


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


def explain_misfit(recipe: Recipe, shapes: Shapes) -> str:
    """Say in one line what differs between a recipe's tensors and these; "" for nothing."""
    model = build_meta(recipe)
    missing, unexpected, wrong = differences(model, shapes)
    parts: list[str] = []
    for what, names in (("missing", missing), ("unexpected", unexpected), ("other shape", wrong)):
        if names:
            parts.append(f"{len(names)} {what} ({_first(names)})")
    own = {**dict(model.named_buffers()), **model.state_dict()}
    if wrong and not missing and not unexpected:
        name = min(wrong)
        parts.append(f"{list(shapes[name])} in the file and {list(own[name].shape)} in the model")
    return ", ".join(parts)


def _first(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:2]) + (", ..." if len(listed) > 2 else "")
