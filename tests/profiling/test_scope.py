"""Profiles and plans of models that are patched as a whole."""

from __future__ import annotations

import pytest
import torch

import elsa_core as elsa
from elsa_core.profiling import policy

timm = pytest.importorskip("timm")


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, patch_size=2, embed_dim=16,
        depths=(1, 1), num_heads=(2, 2), num_classes=5,
    ).eval()  # fmt: skip
    return elsa.profile(
        model, torch.randn(1, 3, 32, 32), baselines=["eager"], scope="model", sites=True,
        rounds=3, budget_seconds=1.0, errors=False,
    )  # fmt: skip


def test_every_layer_has_a_row_but_those_within_a_timed_attention(report):
    """A Swin block is timed in its attention alone: its MLP has a row, its projections have not."""
    rows = {site.path: site for site in report.sites}
    assert rows.keys() == {
        "patch_embed.proj", "layers.0.blocks.0", "layers.0.blocks.0.mlp",
        "layers.1.downsample.reduction", "layers.1.blocks.0", "layers.1.blocks.0.mlp", "head.fc",
        "rest of the model",
    }  # fmt: skip
    assert rows["layers.0.blocks.0.mlp"].kind == "mlp" and rows["head.fc"].patched
    assert all(site.seconds_before > 0 for site in report.sites)
    assert sum(site.share for site in report.sites) == pytest.approx(1.0, abs=0.01)


def test_the_policy_writes_the_scope(report):
    point = {"status": "done", "profile": report.to_dict()}
    document = {"results": {"points": [point], "settings": {}}}
    plan = policy.faster(document)
    assert plan.scope == "model"
    for site in document["results"]["points"][0]["profile"]["sites"]:
        site["patched"] = site["patched"] and site["kind"] == "window"
    assert policy.faster(document).scope == "attention"
