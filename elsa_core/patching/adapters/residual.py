"""A block's residual and LayerScale, in the last product of what the block adds.

Read against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

from typing import Any

from timm.layers.drop import DropPath
from timm.layers.layer_scale import LayerScale
from torch import Tensor, nn

from elsa_core.patching.adapters.common import is_shown


def added(
    x: Tensor, normed: Tensor, part: Any, scale: Any, drop_path: Any, terms: dict[str, Any]
) -> Tensor:
    """x + drop_path(scale(part(normed, **terms))), in the part's last product where it can.

    `scale` is None where the block has none.
    """
    if folds(part) and _idles(drop_path) and _scales(scale):
        gamma = scale.gamma if type(scale) is LayerScale else None
        folded: Tensor = part.elsa_added(normed, x, gamma, **terms)
        return folded
    out = part(normed, **terms)
    result: Tensor = x + drop_path(out if scale is None else scale(out))
    return result


def folds(part: Any) -> bool:
    """Whether a part is patched, has no hooks and drops nothing after its last product."""
    if not hasattr(part, "elsa_added") or is_shown(part):
        return False
    last = part.drop2 if hasattr(part, "drop2") else part.proj_drop
    return _idles(last)


def _idles(drop: Any) -> bool:
    """Whether dropout, or the dropping of paths, hands on what it gets."""
    if type(drop) is nn.Identity:
        return not is_shown(drop)
    if type(drop) is nn.Dropout:
        return not is_shown(drop) and (not drop.training or drop.p == 0.0)
    active = type(drop) is not DropPath or (drop.training and drop.drop_prob != 0.0)
    return not active and not is_shown(drop)


def _scales(scale: Any) -> bool:
    if scale is None:
        return True
    return type(scale) in (nn.Identity, LayerScale) and not is_shown(scale)
