"""What the shapes of a state dict say about the constructor's arguments of its architecture.

Relative position tables give windows, grids and head counts, the patch embedding the patch, the
numbers in the names the depths. What no tensor shows (the heads of a plain ViT, the window of a
SwinV2 that stores no index) is not guessed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from elsa_core.loading.recipe import MAX_BLOCKS

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

# Numbers below 1000, which is as many blocks as are built.
_STAGE = re.compile(r"(layers|stages)\.(\d{1,3})\.blocks\.(\d{1,3})\.")
_BLOCK = re.compile(r"blocks\.(\d{1,3})\.")
_TABLE = "relative_position_bias_table"
_CLASS_OFFSETS = 3  # BEiT's table: token to class, class to token, class to class


@dataclass(frozen=True)
class Shown:
    """Arguments of a constructor, and the image (height, width) in pixels where it shows."""

    args: dict[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = None


def shown(shapes: Shapes) -> list[Shown]:
    """Return what the shapes show, the likeliest first; empty for no known kind of names."""
    depths: dict[tuple[str, int], int] = {}
    for name in shapes:
        if match := _STAGE.match(name):
            stage = match.group(1), int(match.group(2))
            depths[stage] = max(depths.get(stage, 0), int(match.group(3)) + 1)
    if sum(depths.values()) > MAX_BLOCKS:
        return []
    if depths:
        return _swin(shapes, {f"{kind}.{number}": depths[kind, number]
                              for kind, number in sorted(depths)})  # fmt: skip
    return _vit(shapes) if depth_of(shapes) else []


def depth_of(shapes: Shapes) -> int:
    """Return the number of transformer blocks of a model without stages; 0 for none."""
    found = (int(match.group(1)) + 1 for name in shapes if (match := _BLOCK.match(name)))
    return max(found, default=0)


def table_grid(rows: int) -> int | None:
    """Return g of a table with a row for each offset in a g x g grid, BEiT's class rows or not."""
    for offsets in (rows, rows - _CLASS_OFFSETS):
        side = math.isqrt(max(offsets, 0))
        if side % 2 and side * side == offsets:
            return (side + 1) // 2
    return None


def _swin(shapes: Shapes, stages: Mapping[str, int]) -> list[Shown]:
    """Of stages by their prefix ("layers.0"), each with its blocks."""
    args: dict[str, Any] = {"depths": list(stages.values())}
    first = [f"{stage}.blocks.0.attn" for stage in stages]
    heads = [
        (*shapes.get(f"{attn}.{_TABLE}", ())[1:2], *shapes.get(f"{attn}.logit_scale", ())[:1])
        for attn in first
    ]
    if all(heads):
        args["num_heads"] = [found[0] for found in heads]
    patch = _patch(shapes)
    if patch is not None:
        args["patch_size"] = patch
    known = [window for attn in first if (window := _swin_window(shapes, attn)) is not None]
    if not known or len(known) < len(stages):
        return [Shown(args)]
    args["window_size"] = max(known)
    if patch is None:
        return [Shown(args)]
    grid = _swin_grid(shapes, next(iter(stages)), known)
    apart = Shown(args | {"window_size": known})  # a window of its own for every stage
    if grid is not None:
        return [Shown(args, (grid * patch, grid * patch)), apart]
    # Every stage holds a whole window: at the usual size, or at least at this one.
    least = max(known) * 2 ** (len(known) - 1) * patch
    return [Shown(args), Shown(args, (least, least)), apart]


def _swin_window(shapes: Shapes, attn: str) -> int | None:
    """Return the side of a stage's square window, from its table or a stored index."""
    table = shapes.get(f"{attn}.{_TABLE}", ())
    if len(table) == 2:
        side = math.isqrt(table[0])
        return (side + 1) // 2 if side * side == table[0] and side % 2 else None
    index = shapes.get(f"{attn}.relative_position_index", ())
    side = math.isqrt(index[0]) if len(index) == 2 else 0
    return side if side and side * side == index[0] else None


def _swin_grid(shapes: Shapes, first: str, windows: list[int]) -> int | None:
    """Return the patches a side: from a stored mask, or a stage smaller than the window."""
    mask = shapes.get(f"{first}.blocks.1.attn_mask", ())
    if len(mask) == 3:
        tokens = mask[0] * mask[1]
        side = math.isqrt(tokens)
        return side if side * side == tokens else None
    whole = max(windows)
    for stage, window in enumerate(windows):
        if window < whole:
            # The stage has `window` tokens a side, after rounding up at every halving.
            sides = range((window - 1 << stage) + 1, (window << stage) + 1)
            even = [side for side in sides if side % whole == 0]
            return even[-1] if even else sides[-1]
    return None


def _vit(shapes: Shapes) -> list[Shown]:
    said = {"patch_size": _patch(shapes), "num_heads": _vit_heads(shapes)}
    args = {key: value for key, value in said.items() if value}
    depth = {"depth": depth_of(shapes)}
    found = [Shown(depth), Shown(args), Shown(args | depth)]
    return [each for i, each in enumerate(found) if each.args and each not in found[:i]]


def _patch(shapes: Shapes) -> int | None:
    stem = shapes.get("patch_embed.proj.weight", ())
    return stem[2] if len(stem) == 4 and stem[2] == stem[3] else None


def _vit_heads(shapes: Shapes) -> int | None:
    """Return the heads where a tensor is one row a head, or as wide as one head."""
    attn = "blocks.0.attn"
    for name, axis in (
        (f"{attn}.{_TABLE}", 1),
        (f"rel_pos_bias.{_TABLE}", 1),
        (f"{attn}.rel_pos.{_TABLE}", 1),
        (f"{attn}.rel_pos.mlp.fc2.weight", 0),
        ("shared_rel_pos.mlp.fc2.weight", 0),
        (f"shared_rel_pos.{_TABLE}", 1),
    ):
        shape = shapes.get(name, ())
        if len(shape) == 2:
            return shape[axis]
    width = shapes.get("blocks.0.norm1.weight", (0,))[0]
    for name in (f"{attn}.rel_pos_h", f"{attn}.q_norm.weight"):
        shape = shapes.get(name, ())
        if shape and 0 < shape[-1] < width and not width % shape[-1]:
            return width // shape[-1]
    return None
