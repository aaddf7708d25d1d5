"""timm's Swin, of either version, with its rows of windows sharded over the ranks of a group.

In each stage a rank holds whole rows of windows. Its blocks are the model's own, patched or not,
called with the rank's rows as an image: windows do not cross ranks, and the columns are as they
were. Before a block whose windows are shifted against those of the last one the ranks exchange the
rows that windows share (`elsa_core.distributed.rows`). Before patches are merged, rows move so that
no pair is parted and each rank has its windows of the next stage. Pooling combines one row of each
rank, and the head runs on every rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn
from torch.nn import functional

from elsa_core.distributed.groups import place
from elsa_core.distributed.plan import Plan
from elsa_core.distributed.rows import Cut, cut_at_windows, cut_for_pairs, move, rows_sent
from elsa_core.errors import ModelError
from elsa_core.patching.adapters.sharded import (
    check_drops,
    check_hooks,
    compare_calls,
    gathered,
    grid_of,
    pooled,
)

_WHY = "ranks hold rows of windows and exchange those that shifted windows share"
_Module: Any = nn.Module  # untyped, as timm's classes are that stand beside it


class _Stage(NamedTuple):
    """How the rows of a stage lie.

    Attributes:
        before: of its input, for its merging.
        plain: of its blocks that do not shift their rows.
        shifted: of those that do.
        columns: tokens in a row of its blocks.
    """

    before: Cut
    plain: Cut
    shifted: Cut
    columns: int

    def of(self, block: Any) -> Cut:
        """The cut that a block takes."""
        return self.shifted if block.shift_size[0] else self.plain


class _ShardedSwin(_Module):  # type: ignore[misc]
    """A Swin of which each rank holds rows of windows: whole images in, whole outputs out.

    `forward_features` gives this rank's rows [B, n, W, C] of the last stage alone; `forward` and
    `forward_head` of them what the model gives in one process.
    """

    elsa_companion = True
    elsa_group: str
    elsa_lengths: tuple[int, ...]

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, 3, H, W], the same on every rank -> [B, n, W', C] of this rank."""
        compare_calls(self, x, lambda: _check(self, x))
        stages = _stages(self, grid_of(self.patch_embed, x))
        rank, _ = place(self.elsa_group)
        held = stages[0].before
        x = _embedded(self.patch_embed, x, held, rank)
        for stage, cuts in zip(self.layers, stages, strict=True):
            x = _on_rows(stage.downsample, move(x, held, cuts.before, self.elsa_group))
            held = cuts.plain
            for block in stage.blocks:
                needed = cuts.of(block)
                x, held = move(x, held, needed, self.elsa_group), needed
                is_last = needed.last() == rank
                if stage.grad_checkpointing and torch.is_grad_enabled():
                    x = torch.utils.checkpoint.checkpoint(
                        _called, block, x, is_last, use_reentrant=False
                    )
                else:
                    x = _called(block, x, is_last)
        x = move(x, held, stages[-1].plain, self.elsa_group)
        self.elsa_lengths = stages[-1].plain.lengths
        return self.norm(x)  # type: ignore[no-any-return]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """[B, n, W', C] of each rank -> [B, classes], or with `pre_logits` [B, C], on every one."""
        kind = self.head.global_pool.pool_type.lower().removeprefix("fast") or "avg"
        columns, tokens = x.shape[2], x.flatten(1, 2)
        if self.head.global_pool.is_identity():
            lengths = [rows * columns for rows in self.elsa_lengths]
            whole = gathered(tokens, lengths, self.elsa_group).unflatten(1, (-1, columns))
        else:  # the head pools one token, which is that token
            row = pooled(tokens, kind, self.elsa_group)
            whole = row[:, None, None]
        return super().forward_head(whole, pre_logits)  # type: ignore[no-any-return]

    def forward_intermediates(self, *arguments: Any, **options: Any) -> Any:
        """Refused: a rank does not hold them."""
        raise ModelError(
            "forward_intermediates of a sharded model: a rank holds a part of the tokens; take "
            "forward_features, which gives them"
        )

    def elsa_plan(self, images: Tensor) -> Plan:
        """What a forward of a batch [B, C, H, W] sends, pooling left out."""
        grid = grid_of(self.patch_embed, images)
        stages, rank = _stages(self, grid), place(self.elsa_group)[0]
        held, sent = stages[0].before, 0
        for i, (stage, cuts) in enumerate(zip(self.layers, stages, strict=True)):
            # rows before merging are those of the stage before, with its columns and channels
            columns = stages[max(i - 1, 0)].columns
            sent += rows_sent(held, cuts.before, rank) * columns * stage.dim
            held = cuts.plain
            width = cuts.columns * stage.blocks[0].dim
            for block in stage.blocks:
                sent += rows_sent(held, cuts.of(block), rank) * width
                held = cuts.of(block)
            if i + 1 == len(stages):
                sent += rows_sent(held, cuts.plain, rank) * width
        size = images.shape[0] * images.element_size() * sent
        tokens = tuple(rows * grid[1] for rows in stages[0].plain.lengths)
        return Plan("rows", _WHY, tokens, tokens, size, size, {})


class ShardedSwinTransformer(_ShardedSwin, SwinTransformer):  # type: ignore[misc]  # timm is untyped
    """timm's SwinTransformer over ranks."""

    elsa_base = SwinTransformer


class ShardedSwinTransformerV2(_ShardedSwin, SwinTransformerV2):  # type: ignore[misc]
    """timm's SwinTransformerV2 over ranks."""

    elsa_base = SwinTransformerV2


def passed_over(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules that timm's forward calls and this one does not call as a whole, by path."""
    found = [("patch_embed", model.patch_embed), ("layers", model.layers)]
    for i, stage in enumerate(model.layers):
        found += [(f"layers.{i}", stage), (f"layers.{i}.blocks", stage.blocks)]
    return found


def check_head(model: Any) -> None:
    """Refuse hooks that would read, in place of all tokens, what is pooled of them."""
    if model.head.global_pool.is_identity():
        return
    for path in ("head", "head.global_pool"):
        hooks = model.get_submodule(path)._forward_pre_hooks.values()
        if any(not getattr(hook, "elsa_observer", False) for hook in hooks):
            raise ModelError(
                f"{path} cannot be sharded: its forward pre-hooks would read pooled tokens"
            )


def _check(model: Any, images: Tensor) -> None:
    """Hooks may have been registered since the model was sharded."""
    check_hooks(passed_over(model))
    check_head(model)
    check_drops(model)
    grid_of(model.patch_embed, images)


def _stages(model: Any, grid: tuple[int, int]) -> list[_Stage]:
    """The cuts of each stage for an image of rows and columns of patches."""
    _, world = place(model.elsa_group)
    (rows, columns), found = grid, []
    for i, stage in enumerate(model.layers):
        above = rows
        if i:
            rows, columns = (rows + 1) // 2, (columns + 1) // 2
        window, shift = stage.blocks[0].window_size[0], 0
        for block in stage.blocks:
            shift = max(shift, block.shift_size[0])
        shifted = cut_at_windows(rows, window, shift, world)
        plain = Cut(shifted.lengths)
        before = cut_for_pairs(plain, above) if i else plain
        found.append(_Stage(before, plain, shifted, columns))
    return found


def _embedded(embed: Any, images: Tensor, cut: Cut, rank: int) -> Tensor:
    """The patches of this rank's rows [B, n, W, C], of no more of the image than they cover.

    A rank without rows takes none of one: its parameters then have a gradient, of zeros.
    """
    height, width = embed.patch_size
    start, own = sum(cut.lengths[:rank]), cut.lengths[rank]
    top = min(start, sum(cut.lengths) - 1)
    rows = images[..., top * height : (top + max(own, 1)) * height, :]
    missing = (max(own, 1) * height - rows.shape[-2], -rows.shape[-1] % width)
    if any(missing):
        rows = functional.pad(rows, (0, missing[1], 0, missing[0]))
    x: Tensor = embed.norm(embed.proj(rows).permute(0, 2, 3, 1))
    return x[:, :own]


def _called(block: Any, x: Tensor, is_last: bool) -> Tensor:
    """A block on a rank's rows. Only the last rank's rows come from both ends of the image.

    The masks of timm's own forward are made for the rows at hand, not those of the whole image.
    """
    shift, dynamic = block.shift_size, block.dynamic_mask
    if not is_last:
        block.shift_size = (0, shift[1])
    block.dynamic_mask = True
    try:
        return _on_rows(block, x)
    finally:
        block.shift_size, block.dynamic_mask = shift, dynamic


def _on_rows(module: Any, x: Tensor) -> Tensor:
    """module(x); of a rank without rows, nothing of a row of zeros, so that its parameters and x
    stay in the graph and the dtype is that of the other ranks."""
    if x.shape[1]:
        return module(x)  # type: ignore[no-any-return]
    row = x.new_zeros((x.shape[0], 1, *x.shape[2:]))
    return module(torch.cat([x, row], 1))[:, :0]  # type: ignore[no-any-return]
