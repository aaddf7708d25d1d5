"""What adapters share: views of projections, calls of the operators, when the original runs.

Helpers take the module as Any: model libraries are untyped, and attributes differ between versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.errors import ArgumentError
from elsa_core.ops.attention.api import attention
from elsa_core.ops.linear.api import served
from elsa_core.ops.linear.record import epilogue
from elsa_core.patching.adapters.hooks import has_hooks, is_watched, noted
from elsa_core.precision import PRECISIONS


def split_packed(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k, v [B, H, N, D] of a packed projection [B, N, 3 * H * D]."""
    packed = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k, v = packed.unbind(0)
    return q, k, v


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """A view [B, H, N, D] of a projection [B, N, H * D]."""
    heads: Tensor = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return heads


def check_names(precision: str, backend: str) -> None:
    """Refuse a name that there is not."""
    asked = {"precision": (precision, tuple(PRECISIONS)), "backend": (backend, dispatch.names())}
    for name, (value, choices) in asked.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be text, not {type(value).__name__}")
        if value not in choices:
            raise ArgumentError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}")


# Linear layers.


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
) -> Tensor:
    """residual + scale * activation(layer(x)), where the original calls the layer: one call of the
    operator where that is a plain linear one that nothing watches, else the layer is called."""
    # in few calls of Python: every layer of a warm forward passes here
    cls = type(layer)
    called = cls is not nn.Linear and cls.__dict__.get("elsa_base") is not nn.Linear
    if called or is_watched(layer) or not isinstance(x, Tensor):
        return epilogue(layer(x), activation, residual, scale)
    # a recorded program on a CPU calls the layer, but for ONNX, which has a node for the product,
    # where the layer itself is patched
    if not x.is_cuda and calls.recorded() and (cls is nn.Linear or not calls.keeps_products()):
        return epilogue(layer(x), activation, residual, scale)
    return served(
        x, layer.weight, layer.bias, activation, residual, scale, site.elsa_precision,  # type: ignore[arg-type]
        site.elsa_backend,
    )  # fmt: skip


def project_by(site: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, [..., K] -> [..., N], where the original reads a layer's weight and does
    not call the layer."""
    return served(x, weight, bias, "none", None, None, site.elsa_precision, site.elsa_backend)


# Activations by their class; of nn.GELU its argument decides.
_ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "timm.layers.activations.Swish": "silu",
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
    dropout: Any = module
    idle = cls is nn.Identity or (cls is nn.Dropout and (not module.training or dropout.p == 0.0))
    if idle and not is_watched(module):
        return x
    out: Tensor = module(x)
    return out


# When the original forward runs.


def runs_original(
    work: Callable[[Any, Tensor], int],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a patched attention's forward run the original one where attention weights have to
    exist (hooks on them, or another module in the place of softmax or dropout), and in small eager
    calls on a GPU: by `work`, of the module and its first argument the multiply-adds of query
    key^T."""

    def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
        name = forward.__name__

        @functools.wraps(forward)
        def chosen(self: Any, x: Tensor, *given: Any, **named: Any) -> Any:
            if not isinstance(x, Tensor):  # torch.fx traces the original, and finds its names
                return getattr(self.elsa_base, name)(self, x, *given, **named)
            if is_small(self, x, work(self, x)) or weights_are_hooked(self):
                return getattr(self.elsa_base, name)(self, x, *given, **named)
            return forward(self, x, *given, **named)

        return chosen

    return decorated


def is_small(site: Any, x: Tensor, work: int, operator: str = "attention") -> bool:
    """Whether this is a small eager call on a GPU of a site patched without names: Python overhead
    bounds it, and the original forward may have less. Asked anew in every call. A CUDA graph saves
    the host's time and records elsa's kernels."""
    # in few frames of Python, since a model's weights empty the caches between two sites; first
    # what is constant for a compiler, which may read no length
    if not x.is_cuda or calls.traced() or work >= dispatch.eager_least(operator, x.dtype):
        return False
    space = site.__dict__
    return (
        space["elsa_backend"] == "auto"
        and space["elsa_precision"] == "strict"
        and "elsa_sparsity" not in space
        and not calls.capturing()
    )


def trains_by_pytorch(site: Any, x: Tensor, projection: nn.Module) -> bool:
    """Whether an eager call, of tokens x [B, N, C], keeps the original forward since the table
    gives its training to PyTorch's own kernel: the operator would call that, and take longer."""
    if not (torch.is_grad_enabled() or site.training):
        return False
    if noted(site, "elsa_sparsity") is not None:
        return False
    fused = x.is_cuda and getattr(site, "fused_attn", False) and site.elsa_backend == "auto"
    if not fused or calls.traced() or not wants_training(site, x, projection):
        return False
    if calls.capturing():  # the operator chooses, as in eager calls
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    kind = ("cuda", dtype, site.head_dim, site.head_dim, site.elsa_precision)
    work = x.numel() * x.shape[1]
    name = dispatch.choose("attention", *kind, mode="train", gradient=("query",), work=work)
    return dispatch.is_whole("attention", name)


def wants_training(site: Any, x: Tensor, projection: nn.Module) -> bool:
    """Whether this call is of a training step, as far as the choice of a forward goes. That is one
    that wants gradients, and in training any that drops something: reentrant checkpointing runs a
    step without gradients first and must meet the same dropout again."""
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
    """Whether the operator does not stand for a part of an attention: for its class, or a softmax
    along another axis."""
    if name not in _STANDING:
        return False
    return type(part) not in _STANDING[name] or getattr(part, "dim", -1) != -1


def weights_are_hooked(module: Any) -> bool:
    """Whether the attention weights pass through what the operator does not stand for."""
    if getattr(module, "fused_attn", False):
        return False
    for name in _STANDING:
        part = module._modules.get(name)
        if part is not None and (has_hooks(part) or is_other(name, part)):
            return True
    return False


def drop_p(module: Any) -> float:
    """The probability with which the original would drop an attention weight now. Its eager branch
    calls `attn_drop`, which has a mode of its own (Monte Carlo dropout keeps it in training) and
    may have been replaced by an identity; its fused branch uses the module's mode."""
    drop: Any = getattr(module, "attn_drop", None)
    p: float = getattr(drop, "p", 0.0)
    return p if p and (module if getattr(module, "fused_attn", False) else drop).training else 0.0


def scale_of(module: Any) -> float | None:
    """The scale of the scores that timm would take: its fused branch leaves it to the operator."""
    if getattr(module, "fused_attn", False):
        return None
    scale: float = module.scale
    return scale


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
    enable_gqa: bool = True,
) -> Tensor:
    """The operator with the patched module's precision and backend: [B, H, N, D] -> [B, H, N, Dv].
    `scale` is 1 / sqrt(D) if None; for `dropout_p` see `drop_p`. Where weights are dropped, none is
    left out for its size. With `offload` a GPU computes it of a model in host memory."""
    sparsity = None if dropout_p else noted(module, "elsa_sparsity")
    offload = None
    if noted(module, "elsa_offload") is not None:
        from elsa_core.offload.activations import streams

        offload = "host" if streams(module, query, key, mask, dropout_p) else None
    result: Any = attention(
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa,
        precision=module.elsa_precision, backend=module.elsa_backend,
        sparsity=None if offload else sparsity, offload=offload,
    )  # fmt: skip
    return result  # type: ignore[no-any-return]
