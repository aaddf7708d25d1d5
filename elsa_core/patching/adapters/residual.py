"""A block's residual and LayerScale, in the last product of what the block adds, and its layer norm
in the first one.

Read against timm 1.0.20 to 1.0.31, torchvision 0.29 and open_clip 3.3. Classes are known by name,
so that no library is imported for another one's blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from elsa_core import calls
from elsa_core.patching.adapters.common import is_plain_linear, norm_of
from elsa_core.patching.adapters.handing import (
    RESIDUAL,
    Handing,
    Normalising,
    for_nothing,
    leaves_out,
)
from elsa_core.patching.adapters.host import (
    all_original,
    is_host_bound,
    is_settled,
    is_shown,
    is_within_original,
)

# Parts whose forward ends with a linear layer and a dropout (if any), by the names of these two.
_LAST = {
    "timm.layers.attention.Attention": ("proj", "proj_drop"),
    "timm.layers.attention.AttentionRope": ("proj", "proj_drop"),
    "timm.layers.mlp.GatedMlp": ("fc2", "drop2"),
    "timm.layers.mlp.GluMlp": ("fc2", "drop2"),
    "timm.layers.mlp.Mlp": ("fc2", "drop2"),
    "timm.layers.mlp.SwiGLU": ("fc2", "drop2"),
    "timm.models.beit.Attention": ("proj", "proj_drop"),
    "timm.models.cait.ClassAttn": ("proj", "proj_drop"),
    "timm.models.cait.TalkingHeadAttn": ("proj", "proj_drop"),
    "timm.models.eva.EvaAttention": ("proj", "proj_drop"),
    "timm.models.hiera.MaskUnitAttention": ("proj", ""),
    "timm.models.mvitv2.MultiScaleAttention": ("proj", ""),
    "timm.models.swin_transformer.WindowAttention": ("proj", "proj_drop"),
    "timm.models.vision_transformer_relpos.RelPosAttention": ("proj", "proj_drop"),
    "timm.models.xcit.XCA": ("proj", "proj_drop"),
    "torch.nn.modules.activation.MultiheadAttention": ("out_proj", ""),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ("proj", ""),
}
# Parts whose forward reads its input by one linear layer alone, by the name of that layer.
_FIRST = {
    "timm.models.beit.Attention": "qkv",
    "timm.models.cait.TalkingHeadAttn": "qkv",
    "timm.models.eva.EvaAttention": "qkv",
    "timm.models.hiera.MaskUnitAttention": "qkv",
    "timm.models.mvitv2.MultiScaleAttention": "qkv",
    "timm.models.vision_transformer_relpos.RelPosAttention": "qkv",
    "timm.models.xcit.XCA": "qkv",
    "torchvision.models.swin_transformer.ShiftedWindowAttention": "qkv",
}
# Parts of these whose original forward multiplies by the weight of that layer, which is not called.
_FUNCTIONAL = ("torchvision.models.swin_transformer.ShiftedWindowAttention",)
# Layers in a row, the last of which are a linear one and perhaps a dropout.
_CHAINS = (
    "torch.nn.modules.container.Sequential",
    "torchvision.models.vision_transformer.MLPBlock",
    "torchvision.ops.misc.MLP",
)
_SCALES = ("timm.layers.layer_scale.LayerScale", "open_clip.transformer.LayerScale")
# What drops whole samples, by the name of its rate.
_DROP_PATHS = {
    "timm.layers.drop.DropPath": "drop_prob",
    "torchvision.ops.stochastic_depth.StochasticDepth": "p",
}
_Module: Any = nn.Module  # untyped, as the classes of the libraries are that stand beside it


class Adds(_Module):  # type: ignore[misc]
    """What blocks inherit whose residuals go into products: such a block is no site itself.

    `elsa_forward` is the block's forward with `added`. It runs in eager calls; a recorded program,
    and a GPU that would wait for the host, get the block's own.
    """

    elsa_companion = True
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_serves(module: Any) -> tuple[nn.Module, ...]:
        """The sites whose products take the block's terms."""
        return tuple(module.modules())

    def forward(self, *given: Any, **named: Any) -> Any:
        if is_settled(self):
            return self.elsa_forward(*given, **named)
        if is_within_original(self):
            return self.elsa_original(*given, **named)
        if calls.recorded() and not calls.keeps_products():
            return super().forward(*given, **named)

        def by_elsa() -> Any:
            return self.elsa_forward(*given, **named)

        x = next(t for t in (*given, *named.values()) if isinstance(t, Tensor))
        # its largest product has four times as many channels, as MLPs have by default
        if is_host_bound(self, "linear", x, 4 * x.numel() * x.shape[-1], by_elsa):
            return all_original(self.elsa_original, *given, **named)
        return by_elsa()

    def elsa_original(self, *given: Any, **named: Any) -> Any:
        """The block's own forward, in calls that are not compiled."""
        return super().forward(*given, **named)

    def elsa_forward(self, *given: Any, **named: Any) -> Any:
        """The block's forward, by `added`."""
        raise NotImplementedError


def added(
    x: Tensor,
    norm: Any,
    part: Any,
    scale: Any,
    drop_path: Any,
    terms: dict[str, Any] | None = None,
) -> Tensor:
    """x + drop_path(scale * part(norm(x), **terms)), in the part's last product where it can, with
    the norm in its first one where a kernel takes it.

    `norm` is a module, or what it makes of its input. `scale` is a LayerScale, its gamma, or None;
    `drop_path` may be None too.
    """
    terms = terms or {}
    free = _free(scale, drop_path) and folds(part)
    if isinstance(norm, nn.Module):
        if free and _normalises(part) and norm_of(norm, x) is not None:
            within: Tensor = part.elsa_added(x, x, gamma_of(scale), norm=norm, **terms)
            return within
        if not free:
            module = norm
            return added_by(
                lambda: normalised(part, module, x, lambda y: part(y, **terms)),
                x, part, scale, drop_path,
            )  # fmt: skip
        norm = norm(x)
    normed: Tensor = norm
    if free:
        folded: Tensor = part.elsa_added(normed, x, gamma_of(scale), **terms)
        return folded
    return added_by(lambda: part(normed, **terms), x, part, scale, drop_path)


def normalised(part: Any, norm: Any, x: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    """compute(norm(x)), where compute calls a part (or None) with it, the norm in the part's first
    product where a kernel takes it.
    """
    within = None if part is None or calls.recorded() else norm_of(norm, x)
    if within is None or calls.differentiates(x, *within[:2]):
        return compute(norm(x))
    first = first_layer(part)
    if first is None:
        return compute(norm(x))

    def offered() -> tuple[Any, bool]:
        with Normalising(first, x, within) as handed:
            return compute(x), handed.taken

    if _keeps_original(part, first, x, offered):
        return compute(norm(x))
    out, taken = offered()
    return out if taken else compute(norm(x))


def _keeps_original(part: Any, first: Any, x: Tensor, offered: Callable[[], object]) -> bool:
    """Whether a part called with norm(x) keeps the original forward, or its first layer does: then
    nothing takes the norm.

    `offered` calls the part with the norm on its way to that layer; for a CUDA graph, see
    `is_host_bound`.
    """
    if is_within_original(first):
        return True
    if not hasattr(type(part).forward, "__wrapped__"):  # not by `or_original`
        return False

    def warm_up() -> None:
        with for_nothing():  # a residual on its way is for the call that counts
            offered()

    return is_host_bound(part, "attention", x, x.numel() * x.shape[-2], warm_up, "norm")


def added_by(
    compute: Callable[[], Tensor], x: Tensor, part: nn.Module, scale: Any, drop_path: Any
) -> Tensor:
    """x + drop_path(scale * compute()), where compute calls a part, in its last product if that
    layer can take the terms.
    """
    if calls.recorded() and not calls.keeps_products():
        return _plain(x, compute(), scale, drop_path)
    with handed_to(part, x, scale, drop_path) as handed:
        out = compute()
    return out if handed.taken else _plain(x, out, scale, drop_path)


def _plain(x: Tensor, out: Tensor, scale: Any, drop_path: Any) -> Tensor:
    if isinstance(scale, Tensor):
        out = scale * out
    elif scale is not None:
        out = scale(out)
    return x + (out if drop_path is None else drop_path(out))


def handed_to(part: Any, x: Tensor, scale: Any, drop_path: Any) -> Handing:
    """The terms on their way to a part's last layer; to none where that layer cannot take them.
    Not for calls that are recorded.
    """
    free = _free(scale, drop_path)
    return Handing(last_layer(part) if free else None, x, gamma_of(scale) if free else None)


def _free(scale: Any, drop_path: Any) -> bool:
    """Whether nothing stands between a part's last product and the block's sum."""
    return _idles(drop_path) and _scales(scale) and not leaves_out(RESIDUAL)


def folds(part: Any) -> bool:
    """Whether a part takes the terms as arguments, has no hooks and drops nothing after its last
    product.
    """
    if not hasattr(part, "elsa_added") or is_shown(part):
        return False
    return _idles(part.drop2 if hasattr(part, "drop2") else part.proj_drop)


def _normalises(part: Any) -> bool:
    """Whether a part takes the norm of its input as an argument: nothing else in it reads x."""
    return bool(getattr(part, "elsa_normalises", False))


def last_layer(part: nn.Module) -> nn.Module | None:
    """The patched linear layer that computes what a part returns; None where there is none, where
    something is dropped after it, or where hooks read it.
    """
    if is_shown(part):
        return None
    cls: Any = type(part).__dict__.get("elsa_base", type(part))
    names = _last_names(cls, cls.forward)
    if names is None:
        return None
    if not names[0]:
        return _last_of_chain([m for m in part._modules.values() if m is not None])
    rate = getattr(part, "dropout", 0.0)
    if part.training and isinstance(rate, float) and rate > 0.0:
        return None
    layer, drop = getattr(part, names[0]), getattr(part, names[1], None)
    if type(part) is not cls and cls is nn.MultiheadAttention:  # reads the weights of its layer
        return layer if getattr(part, "batch_first", False) else None
    return layer if _takes(layer) and _idles(drop) else None


def first_layer(part: nn.Module) -> nn.Module | None:
    """The patched layer that alone reads what a part is called with; None where there is none,
    where hooks read it, or where the part reads the layer's weight and takes no norm.
    """
    if is_shown(part):
        return None
    cls: Any = type(part).__dict__.get("elsa_base", type(part))
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _FUNCTIONAL and (type(part) is cls or part.training):  # may keep its original
        return None
    if cls is nn.MultiheadAttention:
        packed = getattr(part, "batch_first", False) and part.in_proj_weight is not None
        return part if packed and type(part) is not cls else None
    if name in _CHAINS and _last_names(cls, cls.forward) is not None:
        layer = next(iter(part._modules.values()), None)
    else:
        layer = getattr(part, _FIRST.get(name, ""), None)
        own = f"{cls.forward.__module__}.{cls.forward.__qualname__}" == f"{name}.forward"
        # with these it computes its projection itself, or reads its input twice
        others = (getattr(part, other, None) for other in ("q_bias", "gate"))
        if not own or any(other is not None for other in others):
            return None
    if layer is None or not is_plain_linear(layer) or not _takes(layer):
        return None
    trains = name in _FUNCTIONAL and calls.differentiates(layer.weight)
    return None if trains else layer


@functools.lru_cache(maxsize=256)
def _last_names(cls: Any, forward: Any) -> tuple[str, str] | None:
    """The names of the last layer and its dropout in a class with its own forward; ("", "") of a
    chain, None of any other.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _CHAINS:
        return ("", "") if forward is nn.Sequential.forward else None
    own = f"{forward.__module__}.{forward.__qualname__}" == f"{name}.forward"
    return _LAST.get(name) if own else None  # else another one was put in its place


def _last_of_chain(layers: list[nn.Module]) -> nn.Module | None:
    while layers and type(layers[-1]) in (nn.Dropout, nn.Identity) and _idles(layers[-1]):
        layers.pop()
    if not layers or layers.count(layers[-1]) > 1:  # an earlier call would take the terms
        return None
    return layers[-1] if _takes(layers[-1]) else None


def _takes(layer: nn.Module) -> bool:
    """Whether this is a plain linear layer with the class of elsa's, and no hook reads it."""
    return type(layer).__dict__.get("elsa_base") is nn.Linear and not is_shown(layer)


def _idles(drop: Any) -> bool:
    """Whether dropout, or the dropping of paths, hands on what it gets."""
    if drop is None:
        return True
    if is_shown(drop):
        return False
    if type(drop) is nn.Identity:
        return True
    if type(drop) is nn.Dropout:
        return not drop.training or drop.p == 0.0
    rate = _DROP_PATHS.get(_name(drop))
    return rate is not None and (not drop.training or getattr(drop, rate) == 0.0)


def _scales(scale: Any) -> bool:
    if scale is None or isinstance(scale, Tensor):
        return True
    known = type(scale) is nn.Identity or _name(scale) in _SCALES
    return known and not is_shown(scale)


def gamma_of(scale: Any) -> Tensor | None:
    """The factors [C] of a LayerScale, or of what stands for it."""
    if scale is None or isinstance(scale, Tensor):
        return scale
    gamma: Tensor | None = getattr(scale, "gamma", None)
    return gamma


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
