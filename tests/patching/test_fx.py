"""torch.fx traces a patched model as it traces the original, with the names of its nodes."""

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models import create_feature_extractor
from timm.utils import AttentionExtract

import elsa_core as elsa

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8, "img_size": 32}
MODELS = {
    "vit_tiny_patch16_224": SMALL,
    "swin_tiny_patch4_window7_224": {
        "img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager_softmax():
    set_fused_attn(False)
    yield
    set_fused_attn(True)


@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_traced_attention_and_features(name: str, scope: str) -> None:
    model = timm.create_model(name, **MODELS[name]).eval()
    x = torch.randn(1, 3, *[MODELS[name]["img_size"]] * 2)
    with torch.no_grad():
        maps = AttentionExtract(model)(x)
        head = create_feature_extractor(model, ["norm"])(x)
        elsa.patch(model, scope=scope)
        found, features = AttentionExtract(model)(x), create_feature_extractor(model, ["norm"])(x)
    assert maps.keys() == found.keys() and len(maps) > 0
    for path, weights in maps.items():
        torch.testing.assert_close(found[path], weights)
    torch.testing.assert_close(features, head)
