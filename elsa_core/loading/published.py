"""Models with their published weights, converted and resized by the library that published them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.loading import hub
from elsa_core.loading.checkpoint import read_checkpoint
from elsa_core.loading.libraries import (
    BUILD_ERRORS,
    build,
    default_recipe,
    load_open_clip,
    timm_args,
    timm_name,
)
from elsa_core.loading.recipe import Recipe
from elsa_core.loading.spec import ModelSpec
from elsa_core.loading.weights import read_header
from elsa_core.messages import first_line, quiet


def build_published(recipe: Recipe) -> tuple[nn.Module, str]:
    """Build the model with its published weights, and name them.

    Raises:
        ModelError: no weights are published for the name, or they do not fit it.
        UnavailableError: they are not in the cache and the network cannot be reached.
    """
    builders = {"timm": _timm, "open_clip": _open_clip, "torchvision": _torchvision}
    try:
        with quiet():
            model, origin = builders[recipe.library](recipe)
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


def check_file(path: Path) -> None:
    """Refuse a weights file that is malformed, or that needs pickle to run code.

    Raises:
        ModelError: names the file.
    """
    if path.suffix == ".safetensors":
        read_header(path)
    elif path.suffix in (".bin", ".pt", ".pth"):
        read_checkpoint(path)


def _timm(recipe: Recipe) -> tuple[nn.Module, str]:
    import timm
    from timm.models import get_pretrained_cfg

    name = timm_name(recipe)
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
    elif not _in_torch_cache(cfg.url):
        hub.require_network(cfg.url, need=need)
    model: nn.Module = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, **timm_args(recipe)
    )
    return model, str(origin)


def _in_torch_cache(url: str) -> bool:
    from torch.hub import get_dir

    return (Path(get_dir()) / "checkpoints" / url.rpartition("/")[2]).is_file()


def _open_clip(recipe: Recipe) -> tuple[nn.Module, str]:
    import open_clip

    tags = list(open_clip.list_pretrained_tags_by_model(recipe.name))
    if recipe.tag is None:
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
        url = cfg.get("url", "")
        cached = Path.home() / ".cache" / "clip" / url.rpartition("/")[2]
        if not cached.is_file():
            hub.require_network(url, need=need)
        path = Path(open_clip.download_pretrained(cfg))
    check_file(path)
    usual = default_recipe(ModelSpec("open_clip", recipe.name, recipe.name, recipe.tag))
    return load_open_clip(recipe, usual, str(path)), f"{recipe.name}/{recipe.tag}"


def _torchvision(recipe: Recipe) -> tuple[nn.Module, str]:
    from torchvision.models import get_model_weights

    weights = get_model_weights(recipe.name).DEFAULT
    if not _in_torch_cache(weights.url):
        hub.require_network(weights.url, need=f"the weights of torchvision:{recipe.name}")
    model = build(recipe)
    state = weights.get_state_dict(progress=False, check_hash=True)
    model.load_state_dict(torchvision_resized(model, state))
    return model, f"torchvision {weights.name}"


def torchvision_resized(model: Any, state: Any) -> Any:
    """Return the state with a ViT's position embedding at the model's size, as torchvision does."""
    if not hasattr(model, "image_size") or not hasattr(model, "patch_size"):
        return state
    from torchvision.models.vision_transformer import interpolate_embeddings

    return interpolate_embeddings(model.image_size, model.patch_size, dict(state))
