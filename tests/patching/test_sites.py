"""`inspect`: what it finds, what it says about it, and that the model stays as it was."""

import copy
import json

import pytest
import torch
from sampling import some
from torch import nn

from elsa_core.errors import ArgumentError
from elsa_core.patching.adapters import table
from elsa_core.patching.rewrite import patch
from elsa_core.patching.sites import find_sites, inspect

timm = pytest.importorskip("timm")


def vit(**options) -> nn.Module:
    options = {"img_size": 64, "depth": 2} | options
    return timm.create_model("vit_tiny_patch16_224", **options).eval()


def light(name: str, **options) -> nn.Module:
    """A model without memory for weights, where this timm can build one."""
    try:
        with torch.device("meta"):
            return timm.create_model(name, **options)
    except (NotImplementedError, RuntimeError):
        return timm.create_model(name, **options)


def summary(model: nn.Module) -> list[tuple]:
    """Everything of a model that inspect could have changed."""
    return [
        (
            path,
            type(module),
            module.training,
            sorted(module.__dict__),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            {k: type(v) for k, v in getattr(module, "attention_bias_cache", {}).items()},
        )
        for path, module in model.named_modules()
    ]


def test_a_vit() -> None:
    found = inspect(vit())
    assert found.input_size == (3, 64, 64)
    assert found.model_class == "timm.models.vision_transformer.VisionTransformer"
    assert [site.path for site in found.sites] == ["blocks.0.attn", "blocks.1.attn"]
    site = found.sites[0]
    assert site.module_class == "timm.layers.attention.Attention"
    assert (site.kind, site.num_heads, site.head_dim) == ("global", 3, 64)
    assert (site.query_tokens, site.key_tokens) == (17, 17)
    assert (site.patchable, site.adapter, site.patched) == (True, "ElsaAttention", False)
    assert site.flops == 2 * 2 * 3 * 17 * 17 * 64
    assert found.total_flops is not None
    assert site.flops_share == pytest.approx(site.flops / found.total_flops)
    # By hand: patches, per block qkv, proj and mlp on 17 tokens and attention, the head.
    width, tokens = 192, 17
    linear = 2 * tokens * width * (3 * width + width + 8 * width)
    expected = 2 * 16 * 768 * width + 2 * (linear + site.flops) + 2 * width * 1000
    assert found.total_flops == expected
    json.dumps(found.to_dict(), allow_nan=False)


def test_sizes_and_channels() -> None:
    for size in (64, (64, 64)):
        found = inspect(vit(), size)
        assert found.input_size == (3, 64, 64) and found.sites[0].query_tokens == 17
    model = vit(dynamic_img_size=True, in_chans=1)
    assert inspect(model).input_size == (1, 64, 64)
    assert inspect(model, (1, 32, 96)).sites[0].query_tokens == 13


@pytest.mark.parametrize("size", [0, -5, (3, 0, 64), (1, 2, 3, 4), 2**30, (3, 64.0, 64)])
def test_no_image_size(size) -> None:
    with pytest.raises(ArgumentError, match="input_size="):
        inspect(vit(), size)


def test_a_size_that_the_model_does_not_take() -> None:
    model = vit()
    before = summary(model)
    with pytest.raises(ArgumentError, match=r"does not run on it: .*\(64\)"):
        inspect(model, 65)
    assert summary(model) == before


def test_a_model_that_cannot_run_still_shows_its_sites() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = vit()

        def forward(self, x):
            raise RuntimeError("no\nway")

    class Counting(Broken):
        """Needs a real run: a value decides its shapes."""

        def forward(self, x):
            return self.vit(x) if x.sum().item() < 1 else None

    found = inspect(Broken())
    assert [site.path for site in found.sites] == ["vit.blocks.0.attn", "vit.blocks.1.attn"]
    assert found.total_flops is None
    assert found.note == "tokens and FLOPs are unknown: the model could not be run (no)"
    assert inspect(Counting()).sites[0].query_tokens == 17


MODELS = {
    "levit_128s": {},  # caches a bias tensor in eval mode
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4},
    "eva02_tiny_patch14_224": {"depth": 2},
    "cait_xxs24_224": {"depth": 1},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_the_model_stays_as_it_was(name: str, training: bool) -> None:
    model = timm.create_model(name, **MODELS[name]).train(training)
    calls: list[str] = []
    model.register_forward_hook(lambda m, args, out: calls.append("hook"))
    before, state = summary(model), copy.deepcopy(model.state_dict())
    inspect(model)
    assert summary(model) == before
    assert not calls
    assert all(torch.equal(a, state[name]) for name, a in model.state_dict().items())
    size = inspect(model).input_size
    with torch.no_grad():
        model.eval()(torch.randn(2, *size))  # no fake tensor was left in a cache


def test_a_hook_of_no_module_is_no_obstacle() -> None:
    """As functions have none that are compiled from text without a module's name."""
    model, compiled = timm.create_model("cait_xxs24_224", depth=1), {}
    exec("def hook(module, args, out): pass", compiled)
    assert compiled["hook"].__module__ is None
    model.register_forward_hook(compiled["hook"])
    assert inspect(model).sites[0].query_tokens == 196  # it has been run


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224"])
def test_patched_models_report_the_same_sites(name: str) -> None:
    model = timm.create_model(name, **MODELS[name])
    before = inspect(model).to_dict()
    first = before["sites"][0]["path"]
    patch(model, include=first)
    after = inspect(model).to_dict()
    assert [s["path"] for s in after["sites"] if s["patched"]] == [first]
    for site in after["sites"]:
        site["patched"] = False
    assert after == before


# Family -> the class of a site and its kind, tokens, whether it is patchable, a word of the reason.
KINDS = {
    "cait_xxs24_224": [
        ("TalkingHeadAttn", "talking-heads", 196, False, "mixes heads"),
        ("ClassAttn", "class", 1, True, "its own forward"),
    ],
    "xcit_nano_12_p16_224": [("XCA", "channel", None, False, "channels")],
    "davit_tiny": [
        ("SpatialBlock", "window", 49, True, "adapter"),
        ("ChannelAttention", "channel", None, False, "channels"),
    ],
    "efficientformerv2_s0": [("Attention2d", "talking-heads", 49, False, "mixes heads")],
    "convit_tiny": [
        ("GPSA", "gated-positional", 196, False, "gate"),
        ("MHSA", "global", 197, True, "its own forward"),
    ],
    "volo_d1_224": [("OutlookAttention", "outlook", 9, False, "linear layer")],
    "efficientvit_b0": [("LiteMLA", "linear", None, False, "no softmax")],
    "mobilevitv2_050": [("LinearSelfAttention", "linear", None, False, "separable")],
    "swinv2_tiny_window8_256": [("SwinTransformerV2Block", "window", 64, True, "adapter")],
    "mvitv2_tiny": [("MultiScaleAttention", "global", 3136, True, "adapter")],
    "samvit_base_patch16": [("Attention", "window", 196, True, "adapter")],
    "hiera_tiny_224": [("MaskUnitAttention", "window", 64, True, "its own forward")],
    "vit_base_patch16_siglip_224": [("AttentionPoolLatent", "pooling", 1, True, "its own forward")],
    "crossvit_tiny_240": [("CrossAttention", "cross", 1, True, "its own forward")],
}


@pytest.mark.parametrize("name", some(KINDS))
def test_kinds(name: str) -> None:
    sites = inspect(light(name)).sites
    for cls, kind, tokens, patchable, word in KINDS[name]:
        mine = [s for s in sites if s.module_class.rpartition(".")[2] == cls and s.kind == kind]
        assert mine, (cls, kind, sites)
        assert mine[0].query_tokens == tokens and mine[0].patchable == patchable
        assert word in mine[0].reason
        if mine[0].flops is None and cls == "LiteMLA":
            pytest.skip("this timm's linear attention has no class that is known")
        assert mine[0].flops is not None
        assert mine[0].flops > 0 or cls == "LinearSelfAttention"  # no product of activations


def test_extra_terms() -> None:
    def terms(name: str, **options) -> set[str]:
        sites = inspect(light(name, **options)).sites
        return {term for site in sites for term in site.extra}

    assert terms("swin_tiny_patch4_window7_224") == {"relative bias", "mask"}
    assert terms("swinv2_tiny_window8_256") == {"relative bias", "mask", "cosine"}
    assert terms("samvit_base_patch16") == {"decomposed relative positions"}
    assert terms("vit_tiny_patch16_224", qk_norm=True, attn_drop_rate=0.1) == {"qk-norm", "dropout"}
    assert terms("eva02_base_patch16_clip_224") == {"rope", "scale-norm"}
    assert terms("beit_base_patch16_224") == {"relative bias"}


def test_multihead_attention_is_found_with_its_flops() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Unflatten(3, (2, 32)), nn.Flatten(1, 3), layer).eval()
    found = inspect(model, (3, 5, 64))
    (site,) = found.sites
    assert site.module_class == "torch.nn.modules.activation.MultiheadAttention"
    assert (site.num_heads, site.head_dim, site.query_tokens) == (4, 8, 30)
    assert site.flops == 4 * 30 * 30 * 32 and site.patchable
    assert site.adapter == "ElsaMultiheadAttention"


def test_unknown_classes_are_found_by_their_code() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)
            self.softmax = nn.Softmax(-1)

        def weights(self, q, k):
            return self.softmax(q @ k.transpose(-2, -1))

        def forward(self, x):
            q, k, v = self.qkv(x.flatten(1, 2)).chunk(3, -1)
            return self.weights(q, k) @ v

    class Gate(nn.Module):
        def forward(self, x):
            return x * x.softmax(-1)

    model = nn.Sequential(Gate(), Mine())
    (site,) = inspect(model, (3, 5, 32)).sites  # and no other: a gate is none
    assert (site.path, site.kind, site.query_tokens, site.head_dim) == ("1", "global", 15, 32)
    assert site.adapter == "recognised"


def test_open_clip_towers() -> None:
    open_clip = pytest.importorskip("open_clip")
    with torch.device("meta"):
        model = open_clip.model.CLIP(
            64,
            open_clip.model.CLIPVisionCfg(layers=1, width=64, head_width=32, image_size=64),
            open_clip.model.CLIPTextCfg(width=64, heads=2, layers=1),
        )
    found = inspect(model)
    assert found.input_size == (3, 64, 64)
    assert [(s.path, s.query_tokens, s.patchable) for s in found.sites] == [
        ("visual.transformer.resblocks.0.attn", 17, True),
        ("transformer.resblocks.0.attn", 77, True),
    ]
    assert "mask" in found.sites[1].extra


def test_torchvision() -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        found = inspect(models.swin_v2_t())
    assert {site.kind for site in found.sites} == {"window"}
    assert found.sites[0].query_tokens == 64


def test_the_table_names_classes_that_exist() -> None:
    """A class that timm renames would silently lose its kind and its reason."""
    import importlib

    for name in table.ROWS:
        module, _, cls = name.rpartition(".")
        root = module.partition(".")[0]
        if root != "torch":
            pytest.importorskip(root)
        try:
            assert isinstance(getattr(importlib.import_module(module), cls), type)
        except (ModuleNotFoundError, AttributeError):
            assert root == "timm" and timm.__version__ < "1.0.31", name  # older: fewer families


def test_an_image_that_a_batch_norm_reads_stays_as_it_lies() -> None:
    """As a product its channels come last, and all convolutions after it took twice as long."""
    with_norm, tokens = light("visformer_tiny"), light("nest_tiny")
    kinds = {
        name: [site.path for site in find_sites(model, "model") if site.kind == "patch-embedding"]
        for name, model in (("visformer", with_norm), ("nest", tokens))
    }
    assert kinds == {"visformer": [], "nest": ["patch_embed.proj"]}
