"""Batches of images of different size in timm's NaFlexViT and transformers' SigLIP 2: padding is
left out, and only that; no gradient, copy or recorded program changes by it."""

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from judging import assert_agree, assert_as_exact, cast, outputs
from seen import Calls
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.patching.adapters.hf_transformers import register

OPTIONS: dict[str, dict[str, Any]] = {
    "avg": {},
    "map": {"global_pool": "map"},
    "token": {"global_pool": "token", "class_token": True},
    "max, registers": {"global_pool": "max", "reg_tokens": 2},
    "avgmax": {"global_pool": "avgmax"},
    "mask of keys": {"use_key_only_attn_mask": True},
    "rope": {"rope_type": "axial"},
    "eva": {"attn_type": "eva", "swiglu_mlp": True},
    "qk norm": {"qk_norm": True},
}
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
}  # fmt: skip
SIZES = ((4, 5), (2, 3), (3, 4))
# Of images whose padding is too little to be left out, or none: patches of each.
LITTLE: dict[str, Any] = {
    "naflex": ((20, 20, 19), (20, 20, 20)),
    "siglip2": (((4, 5), (4, 5)), ((4, 5), (4, 5), (3, 6))),
}
PIXELS = {"naflex": "patches", "siglip2": "pixel_values"}
kinds = pytest.mark.parametrize("kind", LITTLE)


def naflex(name: str = "avg") -> Any:
    return timm.create_model(
        "naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=2, num_classes=7,
        **OPTIONS[name],
    )  # fmt: skip


def siglip2(attention: str = "sdpa", cls: str = "Siglip2VisionModel", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("elsa_core.patching.adapters.transformers_siglip2")
    register()
    config = transformers.Siglip2VisionConfig(**SMALL, num_patches=16, patch_size=4, **options)
    if cls != "Siglip2VisionModel":
        text = {**SMALL, "vocab_size": 100, "projection_size": 32}
        config = transformers.Siglip2Config(
            vision_config=config.to_dict(), text_config=text, num_labels=5
        )
    return getattr(transformers, cls)._from_config(config, attn_implementation=attention)


def model(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    made = {"naflex": naflex, "siglip2": siglip2}[kind](**options)
    for parameter in made.parameters():  # some are zeros
        nn.init.normal_(parameter, std=0.15)
    return made.eval()


def pair(
    kind: str, dtype: torch.dtype = torch.float32, *, patching: dict[str, Any] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """A model and its patched copy."""
    original = model(kind, **options).to(dtype)
    patched = copy.deepcopy(original)
    report = elsa.patch(patched, **{"scope": "attention"} | (patching or {}))
    if kind == "siglip2":
        assert "ElsaSiglip2Attention" in {site.adapter for site in report.patched}
        original.set_attn_implementation("sdpa")
    return original, patched


def naflex_batch(valid: tuple[int, ...] = (20, 7, 12)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    patches = torch.randn(len(valid), 20, 16 * 16 * 3, generator=generator)
    place = torch.arange(20)
    coordinates = torch.stack((place // 5, place % 5), -1).expand(len(valid), -1, -1)
    there = place[None] < torch.tensor(valid)[:, None]
    return {"patches": patches, "patch_coord": coordinates.clone(), "patch_valid": there}


def siglip2_batch(sizes: tuple[tuple[int, int], ...] = SIZES) -> dict[str, Tensor]:
    counts = torch.tensor([h * w for h, w in sizes])
    there = torch.arange(20)[None] < counts[:, None]
    pixels = torch.randn(len(sizes), 20, 48, generator=torch.Generator().manual_seed(1))
    return {
        "pixel_values": pixels * there[..., None],  # as transformers' own processor pads
        "pixel_attention_mask": there.int(),
        "spatial_shapes": torch.tensor(sizes),
    }


BATCHES: dict[str, Any] = {"naflex": naflex_batch, "siglip2": siglip2_batch}


@kinds
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("of_pixels", [False, True])
def test_gradients_are_the_originals(
    kind: str, training: bool, of_pixels: bool, packed: list[Any]
) -> None:
    """Of each padded token's pixels too, which one token for all of them would not give.

    A key's bias has no gradient but rounding.
    """
    original, patched = pair(kind)

    def grads(m: Any, given: dict[str, Tensor]) -> Tensor:
        m.train(training).zero_grad()
        pixels = given[PIXELS[kind]].clone().requires_grad_(of_pixels)
        found = outputs(m, given | {PIXELS[kind]: pixels})
        torch.stack([each.square().sum() for each in found.values()]).sum().backward()
        if of_pixels:
            assert pixels.grad is not None
            return pixels.grad
        weights = [p.grad for n, p in m.named_parameters() if "k_proj.bias" not in n]
        return torch.cat([g.flatten() for g in weights if g is not None])

    given = BATCHES[kind]()
    exact = grads(copy.deepcopy(original).double(), cast(given, torch.float64))
    assert_agree(grads(patched, given), grads(original, given), exact)
    assert bool(packed) is (kind == "naflex" and not training)


@kinds
@torch.no_grad()
def test_little_padding_stays_masked(kind: str, packed: list[Any]) -> None:
    original, patched = pair(kind)
    for sizes in LITTLE[kind]:
        assert_as_exact(original, patched, BATCHES[kind](sizes))
    assert not packed


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_other_dtypes(kind: str, dtype: torch.dtype, packed: list[Any]) -> None:
    given = cast(BATCHES[kind](), dtype)
    assert_as_exact(*pair(kind, dtype=dtype), given, 8 * torch.finfo(dtype).eps)
    assert packed


@kinds
@torch.no_grad()
def test_what_is_recorded_keeps_the_mask(kind: str, packed: list[Any]) -> None:
    """A program must not depend on how many tokens this batch has."""
    original, patched = pair(kind)
    with Calls():
        found = outputs(patched, BATCHES[kind]())
    expected = outputs(original, BATCHES[kind]())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert not packed


@pytest.mark.parametrize(("kind", "scope"), [("naflex", "model"), ("siglip2", "attention")])
@torch.no_grad()
def test_copies_pickles_and_goes_back(kind: str, scope: str) -> None:
    original, patched = pair(kind, patching={"scope": scope})
    given = BATCHES[kind]()
    plain, out = outputs(original, given), outputs(patched, given)
    torch.testing.assert_close(out, plain, atol=1e-4, rtol=1e-5)
    for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        torch.testing.assert_close(outputs(other, given), out, atol=0, rtol=0)
    assert patched.state_dict().keys() == original.state_dict().keys()
    assert elsa.unpatch(patched) >= 3 and type(patched) is type(original)
    torch.testing.assert_close(outputs(patched, given), plain, atol=0, rtol=0)


@kinds
@torch.no_grad()
def test_hooks_see_padded_batches(kind: str) -> None:
    (_, patched), given = pair(kind), BATCHES[kind]()
    layers = patched.blocks if kind == "naflex" else patched.encoder.layers
    shapes: list[torch.Size] = []
    plain = outputs(patched, given)
    layers[1].mlp.register_forward_hook(lambda m, i, out: shapes.append(out.shape))
    torch.testing.assert_close(outputs(patched, given), plain, atol=1e-5, rtol=1e-5)
    assert shapes == [(3, {"naflex": 24, "siglip2": 20}[kind], 32)]


# --- NaFlexViT ---


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_agrees_with_the_original(name: str, packed: list[Any]) -> None:
    original, patched = pair("naflex", name=name)
    assert_as_exact(original, patched, naflex_batch())
    whole = name in ("rope", "eva")  # blocks that read positions, or are none of timm's plain ones
    calls = [] if whole else [39 + 3 * original.num_prefix_tokens] * 2
    assert [queries for queries, _ in packed] == calls


@torch.no_grad()
def test_the_scale_of_an_unfused_attention_is_its_own(packed: list[Any]) -> None:
    original, patched = pair("naflex")
    for block in (*original.blocks, *patched.blocks):
        block.attn.fused_attn, block.attn.scale = False, 0.1
    assert_as_exact(original, patched, naflex_batch())
    assert packed


@torch.no_grad()
def test_images_of_one_size_have_no_mask(packed: list[Any]) -> None:
    original, patched = pair("naflex")
    image = torch.randn(2, 3, 64, 64)
    assert torch.allclose(patched(image), original(image), atol=1e-5)
    assert not packed


@torch.no_grad()
def test_a_mask_of_the_callers_is_a_mask(packed: list[Any]) -> None:
    (original, patched), given = pair("naflex"), naflex_batch()
    hidden = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(2)) > 0.8
    given["attn_mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -1e9)
    assert torch.allclose(patched(given), original(given), atol=1e-4)
    assert not packed


class _Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


@torch.no_grad()
@pytest.mark.parametrize("since", [False, True])
def test_weights_that_another_module_changes(since: bool) -> None:
    """A module in the place of the dropout of weights: packed tokens once went past it."""
    original = model("naflex")
    patched = copy.deepcopy(original)
    if since:
        elsa.patch(patched)
    for each in (original, patched):
        for block in each.blocks:
            block.attn.fused_attn = False
            block.attn.attn_drop = _Halved().eval()
    if not since:
        elsa.patch(patched)
    assert_as_exact(original, patched, naflex_batch())


@torch.no_grad()
def test_a_block_that_is_not_patched_keeps_its_mask(packed: list[Any]) -> None:
    (original, patched), given = pair("naflex", patching={"exclude": "blocks.0.*"}), naflex_batch()
    assert torch.allclose(patched(given), original(given), atol=1e-4)
    assert not packed


@torch.no_grad()
def test_an_image_without_patches() -> None:
    assert_as_exact(*pair("naflex", name="map"), naflex_batch((20, 0, 3)))


def test_check_agrees() -> None:
    assert elsa.check(pair("naflex")[1], torch.randn(2, 3, 64, 64)).ok


# --- SigLIP 2 ---


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "elsa"])
@pytest.mark.parametrize("sizes", [SIZES, ((2, 3),), ((1, 1), (4, 5))], ids=["mixed", "1", "2"])
def test_agrees_with_the_original_at_padded_places_too(
    sizes: Any, attention: str, packed: list[Any]
) -> None:
    original, patched = pair("siglip2", attention=attention)
    given = siglip2_batch(sizes)
    assert_as_exact(original, patched, given)
    tokens = sum(h * w for h, w in sizes)
    assert packed[:2] == [(tokens + sum(h * w < 20 for h, w in sizes), tokens)] * 2


@torch.no_grad()
@pytest.mark.parametrize("cls", ["Siglip2ForImageClassification", "Siglip2Model"])
def test_whole_models(cls: str, packed: list[Any]) -> None:
    original, patched = pair("siglip2", cls=cls)
    given = siglip2_batch()
    if cls == "Siglip2Model":
        words = torch.randint(0, 100, (3, 7), generator=torch.Generator().manual_seed(2))
        given |= {"input_ids": words, "attention_mask": (words > 30).int()}
        assert (given["attention_mask"].sum(1) > 0).all()
    assert_as_exact(original, patched, given)
    assert (40, 38) in packed


@torch.no_grad()
def test_padded_tokens_that_differ_stay(packed: list[Any]) -> None:
    original, patched = pair("siglip2")
    given = siglip2_batch()
    given["pixel_values"] = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(3))
    assert_as_exact(original, patched, given)
    assert not packed


@torch.no_grad()
def test_hidden_states_and_weights_are_the_originals(packed: list[Any]) -> None:
    """Whoever looks between the layers sees padded batches; "eager" returns its weights."""
    original, patched = pair("siglip2")
    found, peer = (m(**siglip2_batch(), output_hidden_states=True) for m in (patched, original))
    for one, other in zip(found.hidden_states, peer.hidden_states, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    patched.set_attn_implementation("eager")
    weights = patched(**siglip2_batch(), output_attentions=True).attentions
    assert weights[0].shape == (3, 2, 20, 20)


@torch.no_grad()
def test_a_mask_that_hides_keys_of_some_queries_is_read(packed: list[Any]) -> None:
    original, patched = pair("siglip2")
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(4))
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    exact = copy.deepcopy(original).double().encoder(x.double(), mask).last_hidden_state
    found, peer = (m.encoder(x, mask).last_hidden_state for m in (patched, original))
    assert_agree(found, peer, exact)
    assert not packed


def test_inspect_and_check() -> None:
    original, patched = pair("siglip2", use_head=False)
    sites = elsa.inspect(original, scope="attention").sites
    assert [site.path for site in sites if site.patchable and "self_attn" in site.path]
    report = elsa.check(patched, tuple(siglip2_batch().values()), grad=True)
    assert report.ok, report


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_the_mask_is_read(packed: list[Any]) -> None:
    original, patched = (m.cuda() for m in pair("siglip2"))
    given = {name: tensor.cuda() for name, tensor in siglip2_batch().items()}
    assert_as_exact(original, patched, given)
    assert not packed
