"""`register` puts elsa behind transformers' attention interface: models compute what they did."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seen import Calls

import elsa_core as elsa
from elsa_core.errors import ArgumentError
from elsa_core.patching.adapters import common
from elsa_core.patching.adapters.hf_transformers import attention_forward, register


@pytest.mark.parametrize("mask", ["none", "bool", "additive", "causal"])
@torch.no_grad()
def test_forward_is_the_formula(mask: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 5, 8, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    given = {"bool": lower[None, None], "additive": torch.randn(2, 1, 5, 7).double()}.get(mask)
    module = SimpleNamespace(is_causal=mask == "causal")
    for term in (None, bias):
        scores = query @ key.repeat_interleave(2, 1).transpose(-2, -1) * 0.5
        scores = scores if term is None else scores + term
        if mask in ("bool", "causal"):
            scores = scores.masked_fill(~lower, float("-inf"))
        elif given is not None:
            scores = scores + given[..., :5]
        expected = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
        found, weights = attention_forward(
            module, query, key, value, given, scaling=0.5, position_bias=term
        )
        assert weights is None
        torch.testing.assert_close(found, expected)


def test_unknown_terms_and_choices_are_refused() -> None:
    x = torch.randn(1, 1, 2, 4)
    with pytest.raises(ArgumentError, match="softcap"):
        attention_forward(SimpleNamespace(), x, x, x, None, softcap=30.0)
    with pytest.raises(ArgumentError, match="exact"):
        register(precision="exact")


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
VISION = {**SMALL, "image_size": 32, "patch_size": 8}


@torch.no_grad()
def test_models_run_on_it() -> None:
    transformers = pytest.importorskip("transformers")
    register()
    torch.manual_seed(0)
    vision = transformers.ViTConfig(**VISION, num_hidden_layers=2)
    text = transformers.LlamaConfig(
        **SMALL, num_hidden_layers=2, num_key_value_heads=2, vocab_size=50
    )
    padding = torch.tensor([[1] * 7, [0, 0] + [1] * 5])
    ids = torch.randint(0, 50, (2, 7))
    for config, inputs in (
        (vision, {"pixel_values": torch.randn(2, 3, 32, 32)}),
        (text, {"input_ids": ids}),
        (text, {"input_ids": ids, "attention_mask": padding}),
    ):
        eager = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
        ours = transformers.AutoModel.from_config(config, attn_implementation="elsa").eval()
        ours.load_state_dict(eager.state_dict())
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        expected = copy.deepcopy(eager).double()(**wide).last_hidden_state
        own = eager(**inputs).last_hidden_state.double()
        with Calls() as calls:
            found = ours(**inputs).last_hidden_state.double()
        assert len(calls.elsa) == 2
        if "attention_mask" in inputs:  # a padded token's own output is nobody's promise
            expected, own, found = (x[padding.bool()] for x in (expected, own, found))
        band = 4 * torch.finfo(torch.float32).eps * expected.norm()
        assert (found - expected).norm() <= 2 * (own - expected).norm() + band


def test_inspect_says_how_it_runs_on_elsa() -> None:
    """Attention that a class looks up by name is recognised as it runs."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**VISION, num_hidden_layers=1)
    (site,) = elsa.inspect(transformers.ViTModel(config).eval(), 32).sites
    assert site.patchable and site.adapter == "recognised"


def test_a_caller_of_weights_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    """An empty tuple came back without a word."""
    transformers = pytest.importorskip("transformers")
    register()
    config = transformers.ViTConfig(**VISION, num_hidden_layers=1, attn_implementation="elsa")
    model, x = transformers.ViTModel(config).eval(), torch.randn(1, 3, 32, 32)
    logger: Any = logging.getLogger("transformers.integrations.elsa")
    logger.warning_once.cache_clear()  # it warns once
    logger.addHandler(caplog.handler)
    model(x, output_attentions=True)
    logger.removeHandler(caplog.handler)
    assert "output_attentions" in caplog.text
    assert [site.path for site in elsa.patch(model, x).patched] == ["layers.0.attention"]


def test_gradients_of_dinov2() -> None:
    """No parameter's gradient errs more than twice as much as transformers' own default path.

    A key's bias adds the same number to all scores of a row: its gradient is zero, and what is left
    is rounding, here judged beside the gradient of the keys' weights.
    """
    transformers = pytest.importorskip("transformers")
    register()
    config = transformers.Dinov2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=70, patch_size=14
    )
    x = torch.randn(2, 3, 70, 70, generator=torch.Generator().manual_seed(0))
    wanted = torch.randn(2, 26, 64, generator=torch.Generator().manual_seed(1))

    def gradients(model, kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(model).to(dtype)
        model.set_attn_implementation(kind)
        (model(x.to(dtype)).last_hidden_state * wanted.to(dtype)).sum().backward()
        return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}

    squares: dict[str, list[float]] = {}
    for seed in range(4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.Dinov2Model(config).eval()
        exact = gradients(model, "eager", torch.float64)
        own, found = (gradients(model, kind, torch.float32) for kind in ("sdpa", "elsa"))
        for name, gradient in exact.items():
            scale = exact[name.replace("k_proj.bias", "k_proj.weight")].norm()
            sums = squares.setdefault(name, [0.0, 0.0])
            for i, other in enumerate((own, found)):
                sums[i] += float((other[name] - gradient).norm() / scale) ** 2
    for name, (own_square, square) in squares.items():
        assert square**0.5 <= 2 * own_square**0.5 + 4 * torch.finfo(torch.float32).eps, name


@torch.no_grad()
def test_what_was_asked_for_reaches_the_operator() -> None:
    """A precision that is dropped on the way is `strict`, which no result on a CPU shows."""
    x, module = torch.randn(1, 2, 3, 4), SimpleNamespace(is_causal=False)
    site = SimpleNamespace(elsa_precision="ieee", elsa_backend="auto")
    with Calls() as calls:
        attention_forward(module, x, x, x, None, precision="ieee")
        common.attend(site, x, x, x, scale=0.5, is_causal=True)
    assert [args[-1] for args, _ in calls.elsa] == ["ieee", "ieee"]


def test_a_model_that_ran_before_it_is_patched() -> None:
    """It collects hidden states by hooks, which its first call sets, once."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_labels=3, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], decoder_hidden_size=16,
        num_attention_heads=[1, 2, 3, 4],
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config).eval()
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(images).logits
        assert len(elsa.patch(model, images).patched) == 4
        torch.testing.assert_close(model(images).logits, wanted)
