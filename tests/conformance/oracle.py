"""The operators by their definitions, in plain PyTorch that shares no code with the product.

In float64 they are the oracle; in a call's own dtype, with scores and sums in float32, the peer of
operators that PyTorch does not have. Each gives its results by name.
"""

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Results = dict[str, Tensor]
ACTIVATIONS = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
}


def wide(t: Tensor) -> Tensor:
    """float32 for half precision, else as it is."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Scores [..., Hq, Nq, Nk], 0 where hidden, and which of them are seen."""
    k = k.repeat_interleave(q.shape[-3] // max(1, k.shape[-3]), dim=-3)
    if scale is None:
        scale = 1.0 if q.shape[-1] == 0 else q.shape[-1] ** -0.5
    s = (wide(q) @ wide(k).mT) * scale
    seen = torch.ones(s.shape, dtype=torch.bool, device=s.device)
    if causal:
        seen = seen.tril()
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        s = s + mask.to(s.dtype)
        seen = seen & (mask != -math.inf)
    return torch.where(seen, s, 0.0), seen


def softmax(s: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, zeros in rows that see nothing, and the logarithm of the normaliser."""
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], -math.inf)
    # a stand-in keeps the derivatives of rows without keys free of NaN
    some = seen.any(-1, keepdim=True)
    filled = torch.where(some, s.masked_fill(~seen, -math.inf), 0.0)
    lse = torch.where(some[..., 0], filled.logsumexp(-1), -math.inf)
    return torch.where(some, filled.softmax(-1), 0.0), lse


def weighted(w: Tensor, v: Tensor) -> Tensor:
    """Weights [..., Hq, Nq, Nk] times values; what weighs nothing may hold anything."""
    v = v.repeat_interleave(w.shape[-3] // max(1, v.shape[-3]), dim=-3)
    return w.to(v.dtype) @ v


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *,
    is_causal: bool = False, scale: float | None = None, keep: Tensor | None = None,
    dropout_p: float = 0.0, **_: Any,
) -> Results:  # fmt: skip
    """softmax(q k^T scale + mask) v. keep: of dropout, which weights stay."""
    s, seen = scores(query, key, attn_mask, is_causal, scale)
    w, lse = softmax(s, seen)
    if keep is not None:
        w = torch.where(keep, w / (1 - dropout_p), 0.0)
    return {"out": weighted(w, value), "lse": lse}


def entmax_weights(s: Tensor, seen: Tensor, alpha: Tensor) -> Tensor:
    """[(alpha - 1) s - tau]_+^(1 / (alpha - 1)), tau by bisection, then one step that autograd
    records: Newton's, whose derivative is the implicit one."""
    power = 1 / (alpha - 1)
    x = torch.where(seen, s * (alpha - 1), -math.inf)
    some = seen.any(-1, keepdim=True)
    x = torch.where(some, x, 0.0)
    with torch.no_grad():
        top = x.amax(-1, keepdim=True)
        low, high = top - 1, top.clone()
        for _ in range(56):
            tau = (low + high) / 2
            total = ((x - tau).clamp_min(0) ** power).sum(-1, keepdim=True)
            low, high = torch.where(total >= 1, tau, low), torch.where(total >= 1, high, tau)
        tau = (low + high) / 2
        above = x > tau
    inside = torch.where(above, x - tau, 1.0)
    p = torch.where(above, inside**power, 0.0)
    slope = torch.where(above, inside ** (power - 1), 0.0).detach() * power.detach()
    tau = tau + (p.sum(-1, keepdim=True) - 1) / slope.sum(-1, keepdim=True)
    inside = torch.where(above, (x - tau).clamp_min(0), 1.0)
    return torch.where(some & above, inside**power, 0.0)


def entmax_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *,
    alpha: float | Tensor = 1.5, is_causal: bool = False, scale: float | None = None, **_: Any,
) -> Results:  # fmt: skip
    s, seen = scores(query, key, attn_mask, is_causal, scale)
    power = torch.as_tensor(alpha, dtype=s.dtype, device=s.device)
    if s.shape[-1] == 0:
        return {"out": weighted(s, value)}
    if power.numel() == 1 and power == 1:
        return {"out": weighted(softmax(s, seen)[0], value)}
    return {"out": weighted(entmax_weights(s, seen, power), value)}


def by_sequence(one: Any, *packed: Any, **terms: Any) -> Results:
    """Packed operands [T, H, D], cut at cu_seqlens, each sequence a call of its own."""
    query, key, value, ends_q, ends_k = packed
    ends_k = ends_q if ends_k is None else ends_k
    alpha = terms.pop("alpha", None)
    parts = []
    for i, ((a, b), (c, d)) in enumerate(
        zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True)
    ):
        own = {} if alpha is None else {"alpha": alpha}
        if isinstance(alpha, Tensor) and alpha.dim() == 4 and alpha.shape[0] > 1:
            own = {"alpha": alpha[i]}
        elif isinstance(alpha, Tensor) and alpha.dim() == 4:
            own = {"alpha": alpha[0]}
        cut = (query[a:b], key[c:d], value[c:d])
        parts.append(one(*(t.transpose(0, 1) for t in cut), **own, **terms))
    # the lse of a sequence is [H, n]
    found = {"out": torch.cat([query.new_empty(0, query.shape[1], value.shape[2]),
                               *(p["out"].transpose(0, 1) for p in parts)])}  # fmt: skip
    if "lse" in (parts[0] if parts else {}):
        found["lse"] = torch.cat([p["lse"] for p in parts], 1)
    return found


def varlen_attention(*packed: Any, **terms: Any) -> Results:
    return by_sequence(attention, *packed, **terms)


def entmax_varlen_attention(*packed: Any, **terms: Any) -> Results:
    return by_sequence(entmax_attention, *packed, **terms)


def _cut(x: Tensor, window: Sequence[int], grid: bool) -> Tensor:
    """[B, D, H, W, ...] -> [B, nd, nh, nw, T, ...]."""
    for axis in (3, 2, 1):
        size, w = x.shape[axis], window[axis - 1]
        x = x.unflatten(axis, (w, size // w) if grid else (size // w, w))
    order = (0, 2, 4, 6, 1, 3, 5) if grid else (0, 1, 3, 5, 2, 4, 6)
    return x.permute(*order, *range(7, x.dim())).flatten(4, 6)


def _joined(x: Tensor, window: Sequence[int], grid: bool) -> Tensor:
    """The way back from `_cut`, of [B, nd, nh, nw, T, C]."""
    x = x.unflatten(4, tuple(window))
    order = (0, 4, 1, 5, 2, 6, 3, 7) if grid else (0, 1, 4, 2, 5, 3, 6, 7)
    return x.permute(*order).flatten(5, 6).flatten(3, 4).flatten(1, 2)


def window_attention(
    qkv: Tensor, bias: Tensor | None = None, *, num_heads: int, window_size: Sequence[int],
    shift_size: Sequence[int], scale: float | None = None, bias_index: Tensor | None = None,
    pad_qkv: Tensor | None = None, logit_scale: Tensor | None = None, mask_value: float = -100.0,
    layout: str = "qkv", grid: bool = False, **_: Any,
) -> Results:  # fmt: skip
    """Roll, pad, cut, attend, join, crop and roll back, as Swin and MaxViT write it."""
    plane = qkv.dim() == 4
    image = qkv.unsqueeze(1) if plane else qkv
    window, shift = tuple(window_size), tuple(shift_size)
    shift = shift if any(shift) else (0,) * len(window)
    if plane:
        window, shift = (1, *window), (0, *shift)
    sizes = image.shape[1:4]
    padded = [-(-n // w) * w for n, w in zip(sizes, window, strict=True)]
    rolled = image.roll([-s for s in shift], (1, 2, 3))
    inside = torch.ones(sizes, dtype=torch.bool, device=qkv.device)
    room = [x for n, p in zip(reversed(sizes), reversed(padded), strict=True) for x in (0, p - n)]
    rolled = F.pad(rolled, [0, 0, *room])
    if pad_qkv is not None:
        outside = ~F.pad(inside, room)
        rolled = rolled + outside[..., None] * pad_qkv.to(qkv.dtype)
    parts = (3, num_heads, -1) if layout == "qkv" else (num_heads, 3, -1)
    cut = _cut(rolled, window, grid).unflatten(-1, parts)
    q, k, v = (t.transpose(4, 5) for t in cut.unbind(5 if layout == "qkv" else 6))
    if logit_scale is not None:
        q, k = (F.normalize(wide(t), dim=-1, eps=1e-12) for t in (q, k))
        s = (q @ k.mT) * wide(logit_scale).view(-1, 1, 1)
    else:
        s = (wide(q) @ wide(k).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        dense = bias if bias_index is None else bias[bias_index].permute(2, 0, 1)
        s = s + dense.to(s.dtype)
    if any(shift):
        number = torch.zeros(1, *padded, dtype=torch.int64, device=qkv.device)
        slices = [
            (slice(0, p - w), slice(p - w, p - m), slice(p - m, p)) if m else (slice(0, p),)
            for p, w, m in zip(padded, window, shift, strict=True)
        ]
        for i, (z, y, x) in enumerate(product(*slices)):
            number[:, z, y, x] = i
        region = _cut(number, window, grid)
        differ = (region.unsqueeze(-1) != region.unsqueeze(-2)).unsqueeze(4)
        s = s + torch.zeros(differ.shape, dtype=s.dtype, device=s.device).masked_fill(
            differ, mask_value
        )
    w, _ = softmax(s, s != -math.inf)
    out = (w.to(v.dtype) @ v).transpose(4, 5).flatten(5)
    out = _joined(out, window, grid)[:, : sizes[0], : sizes[1], : sizes[2]].roll(shift, (1, 2, 3))
    return {"out": out.squeeze(1) if plane else out}


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, value: Any = None,
    **_: Any,
) -> Results:  # fmt: skip
    out = ACTIVATIONS[activation](F.linear(input, weight, bias))
    if value is not None:
        out = out * F.linear(input, *value)
    if scale is not None:
        out = out * scale
    return {"out": out if residual is None else residual + out}
