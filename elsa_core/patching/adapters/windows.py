"""What adapters of windowed blocks share: when a block computes its attention itself, and the call.

A block's adapter computes from image to image: roll, padding, windows and mask are index arithmetic
inside `elsa_core.ops.window.api.window_attention`. The attention module within the block keeps
its class, its parameters and its place in the state dict; its forward is not called.
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
    other_part,
    wants_training,
)
from elsa_core.patching.adapters.hooks import has_hooks

# A dense bias of up to these bytes a block is kept: every window of 7x7 or 8x8, not those of 24x24,
# whose biases of all blocks would take as much memory as the model.
DENSE_BYTES = 1 << 20
_MAX_LOGIT_SCALE = math.log(1.0 / 0.01)  # of Swin-V2 (arXiv 2111.09883), Sec. 3.3


def has_hooked_parts(module: nn.Module) -> bool:
    """Whether a part of an attention must be called: it has hooks, which in the original see padded
    windows, or another module has taken its place.
    """
    return any(
        part is not None and (has_hooks(part) or is_other(name, part))
        for name, part in module._modules.items()
    )


def is_hooked(attention: nn.Module, expected: type[nn.Module]) -> bool:
    """Whether the attention module within a block must run: it or a part of it has hooks, or its
    class is not the library's own."""
    return type(attention) is not expected or has_hooks(attention) or has_hooked_parts(attention)


def must_call(attention: nn.Module, expected: type[nn.Module]) -> bool:
    """Whether the attention module within a block must run: as `is_hooked`, or it drops weights."""
    return is_hooked(attention, expected) or drop_p(attention) > 0.0


def why_not(attention: nn.Module, expected: type[nn.Module]) -> str:
    """Why a block around another attention than its library's stays as it is."""
    if type(attention) is expected:
        return other_part(attention)
    return f"its attention is a {type(attention).__qualname__}, not a {expected.__qualname__}"


def of_padding(projection: nn.Module, x: Tensor, window: Sequence[int]) -> Tensor | None:
    """What a projection makes of a padded one of tokens x [B, H, W, C], a zero: [3 * C].

    None for zeros, and where none is asked for.
    """
    if is_plain_linear(projection):
        bias: Tensor | None = projection.bias  # type: ignore[assignment]
        return bias
    if not any(n % w for n, w in zip(x.shape[1:3], window, strict=True)):
        return None
    # Not the library's own layer: a quantised one, or one with a low-rank addition.
    padding: Tensor = projection(x.new_zeros(1, x.shape[-1])).squeeze(0)
    return padding


def keeps_original(
    site: Any, x: Tensor, projection: Any, num_heads: int, window: Sequence[int]
) -> bool:
    """Whether a call keeps the original forward.

    That is so on a GPU that no backend has kernels for, and where gradients are wanted and the
    shipped table says that the operator's forward and gradients together are slower than the
    original's; never where a backend was asked for by name.

    Args:
        site: the patched module. x: its input. projection: its first one, to 3 * C channels.
        num_heads, window: of the attention.
    """
    if not isinstance(x, Tensor):  # torch.fx traces the original, and finds its names
        return True
    if site.elsa_backend != "auto":
        return False
    kind, learns = x.device.type, wants_training(site, x, projection)
    if not learns and kind != "cuda":
        return False
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    head_dim = getattr(projection, "out_features", 3 * x.shape[-1]) // (3 * num_heads)
    if kind == "cuda" and dtype.itemsize <= 4 and not calls.exporting():
        dims = (head_dim, head_dim)
        name = dispatch.choose(
            "window_attention", calls.place(x), dtype, *dims, site.elsa_precision, "auto"
        )
        if name == dispatch.PLAIN:
            return True
    if not learns:
        return False
    return bool(dispatch.choose(
        "window_attention", kind, dtype, head_dim, head_dim, site.elsa_precision, mode="site",
        gradient=("qkv",), tokens=math.prod(window),
    ))  # fmt: skip


def attend_windows(site: Any, qkv: Tensor, bias: Tensor | None, **terms: Any) -> Tensor:
    """The operator with the site's precision and backend: [B, H, W, 3 * C] -> [B, H, W, C].

    What a padded token would be is left out of eager calls without one if its dtype is another, as
    under autocast: a kernel would wait for the copy.
    """
    pad = terms.get("pad_qkv")
    if pad is not None and pad.dtype != qkv.dtype and not calls.traced():
        sizes = zip(qkv.shape[1:3], terms["window_size"], strict=True)
        if not any(n % w for n, w in sizes):
            terms["pad_qkv"] = None
    return window_attention(
        qkv, bias, precision=site.elsa_precision, backend=site.elsa_backend, **terms
    )


class Bias(NamedTuple):
    """A relative position bias as the operator takes it."""

    bias: Tensor | None  # [heads, T, T], or a table [L, heads]; None for none
    bias_index: Tensor | None  # None, or [T, T] into the table


def read_bias(table: Tensor, index: Tensor, num_heads: int, tokens: int) -> Bias:
    """The bias of a table [L, heads] and an index [T, T] or [T * T]: dense unless it is large.

    Kernels read a dense bias faster than a table.
    """
    if not is_small(table, num_heads, tokens):
        return as_table(table, index, tokens)
    pairs = table.t().index_select(1, index.flatten())
    return Bias(pairs.view(num_heads, tokens, tokens), None)


def as_table(table: Tensor, index: Tensor, tokens: int) -> Bias:
    """The same bias, which the operator itself reads through the index: nothing is derived."""
    return Bias(table, index if index.dim() == 2 else index.view(tokens, tokens))


def is_small(table: Tensor, num_heads: int, tokens: int) -> bool:
    """Whether the dense bias of a table takes no more than DENSE_BYTES."""
    return num_heads * tokens * tokens * table.element_size() <= DENSE_BYTES


def cosine_scale(logit_scale: Tensor) -> Tensor:
    """[heads] factors of Swin-V2's cosine scores from their logarithms, float32 or wider."""
    wide = logit_scale.flatten().to(torch.promote_types(logit_scale.dtype, torch.float32))
    return wide.clamp(max=_MAX_LOGIT_SCALE).exp()


def cosine_table(attn: Any) -> Tensor:
    """The biases [L, num_heads] of Swin v2's position network."""
    table = attn.cpb_mlp(attn.relative_coords_table).view(-1, attn.num_heads)
    return 16 * torch.sigmoid(table)
