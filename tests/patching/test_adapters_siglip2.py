"""Batches of images of different size in transformers' SigLIP 2: padding is left out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from judging import assert_agree, assert_as_exact
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.patching.adapters.hf_transformers import register

transformers = pytest.importorskip("transformers")
siglip2 = pytest.importorskip("elsa_core.patching.adapters.transformers_siglip2")

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip
SIZES = ((4, 5), (2, 3), (3, 4))


def model(kind: str = "sdpa", cls: str = "Siglip2VisionModel", **options: Any) -> Any:
    torch.manual_seed(0)
    register()
    config = transformers.Siglip2VisionConfig(**SMALL, num_patches=16, patch_size=4, **options)
    if cls != "Siglip2VisionModel":
        text = {**SMALL, "vocab_size": 100, "projection_size": 32}
        config = transformers.Siglip2Config(
            vision_config=config.to_dict(), text_config=text, num_labels=5
        )
    made = getattr(transformers, cls)._from_config(config, attn_implementation=kind)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.15)
    return made.eval()


def batch(sizes: tuple[tuple[int, int], ...] = SIZES, tokens: int = 20) -> dict[str, Tensor]:
    counts = torch.tensor([h * w for h, w in sizes])
    there = torch.arange(tokens)[None] < counts[:, None]
    pixels = torch.randn(len(sizes), tokens, 48, generator=torch.Generator().manual_seed(1))
    return {
        "pixel_values": pixels * there[..., None],  # as transformers' own processor pads
        "pixel_attention_mask": there.int(),
        "spatial_shapes": torch.tensor(sizes),
    }


def pair(**options: Any) -> tuple[Any, Any]:
    original = model(**options)
    patched = copy.deepcopy(original)
    report = elsa.patch(patched, scope="attention")
    assert "ElsaSiglip2Attention" in {site.adapter for site in report.patched}
    original.set_attn_implementation("sdpa")
    return original, patched


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sdpa", "elsa"])
@pytest.mark.parametrize("sizes", [SIZES, ((2, 3),), ((1, 1), (4, 5))], ids=["mixed", "1", "2"])
def test_agrees_with_the_original_at_padded_places_too(
    sizes: Any, kind: str, packed: list[Any]
) -> None:
    original, patched = pair(kind=kind)
    given = batch(sizes)
    assert_as_exact(original, patched, given)
    tokens = sum(h * w for h, w in sizes)
    assert packed[:2] == [(tokens + sum(h * w < 20 for h, w in sizes), tokens)] * 2


@torch.no_grad()
@pytest.mark.parametrize("cls", ["Siglip2ForImageClassification", "Siglip2Model"])
def test_whole_models(cls: str, packed: list[Any]) -> None:
    original, patched = pair(cls=cls)
    given = batch()
    if cls == "Siglip2Model":
        words = torch.randint(0, 100, (3, 7), generator=torch.Generator().manual_seed(2))
        given |= {"input_ids": words, "attention_mask": (words > 30).int()}
        assert (given["attention_mask"].sum(1) > 0).all()
    assert_as_exact(original, patched, given)
    assert (40, 38) in packed


@torch.no_grad()
def test_padded_tokens_that_differ_stay(packed: list[Any]) -> None:
    original, patched = pair()
    given = batch()
    given["pixel_values"] = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(3))
    assert_as_exact(original, patched, given)
    assert not packed


@torch.no_grad()
def test_hidden_states_hooks_and_weights_are_the_originals(packed: list[Any]) -> None:
    """Whoever looks between the layers sees padded batches; "eager" returns its weights."""
    original, patched = pair()
    found, peer = (m(**batch(), output_hidden_states=True) for m in (patched, original))
    for one, other in zip(found.hidden_states, peer.hidden_states, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    patched.encoder.layers[1].mlp.register_forward_hook(lambda m, i, out: shapes.append(out.shape))
    shapes: list[Any] = []
    patched(**batch())
    assert shapes == [(3, 20, 32)]
    patched.set_attn_implementation("eager")
    weights = patched(**batch(), output_attentions=True).attentions
    assert weights[0].shape == (3, 2, 20, 20)


@torch.no_grad()
def test_a_mask_that_hides_keys_of_some_queries_is_read(packed: list[Any]) -> None:
    original, patched = pair()
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(4))
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    exact = copy.deepcopy(original).double().encoder(x.double(), mask).last_hidden_state
    found, peer = (m.encoder(x, mask).last_hidden_state for m in (patched, original))
    assert_agree(found, peer, exact)
    assert not packed


def test_inspect_and_check() -> None:
    original, patched = pair(use_head=False)
    sites = elsa.inspect(original, scope="attention").sites
    assert [site.path for site in sites if site.patchable and "self_attn" in site.path]
    report = elsa.check(patched, tuple(batch().values()), grad=True)
    assert report.ok, report


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_the_mask_is_read(packed: list[Any]) -> None:
    original, patched = (m.cuda() for m in pair())
    given = {name: tensor.cuda() for name, tensor in batch().items()}
    assert_as_exact(original, patched, given)
    assert not packed
