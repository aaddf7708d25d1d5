"""What must survive patching: state dicts, copies, pickles, hooks, compilers, training."""

import copy
import io
import json
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from judging import assert_recorded, assert_same_gradients
from originals import of_original
from processes import at_once, python
from sampling import thinned
from seen import Calls
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError, UnavailableError
from elsa_core.patching import adapters
from elsa_core.patching.rewrite import original, patch, patched_sites, unpatch
from elsa_core.patching.sites import inspect
from elsa_core.proof.checking import check

timm = pytest.importorskip("timm")

SWIN = {"img_size": 32, "window_size": 4, "patch_size": 2, "embed_dim": 16}
SWIN |= {"depths": (2, 2), "num_heads": (2, 2), "num_classes": 5}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 48, "depth": 2, "num_classes": 5}),
    "rope": ("vit_small_patch16_rope_224", {"img_size": 48, "depth": 2, "embed_dim": 192}),
    "eva": ("eva02_tiny_patch14_224", {"img_size": 56, "depth": 2, "num_classes": 5}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
}


def unwritten() -> nn.Module:
    """A model whose four sites have no written adapter."""
    from timm.models import metaformer

    torch.manual_seed(0)
    return metaformer.MetaFormer(
        depths=(1, 1, 2, 2),
        dims=(8, 16, 32, 32),
        token_mixers=[metaformer.SepConv] * 2 + [metaformer.Attention] * 2,
        norm_layers=[metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2,
        num_classes=5,
    ).eval()


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    name, options = MODELS[kind]
    return timm.create_model(name, pretrained=False, **options).eval()


def images(kind: str, batch: int = 2) -> torch.Tensor:
    side = MODELS[kind][1]["img_size"]
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(3))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


every_model = pytest.mark.parametrize("kind", MODELS)
TRACED = thinned(MODELS, ("compiled", "exported"))


@every_model
@torch.no_grad()
def test_the_class_is_all_that_changes(kind: str) -> None:
    model, x = make(kind), images(kind)
    expected = model(x)
    before = {path: (type(m), dict(m.__dict__)) for path, m in model.named_modules()}
    state = {name: t.data_ptr() for name, t in model.state_dict().items()}
    report = patch(model, precision="ieee", backend="eager")
    assert report.patched and not report.kept
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == state
    assert set(patched_sites(model)) == {site.path for site in report.patched}
    for path, module in model.named_modules():
        cls, attributes = before[path]
        mine = {k: v for k, v in module.__dict__.items() if not k.startswith("elsa_")}
        assert mine == attributes
        if path in patched_sites(model):
            own = [b for b in type(module).__bases__ if not b.__module__.startswith("elsa_core")]
            assert own == [cls]
            assert "__init__" not in type(module).__dict__
            assert (module.elsa_precision, module.elsa_backend) == ("ieee", "eager")
    close(model(x), expected)
    assert unpatch(model) == len(report.patched)
    assert {p: (type(m), dict(m.__dict__)) for p, m in model.named_modules()} == before
    assert torch.equal(model(x), expected) and unpatch(model) == 0


@every_model
@torch.no_grad()
def test_state_dicts_load_both_ways(kind: str) -> None:
    plain, patched = make(kind), make(kind)
    for parameter in patched.parameters():
        parameter.add_(0.01)
    patch(patched)
    assert list(plain.state_dict()) == list(patched.state_dict())
    plain.load_state_dict(patched.state_dict(), strict=True)
    close(patched(images(kind)), plain(images(kind)))
    patched.load_state_dict(make(kind).state_dict(), strict=True)
    close(patched(images(kind)), make(kind)(images(kind)))


@every_model
@torch.no_grad()
def test_copies_and_pickles(kind: str) -> None:
    model, x = make(kind), images(kind)
    patch(model)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(twin(x), expected) and unpatch(twin) == len(patched_sites(model))


def test_a_fresh_process_unpickles_without_patching_anything(tmp_path) -> None:
    """Watched classes exist in no file: their module rebuilds them from the name."""
    model, x = unwritten(), images("vit")
    patch(model, precision="ieee", backend="eager")
    torch.save((model, x, model(x)), tmp_path / "model.pt")
    code = (
        "import sys, torch; model, x, y = torch.load(sys.argv[1], weights_only=False)\n"
        "from elsa_core.patching.rewrite import patched_sites\n"
        "assert len(patched_sites(model)) == 4 and torch.allclose(model(x), y, atol=1e-6)\n"
        "print({m.elsa_precision for m in patched_sites(model).values()})"
    )
    done = python("-c", code, str(tmp_path / "model.pt"))
    assert (done.returncode, done.stdout.strip()) == (0, "{'ieee'}"), done.stderr


@pytest.mark.parametrize("kind", ["vit", "swin"])
@torch.no_grad()
def test_hooks_stay(kind: str) -> None:
    model, seen = make(kind), []
    path = next(p for p, m in model.named_modules() if p.endswith("attn"))
    model.get_submodule(path).register_forward_pre_hook(lambda m, a: seen.append("before"))
    model.get_submodule(path).register_forward_hook(lambda m, a, out: out * 0)
    expected = model(images(kind))
    patch(model)
    close(model(images(kind)), expected)
    unpatch(model)
    model(images(kind))
    assert seen == ["before"] * 3


@pytest.mark.parametrize("kind", [kind for kind, way in TRACED if way == "compiled"])
@torch.no_grad()
def test_compiles_in_one_graph(kind: str) -> None:
    model = make(kind)
    patch(model)
    assert_recorded("compile", model, images(kind), images(kind, 3))


@pytest.mark.usefixtures("inductor")
@torch.no_grad()
def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    patch(model)
    x = torch.randn(2, 3, 32, 32)
    close(torch.compile(model, fullgraph=True)(x), model(x))


@pytest.mark.parametrize("kind", [kind for kind, way in TRACED if way == "exported"])
@torch.no_grad()
def test_exports_with_a_dynamic_batch(kind: str) -> None:
    model = make(kind)
    patch(model)
    called = assert_recorded("export", model, images(kind, 2), images(kind, 5))
    assert any(name.startswith(("elsa.attention", "elsa.window_attention")) for name in called)
    assert not any("scaled_dot_product" in name or "softmax" in name for name in called)


@pytest.mark.parametrize("name", ["vit", "swin_t", "unwritten"])
@torch.no_grad()
def test_feature_extractors_take_sites_as_leaves(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    from torchvision.models.feature_extraction import create_feature_extractor

    torch.manual_seed(0)
    if name == "swin_t":
        options = {"patch_size": [4, 4], "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2]}
        model = torchvision.models.SwinTransformer(window_size=[4, 4], **options).eval()
        node, x = "features.1", torch.randn(2, 3, 32, 32)
    elif name == "unwritten":
        model, node, x = unwritten(), "stages.3", torch.randn(2, 3, 64, 64)
    else:
        model, node, x = make(name), "blocks.0", images(name)
    expected = create_feature_extractor(model, [node])(x)[node]
    report = patch(model)
    leaves = list({type(model.get_submodule(site.path)) for site in report.patched})
    traced = create_feature_extractor(model, [node], tracer_kwargs={"leaf_modules": leaves})
    close(traced(x)[node], expected)
    assert any(isinstance(module, tuple(leaves)) for module in traced.modules())


@every_model
def test_trains(kind: str) -> None:
    plain, patched = make(kind), make(kind)
    patch(patched)
    for model in (plain, patched):
        model.double().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout) or type(module).__name__ == "DropPath":
                module.p = module.drop_prob = 0.0
        model(images(kind).double()).square().sum().backward()
    assert_same_gradients(plain, patched)


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@torch.no_grad()
def test_changes_dtype_after_patching(kind: str, dtype: torch.dtype) -> None:
    model, x = make(kind), images(kind)
    expected = copy.deepcopy(model).double()(x.double())
    patch(model)
    found = model.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < 50 * torch.finfo(dtype).eps * expected.norm()


@torch.no_grad()
def test_the_backend_reaches_the_operator() -> None:
    """PyTorch's attention calls no operator of elsa's; one that is lost on the way is `auto`."""
    counts = []
    for backend in ("auto", "sdpa"):
        model = make("vit")
        patch(model, backend=backend)
        with Calls() as calls:
            model(images("vit"))
        counts.append(len(calls.elsa))
    assert counts == [2, 0]


@torch.no_grad()
def test_patching_again_updates() -> None:
    model = unwritten()
    first = patch(model)
    again = patch(model)
    assert [s.path for s in again.patched] == [s.path for s in first.patched]
    patch(model, precision="ieee", backend="eager", include="stages.2.*")
    precisions = [module.elsa_precision for module in patched_sites(model).values()]
    assert precisions == ["ieee", "ieee", "strict", "strict"]
    bases = [type(m).__mro__[1] for m in model.modules() if adapters.patched_class(m)]
    assert bases and all(base.__module__.startswith("timm") for base in bases)
    unpatch(model)
    assert not patched_sites(model)


def test_include_and_exclude() -> None:
    model = make("vit")
    report = patch(model, include=["blocks.*.attn"], exclude="blocks.1.*")
    assert [site.path for site in report.patched] == ["blocks.0.attn"]
    kept = [(site.path, site.reason) for site in report.kept]
    assert kept == [("blocks.1.attn", "excluded by 'blocks.1.*'")]
    report = patch(model, include="blocks.1.attn")
    assert report.kept[0].reason == "not named by include"
    assert report.kept[0].patched  # by the first call, and left so
    json.dumps(report.to_dict())


def test_a_module_that_is_a_site_itself() -> None:
    module = make("vit").blocks[0].attn
    assert [site.path for site in patch(module).patched] == [""]


UNMATCHED = r"'block\..\.\*' matches none of the 2 attention"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"precision": "exact"}, ArgumentError, "precision='exact'"),
        ({"backend": "cuda"}, ArgumentError, "backend='cuda'"),
        ({"precision": "turbo"}, ArgumentError, r"blocks\.0\.attn: .*turbo"),  # of bfloat16
        ({"backend": "triton"}, UnavailableError, r"'triton' cannot serve blocks\.0\.attn: "),
        # the site that a glob was meant for would have been patched without a word
        ({"exclude": "block.0.*"}, ArgumentError, UNMATCHED),
        ({"include": ["blocks.0.*", "block.1.*"]}, ArgumentError, UNMATCHED),
    ],
)
def test_what_is_refused_before_anything_changes(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = make("vit").bfloat16()
    with pytest.raises(error, match=words):
        patch(model, **arguments)
    assert not patched_sites(model)


def test_a_backend_of_another_device_may_be_named_on_the_meta_device() -> None:
    with torch.device("meta"):
        patch(of_original(lambda: make("vit").to("meta")), backend="triton")


@pytest.mark.parametrize("function", [patch, unpatch, inspect, patched_sites])
def test_what_is_no_model(function: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not str: elsa\.load"):
        function("vit")


def test_reports_print_as_tables() -> None:
    model = make("vit")
    lines = str(inspect(model)).splitlines()
    assert lines[0].startswith("timm.models.vision_transformer.VisionTransformer · 3x")
    assert lines[0].endswith("2 of 2 attention sites patchable")
    assert lines[1].split() == ["site", "count", "class", "kind", "heads", "tokens", "FLOPs"]
    assert lines[2].split()[:4] == ["blocks.0-1.attn", "2x", "Attention", "global"]
    report = patch(model, exclude="blocks.1.*")
    lines = str(report).splitlines()
    assert lines[0] == "1 of 2 attention sites patched · precision strict · backend auto"
    assert lines[2].split()[0] == "blocks.0.attn"
    assert lines[3] == "kept blocks.1.attn (Attention): excluded by 'blocks.1.*'"
    assert repr(report) == str(report)
    cait = str(inspect(timm.create_model("cait_xxs24_224", depth=1)))
    assert "not patchable: blocks.0.attn (TalkingHeadAttn): mixes heads" in cait


def test_nothing_to_patch_says_what_was_found() -> None:
    with pytest.raises(NothingPatchedError, match="ResNet has no attention site"):
        patch(timm.create_model("resnet18"))
    with pytest.raises(NothingPatchedError, match=r"x CrossCovarianceAttn \(.*over channels"):
        patch(timm.create_model("edgenext_xx_small"))
    with pytest.raises(NothingPatchedError, match="leave none of the 2 attention sites"):
        patch(make("vit"), exclude="*")


def test_strict_refuses_a_model_that_it_can_patch_in_part() -> None:
    model = timm.create_model("cait_xxs24_224", depth=2)
    with pytest.raises(NothingPatchedError, match="TalkingHeadAttn"):
        patch(model, strict=True)
    assert not patched_sites(model)
    assert patch(model, strict=True, include="blocks_token_only.*").patched
    assert len(patch(model).kept) == 2


@torch.no_grad()
def test_original_is_a_loan() -> None:
    model, x = make("swin"), images("swin")
    plain = model(x)
    patch(model, precision="ieee")
    classes = [type(m) for m in model.modules()]
    with original(model) as same:
        assert same is model and not patched_sites(model)
        assert torch.equal(model(x), plain)
    assert [type(m) for m in model.modules()] == classes
    with pytest.raises(RuntimeError), original(model):
        raise RuntimeError
    assert [type(m) for m in model.modules()] == classes
    with original(model):
        unpatch(model)
        patch(model, include="layers.0.blocks.0")
    assert list(patched_sites(model)) == ["layers.0.blocks.0"]


def test_a_parametrization_on_a_patched_site() -> None:
    """It derives a class for the one instance; the site was not seen below it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    patch(model)
    spectral_norm(model[0].self_attn, "in_proj_weight")
    model.eval()
    x = torch.randn(2, 5, 16)
    expected, cls = model(x), type(model[0].self_attn)
    assert list(patched_sites(model)) == ["0.self_attn"]
    report = check(model, x)
    assert report.ok and report.sites[0].operator_calls and type(model[0].self_attn) is cls
    assert [site.path for site in patch(model, backend="eager").patched] == ["0.self_attn"]
    close(model(x), expected)
    assert unpatch(model) == 1 and not patched_sites(model)
    close(model(x), expected)
    parametrize.remove_parametrizations(model[0].self_attn, "in_proj_weight")
    assert type(model[0].self_attn) is nn.MultiheadAttention


@torch.no_grad()
def test_a_class_derived_from_a_patched_one() -> None:
    """`fully_shard` derives from a class of its own and the module's."""
    model, x = make("swin"), images("swin")
    expected = model(x)
    patch(model)
    block = model.layers[0].blocks[0]
    patched = type(block)
    mixin = type("Mixin", (), {"extra": 1})
    block.__class__ = type("Derived", (mixin, patched), {"__doc__": "of one instance"})
    assert len(patched_sites(model)) == 4
    with original(model):
        assert not patched_sites(model) and block.extra == 1
        assert torch.equal(model(x), expected)
    assert isinstance(block, patched)
    assert unpatch(model) == 4 and not isinstance(block, patched)
    assert block.extra == 1 and torch.equal(model(x), expected)


def test_a_derived_class_that_calls_super_is_refused_whole() -> None:
    model = make("vit")
    patch(model)
    attention = model.blocks[1].attn

    class Derived(type(attention)):  # type: ignore[misc]
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    attention.__class__ = Derived
    with pytest.raises(ModelError, match=r"Derived was derived from elsa's .* calls super\(\)"):
        unpatch(model)
    assert len(patched_sites(model)) == 2


def test_a_compiled_model_is_patched_inside() -> None:
    model = make("vit")
    compiled = torch.compile(model, backend="eager")
    assert len(patch(compiled).patched) == 2
    assert len(patched_sites(compiled)) == len(patched_sites(model)) == 2
    assert unpatch(compiled) == 2


def test_threads_get_one_class() -> None:
    """Two classes of one name would break pickle: it looks the class up again."""
    models = [unwritten() for _ in range(4)]
    at_once(partial(patch, precision="lean", backend="eager"), models)
    assert len({type(m) for model in models for m in patched_sites(model).values()}) == 1
