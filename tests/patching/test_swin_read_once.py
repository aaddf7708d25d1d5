"""The attention of a Swin block whose modules were read once: what its modules compute, or they."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core import calls, routing
from elsa_core.patching.adapters import handing, host, timm_swin
from elsa_core.patching.adapters.derived import DERIVED

pytest.importorskip("timm")

from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention

OPTIONS = {
    "plain": {},
    "shifted": {"shift_size": 2},
    "padded": {"input_resolution": (7, 9), "shift_size": 1},
    "no bias": {"qkv_bias": False},
    "dropping": {"shift_size": 2, "attn_drop": 0.3, "proj_drop": 0.3},
}


def block(scope="attention", **options):
    torch.manual_seed(0)
    options = {"input_resolution": (8, 8), "window_size": 4, **options}
    made = SwinTransformerBlock(24, num_heads=3, **options).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    holder = nn.Sequential(made)
    elsa.patch(holder, scope=scope)
    return holder[0], torch.randn(2, *options["input_resolution"], 24)


@pytest.fixture
def asked(on_gpu, monkeypatch):
    """The calls whose modules were asked."""
    found, ask = [], timm_swin.ElsaSwinTransformerBlock._elsa_attn

    def noted(self, *given):
        found.append(given)
        return ask(self, *given)

    monkeypatch.setattr(timm_swin.ElsaSwinTransformerBlock, "_elsa_attn", noted)
    return found


def warm(site, x):
    """What the modules give; later calls need not ask them."""
    with torch.no_grad():
        expected = site._attn(x)
        assert torch.equal(site._attn(x), expected)
    return expected


@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_later_calls_compute_the_same(options, scope, asked):
    site, x = block(scope, **options)
    expected = warm(site, x)
    assert len(asked) == 1
    torch.testing.assert_close(site.elsa_base._attn(site, x), expected, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        assert torch.equal(site._attn(x), expected)
        warm(site, torch.cat((x, x)))
    assert len(asked) == 2


def scaled(tensor):
    with torch.no_grad():
        tensor.mul_(1.5)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled(layer):
    made = Doubled(layer.in_features, layer.out_features)
    made.load_state_dict(layer.state_dict())
    return made


def with_tensor(site):
    weight = site.attn.proj.weight.detach() * 2
    del site.attn.proj.weight
    site.attn.proj.weight = weight


def hide(module, name):
    """Put an attribute in front of a parameter, which stays."""
    vars(module)[name] = getattr(module, name).detach() * 2


def with_attention(site):
    """Another attention, whose weights are others."""
    site.attn = copy.deepcopy(site.attn)
    scaled(site.attn.qkv.weight)


# What is changed, and whether the modules must be asked.
CHANGES = {
    "weight in place": (lambda s: scaled(s.attn.qkv.weight), False),
    "data": (lambda s: s.attn.proj.weight.data.mul_(2), False),
    "bias in place": (lambda s: scaled(s.attn.proj.bias), False),
    "projection's bias": (lambda s: scaled(s.attn.qkv.bias), False),
    "table": (lambda s: scaled(s.attn.relative_position_bias_table), False),
    "index": (lambda s: s.attn.relative_position_index.copy_(
        s.attn.relative_position_index.flip(0)), False),
    "parameter": (lambda s: setattr(
        s.attn.qkv, "weight", nn.Parameter(s.attn.qkv.weight.flip(0))), False),
    "state": (lambda s: s.load_state_dict(
        {k: v * 2 if v.is_floating_point() else v for k, v in s.state_dict().items()}), False),
    "no parameter": (with_tensor, True),
    "hidden weight": (lambda s: hide(s.attn.proj, "weight"), True),
    "hidden bias": (lambda s: hide(s.attn.qkv, "bias"), True),
    "hidden table": (lambda s: (hide(s.attn, "relative_position_bias_table"), DERIVED.drop(s)),
                     True),
    "layer": (lambda s: setattr(s.attn, "proj", doubled(s.attn.proj)), True),
    "class": (lambda s: setattr(s.attn.proj, "__class__", Doubled), True),
    "attention": (with_attention, False),
    "shift": (lambda s: setattr(s, "shift_size", (1, 3)), False),
    "window": (lambda s: s.set_input_size((8, 8), (2, 2)), False),
    "scale": (lambda s: (setattr(s.attn, "scale", 0.7), setattr(s.attn, "fused_attn", False)),
              False),
    "frozen": (elsa.freeze, False),
    "names": (lambda s: setattr(s, "elsa_backend", "eager"), True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_followed(name, asked):
    change, must_ask = CHANGES[name]
    site, x = block(shift_size=2)
    before = warm(site, x)
    asked.clear()
    change(site)
    with torch.no_grad():
        found = site._attn(x)
        assert len(asked) == must_ask
        calls.forget_kinds()
        expected = site._attn(x)
        assert len(asked) == must_ask + 1
    assert torch.equal(found, expected)
    if name not in ("frozen", "names"):
        assert not torch.allclose(found, before, rtol=1e-2, atol=1e-2)


PARTS = ["attn", "attn.qkv", "attn.proj", "attn.proj_drop", "attn.attn_drop", "attn.softmax"]
HOOKS = ["register_forward_hook", "register_forward_pre_hook"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("part", PARTS)
def test_hooks_are_called(part, hook, asked):
    site, x = block(shift_size=2)
    site.attn.fused_attn = False  # whose softmax is called
    warm(site, x)
    seen = []
    handle = getattr(site.get_submodule(part), hook)(lambda *_: seen.append(part))
    with torch.no_grad():
        site._attn(x)
        assert seen
        handle.remove()
        warm(site, x)
    assert len(seen) == 1
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("any"))
    try:
        with torch.no_grad():
            site._attn(x)
    finally:
        handle.remove()
    assert seen[1:]


def test_a_forward_of_ones_own_is_called(asked, monkeypatch):
    site, x = block()
    warm(site, x)
    for part in (site.attn.proj, site.attn):
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(part, "forward", lambda x, *_, **named: torch.zeros_like(x))
            assert not site._attn(x).any()
    assert len(asked) == 3


def test_dropout_in_training(asked):
    """Of the block, of its attention, of a dropout alone."""
    site, x = block(attn_drop=0.5, proj_drop=0.5)
    expected = warm(site, x)
    for part in (site, site.attn, site.attn.proj_drop, site.attn.attn_drop):
        site.attn.fused_attn = part is not site.attn.attn_drop
        part.train()
        asked.clear()
        with torch.no_grad():
            assert not torch.equal(site._attn(x), expected)
        assert len(asked) == 1
        site.eval()
    site.attn.fused_attn = True
    assert torch.equal(warm(site, x), expected)


@contextmanager
def handed():
    with handing.Handing(None, torch.zeros(1), None):
        yield


AROUND = {
    "gradient": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "residual": handed,
}


@pytest.mark.parametrize("name", AROUND)
def test_calls_whose_modules_are_asked(name, asked):
    site, x = block()
    warm(site, x)
    asked.clear()
    with torch.no_grad(), AROUND[name]():
        site._attn(x)
    assert len(asked) == 1


def test_graphs_large_calls_transforms_and_what_was_forgotten(asked, monkeypatch):
    site, x = block()
    warm(site, x)
    asked.clear()
    with torch.no_grad():
        with monkeypatch.context() as patched:
            patched.setattr(host, "_capturing", lambda: True)
            site._attn(x)
        with monkeypatch.context() as patched:
            patched.setattr(routing, "eager_least", lambda *_: 0)
            site._attn(x)
        torch.func.vmap(site._attn)(x[:, None])
        assert len(asked) == 3
        calls.forget_kinds()
        warm(site, x)
        assert len(asked) == 4
        with routing.unmeasured("norm"):
            site._attn(x)
        assert len(asked) == 5


def test_the_originals_calls_stay_so(asked, monkeypatch):
    """No kernel of elsa's serves the windows: nothing is read."""
    site, x = block()
    monkeypatch.setattr(timm_swin, "keeps_original", lambda *given: True)
    warm(site, x)
    with torch.no_grad():
        site._attn(x)
    assert len(asked) == 3


def test_heads_of_another_length_are_asked_about(asked):
    """One call may be a kernel's where that of a block with as many, longer heads is not."""
    one, other = block(), block(head_dim=4)
    warm(*one)
    warm(*other)
    assert len(asked) == 2


def test_copies_follow_their_own_weights(asked):
    site, x = block(shift_size=2)
    expected = warm(site, x)
    for made in (copy.deepcopy(site), pickle.loads(pickle.dumps(site))):
        scaled(made.attn.proj.weight)
        with torch.no_grad():
            assert not torch.allclose(made._attn(x), expected)
            assert torch.equal(site._attn(x), expected)
    assert type(site.attn) is WindowAttention and len(asked) == 1
