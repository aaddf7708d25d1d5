"""A batch that is half padding takes a patched model two thirds of the original's time, or less.

`pytest -n 0 -s tests/patching/test_padding_time.py` prints what it takes, and the machine's load.
The time is that of the process's threads, which other processes change less than the clock's.
"""

import copy
import os
import statistics
import time
from typing import Any

import pytest
import timm
import torch

import elsa_core as elsa

IMAGES, TOKENS, SIDE = 8, 256, 16
# rows and columns of patches: half of all places are padding
SIZES = torch.tensor([[16, 16], [8, 16], [8, 8], [8, 8]]).repeat(IMAGES // 4, 1)


def naflexvit() -> tuple[Any, Any]:
    model = timm.create_model("naflexvit_base_patch16_gap", depth=2, embed_dim=384, num_heads=6)
    place = torch.arange(TOKENS)
    coordinates = torch.stack((place // SIDE, place % SIDE), -1).repeat(IMAGES, 1, 1)
    there = place < SIZES.prod(1)[:, None]
    patches = torch.randn(IMAGES, TOKENS, 768)
    return model, ({"patches": patches, "patch_coord": coordinates, "patch_valid": there},)


def siglip2() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.Siglip2VisionConfig(
        num_hidden_layers=4, hidden_size=384, num_attention_heads=6, intermediate_size=1536
    )
    there = torch.arange(TOKENS) < SIZES.prod(1)[:, None]
    patches = torch.randn(IMAGES, TOKENS, 768) * there[..., None]
    return transformers.Siglip2VisionModel(config), (patches, there.int(), SIZES)


def seconds(model: Any, given: Any) -> float:
    start = time.process_time()
    model(*given)
    return time.process_time() - start


@pytest.mark.alone
@torch.no_grad()
@pytest.mark.parametrize("make", [naflexvit, siglip2])
def test_half_padding(make: Any) -> None:
    model, given = make()
    patched = copy.deepcopy(model.eval())
    elsa.patch(patched, scope="attention")
    for warm in (model, patched):
        warm(*given)
    rounds = [(seconds(model, given), seconds(patched, given)) for _ in range(5)]
    ratio = statistics.median(one / other for one, other in rounds)
    own, ours = (statistics.median(each) for each in zip(*rounds, strict=True))
    print(f"{make.__name__}: {own:.2f} s, patched {ours:.2f} s, {ratio:.2f}x, {os.getloadavg()}")
    assert ratio >= 1.5
