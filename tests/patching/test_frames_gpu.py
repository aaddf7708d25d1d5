"""A warm eager call on a GPU enters few of elsa's functions before it launches."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elsa_core as elsa

timm = pytest.importorskip("timm")

pytestmark = pytest.mark.gpu


LAUNCHES = ("serve", "multiply")  # the functions of csrc/cuda/python.cpp


def entered(call: Callable[[], Any]) -> tuple[int, int]:
    """How many of elsa's functions a warm call enters, and how many of them lead to a launch."""
    for _ in range(3):
        call()
    total, depth, deepest = 0, 0, 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal total, depth, deepest
        if "elsa_core" not in frame.f_code.co_filename:
            return
        if event == "call":
            total, depth = total + 1, depth + 1
        elif event == "return":
            depth -= 1
        elif event == "c_call" and getattr(argument, "__name__", "") in LAUNCHES:
            deepest = max(deepest, depth)

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return total, deepest


@torch.inference_mode()
def test_sites_and_layers() -> None:
    vit = timm.create_model("vit_base_patch16_224", depth=1).eval().cuda()
    swin = timm.create_model("swin_tiny_patch4_window7_224").eval().cuda()
    elsa.patch(vit, scope="model")
    elsa.patch(swin, scope="attention")
    tokens, image = torch.randn(8, 197, 768).cuda(), torch.randn(8, 56, 56, 96).cuda()
    head, block = vit.head, swin.layers[0].blocks[0]
    rows = torch.randn(2048, 768).cuda()
    assert 0 < entered(lambda: vit.blocks[0].attn(tokens))[1] <= 6
    assert 0 < entered(lambda: block._attn(image))[1] <= 6
    assert 0 < entered(lambda: head(rows))[1] <= 3
    total, _ = entered(lambda: vit.blocks[0](tokens))
    assert total <= 105, total
