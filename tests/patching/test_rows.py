"""Patched blocks as functions in a row: what their modules compute, or nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core.patching.adapters import flat, handing, host, rows

timm = pytest.importorskip("timm")

from timm.models.swin_transformer import SwinTransformerBlock  # noqa: E402
from timm.models.vision_transformer import Block  # noqa: E402

VARIANTS = {
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "scaled": {"init_values": 0.5, "qkv_bias": False},
    "normed": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "tanh": {"act_layer": lambda: nn.GELU(approximate="tanh")},
}


SWIN = {
    "plain": {},
    "shifted": {"shift_size": 2},
    "padded": {"input_resolution": (7, 9), "shift_size": 1},
    "no bias": {"qkv_bias": False},
}


@pytest.fixture
def large(on_gpu, monkeypatch):
    """No call is small; the model with one block, and the tokens that rows computed."""
    monkeypatch.setattr(host.routing, "eager_least", lambda *_: 0)
    seen, by_row = [], rows.by_row

    def noted(module, x):
        out = by_row(module, x)
        seen.append(out is not None)
        return out

    monkeypatch.setattr("elsa_core.patching.adapters.timm_blocks.by_row", noted)
    return seen


def block(**options):
    torch.manual_seed(0)
    made = Block(24, 3, **{"qkv_bias": True, **options}).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    holder = nn.Sequential(made)
    elsa.patch(holder, scope="model")
    return holder


def swin(training=False, **options):
    torch.manual_seed(0)
    options = {"input_resolution": (8, 8), "window_size": 4, **options}
    made = SwinTransformerBlock(24, num_heads=3, **options).train(training)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    holder = nn.Sequential(made)
    elsa.patch(holder, scope="model")
    return holder, torch.randn(2, *options["input_resolution"], 24)


@pytest.fixture
def swin_rows(large, monkeypatch):
    """Whether rows computed each call of a Swin block."""
    seen, row_of = [], rows.row_of

    def noted(module, read, x):
        out = row_of(module, read, x)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(rows, "row_of", noted)
    monkeypatch.setattr(host.routing, "trains_original", lambda *_: False)
    return seen


def tokens():
    return torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))


def by_modules(model, x):
    """The patched model's forward without rows: a hook that changes nothing is seen."""
    handle = model[0].norm1.register_forward_hook(lambda *_: None)
    try:
        return model(x)
    finally:
        handle.remove()


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_rows_compute_what_the_modules_do(large, options):
    model, x = block(**options), tokens()
    with torch.no_grad():
        expected = by_modules(model, x)
        assert large == [False]
        assert torch.equal(model(x), expected) and large[-1]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("unfused", [False, True])
def test_gradients_are_the_modules(large, options, unfused):
    model = block(**options).train()
    model[0].attn.fused_attn = not unfused
    grads = []
    for forward in (by_modules, lambda model, x: model(x)):
        model.zero_grad()
        x = tokens().requires_grad_()
        forward(model, x).square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    assert large == [False, True]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", SWIN.values(), ids=SWIN)
@pytest.mark.parametrize("training", [False, True])
def test_swin_rows_compute_what_the_modules_do(swin_rows, options, training):
    model, x = swin(training, **options)
    grads = []
    for forward in (by_modules, lambda model, x: model(x)):
        model.zero_grad()
        given = x.clone().requires_grad_()
        out = forward(model, given)
        out.square().sum().backward()
        grads.append([out, given.grad, *(p.grad.clone() for p in model.parameters())])
    assert swin_rows == [False, True]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(model(x), by_modules(model, x))
    assert swin_rows == [False, True, True, False]


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_paths_are_dropped_as_by_the_modules(large, swin_rows, kind):
    if kind == "vit":
        model, x = block(drop_path=0.5, init_values=0.5).train(), tokens().repeat(4, 1, 1)
    else:
        model, x = swin(training=True, drop_path=0.5)
    outs = []
    for forward in (by_modules, lambda model, x: model(x)):
        torch.manual_seed(4)
        outs.append(forward(model, x))
    seen = large if kind == "vit" else swin_rows
    assert seen[-1] and not seen[0] and torch.equal(*outs)
    assert not torch.equal(outs[0], model.eval()(x))


def test_weights_are_read_at_each_call(large):
    model, x = block(init_values=0.5), tokens()
    with torch.no_grad():
        model(x)
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        assert torch.equal(model(x), by_modules(model, x))
        elsa.freeze(model)
        assert torch.equal(model(x), by_modules(model, x))


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.attn.proj.register_forward_pre_hook(lambda *_: None),
        lambda b: b.mlp.act.register_full_backward_hook(lambda *_: None),
        lambda b: setattr(b.mlp, "act", nn.Tanh()),
        lambda b: setattr(b.attn, "qkv", nn.Linear(24, 72)),
        lambda b: setattr(b.mlp, "fc2", nn.Sequential(b.mlp.fc2)),
        lambda b: setattr(b.attn, "elsa_precision", "ieee"),
        lambda b: elsa.unpatch(b.mlp),
        lambda b: (b.train(), setattr(b.attn.proj_drop, "p", 0.5)),
        lambda b: (b.train(), setattr(b.attn.attn_drop, "p", 0.5)),
    ],
    ids=["hook", "backward", "act", "layer", "chain", "named", "unpatched", "drops", "weights"],
)
def test_a_block_of_other_parts_is_called(large, change):
    model = block()
    model(tokens())
    assert large.pop()
    change(model[0])
    model(tokens())
    assert large == [False]


def test_what_rows_do_not_take(large, monkeypatch):
    model, x = block(), tokens()
    with torch.no_grad():
        model[0](x, torch.zeros(7, 7))
        assert large == []
        with monkeypatch.context() as patch:
            patch.setattr(torch, "is_autocast_enabled", lambda *_: True)
            assert rows.by_row(model[0], x) is None
        assert rows.by_row(model[0], x) is not None
        with handing.left_out(handing.ACTIVATION):
            model(x)
        assert large == [False]
        assert rows.by_row(model[0], x[0]) is None
    elsa.patch(alone := nn.Sequential(Block(24, 3)).eval(), scope="attention")
    with torch.no_grad():
        alone(x)
    assert large == [False]


def test_a_reading_ends_with_its_block(large):
    model = block()
    model(tokens())
    keys = [key for key in flat._READINGS if key[1] is rows.block]
    del model
    assert keys and not [key for key in flat._READINGS if key in keys]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compilers_and_tracers_see_the_modules():
    model, x = block(), tokens()
    with torch.no_grad():
        expected = model(x)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)


def test_a_scale_that_is_no_parameter_any_more_counts(large):
    model, x = block(init_values=0.5), tokens()
    with torch.no_grad():
        expected = model(x)
        for scale in (model[0].ls1, model[0].ls2):
            gamma = scale.gamma.data
            del scale.gamma
            scale.register_buffer("gamma", gamma)
        large.clear()
        torch.testing.assert_close(model(x), expected)
    assert large == [False]


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_monte_carlo_dropout_drops(large, swin_rows, kind):
    """Weights are dropped by the dropout's own mode where attention is not fused."""
    if kind == "vit":
        model, x = block(attn_drop=0.9), tokens()
    else:
        model, x = swin(attn_drop=0.9)
    model[0].attn.fused_attn = False
    model[0].attn.attn_drop.train()
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))
    assert not any(large) and not any(swin_rows)


def test_a_hook_that_holds_the_model_leaves_it_mortal(large):
    class Extractor:
        def __init__(self, model):
            self.model = model
            model[0].attn.register_forward_hook(self.take)

        def take(self, *_):
            pass

    model = block()
    model(tokens())
    extractor = Extractor(model)
    model(tokens())
    seen = weakref.ref(model[0])
    del model, extractor
    gc.collect()
    assert seen() is None
