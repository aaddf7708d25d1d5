"""Small calls on a GPU of which some sites keep their originals and others do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core.patching.adapters import host, timm_mlp
from elsa_core.patching.rewrite import original

timm = pytest.importorskip("timm")


def images(batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def call(model, asked, x=None):
    asked.clear()
    with torch.no_grad():
        return model(images() if x is None else x)


def with_own(model):
    return {name for name, m in model.named_modules() if "forward" in vars(m)}


@pytest.fixture
def large(monkeypatch):
    """Sites are large from this many multiply-adds on."""
    least = [0]
    monkeypatch.setattr(host.routing, "eager_least", lambda *_: least[0])
    return least


@pytest.fixture
def model(on_gpu, large):
    """ConViT, whose MLPs are large, after two calls of a kind."""
    torch.manual_seed(0)
    options = {"depth": 2, "img_size": 32, "embed_dim": 6, "num_heads": 2, "local_up_to_layer": 1}
    made = timm.create_model("convit_tiny", num_classes=5, **options).eval()
    elsa.patch(made, scope="model")
    tokens, width = 5, made.embed_dim
    large[0] = 2 * tokens * width * 2 * width + 1  # 2 images; an MLP has 4 * width
    for _ in range(2):
        call(made, on_gpu)
    assert True in on_gpu and False in on_gpu
    return made


def during(model):
    """What modules have methods of their own within a call."""
    seen = set()
    handle = model.norm.register_forward_hook(lambda *_: seen.update(with_own(model)))
    with torch.no_grad():
        model(images())
    handle.remove()
    return seen


def test_no_site_asks_any_more(model, on_gpu, monkeypatch):
    products = []
    own = timm_mlp.project
    monkeypatch.setattr(timm_mlp, "project", lambda *g, **k: products.append(1) or own(*g, **k))
    found = call(model, on_gpu)
    assert not on_gpu and len(products) == 4  # of the MLPs, which are elsa's
    with torch.no_grad(), original(model):
        torch.testing.assert_close(found, model(images()))


def test_nothing_is_put_within_those_that_ask(model):
    seen = during(model)
    assert "head" in seen and any(".attn" in name for name in seen)
    assert not any("mlp" in name for name in seen)
    assert not with_own(model)


def test_layers_of_an_attention_that_asks(on_gpu, monkeypatch):
    """One that asks may take a layer with a forward of its own for one that must be called."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.norm = timm.models.pvt_v2.Attention(24, 3), nn.Linear(24, 24)

        def forward(self, x):
            return self.norm(self.attn(x.flatten(2)[..., :24], (3, 1)))

    monkeypatch.setattr(host.routing, "eager_least", lambda op, _: 10**9 * (op == "linear"))
    model = Attends().eval()
    elsa.patch(model, scope="model")
    for _ in range(3):
        call(model, on_gpu)
    assert on_gpu.count(True) == 3 and on_gpu.count(False) == 1  # q, kv, proj and the attention
    assert during(model) == {"norm"}


def test_weights_hooks_and_names_given_since(model, on_gpu):
    seen, expected = [], call(model, on_gpu)
    model.head.weight.data.mul_(2)
    model.head.bias.data.mul_(2)
    torch.testing.assert_close(call(model, on_gpu), 2 * expected)
    handle = model.head.register_forward_hook(lambda *_: seen.append(1))
    call(model, on_gpu)
    assert seen == [1]
    handle.remove()
    model.head.elsa_precision = "ieee"
    assert "head" not in during(model)


def test_with_gradients_all_ask(model, on_gpu):
    for _ in range(4):
        on_gpu.clear()
        model(images())
        assert True in on_gpu


def test_an_error_leaves_nothing(model, on_gpu):
    def fails(*_):
        raise ValueError("a hook's")

    model.norm.register_forward_hook(fails)
    with pytest.raises(ValueError, match="a hook's"):
        call(model, on_gpu)
    assert not with_own(model)


def test_a_module_called_in_two_ways_goes_on_asking(on_gpu, large):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x), self.layer(x[:, :1]), self.other(x[:, :1])

    model = Twice().eval()
    elsa.patch(model, scope="model")
    large[0] = 200
    x = torch.randn(2, 3, 8)
    for _ in range(2):
        call(model, on_gpu, x)
    assert sorted(on_gpu) == [False, True, True]
    call(model, on_gpu, x)
    assert sorted(on_gpu) == [False, True]


def test_a_model_within_is_not_asked_for_by_the_one_around(on_gpu, large):
    """Of sites that were settled for the model around it, one within once said that all kept their
    originals: its next calls of that kind gave the large ones to these too."""

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 800)

        def forward(self, x):
            return self.large(self.small(x))

    large[0] = 10_000
    tower, x = Tower().eval(), torch.randn(2, 3, 8)
    elsa.patch(tower, scope="model")
    for _ in range(2):
        with torch.no_grad():
            host.with_settled(frozenset({id(tower.large)}), tower, x)
        assert on_gpu == [True, False]
        on_gpu.clear()


@pytest.mark.parametrize("work", [0, 1 << 62])
def test_a_trace_within_a_settled_call(on_gpu, large, work):
    """It records what one within any other call does."""

    class Traces(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            options = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "num_classes": 0}
            name = "beit_base_patch16_224" if work == 0 else "vit_tiny_patch16_224"
            self.tower = timm.create_model(name, depth=1, **options)
            self.traced = None

        def forward(self, x):
            if self.traced is True:
                self.traced = torch.jit.trace(self.tower.blocks[0], x, check_trace=False)
            return self.tower.blocks[0](x)

    def recorded(calls):
        model = Traces().eval()
        elsa.patch(model, scope="model")
        for _ in range(calls):
            call(model, on_gpu, x)
        model.traced = True
        call(model, on_gpu, x)
        return [node.kind() for node in model.traced.inlined_graph.nodes()]

    large[0], x = work, torch.randn(2, 5, 24)
    assert recorded(3) == recorded(0)
