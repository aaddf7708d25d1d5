"""The operands of `attention`: checked, and brought to the layout of the operator."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from elsa_core.base import calls
from elsa_core.errors import ArgumentError


def operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    *,
    one_device: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Check the arguments of `elsa_core.attention` and bring them to the operator's layout, by
    views where any exist: query [B, Hq, Nq, D], key [B, Hkv, Nk, D], value [B, Hkv, Nk, Dv], and
    the mask of `checked_mask` or None. ArgumentError names what does not fit; `one_device`: whether
    they must share a device."""
    require_dense(query=query, key=key, value=value, attn_mask=attn_mask)
    all_three = "query, key and value must"
    if not query.dtype.is_floating_point:
        raise ArgumentError(f"query must be floating, not {query.dtype}")
    if query.dtype != key.dtype or query.dtype != value.dtype:
        found = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ArgumentError(f"{all_three} share one dtype, not {found}")
    if one_device and (query.device != key.device or query.device != value.device):
        found = f"{query.device}, {key.device} and {value.device}"
        raise ArgumentError(f"{all_three} be on one device, not {found}")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        found = f"{query.dim()}, {key.dim()} and {value.dim()}"
        raise ArgumentError(f"{all_three} be of rank 2 or more, not {found}")
    if query.shape[-1] != key.shape[-1]:
        raise ArgumentError(
            f"key has head_dim {key.shape[-1]}, query {query.shape[-1]}: they must be equal"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ArgumentError(
            f"value has {value.shape[-2]} tokens, key {key.shape[-2]}: they must be equal"
        )
    if (
        not query.dim() == key.dim() == value.dim() == 4
        or key.shape[:2] != query.shape[:2]
        or value.shape[:2] != query.shape[:2]
    ):
        query, key, value, attn_mask = _to_four_dims(query, key, value, attn_mask, enable_gqa)
    if attn_mask is not None:
        attn_mask = checked_mask(attn_mask, query, key, is_causal, one_device=one_device)
    return query, key, value, attn_mask


def checked_mask(
    attn_mask: Tensor, query: Tensor, key: Tensor, is_causal: bool, *, one_device: bool = True
) -> Tensor:
    """The mask, of any rank up to 4, as [B or 1, H or 1, Nq or 1, Nk or 1] for query [B, H, Nq, D]
    and key [B, Hkv, Nk, D]."""
    require_mask(attn_mask, query, is_causal, one_device=one_device)
    shape, full = attn_mask.shape, (*query.shape[:3], key.shape[2])
    if len(shape) < 4:
        attn_mask = attn_mask.reshape((1,) * (4 - len(shape)) + tuple(shape))
        shape = attn_mask.shape
    pairs = zip(shape, full, strict=False)
    if len(shape) > 4 or any(size not in (1, wanted) for size, wanted in pairs):
        raise ArgumentError(f"attn_mask of shape {list(shape)} does not broadcast to {list(full)}")
    return attn_mask


def require_mask(
    attn_mask: Tensor, query: Tensor, is_causal: bool, *, one_device: bool = True
) -> None:
    """Refuse a mask of another kind or device than the query takes, or beside `is_causal`."""
    if is_causal:
        raise ArgumentError(
            "attn_mask and is_causal exclude each other: put the triangle in the mask"
        )
    dtype = attn_mask.dtype
    if dtype != query.dtype and dtype not in (torch.bool, torch.float32):
        raise ArgumentError(
            f"attn_mask must be bool, float32 or the query's {query.dtype}, not {dtype}"
        )
    if one_device and attn_mask.device != query.device:
        raise ArgumentError(f"attn_mask is on {attn_mask.device}, query on {query.device}")


def require_dense(**tensors: Tensor | None) -> None:
    """Refuse nested, sparse and opaque tensors by their names; None is let through."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require_tensor(name, tensor)
        if tensor.is_nested:
            raise ArgumentError(
                f"{name} is a nested tensor: query, key and value are all jagged [B, H, j, D] or "
                "none is; pad it (torch.nested.to_padded_tensor) and hide the padding with "
                "attn_mask"
            )
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise ArgumentError(f"{name} has layout {layout}: convert it with {name}.to_dense()")


def require_tensor(name: str, given: object) -> None:
    """Refuse what is no tensor, by its name."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(given).__name__}")


def require_number(name: str, given: object) -> None:
    """Refuse what is no number, by its name."""
    # a compiler knows the first test, and not the protocol
    if not isinstance(given, (int, float)) and not isinstance(given, SupportsFloat):
        raise TypeError(f"{name} must be a number, not {type(given).__name__}")


def require_inside(bias_index: Tensor, rows: int) -> bool:
    """Refuse a bias_index that leaves its table of `rows` rows; whether it was looked at, and is
    inside. Only where a look costs no wait: on the CPU, outside tracing. Elsewhere whoever reads
    the table gives NaN for the scores of an entry outside."""
    if bias_index.device.type != "cpu" or calls.traced():  # traced values may not exist
        return False
    if bias_index.numel():
        low, high = (int(end) for end in bias_index.aminmax())
        if low < 0 or high >= rows:
            raise ArgumentError(
                f"bias_index has entries from {low} to {high}, which must lie in [0, {rows})"
            )
    return True


def leading_dims(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The output's dims before [Nq, Dv]: the broadcast batch dims and the heads."""
    if max(query.dim(), key.dim(), value.dim()) == 2:
        return ()
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads, *others = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
    return (*batch, max(others) if heads == 1 else heads)


def autocast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast where autocast is on, as PyTorch does for its own attention operator: float64 stays."""
    place = query.device.type
    if place == "meta" or not torch.is_autocast_enabled(place):
        return query, key, value, attn_mask
    dtype = torch.get_autocast_dtype(place)
    query, key, value = (
        t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value)
    )
    if attn_mask is not None and attn_mask.is_floating_point() and query.dtype == dtype:
        attn_mask = attn_mask.to(dtype)
    return query, key, value, attn_mask


def _to_four_dims(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    rank = max(query.dim(), key.dim(), value.dim())
    query, key, value = (t[(None,) * (rank - t.dim())] for t in (query, key, value))
    if rank < 4:
        query, key, value = (
            t.reshape((1,) * (4 - rank) + tuple(t.shape)) for t in (query, key, value)
        )
        plain = all(t.shape[1] in (1, query.shape[1]) for t in (key, value))
        if rank == 3 and (plain or not enable_gqa):
            # [B, N, D]: the leading dim is the batch's, and stays in front of one head
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
            if attn_mask is not None and attn_mask.dim() == 3:
                attn_mask = attn_mask.unsqueeze(1)
    query, key, value = _broadcast_batch(query, key, value, enable_gqa)
    if (
        rank == 5
        and attn_mask is None
        and not all(
            1 in t.shape[:2] or t.stride(0) == t.stride(1) * t.shape[1] for t in (query, key, value)
        )
    ):
        # [B, H, windows, N, D]: merging heads and windows is a view where batch and heads is none.
        query, key, value = (t.flatten(1, 2) for t in (query, key, value))
    elif rank > 4:
        if attn_mask is not None and 3 < attn_mask.dim() <= rank:
            batch = query.shape[:-3]
            if attn_mask.shape[:-3].numel() > 1:
                pairs = zip(reversed(attn_mask.shape[:-3]), reversed(batch), strict=False)
                if any(size not in (1, wanted) for size, wanted in pairs):
                    full = [*query.shape[:-1], key.shape[-2]]
                    raise ArgumentError(
                        f"attn_mask of shape {list(attn_mask.shape)} does not broadcast to {full}"
                    )
                attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:])
            attn_mask = attn_mask.flatten(0, -4)
        query, key, value = (t.flatten(0, -4) for t in (query, key, value))
    return query, key, value, attn_mask


def _broadcast_batch(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch: Any = query.shape[:-3]
    try:
        if not batch == key.shape[:-3] == value.shape[:-3]:
            batch = torch.broadcast_shapes(batch, key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        raise ArgumentError(
            "the batch dims of query, key and value do not broadcast: "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        ) from None
    heads, of_key, of_value = query.shape[-3], key.shape[-3], value.shape[-3]
    unequal = enable_gqa and of_key != of_value and 1 not in (of_key, of_value)
    if unequal and not heads % of_key and not heads % of_value:
        common = math.lcm(of_key, of_value)
        key = key.repeat_interleave(common // of_key, dim=-3)
        value = value.repeat_interleave(common // of_value, dim=-3)
    kv_heads = max(key.shape[-3], value.shape[-3])
    if heads == 1 and kv_heads > 1:
        heads = kv_heads
    grouped = enable_gqa and kv_heads > 0 and heads % kv_heads == 0
    if kv_heads not in (heads, 1) and not grouped:
        raise ArgumentError(
            f"key has {kv_heads} heads, query {heads}: they must be equal, or query's a multiple "
            "of key's with enable_gqa=True"
        )
    if any(t.shape[-3] not in (1, kv_heads) for t in (key, value)):
        raise ArgumentError(f"key has {key.shape[-3]} heads, value {value.shape[-3]}")
    query = query.expand(*batch, heads, *query.shape[-2:])
    key, value = (t.expand(*batch, kv_heads, *t.shape[-2:]) for t in (key, value))
    return query, key, value
