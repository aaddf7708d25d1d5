"""`patch(scope="model")`: linear layers, MLPs and blocks compute, train and hook as before."""

import copy
import dataclasses
import json
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

import elsa_core as elsa
from elsa_core import dispatch
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError
from elsa_core.loading.plan import apply_plan, plan_of, read_plan
from elsa_core.patching import adapters, layers
from elsa_core.patching.adapters import common, torch_layers
from elsa_core.patching.rewrite import original
from elsa_core.patching.sites import find_sites

timm = pytest.importorskip("timm")

VIT = {"img_size": 48, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}


def vit(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **(VIT | more)).eval()


def image(side: int = 48) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


class Calls(list[tuple[int, str, bool, bool]]):
    """What layers ask `served` for: (columns, activation, residual given, scale given)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = common.served

        def called(x, w, b, activation="none", residual=None, scale=None, *rest, **named):
            self.append((w.shape[0], activation, residual is not None, scale is not None))
            return inner(x, w, b, activation, residual, scale, *rest, **named)

        for module in (common, torch_layers):
            monkeypatch.setattr(module, "served", called)


@pytest.mark.parametrize(
    ("named", "dtype", "scope"),
    [
        (("AuthenticAMD", "AVX512"), torch.float32, "model"),
        (("AuthenticAMD", "AVX512"), torch.bfloat16, "attention"),
        (("AuthenticAMD", "AVX2"), torch.float32, "attention"),
        (("GenuineIntel", "AVX512"), torch.float32, "attention"),
        (("", "DEFAULT"), torch.float32, "attention"),
    ],
)
def test_the_default_scope_of_a_processor(pretended, named, dtype, scope):
    """Where the table says so it is "model"; a saved plan names it."""
    pretended(*named)
    model = vit().to(dtype)
    assert elsa.inspect(model).scope == scope
    report = elsa.patch(model)
    assert report.scope == scope and layers.patched_scope(model) == scope
    assert (type(model.head) is nn.Linear) is (scope == "attention")
    assert plan_of(report).scope == scope


def test_an_export_does_not_take_the_scope_of_a_processor(pretended, tmp_path, capsys):
    from elsa_cli.main import run

    pretended("AuthenticAMD", "AVX512")
    given = ["test_vit", "--img", "32", "--formats", "torchscript", "-o", str(tmp_path / "b")]
    assert run(["export", *given]) == 0
    assert "one form for all processors; --scope model" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["model"]["scope"] == "attention"


def test_every_layer_of_a_vit_is_a_site():
    found = elsa.inspect(vit(), scope="model")
    kinds = Counter(site.kind for site in found.sites)
    assert kinds == {"global": 2, "linear-layer": 5, "mlp": 2, "patch-embedding": 1}
    assert found.scope == "model" and all(site.patchable for site in found.sites)
    # products, all of them: nothing is counted twice and nothing is missing
    assert sum(site.flops or 0 for site in found.sites) == found.total_flops
    by_path = {site.path: site for site in found.sites}
    tokens, width = 10, 32
    assert by_path["blocks.1.mlp"].flops == 2 * 2 * tokens * width * 4 * width
    assert by_path["blocks.0.attn.qkv"].flops == 2 * tokens * width * 3 * width
    assert by_path["patch_embed.proj"].flops == 2 * 9 * width * 3 * 16 * 16
    assert "10 of 10 sites" in str(found)


@pytest.mark.parametrize("init_values", [None, 0.5])
def test_what_follows_a_product_is_in_its_call(monkeypatch, init_values):
    model = vit(init_values=init_values)
    with torch.no_grad():
        wanted = model(image())
        elsa.patch(model, scope="model")
        seen = Calls(monkeypatch)
        out = model(image())
    torch.testing.assert_close(out, wanted)
    scaled = init_values is not None
    block = [(96, "none", False, False), (32, "none", True, scaled),
             (128, "gelu", False, False), (32, "none", True, scaled)]  # fmt: skip
    assert seen == [(32, "none", False, False), *block, *block, (5, "none", False, False)]


def test_the_check_judges_every_site(monkeypatch):
    model = vit(init_values=0.5)
    report = elsa.patch(model, scope="model")
    verdict = elsa.check(model, image())
    assert verdict.ok and [s.path for s in verdict.sites] == [s.path for s in report.patched]
    assert all(site.calls for site in verdict.sites)
    monkeypatch.setenv("ELSA_FAULT_INJECTION", "blocks.1.mlp:1e-3")
    verdict = elsa.check(model, image(), stress=False)
    assert not verdict.ok and any(line.startswith("blocks.1.mlp") for line in verdict.failures)


def test_unpatch_copies_and_pickles():
    model = vit(init_values=0.5)
    classes = [type(m) for m in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = model(image())
    elsa.patch(model, scope="model")
    assert model.state_dict().keys() == before.keys()
    model.load_state_dict(before, strict=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.blocks[0].mlp).__name__ == "ElsaMlp"
        assert type(other.blocks[0]).__name__ == "ElsaBlock"
        torch.testing.assert_close(other(image()), wanted)
    with original(model):
        assert [type(m) for m in model.modules()] == classes
        assert torch.equal(model(image()), wanted)
    assert adapters.patched_class(model.head)
    elsa.unpatch(model)
    assert [type(m) for m in model.modules()] == classes
    assert not any("elsa_precision" in vars(m) for m in model.modules())


def test_globs_choose_among_all_sites():
    model = vit()
    report = elsa.patch(model, scope="model", include="blocks.*", exclude="*.mlp")
    assert {site.path.rpartition(".")[2] for site in report.patched} == {"attn", "qkv", "proj"}
    assert type(model.blocks[0].mlp.fc1) is nn.Linear and type(model.head) is nn.Linear
    with pytest.raises(ArgumentError, match="fc1"):
        elsa.patch(model, scope="model", include=["head", "*.fc1"])
    with pytest.raises(ArgumentError, match="scope"):
        elsa.patch(model, scope="everything")


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Wrapped(torch.Tensor):
    """A weight as quantisers make them."""


def test_what_is_no_plain_layer_is_left_alone_with_the_reason():
    model = vit()
    model.blocks[0].mlp.fc1 = Doubled(32, 128)
    quantised = model.blocks[1].attn.qkv
    quantised.weight = nn.Parameter(quantised.weight.detach().as_subclass(Wrapped), False)
    parametrize.register_parametrization(model.head, "weight", nn.Identity())
    wanted = model(image())
    report = elsa.patch(model, scope="model")
    reasons = {site.path: site.reason for site in report.kept}
    assert reasons.keys() == {"blocks.0.mlp.fc1", "blocks.1.attn.qkv", "head"}
    assert "Doubled" in reasons["blocks.0.mlp.fc1"] and "Wrapped" in reasons["blocks.1.attn.qkv"]
    assert "Parametrized" in reasons["head"]
    assert {"blocks.0.mlp.fc2", "blocks.1.mlp"} <= {site.path for site in report.patched}
    torch.testing.assert_close(model(image()), wanted)
    with pytest.raises(NothingPatchedError, match="strict"):
        elsa.patch(model, scope="model", strict=True)


def test_dynamically_quantised_layers_are_left_alone():
    quantised = pytest.importorskip("torch.ao.nn.quantized.dynamic").Linear
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.append(quantised(4, 4))
    found = {site.path: site for site in find_sites(model, "model")}
    assert found["0"].patchable and not found["2"].patchable


@pytest.mark.parametrize(
    "path",
    ["blocks.0.mlp.fc1", "blocks.0.mlp.act", "blocks.0.mlp.fc2", "blocks.0.mlp", "blocks.0.attn",
     "blocks.0.attn.proj", "blocks.0.ls1", "blocks.0.drop_path2", "blocks.0.mlp.norm", "head"],
)  # fmt: skip
def test_hooks_see_what_they_saw(path):
    model = vit(init_values=0.5)
    seen: list[tuple[Tensor, Tensor]] = []
    model.get_submodule(path).register_forward_hook(
        lambda module, args, out: seen.append((args[0].clone(), out.clone()))
    )
    with torch.no_grad():
        model(image())
        elsa.patch(model, scope="model")
        model(image())
    assert len(seen) == 2
    for before, after in zip(*seen, strict=True):
        torch.testing.assert_close(after, before)


def test_training_drops_and_learns_as_before():
    model = vit(proj_drop_rate=0.3, drop_path_rate=0.5, init_values=0.5).train()

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(image()).square().sum()
        loss.backward()
        return loss, {name: p.grad.clone() for name, p in model.named_parameters()}

    loss, grads = step()
    elsa.patch(model, scope="model")
    again, own = step()
    torch.testing.assert_close(again, loss)
    for name, grad in grads.items():
        torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=1e-5, msg=name)


def test_recorded_programs_hold_pytorchs_own_layers():
    """Bundles of the CPU need no library for them, and compilers fuse them as before."""
    model = vit(init_values=0.5)
    wanted = model(image())
    elsa.patch(model, scope="model")
    program = torch.export.export(model, (image(),))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "elsa.linear.default" not in targets and "aten.conv2d.default" in targets
    torch.testing.assert_close(program.module()(image()), wanted)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(image()), wanted)


def test_weights_may_be_tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    x = torch.randn(3, 8)
    wanted = model(x)
    elsa.patch(model, scope="model")
    assert model[2].weight is model[0].weight
    torch.testing.assert_close(model(x), wanted)


def test_gated_mlps(monkeypatch):
    mlp = pytest.importorskip("timm.layers.mlp")
    model = nn.ModuleDict({
        "split": mlp.SwiGLU(8, 12, norm_layer=nn.LayerNorm), "packed": mlp.SwiGLUPacked(8, 24),
        "sigmoid": mlp.GluMlp(8, 24),  # of an activation that no product takes
        "conv": mlp.Mlp(8, 16, use_conv=True), "other": mlp.Mlp(8, 16, act_layer=nn.Tanh),
    }).eval()  # fmt: skip
    x = torch.randn(3, 8)
    inputs = {"split": x, "packed": x, "sigmoid": x, "other": x, "conv": torch.randn(1, 8, 2, 2)}
    wanted = {name: model[name](given) for name, given in inputs.items()}
    report = elsa.patch(model, scope="model")
    assert {site.path: site.kind for site in report.patched} == {
        "split": "mlp", "packed": "mlp", "sigmoid.fc1": "linear-layer",
        "sigmoid.fc2": "linear-layer", "other.fc1": "linear-layer", "other.fc2": "linear-layer",
    }  # fmt: skip
    seen = Calls(monkeypatch)
    for name, given in inputs.items():
        torch.testing.assert_close(model[name](given), wanted[name])
    assert [call[1] for call in seen[:3]] == ["silu", "none", "none"]


@pytest.mark.parametrize("name", ["split", "packed", "gate last"])
def test_a_gated_unit_in_one_call(monkeypatch, name):
    """With the operands that the module's formula names, where a backend has such a kernel."""
    mlp = pytest.importorskip("timm.layers.mlp")

    from elsa_core.ops.linear.record import plain_gated as plain

    torch.manual_seed(0)
    model = {
        "split": mlp.SwiGLU(8, 12),
        "packed": mlp.SwiGLUPacked(8, 24),
        "gate last": mlp.GluMlp(8, 24, act_layer=nn.SiLU, gate_last=True),
    }[name].eval()
    model = nn.Sequential(model)
    x, calls = torch.randn(3, 8), []

    def serve(*given):
        calls.append(given)
        return plain(*given)

    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        torch.testing.assert_close(model(x), wanted)
        monkeypatch.setitem(dispatch.SERVING, ("gated_linear", "cpu", "auto"), (serve,))
        torch.testing.assert_close(model(x), wanted)
        assert len(calls) == 1
        model[0].act.register_forward_hook(lambda *seen: None)
        torch.testing.assert_close(model(x), wanted)
        assert len(calls) == 1  # a hook sees what is between
    model[0].act._forward_hooks.clear()
    model[0](x).sum().backward()  # composed, where a gradient is wanted
    assert len(calls) == 1 and all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_a_patch_embedding_is_a_product(bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 10, (4, 2), (4, 2), bias=bias)
    model = nn.Sequential(conv)
    assert elsa.patch(model, scope="model").patched[0].kind == "patch-embedding"
    plain = torch.randn(2, 3, 13, 9)  # what does not fill a window is left out
    for x in (plain, plain.to(memory_format=torch.channels_last), plain[0], plain[:, :, 1:, 1:]):
        exact = functional.conv2d(
            x.double(), conv.weight.double(), None if conv.bias is None else conv.bias.double(),
            conv.stride,
        )  # fmt: skip
        out = model(x)
        assert out.shape == exact.shape
        peer = (functional.conv2d(x, conv.weight, conv.bias, conv.stride) - exact).norm()
        assert (out - exact).norm() <= 2 * peer + 1e-7 * exact.norm()
    x = plain.double().requires_grad_()
    assert torch.autograd.gradcheck(model.double(), x)


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(4, 4, 3, 2), nn.Conv2d(4, 4, 2, 2, padding=1), nn.Conv2d(4, 4, 2, 2, groups=2),
     nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 2, 2, dilation=2)],
)  # fmt: skip
def test_other_convolutions_are_no_sites(conv):
    assert find_sites(nn.Sequential(conv), "model") == ()


@pytest.mark.parametrize("scope", ["model", "attention"])
def test_a_plan_knows_the_scope(tmp_path, scope):
    model = vit()
    wanted = model(image())
    report = elsa.patch(model, scope=scope, exclude="head" if scope == "model" else ())
    plan, classes = plan_of(report), [type(m) for m in model.modules()]
    elsa.unpatch(model)
    again = apply_plan(model, plan, tmp_path)
    assert plan.scope == again.scope == scope and again.patched == report.patched
    assert [type(m) for m in model.modules()] == classes
    torch.testing.assert_close(model(image()), wanted)
    if scope == "attention":
        assert plan.sites == ("blocks.0.attn", "blocks.1.attn")
        return
    # a profile's plan has one row for attention and its projections
    bare = dataclasses.replace(plan, sites=("blocks.0.attn", "blocks.1.mlp"), exclude=())
    elsa.unpatch(model)
    paths = [site.path for site in apply_plan(model, bare, tmp_path).patched]
    assert paths == ["blocks.0.attn", "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.1.mlp"]


def test_a_plan_of_no_scope(tmp_path):
    model = vit()
    content = plan_of(elsa.patch(model)).to_dict()
    file = tmp_path / "elsa_plan.json"
    del content["scope"]  # as elsa wrote it before there were scopes
    file.write_text(json.dumps(content))
    assert read_plan(file).scope == "attention"
    file.write_text(json.dumps(content | {"scope": ["model"]}))
    with pytest.raises(ModelError, match="scope"):
        read_plan(file)
