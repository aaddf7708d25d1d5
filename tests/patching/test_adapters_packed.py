"""transformers' vision towers of packed images (Qwen-VL) pass the check, each image by elsa."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elsa_core as elsa

pytest.importorskip("transformers")

_SHARED = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VisionTransformerPretrainedModel",
        {**_SHARED, "embed_dim": 32, "hidden_size": 48},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VisionTransformerPretrainedModel",
        {**_SHARED, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48,
         "fullatt_block_indexes": [1], "window_size": 16},
    ),
    "qwen3_vl": (
        "Qwen3VLVisionModel",
        {**_SHARED, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48,
         "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
}  # fmt: skip
# Frames, rows and columns of patches: images of different size, and a video.
GRIDS = {"mixed": ((1, 6, 10), (1, 2, 4), (3, 4, 6)), "one": ((1, 6, 10),), "equal": ((2, 4, 4),)}


def model(name: str) -> Any:
    torch.manual_seed(0)
    cls, options = TOWERS[name]
    made = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), cls)
    tower = made._from_config(made.config_class(**options), attn_implementation="sdpa")
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.15)
    return tower.eval()


def batch(grid: str = "mixed") -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(GRIDS[grid])
    generator = torch.Generator().manual_seed(1)
    return torch.randn(int(sizes.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator), sizes


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", TOWERS)
def test_check_agrees(name: str, grid: str) -> None:
    """transformers calls attention once for each image, frame or window; all of these run elsa."""
    tower, given = model(name), batch(grid)
    report = elsa.patch(tower, scope="attention")
    assert len(report.patched) == 2 and not report.kept
    verdict = elsa.check(tower, given, batch_size=len(given[0]), grad=True)  # all rows at once
    assert verdict.ok, verdict
    assert all(site.operator_calls for site in verdict.sites)
