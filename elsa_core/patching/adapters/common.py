"""What adapters share: views of projections, and the one call of the operator.

Helpers take the module as Any: model libraries are untyped, and attributes differ between versions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elsa_core import calls, graph_steps, routing, short_calls
from elsa_core.attention import attention
from elsa_core.linear import Norm, served
from elsa_core.operators.linear import epilogue
from elsa_core.patching.adapters.handing import (
    ACTIVATION,
    leaves_out,
    taken,
    taken_norm,
    waiting,
)
from elsa_core.patching.adapters.host import (
    by_sdpa,
    has_hooks,
    is_shown,
    is_within_original,
    noted,
)


def split_packed(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k, v [B, H, N, D] of a packed projection [B, N, 3 * H * D]."""
    packed = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k, v = packed.unbind(0)
    return q, k, v


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """A view [B, H, N, D] of a projection [B, N, H * D]."""
    heads: Tensor = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return heads


def join_heads(out: Tensor) -> Tensor:
    """[B, N, H * D] of the operator's result [B, H, N, D], whose memory it already is."""
    return out.transpose(1, 2).flatten(2)


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer is PyTorch's own `nn.Linear`, patched or not."""
    cls = type(layer)
    return cls is nn.Linear or cls.__dict__.get("elsa_base") is nn.Linear


def why_no_weight(layer: Any) -> str:
    """Why the weight of a layer is none that a kernel may read; empty if it is one."""
    weight: Any = getattr(layer, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__qualname__}"
    floating: bool = weight.is_floating_point()
    return "" if floating else f"its weight is {weight.dtype}"


def project(
    site: Any,
    layer: nn.Module,
    x: Tensor,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    norm: nn.Module | None = None,
) -> Tensor:
    """residual + scale * activation(layer(norm(x))), a projection of the patched site: one call
    where that is a plain linear layer without hooks, and the norm in it where a kernel takes it. On
    a CPU a recorded program calls the layer, see `is_elsas`. A block may have handed the layer a
    residual and a scale.
    """
    if activation != "none" and leaves_out(ACTIVATION):
        return epilogue(project(site, layer, x, norm=norm), activation, residual, scale)
    if is_plain_linear(layer) and not is_shown(layer) and is_elsas(layer, x):
        if is_within_original(site):
            out = by_pytorch(layer, x if norm is None else norm(x))
            return epilogue(out, activation, residual, scale)
        within = None
        if waiting():
            if residual is None and scale is None:
                residual, scale = taken(layer, x, layer.weight.shape[0])  # type: ignore[arg-type, index]
            within = taken_norm(layer, x) if norm is None else None
        if norm is not None:
            within = norm_of(norm, x)  # type: ignore[arg-type]
            x = norm(x) if within is None else x
        kept: Any = getattr(layer, "elsa_halves", None)
        halves, powers = (None, None) if kept is None else kept()
        return served(
            x, layer.weight, layer.bias, activation, residual, scale, site.elsa_precision,  # type: ignore[arg-type]
            site.elsa_backend, halves, powers, within,
        )  # fmt: skip
    return epilogue(layer(x if norm is None else norm(x)), activation, residual, scale)


def is_elsas(layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer's product of x is a call of elsa's. A recorded program on a CPU calls the
    layer, but for ONNX, which has a node for it, where the layer itself is patched.
    """
    if x.is_cuda or not calls.recorded():
        return True
    return type(layer) is not nn.Linear and calls.keeps_products()


def by_pytorch(layer: Any, x: Tensor) -> Tensor:
    """layer(x) of a plain linear layer without hooks, as its class computes it."""
    terms = layer._parameters  # here the host finds them sooner than as attributes
    try:
        return functional.linear(x, terms["weight"], terms["bias"])
    except KeyError:  # something derived stands for a parameter
        return functional.linear(x, layer.weight, layer.bias)


# Layer norms whose forward is `torch.nn.functional.layer_norm` in float32.
_NORMS = (
    "open_clip.transformer.LayerNorm",
    "timm.layers.norm.LayerNorm",
    "torch.nn.modules.normalization.LayerNorm",
)


def norm_of(module: Any, x: Tensor) -> Norm | None:
    """What `elsa_core.linear` takes of a layer norm over the channels of x; None where the module
    must be called: no kernel takes its norm, another class, another shape, or hooks.
    """
    if x.dtype != torch.float32 or not routing.linear_form(routing.NORM, x.device):
        return None
    cls = type(module)
    if f"{cls.__module__}.{cls.__qualname__}" not in _NORMS or is_shown(module):
        return None
    if tuple(module.normalized_shape) != x.shape[-1:]:
        return None
    vectors = (module.weight, module.bias)
    if any(type(v) not in (Tensor, nn.Parameter, type(None)) for v in vectors):
        return None
    return *vectors, module.eps


def project_by(
    site: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    halves: tuple[Tensor | None, Tensor | None] = (None, None),
    terms: tuple[Tensor | None, Tensor | None] = (None, None),
    norm: Norm | None = None,
) -> Tensor:
    """residual + scale * (norm(x) @ weight.T + bias) with the patched site's precision and backend:
    [..., K] -> [..., N]. `terms` are the residual and the scale.
    """
    given = ("none", *terms, site.elsa_precision, site.elsa_backend, *halves, norm)
    return served(x, weight, bias, *given)


# Activations by their class; of nn.GELU its argument decides.
_ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "timm.layers.activations.Swish": "silu",
    "open_clip.transformer.QuickGELU": "quick_gelu",
}


def activation_of(module: nn.Module) -> str:
    """The operator's name for an activation module; empty where it has none."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    cls = type(module)
    return _ACTIVATIONS.get(f"{cls.__module__}.{cls.__qualname__}", "")


def passed(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), without the call where it changes nothing: an identity, dropout in eval mode."""
    cls = type(module)
    idle = cls is nn.Identity or (cls is nn.Dropout and (not module.training or module.p == 0.0))  # type: ignore[comparison-overlap]
    if idle and not is_shown(module):
        return x
    out: Tensor = module(x)
    return out


def trains_by_pytorch(site: Any, x: Tensor, projection: nn.Module) -> bool:
    """Whether an eager call keeps the original forward, which calls PyTorch's own kernel.

    That is so where gradients are wanted and the shipped table gives forward and gradients to that
    kernel: the operator would call it too, and take the host more time.

    Args:
        site: a patched module that attends within x [B, N, C]. projection: its first one.
    """
    if not (torch.is_grad_enabled() or site.training):
        return False
    if noted(site, "elsa_sparsity") is not None:
        return False
    fused = x.is_cuda and getattr(site, "fused_attn", False) and site.elsa_backend == "auto"
    if not fused or calls.traced() or not wants_training(site, x, projection):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    kind = ("cuda", dtype, site.head_dim, site.head_dim, site.elsa_precision)
    if not routing.training_name("attention", *kind, ("query",), x.numel() * x.shape[1]):
        return False
    return not graph_steps.serve_packed(x, site.num_heads, kind)


def load_for_graph(site: Any, x: Tensor, projection: nn.Module) -> None:
    """Load what a CUDA graph of this eager call would run, where the call may warm up for one: a
    step on a stream of the caller's own."""
    if torch.is_grad_enabled() and calls.is_own_stream(x.device):
        trains_by_pytorch(site, x, projection)


def wants_training(site: Any, x: Tensor, projection: nn.Module) -> bool:
    """Whether this call is of a training step, as far as the choice of a forward goes.

    That is one that wants gradients, and in training any that drops something: reentrant
    checkpointing runs a step without gradients first and must meet the same dropout again.
    """
    weight = getattr(projection, "weight", None)  # a method in quantised layers
    if calls.wanted(x=x, weight=weight if isinstance(weight, Tensor) else None):
        return True
    if not site.training:
        return False
    rates = [getattr(site, name, 0.0) for name in ("dropout", "attention_dropout")]
    rates += [part.p for part in site.modules() if isinstance(part, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0.0 for rate in rates)


# The modules of an eager branch that an operator stands for, and what they may be.
_STANDING = {"softmax": (nn.Softmax,), "attn_drop": (nn.Dropout, nn.Identity)}


def is_other(name: str, part: object) -> bool:
    """Whether a part of an attention is of a class that the operator does not stand for."""
    return name in _STANDING and type(part) not in _STANDING[name]


def other_part(module: nn.Module) -> str:
    """What of an attention's eager branch is of such a class, in words; empty where nothing is."""
    for name in _STANDING:
        part = module._modules.get(name)
        if part is not None and is_other(name, part):
            return f"its {name} is a {type(part).__qualname__}"
    return ""


def weights_are_hooked(module: Any) -> bool:
    """Whether the attention weights pass through what the operator does not stand for: a hook, or
    another module in the place of the eager branch's softmax or dropout.
    """
    return not getattr(module, "fused_attn", False) and hooks_weights(module)


def hooks_weights(module: Any) -> bool:
    """As `weights_are_hooked`, of an eager branch that is taken."""
    for name in _STANDING:
        part = module._modules.get(name)
        if part is not None and (has_hooks(part) or is_other(name, part)):
            return True
    return False


def drop_p(module: Any) -> float:
    """The probability with which the original would drop an attention weight now.

    Its eager branch calls `attn_drop`, which has a mode of its own (Monte Carlo dropout keeps it in
    training) and may have been replaced by an identity; its fused branch uses the module's mode.
    """
    drop = module.attn_drop
    dropping = module.training if getattr(module, "fused_attn", False) else drop.training
    p: float = getattr(drop, "p", 0.0)
    return p if dropping else 0.0


def scale_of(module: Any) -> float | None:
    """The scale of the scores that timm would take: its fused branch leaves it to the operator."""
    if getattr(module, "fused_attn", False):
        return None
    scale: float = module.scale
    return scale


def attend_small(query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Attention of an eager call on a GPU that waits for the host, where such calls were admitted
    to the short way and the shipped table takes it for their dtype; None where PyTorch is to serve.
    [B, H, N, D] -> [B, H, N, Dv].
    """
    if short_calls.ATTENTION.serve is None or not routing.eager_short(query.device, query.dtype):
        return None
    if torch._C._is_any_autocast_enabled() or calls.traced():
        return None
    given = query, key, value, None, False, None, "strict"
    out: Tensor | None = short_calls.served(short_calls.ATTENTION, *given)
    return out


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """The operator with the patched module's precision and backend: [B, H, N, D] -> [B, H, N, Dv].

    `scale` is 1 / sqrt(D) if None; for `dropout_p` see `drop_p`. Small eager calls on a GPU are
    PyTorch's, see `by_sdpa`. Where weights are dropped, none is left out for its size. Of a model
    in host memory that was patched with `offload` a GPU computes it.
    """
    sparsity = None if dropout_p else noted(module, "elsa_sparsity")
    names = module.elsa_backend, module.elsa_precision
    by_pytorch = mask is None and sparsity is None and query.is_cuda
    if by_pytorch and by_sdpa(query, key, value, *names):
        plain = scale is None and dropout_p == 0.0 and not is_causal
        small = attend_small(query, key, value) if plain else None
        return small if small is not None else functional.scaled_dot_product_attention(
            query, key, value, None, dropout_p, is_causal, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    if noted(module, "elsa_offload") is not None:
        from elsa_core.offload.activations import streams

        if streams(module, query, key, mask, dropout_p):
            streamed: Any = attention(
                query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True,
                precision=module.elsa_precision, backend=module.elsa_backend, offload="host",
            )  # fmt: skip
            return streamed  # type: ignore[no-any-return]
    out: Any = attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
        precision=module.elsa_precision,
        backend=module.elsa_backend,
        sparsity=sparsity,
    )
    result: Tensor = out
    return result
