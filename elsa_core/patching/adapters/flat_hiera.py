"""timm's Hiera blocks as functions in a row, see `flat.py`.

The windows of one image are elsa's too: PyTorch computes five dimensions by some ten operators.
Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from timm.models.hiera import MaskUnitAttention
from torch import Tensor, nn
from torch.nn import functional

from elsa_core import calls, routing
from elsa_core.attention import attention as elsa_attention
from elsa_core.patching.adapters import flat, redirect
from elsa_core.patching.adapters.common import attend_small
from elsa_core.patching.adapters.host import is_captured, warm_up
from elsa_core.short_calls import small_way

_Operands = tuple[Tensor, Tensor, Tensor]
# Later versions of timm attend globally in four dimensions, of operands without gaps.
_SEPARATE: Final = "contiguous" in MaskUnitAttention.forward.__code__.co_names
_ALIGNED: Final = 16  # bytes: kernels of attention read operands that begin elsewhere by others


def block(module: Any, drops: flat.Drops, every: bool = False) -> flat.Run | None:
    """What computes a timm `HieraBlock`."""
    attend, change = attention(module.attn, every), flat.of_mlp(module.mlp, drops, every)
    shorten = _shortening(module, every)
    norms = flat.norm(module.norm1), flat.norm(module.norm2)
    gammas = flat.gamma_of(module.ls1), flat.gamma_of(module.ls2)
    known = all(flat.idles(drop, drops) for drop in (module.drop_path1, module.drop_path2))
    if not known or None in (attend, change, shorten, *norms, *gammas):
        return None
    (first, second), (gamma1, gamma2) = norms, gammas

    def run(x: Tensor) -> Tensor:
        way, normed = small_way(x), first(x)  # type: ignore[misc]
        x = attend(normed, way, shorten(x, normed, way), gamma1())  # type: ignore[misc]
        return change(second(x), way, x, gamma2())  # type: ignore[misc]

    return run


def any_block(module: Any, drops: flat.Drops) -> flat.Run | None:
    """As `block`, whose linear layers need not be patched to be elsa's."""
    return block(module, drops, every=True)


def _shortening(module: Any, every: bool) -> Callable[[Tensor, Tensor, Any], Tensor] | None:
    """What makes the residual of x and norm1(x): fewer and wider tokens in some blocks."""
    space, attn, proj = vars(module), vars(module.attn), module.proj
    widen = None if proj is None else flat.linear(proj, every)
    if proj is not None and widen is None:
        return None

    def run(x: Tensor, normed: Tensor, way: flat.Way | None) -> Tensor:
        if not space["do_expand"]:
            return x
        wide = x if widen is None else widen(normed, way)
        pooled = wide.view(wide.shape[0], attn["q_stride"], -1, wide.shape[-1])
        most = pooled.amax(dim=1)
        return most if widen is not None else torch.cat((most, pooled.mean(dim=1)), dim=-1)

    return run


def attention(module: Any, every: bool = False) -> flat.Run | None:
    """What computes a timm `MaskUnitAttention`: of x, and of what `flat.linear` takes further."""
    space = vars(module)
    if not _is_known(module):
        return None
    qkv, proj = flat.linear(module.qkv, every), flat.linear(module.proj, every)
    if qkv is None or proj is None:
        return None
    owner = weakref.ref(module)  # what holds the module itself would keep it for ever

    def run(
        x: Tensor, way: flat.Way | None, residual: Tensor | None, gamma: Tensor | None
    ) -> Tensor:
        if not space["fused_attn"]:
            return flat.followed(MaskUnitAttention.forward(owner(), x), residual, gamma)
        batch, windowed = x.shape[0], space["use_mask_unit_attn"]
        if windowed or not _SEPARATE:
            out = _attend_windows(_in_windows(qkv(x, way), space, windowed)).transpose(1, 3)
        else:
            q, k, v = _in_one(qkv(x, way), space)
            small = attend_small(q, k, v)
            out = functional.scaled_dot_product_attention(q, k, v) if small is None else small
            out = out.transpose(1, 2)
        return proj(out.reshape(batch, -1, space["dim_out"]), way, residual, gamma)

    return run


def _is_known(module: nn.Module) -> bool:
    """Whether a module is such an attention, patched or not."""
    cls: Any = type(module)
    patched = cls.__module__ == redirect.__name__
    return (cls.__dict__.get("elsa_base") if patched else cls) is MaskUnitAttention


def _in_windows(packed: Tensor, space: flat.Space, windowed: bool) -> _Operands:
    """Operands [B, H, windows, N, D] of a packed projection [B, N, 3 * H * D]."""
    stride, heads, dim = space["q_stride"], space["heads"], space["head_dim"]
    batch, tokens, _ = packed.shape
    windows = tokens // (stride * space["window_size"]) if windowed else 1
    parts = packed.reshape(batch, -1, windows, 3, heads, dim)
    q, k, v = parts.permute(3, 0, 4, 2, 1, 5).unbind(0)
    if stride > 1:
        q = q.view(batch, heads, windows, stride, -1, dim).amax(dim=3)
    return q, k, v


def _in_one(packed: Tensor, space: flat.Space) -> _Operands:
    """Operands [B, H, N, D] of a packed projection, without gaps: by one copy of two or three,
    where each begins as it would by itself, and no gradient would lie otherwise.
    """
    stride, heads, dim = space["q_stride"], space["heads"], space["head_dim"]
    batch, tokens, _ = packed.shape
    parts = packed.reshape(batch, tokens, 3, heads, dim).permute(2, 0, 3, 1, 4)
    if torch.is_grad_enabled() or packed.numel() // 3 * packed.element_size() % _ALIGNED:
        q, k, v = parts.unbind(0)
        if stride > 1:
            q = q.view(batch, heads, stride, -1, dim).amax(dim=2)
        return q.contiguous(), k.contiguous(), v.contiguous()
    if stride == 1:
        q, k, v = parts.contiguous().unbind(0)
        return q, k, v
    q = parts[0].view(batch, heads, stride, -1, dim).amax(dim=2)
    k, v = parts[1:].contiguous().unbind(0)
    return q.contiguous(), k, v


def _attend_windows(operands: _Operands) -> Tensor:
    """Attention [B, H, windows, N, D]; of one image as [H, windows, N, D]."""
    query = operands[0]
    if query.shape[0] == 1 and routing.eager_short(query.device, query.dtype):
        q, k, v = (t.squeeze(0) for t in operands)
        small = attend_small(q, k, v)
        if small is not None:
            return small.unsqueeze(0)
        _load(q, k, v)
    return functional.scaled_dot_product_attention(*operands)


def _load(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Have the kernel of such calls loaded, so that the next one goes the short way."""
    if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled() or calls.traced():
        return
    kind = ("hiera", q.shape, k.shape, q.stride(), k.stride(), q.dtype, q.device)
    if q.is_cuda and not is_captured() and calls.first_of_kind(kind):
        warm_up(lambda: elsa_attention(q, k, v))
