"""Models of other libraries, of which older releases cannot run all that newer ones do."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def of_original(run: Callable[[], T]) -> T:
    """What the original computes; the test is skipped where it fails."""
    try:
        return run()
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"the original fails: {str(error).splitlines()[0]}")


def torchvision_swin(version: int, **sizes: Any) -> Any:
    """torchvision's Swin or Swin V2 in eval mode, in windows of 4 x 4 tokens."""
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    block, merge = swin.SwinTransformerBlock, swin.PatchMerging
    if version == 2:
        block, merge = swin.SwinTransformerBlockV2, swin.PatchMergingV2
    given = {"patch_size": [4, 4], "window_size": [4, 4], "block": block} | sizes
    return swin.SwinTransformer(downsample_layer=merge, **given).eval()
