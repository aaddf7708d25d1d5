"""`patch(model, offload="host")`: what a backward needs is kept in host memory."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading import load, save
from elsa_core.offload import activations
from elsa_core.patching import require_shardable
from elsa_core.patching.adapters import hooks


def vit(**given: object) -> VisionTransformer:
    torch.manual_seed(0)
    terms = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return VisionTransformer(**terms | given, num_classes=5).eval()


def image(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, call: Any = None) -> list[Tensor]:
    """The output of a call, by default the model itself, and the gradients of all parameters."""
    model.zero_grad()
    out = (model if call is None else call)(image())
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def on_host(model: nn.Module) -> activations.SavedOnHost:
    """As if all tensors of 64 bytes were on a device."""
    return activations.SavedOnHost(model, lambda tensor: True, 64)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_without(checkpointed: bool) -> None:
    model = vit()
    model.set_grad_checkpointing(checkpointed)
    elsa.patch(model)
    expected = step(model)
    with on_host(model):
        found = step(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_parameters_stay_and_broadcast_dims_are_not_copied() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(4, 64, requires_grad=True)
    wide = torch.randn(1, 64).expand(4, 64)
    with on_host(layer):
        out, product = layer(x), x * wide
    weight, mine = out.grad_fn._raw_saved_mat2.data, out.grad_fn._raw_saved_mat1.data
    assert weight.device is None and mine.device is not None
    assert mine.tensor.data_ptr() != x.data_ptr()
    assert product.grad_fn._raw_saved_other.data.tensor.shape == (1, 64)
    product.sum().backward()
    assert torch.equal(x.grad, wide)


def test_on_a_cpu_nothing_moves_and_a_late_write_is_noticed() -> None:
    model = vit()
    elsa.patch(model)
    expected = step(model)
    elsa.patch(model, offload="host")
    assert all(torch.equal(a, b) for a, b in zip(step(model), expected, strict=True))
    out = model(image())
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_unpatch_copies_and_another_patch() -> None:
    model = vit()
    before, cls = model.state_dict(), type(model)
    report = elsa.patch(model, offload="host")
    assert report.offload == report.to_dict()["offload"] == "host"
    assert report.summary().title.endswith("offload host")
    expected = step(model)
    assert list(model.state_dict()) == list(before)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(step(each), expected, strict=True))
        assert any("elsa_offload" in vars(m) for m in each.modules())
        elsa.patch(each)  # without offload
        step(each)
        assert not any("elsa_offload" in vars(m) for m in each.modules())
    elsa.unpatch(model)
    step(model)
    assert type(model) is cls
    assert not any(name.startswith("elsa") for m in model.modules() for name in vars(m))


def test_compilers() -> None:
    model = vit(depth=1)
    elsa.patch(model, offload="host")
    expected = step(model)
    torch.compiler.reset()
    found = step(model, torch.compile(model, backend="aot_eager"))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.compiler.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph=True out"):
        whole(image())
    with torch.no_grad():
        torch.testing.assert_close(whole(image()), expected[0])
    torch.testing.assert_close(
        torch.export.export(model, (image(),)).module()(image()), expected[0]
    )
    torch.compiler.reset()


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="offload='disk': offload must be 'host'"):
        elsa.patch(vit(), offload="disk")
    with pytest.raises(ArgumentError, match="offload and mesh exclude each other"):
        elsa.patch(vit(), offload="host", mesh=object())
    site = Attention(32, num_heads=2)
    with pytest.raises(ArgumentError, match="cannot change the class of Attention"):
        elsa.patch(site, offload="host")
    assert type(site) is Attention
    naflex = timm.create_model("naflexvit_base_patch16_gap", embed_dim=64, depth=1, num_heads=2)
    with pytest.raises(ArgumentError, match="cannot change the class of NaFlexVit"):
        elsa.patch(naflex, offload="host")
    model = vit()
    elsa.patch(model, offload="host")
    with pytest.raises(ModelError, match="patched with offload"):
        require_shardable(model)


def test_a_saved_model_keeps_it(tmp_path) -> None:
    loaded = elsa.loading.load_model("vit_tiny_patch16_224", image_size=32)
    report = elsa.patch(loaded.model, offload="host")
    save(loaded, report, tmp_path / "saved")
    model = load(str(tmp_path / "saved"))
    assert vars(model)["elsa_offload"] == "host"
    step(model)


def test_which_attention_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    x, site = torch.zeros(1, 1, 3, 4), SimpleNamespace(elsa_offload="host", elsa_backend="auto")
    with torch.no_grad():
        assert not activations.streams(site, x, x, None, 0.0)  # there is no GPU
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        seen, bias = torch.ones(3, 3, dtype=torch.bool), torch.zeros(3, 3)
        assert activations.streams(site, x, x, None, 0.0)
        assert activations.streams(site, x, x, seen, 0.0)
        assert not activations.streams(site, x, x, bias, 0.0)
        assert not activations.streams(site, x, x, None, 0.1)
        assert not activations.streams(site, x.to("meta"), x, None, 0.0)
        assert not activations.streams(SimpleNamespace(elsa_backend="native"), x, x, None, 0.0)
        site.elsa_sparsity = "exact"
        assert not activations.streams(site, x, x, None, 0.0)
        del site.elsa_sparsity
    assert not activations.streams(site, x, x, None, 0.0)  # gradients may be wanted


def test_a_compiled_program_sees_what_was_noted_since() -> None:
    """A compiler guards no key of a `__dict__`."""

    def read(module: nn.Module, x: Tensor) -> Tensor:
        return x if hooks.noted(module, "elsa_offload") is None else 2 * x

    torch.compiler.reset()
    module, x = nn.Identity(), torch.ones(2)
    compiled = torch.compile(read, backend="eager", fullgraph=True)
    assert torch.equal(compiled(module, x), x)
    module.__dict__["elsa_offload"] = "host"
    assert torch.equal(compiled(module, x), 2 * x) and torch.equal(read(module, x), 2 * x)
