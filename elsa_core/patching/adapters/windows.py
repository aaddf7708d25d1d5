"""What adapters of windowed blocks share: when a block computes its attention itself, and the call.

A block's adapter computes from image to image. The attention module within it keeps its class and
parameters; its forward is not called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.ops.window.api import window_attention
from elsa_core.patching.adapters.common import (
    drop_p,
    is_other,
    is_plain_linear,
    project,
    scale_of,
    wants_training,
)
from elsa_core.patching.adapters.derived import Derivation, Derives
from elsa_core.patching.adapters.hooks import has_hooks

# A dense bias of up to these bytes a block is kept: every window of 7x7 or 8x8, not those of 24x24,
# whose biases of all blocks would take as much memory as the model.
DENSE_BYTES = 1 << 20
_MAX_LOGIT_SCALE = math.log(1.0 / 0.01)  # of Swin-V2 (arXiv 2111.09883), Sec. 3.3


class WindowBlock(Derives):
    """A block whose adapter computes the attention within it."""

    elsa_attention = "attn"  # where that attention is
    elsa_expects: type[nn.Module]  # its class, the library's own

    @classmethod
    def elsa_why_not(cls, module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        attention = module.get_submodule(cls.elsa_attention)
        own, expected = type(attention).__qualname__, cls.elsa_expects.__qualname__
        if type(attention) is not cls.elsa_expects:
            return f"its attention is a {own}, not a {expected}"
        for name, part in attention._modules.items():
            if part is not None and is_other(name, part):
                return f"its {name} is a {type(part).__qualname__}"
        return ""


def must_call(attention: nn.Module, expected: type[nn.Module] | None) -> bool:
    """Whether the attention module within a block must run: its class is not the library's own, it
    drops weights, or it or a part of it has hooks (which in the original see padded windows) or
    another module has taken a part's place. `expected` is None where the module is the site."""
    if expected is not None and (type(attention) is not expected or has_hooks(attention)):
        return True
    if drop_p(attention) > 0.0:
        return True
    return any(
        part is not None and (has_hooks(part) or is_other(name, part))
        for name, part in attention._modules.items()
    )


def of_padding(projection: nn.Module, x: Tensor, window: Sequence[int]) -> Tensor | None:
    """What a projection makes of a padded token of x [B, H, W, C], a zero: [3 * C], None for zeros,
    and where there is none."""
    if is_plain_linear(projection):
        bias: Tensor | None = projection.bias  # type: ignore[assignment]
        return bias
    if not any(n % w for n, w in zip(x.shape[1:3], window, strict=True)):
        return None
    # Not the library's own layer: a quantised one, or one with a low-rank addition.
    padding: Tensor = projection(x.new_zeros(1, x.shape[-1])).squeeze(0)
    return padding


def keeps_original(site: Any, x: Tensor, attn: Any, window: Sequence[int]) -> bool:
    """Whether a call keeps the original forward: on a GPU that no backend has kernels for, and
    where the shipped table says that the operator is slower with its gradients, which are wanted;
    never where a backend was asked for by name."""
    if not isinstance(x, Tensor):  # torch.fx traces the original, and finds its names
        return True
    if site.elsa_backend != "auto":
        return False
    kind, learns = x.device.type, wants_training(site, x, attn.qkv)
    if not learns and kind != "cuda":
        return False
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    head_dim = getattr(attn.qkv, "out_features", 3 * x.shape[-1]) // (3 * attn.num_heads)
    given = (dtype, head_dim, head_dim, site.elsa_precision)
    if kind == "cuda" and dtype.itemsize <= 4 and not calls.exporting():
        name = dispatch.choose("window_attention", calls.place(x), *given, "auto")
        if name == dispatch.PLAIN:
            return True
    tokens = math.prod(window)
    return learns and bool(
        dispatch.choose(
            "window_attention", kind, *given, mode="site", gradient=("qkv",), tokens=tokens
        )
    )


class Bias(NamedTuple):
    """A relative position bias as the operator takes it."""

    bias: Tensor | None  # [heads, T, T], or a table [L, heads]; None for none
    bias_index: Tensor | None = None  # None, or [T, T] into the table


def attend_windows(
    site: Any,
    attn: Any,
    x: Tensor,
    window: Sequence[int],
    bias: Bias | None = None,
    *,
    qkv: Tensor | None = None,
    flat: bool = False,
    **terms: Any,
) -> Tensor:
    """Both projections of `attn` and the operator between them, with the site's precision and
    backend: [B, H, W, C] -> [B, H, W, C], or [B, H * W, C] if `flat`. `qkv` is the first
    projection, where that is no plain call. What a padded token would be is left out of eager calls
    without one if its dtype is another, as under autocast: a kernel would wait for the copy."""
    if qkv is None:
        qkv = project(site, attn.qkv, x)
    pad = terms.get("pad_qkv")
    if pad is not None and pad.dtype != qkv.dtype and not calls.traced():
        sizes = zip(qkv.shape[1:3], window, strict=True)
        terms["pad_qkv"] = pad if any(n % w for n, w in sizes) else None
    added, index = (None, None) if bias is None else bias
    out = window_attention(
        qkv, added, bias_index=index, num_heads=attn.num_heads, window_size=window,
        scale=None if terms.get("logit_scale") is not None else scale_of(attn),
        precision=site.elsa_precision, backend=site.elsa_backend, **terms,
    )  # fmt: skip
    return project(site, attn.proj, out.flatten(1, 2) if flat else out)


def read_bias(table: Tensor, index: Tensor, dense: bool) -> Bias:
    """The bias of a table: where `dense` and small each pair's, which kernels read faster, else the
    table, which the operator reads through the index."""
    tokens = math.isqrt(index.numel())
    if not dense or index.numel() * table.shape[1] * table.element_size() > DENSE_BYTES:
        return Bias(table, index if index.dim() == 2 else index.view(tokens, tokens))
    pairs = table.t().index_select(1, index.flatten())
    return Bias(pairs.view(-1, tokens, tokens))


class CosineTerms(NamedTuple):
    """What Swin-V2's attention derives from its weights."""

    bias: Bias
    scale: Tensor  # [heads], of the scores
    qkv_bias: Tensor | None  # [3 * C]


def cosine_terms(site: nn.Module, attn: Any, biases: Sequence[Tensor | None]) -> Derivation:
    """The position network's bias, the factors of the scores, and the bias of the projection: of
    queries, keys and values, or of all in one, of which the keys' does not count."""
    index = attn.relative_position_index

    def compute(dense: bool) -> CosineTerms:
        table = attn.cpb_mlp(attn.relative_coords_table).view(-1, attn.num_heads)
        table = 16 * torch.sigmoid(table)
        bias = read_bias(table, index, dense)
        given = [one for one in biases if one is not None]
        if len(given) == 1:  # of all in one
            q, k, v = given[0].chunk(3)
            given = [q, torch.zeros_like(k), v]
        qkv_bias = torch.cat(given) if given else None
        return CosineTerms(bias, cosine_scale(attn.logit_scale), qkv_bias)

    tensors = (attn.relative_coords_table, index, attn.logit_scale, *biases)
    return Derivation(site, attn, compute, tensors, (attn.cpb_mlp,))


def cosine_scale(logit_scale: Tensor) -> Tensor:
    """[heads] factors of Swin-V2's cosine scores from their logarithms, float32 or wider."""
    wide = logit_scale.flatten().to(torch.promote_types(logit_scale.dtype, torch.float32))
    return wide.clamp(max=_MAX_LOGIT_SCALE).exp()
