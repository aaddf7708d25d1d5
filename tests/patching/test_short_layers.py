"""Which calls of patched linear layers ask the CUDA library ahead of all other questions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import elsa_core as elsa
from elsa_core import routing, short_calls
from elsa_core.patching.adapters import handing, host, torch_layers


@pytest.fixture
def served(on_gpu, monkeypatch):
    """The arguments of calls that the library was asked for; each gives its bias."""
    found = []

    def serve(*arguments):
        found.append(arguments)
        return arguments[2].detach()

    monkeypatch.setattr(short_calls.LINEAR, "serve", serve)
    monkeypatch.setattr(routing, "eager_least", lambda *_: 2 * 9 * 8 * 8)
    return found


def layer(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    elsa.patch(model, scope="model", **options)
    return model[0], torch.randn(2, 9, 8)


def test_large_calls_of_the_weights_as_they_are(served, on_gpu):
    site, x = layer()
    with torch.inference_mode():
        site(x)
    site.weight = nn.Parameter(torch.ones(8, 8))
    other = copy.deepcopy(site)
    with torch.no_grad():
        for each in (site, other):
            each(x)
    terms = ("none", None, None, "strict", None, None)
    assert [given[3:] for given in served] == [terms] * 3
    assert [given[1] for given in served[1:]] == [site.weight, other.weight]
    assert served[0][1] is not site.weight and on_gpu == [False] * 3  # told the model around


def test_what_is_handed_to_another_layer_is_no_matter(served, on_gpu, monkeypatch):
    site, x = layer()
    monkeypatch.setattr(torch_layers, "is_host_bound", None)  # a later question
    with torch.no_grad(), handing.Handing(nn.Identity(), torch.ones(2, 9, 8), None) as handed:
        site(x)
    assert len(served) == 1 and not handed.taken and on_gpu == [False]


def test_open_lengths_are_not_compared(served):
    """A tracer of symbolic lengths raised, or guarded on them, once a call had been admitted."""
    site, _ = layer()
    env = ShapeEnv()
    with torch.no_grad(), FakeTensorMode(shape_env=env, allow_non_fake_inputs=True):
        rows = env.create_unbacked_symint()
        torch._check(rows >= 1)
        site(torch.empty(rows, 9, 8))
    assert not served


def test_an_attribute_in_front_of_a_parameter_is_what_is_read(served, monkeypatch):
    site, x = layer()
    monkeypatch.setattr(short_calls, "product", lambda *given: None)
    vars(site)["weight"] = 2 * site.weight.detach()
    with torch.no_grad():
        assert site._elsa_short(x) is None
        torch.testing.assert_close(site(x), nn.functional.linear(x, site.weight, site.bias))


def test_what_else_asks_further(served, monkeypatch):
    site, x = layer()
    weight, bias = site.weight.detach(), site.bias.detach()
    expected = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(site(x), expected)  # a gradient
    with torch.no_grad():
        torch.testing.assert_close(site(x[:1]), expected[:1])  # small
        torch.testing.assert_close(host.all_original(site, x), expected)
        with handing.Handing(site, torch.ones(2, 9, 8), None) as handed:
            found = site(x)
        assert not served or handed.taken  # by `elsa.linear` itself, with its residual
        served.clear()
        with torch.autocast("cpu", torch.bfloat16):
            site(x)
        torch.func.vmap(site)(x)
        layer(backend="eager")[0](x)
        for name in ("bias", "weight"):  # something derived stands for a parameter
            value = getattr(site, name).detach()
            delattr(site, name)
            setattr(site, name, value)
            monkeypatch.setattr(short_calls, "product", lambda *given: None)
            torch.testing.assert_close(site(x), expected)
    assert not served and found is not None
