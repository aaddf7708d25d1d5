"""Eager calls that wait for the host: the original forward of a block, and of all within it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core import calls
from elsa_core.patching.adapters import (
    common,
    host,
    timm_attention,
    timm_blocks,
    timm_mlp,
    torch_layers,
)
from elsa_core.patching.rewrite import original

timm = pytest.importorskip("timm")
ADAPTERS = (timm_attention, timm_blocks, timm_mlp, torch_layers)


@pytest.fixture
def block():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64).eval()
    elsa.patch(model, scope="model")
    return model.blocks[0]


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors say that they lie on a GPU where the question is who waits."""
    monkeypatch.setattr(host, "_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(calls, "_KINDS", set())

    def asked(site, operator, x, work, by_elsa, form=None):
        class Shown:
            is_cuda, is_nested, dtype, shape = True, False, x.dtype, x.shape
            get_device = staticmethod(lambda: 0)

        return host.is_host_bound(site, operator, Shown, work, by_elsa)

    for adapter in ADAPTERS:
        monkeypatch.setattr(adapter, "is_host_bound", asked)


def test_a_block_that_waits_is_the_original(block, on_gpu, monkeypatch):
    x = torch.randn(2, 17, 192)
    with torch.inference_mode(), original(block):
        expected = block(x)
    products = []
    monkeypatch.setattr(torch_layers, "served", lambda *given: products.append("layer"))
    own = common.served
    monkeypatch.setattr(common, "served", lambda *g, **k: products.append("site") or own(*g, **k))
    with torch.inference_mode():
        assert torch.equal(block(x), expected)
        assert products.count("site") >= 4  # the first call loads what a graph will need
        products.clear()
        assert torch.equal(block(x), expected)
    assert not products


def test_what_was_named_is_kept(block, on_gpu):
    elsa.patch(block, precision="ieee", include="attn")
    assert host.is_within_original(block.attn) is False

    class Outer(nn.Module):
        def forward(self, site):
            return torch.tensor(host.is_within_original(site))

    assert not host.all_original(Outer(), block.attn)
    assert host.all_original(Outer(), block.mlp)
    assert not host.is_within_original(block.mlp)


def test_the_mark_ends_with_an_error(block):
    def fails():
        raise ValueError

    with pytest.raises(ValueError):
        host.all_original(fails)
    assert not host.is_within_original(block.mlp)


def test_hooks_see_a_call_once(block, on_gpu):
    seen = []
    block.norm1.register_forward_hook(lambda *given: seen.append("norm1"))
    block.mlp.act.register_forward_hook(lambda *given: seen.append("act"))
    with torch.inference_mode():
        for _ in range(2):
            block(torch.randn(2, 17, 192))
    assert seen == ["norm1", "act"] * 2


class Counted(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize("why", ["ranks", "dropout", "nothing"])
def test_what_a_warm_up_would_disturb(block, on_gpu, why):
    """Ranks whose first calls differ would wait for each other; dropout would draw twice."""
    block.mlp.drop1 = block.attn.q_norm = counted = Counted().eval()
    if why == "ranks":
        block.attn.elsa_group = block.mlp.elsa_group = "a group"
    counted.training = why == "dropout"  # Monte Carlo dropout
    with torch.inference_mode():
        block(torch.randn(2, 17, 192))
    assert (counted.calls == 2) == (why != "nothing")


def test_a_warm_up_that_fails_leaves_the_call_to_the_original(block, on_gpu, monkeypatch, caplog):
    """It is for a graph that may never come: what is not there, memory say, ends no call."""
    x = torch.randn(2, 17, 192)
    with torch.inference_mode(), original(block):
        expected = block(x)

    def fails(*given, **named):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(common, "served", fails)
    with torch.inference_mode(), caplog.at_level("INFO", logger="elsa"):
        assert torch.equal(block(x), expected)
        said = [r.getMessage().partition(": ")[2] for r in caplog.records]
        assert said and set(said) == {"no compiler"}
        assert torch.equal(block(x), expected)
    assert len(caplog.records) == len(said), "it was tried again"
    assert not host.is_within_original(block.mlp)


def test_dropout_draws_as_often_as_the_original(on_gpu):
    drawn = []
    for scope in ("", "model"):
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", depth=1, img_size=64, drop_path_rate=0.5, proj_drop_rate=0.3
        ).train()
        if scope:
            elsa.patch(model, scope=scope)
        torch.manual_seed(1)
        model.blocks[0](torch.ones(4, 17, 192))
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("scope", "question"),
    [
        ("model", ("linear", 4 * 2 * 17 * 192 * 192)),
        ("attention", ("attention", 2 * 17 * 192 * 17)),
    ],
)
def test_a_block_asks_for_its_largest_call(scope, question, monkeypatch):
    """The largest product of its MLP; where attention alone is patched, queries by keys."""
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64).eval()
    elsa.patch(model, scope=scope)
    asked = []

    def is_host_bound(site, operator, x, work, by_elsa):
        asked.append((operator, work))
        return True

    monkeypatch.setattr(timm_blocks, "is_host_bound", is_host_bound)
    monkeypatch.setattr(timm_blocks, "all_original", lambda forward, x, terms: x)
    model.blocks[0](torch.randn(2, 17, 192).as_subclass(OnGpu))
    assert asked == [question]
