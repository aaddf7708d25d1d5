"""timm's MViTv2 blocks and their attention as functions in a row, see `flat.py`.

What the original computes of lengths alone in each call, which embedding belongs to which pair of
places, is kept here; its einsums are the batched products that PyTorch makes of them. Read against
timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from elsa_core import calls
from elsa_core.patching.adapters import flat
from elsa_core.patching.adapters.host import is_captured
from elsa_core.short_calls import small_way

Size = Any  # two lengths, a list or a torch.Size
Run = Callable[..., tuple[Tensor, Size]]

_ATTENTION: Final = (
    "timm.models.mvitv2.MultiScaleAttention",
    "elsa_core.patching.adapters.timm_mvitv2.ElsaMultiScaleAttention",
)
_CONVOLUTION: Final = "torch.nn.modules.conv.Conv2d"
_POOLS: Final = (
    "torch.nn.modules.pooling.AvgPool2d",
    "torch.nn.modules.pooling.MaxPool2d",
)
_ALIGNED: Final = 512  # bytes, as memory for a tensor of its own is
# Distances by lengths, place and default dtype. CUDA graphs may read them, so none is dropped;
# elements of all.
_DISTANCES: Final[dict[Any, Tensor]] = {}
_MOST: Final = 1 << 20


def block(module: Any, drops: flat.Drops, every: bool = False) -> Run | None:
    """What computes a timm `MultiScaleBlock`."""
    attend = attention(module.attn, drops, every)
    change = flat.of_mlp(module.mlp, drops, every)
    first, second = flat.norm(module.norm1), flat.norm(module.norm2)
    known = all(flat.idles(drop, drops) for drop in (module.drop_path1, module.drop_path2))
    wide: tuple[Any, ...] = tuple(
        flat.unchanged if layer is None else flat.linear(layer, every)
        for layer in (module.shortcut_proj_attn, module.shortcut_proj_mlp)
    )
    if not known or None in (attend, change, first, second, *wide):
        return None
    widen_attn, widen_mlp = (None if each is flat.unchanged else each for each in wide)
    owner = weakref.ref(module)  # what holds the module itself would keep it for ever
    pools = module.shortcut_pool_attn is not None

    def run(x: Tensor, feat_size: Size) -> tuple[Tensor, Size]:
        way, normed = small_way(x), first(x)  # type: ignore[misc]
        short = x if widen_attn is None else widen_attn(normed, way)
        if pools:
            short = owner()._shortcut_pool(short, feat_size)  # type: ignore[union-attr]
        x, size = attend(normed, feat_size, way, short)  # type: ignore[misc]
        normed = second(x)  # type: ignore[misc]
        return change(normed, way, x if widen_mlp is None else widen_mlp(normed, way)), size  # type: ignore[misc]

    return run


def any_block(module: Any, drops: flat.Drops) -> Run | None:
    """As `block`, whose linear layers need not be patched to be elsa's."""
    return block(module, drops, every=True)


def attention(module: Any, drops: flat.Drops, every: bool = False) -> Run | None:
    """What computes a timm `MultiScaleAttention` that pools queries, keys and values: of x, the
    size of its image, and of what `flat.linear` takes further.
    """
    if f"{type(module).__module__}.{type(module).__qualname__}" not in _ATTENTION:
        return None
    qkv, proj = flat.linear(module.qkv, every), flat.linear(module.proj, every)
    pools = tuple(map(_pool, (module.pool_q, module.pool_k, module.pool_v)))
    norms = tuple(map(_norm, (module.norm_q, module.norm_k, module.norm_v)))
    if None in (qkv, proj, *pools, *norms):
        return None
    space = vars(module)

    def run(
        x: Tensor, feat_size: Size, way: flat.Way | None = flat.UNASKED,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Size]:  # fmt: skip
        way = small_way(x) if way is flat.UNASKED else way
        batch, heads, prefix = x.shape[0], space["num_heads"], int(space["has_cls_token"])
        images, first = _images(qkv(x, way), feat_size, heads, prefix)  # type: ignore[misc]
        pooled = [pool(image) for pool, image in zip(pools, images, strict=True)]  # type: ignore[misc]
        size, k_size = [*pooled[0].shape[2:]], [*pooled[1].shape[2:]]
        tokens = [image.flatten(2).transpose(1, 2) for image in pooled]
        if prefix:
            tokens = [torch.cat(pair, dim=1) for pair in zip(first, tokens, strict=True)]
        q, k, v = (norm(t) for norm, t in zip(norms, tokens, strict=True))  # type: ignore[misc]
        scores = torch.bmm(q * space["scale"], k.transpose(1, 2))
        if space["rel_pos_type"] == "spatial":
            tables = _tables(space)
            scores = _positioned(scores, q, size, k_size, tables, prefix)
        out = torch.bmm(scores.softmax(dim=-1), v)
        if space["residual_pooling"]:
            out = out + q
        joined = out.view(batch, heads, *out.shape[1:]).transpose(1, 2)
        joined = joined.reshape(batch, -1, space["dim_out"])
        return proj(joined, way, residual), size  # type: ignore[misc]

    return run


def _images(
    packed: Tensor, size: Size, heads: int, prefix: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Queries, keys and values [B * H, D, rows, columns] of a packed projection [B, N, 3 * H * D],
    without gaps, and their class tokens [B * H, 1, D]: by one copy where each begins as it would by
    itself, and no gradient would lie otherwise.
    """
    batch, tokens, _ = packed.shape
    rows, columns = size
    split = packed.view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    first: tuple[Tensor, ...] = ()
    if prefix:
        first, split = split[:, :, :, :1].flatten(1, 2).unbind(0), split[:, :, :, 1:]
    dim = split.shape[-1]
    shape = batch * heads, dim, rows, columns
    if torch.is_grad_enabled() or split.numel() // 3 * split.element_size() % _ALIGNED:
        parts = (part.view(batch, heads, rows, columns, dim) for part in split.unbind(0))
        return tuple(p.permute(0, 1, 4, 2, 3).contiguous().view(shape) for p in parts), first
    whole = split.view(3, batch, heads, rows, columns, dim).permute(0, 1, 2, 5, 3, 4)
    return whole.contiguous().view(3, *shape).unbind(0), first


def _pool(module: Any) -> flat.Run | None:
    """What computes a pooling."""
    name = flat.name_of(module)
    if name in _POOLS:
        return module.forward  # type: ignore[no-any-return]
    if name != _CONVOLUTION or module.padding_mode != "zeros":
        return None
    space = vars(module)

    def run(x: Tensor) -> Tensor:
        terms = space["_parameters"]
        if "weight" in space or "bias" in space:  # an attribute that Python finds before them
            raise KeyError("weight")
        return functional.conv2d(
            x, terms["weight"], terms["bias"], space["stride"], space["padding"],
            space["dilation"], space["groups"],
        )  # fmt: skip

    return run


def _norm(module: Any) -> flat.Run | None:
    return flat.unchanged if module is None else flat.norm(module)


def _tables(space: flat.Space) -> tuple[Tensor, Tensor]:
    terms = space["_parameters"]
    if "rel_pos_h" in space or "rel_pos_w" in space:  # as above
        raise KeyError("rel_pos_h")
    return terms["rel_pos_h"], terms["rel_pos_w"]


def _positioned(
    scores: Tensor,
    q: Tensor,
    q_size: Size,
    k_size: Size,
    tables: tuple[Tensor, Tensor],
    prefix: int,
) -> Tensor:
    """scores [B * H, Nq, Nk] of the unscaled queries q, with decomposed relative positions."""
    (rows, columns), (k_rows, k_columns), flat_heads = q_size, k_size, q.shape[0]
    grid = (q[:, prefix:] if prefix else q).reshape(flat_heads, rows, columns, -1)
    row_table = _embedded(tables[0], rows, k_rows).transpose(1, 2)
    column_table = _embedded(tables[1], columns, k_columns).transpose(1, 2)
    # as torch.einsum has them: what both have first, what is summed last
    by_row = torch.bmm(grid.transpose(0, 1).reshape(rows, flat_heads * columns, -1), row_table)
    by_row = by_row.view(rows, flat_heads, columns, k_rows).transpose(0, 1)
    by_column = torch.bmm(
        grid.permute(2, 0, 1, 3).reshape(columns, flat_heads * rows, -1), column_table
    )
    by_column = by_column.view(columns, flat_heads, rows, k_columns).permute(1, 2, 0, 3)
    inner = scores[:, prefix:, prefix:] if prefix else scores
    inner = inner.view(flat_heads, rows, columns, k_rows, k_columns)
    by_row, by_column = by_row.unsqueeze(-1), by_column.unsqueeze(-2)
    if torch.is_grad_enabled() or by_row.dtype != scores.dtype:  # rounds once
        inner.copy_(inner + by_row + by_column)
    else:
        inner.add_(by_row).add_(by_column)
    return scores


def _embedded(table: Tensor, queries: int, keys: int) -> Tensor:
    """[queries, keys, D] from relative embeddings [L, D]."""
    index = _distances(queries, keys, table.device)
    if calls.differentiates(table):
        return table[index.view(queries, keys)]
    # takes the host half the time
    return table.index_select(0, index).view(queries, keys, -1)


def _distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """The embedding of each pair of places of one axis, [queries * keys]. What is kept was complete
    when it was, for whatever stream.
    """
    key = queries, keys, device, torch.get_default_dtype()
    found = _DISTANCES.get(key)
    if found is not None:
        return found
    if device.type == "cuda" and is_captured():
        return _made(queries, keys, device)
    with torch.inference_mode(False), torch.no_grad():
        made = _made(queries, keys, torch.device("cpu")).to(device)  # waits for the copy
    if sum(each.numel() for each in list(_DISTANCES.values())) + made.numel() <= _MOST:
        _DISTANCES.setdefault(key, made)
    return made


def _made(queries: int, keys: int, device: torch.device) -> Tensor:
    """As the original computes it, in floating point of the default dtype."""
    q_step, k_step = max(keys / queries, 1.0), max(queries / keys, 1.0)
    i = torch.arange(queries, device=device).unsqueeze(-1) * q_step
    j = torch.arange(keys, device=device).unsqueeze(0) * k_step
    return (i - j + (keys - 1) * k_step).long().view(-1)
