"""`elsa.nn`: layers made of the operators take timm's weights and compute what those do."""

import copy
import inspect
import pickle

import pytest
import torch

import elsa_core as elsa
from elsa_core.errors import ArgumentError
from elsa_core.nn import EntmaxAttention


def test_takes_timms_weights_and_is_timms_at_alpha_one() -> None:
    timm_attention = pytest.importorskip("timm.layers.attention").Attention
    torch.manual_seed(0)
    theirs = timm_attention(24, num_heads=3, qkv_bias=True)
    ours = elsa.nn.EntmaxAttention(24, num_heads=3, qkv_bias=True, alpha=1.0)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 17, 24)
    torch.testing.assert_close(ours(x), theirs(x))
    if "is_causal" in inspect.signature(theirs.forward).parameters:
        torch.testing.assert_close(ours(x, is_causal=True), theirs(x, is_causal=True))


def test_alpha_of_heads_is_learned() -> None:
    torch.manual_seed(0)
    layer = EntmaxAttention(24, num_heads=3, alpha="learned")
    assert isinstance(layer.alpha, torch.Tensor) and layer.alpha.eq(1.5).all()
    x = torch.randn(2, 17, 24)
    fixed = EntmaxAttention(24, num_heads=3)
    fixed.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x), fixed(x))
    layer(x).square().sum().backward()
    assert layer.alpha_logit is not None and layer.alpha_logit.grad.ne(0).all()
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x), layer(x))


def test_the_weights_are_those_of_the_output() -> None:
    torch.manual_seed(0)
    layer = EntmaxAttention(24, num_heads=3, alpha=1.7)
    x = torch.randn(2, 17, 24)
    weights = layer.weights(x)
    assert weights.shape == (2, 3, 17, 17) and (weights == 0).any()
    out = (weights @ layer.split(x)[2]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.proj(out), layer(x))


@pytest.mark.parametrize("alpha", [0.5, 5.0, "soft", float("nan")])
def test_wrong_alpha_is_named(alpha: float | str) -> None:
    with pytest.raises(ArgumentError, match=r"must be a number in \[1, 4\] or 'learned'"):
        EntmaxAttention(24, num_heads=3, alpha=alpha)
    with pytest.raises(ArgumentError, match="multiple of num_heads=5"):
        EntmaxAttention(24, num_heads=5)
