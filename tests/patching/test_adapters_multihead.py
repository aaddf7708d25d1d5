"""`torch.nn.MultiheadAttention` on elsa: alone, in PyTorch's encoder layer, open_clip and
torchvision."""

import copy
import pickle

import pytest
import torch
from judging import assert_recorded, assert_same, randomised
from torch import nn

from elsa_core.errors import ArgumentError, NothingPatchedError
from elsa_core.patching.rewrite import patch, unpatch
from elsa_core.patching.sites import find_sites, inspect

WIDTH, HEADS, QUERIES, KEYS = 32, 4, 7, 9


def attend(module: nn.Module, query, key, value, **more) -> torch.Tensor:
    out, weights = module(query, key, value, need_weights=False, **more)
    assert weights is None
    return out


def self_attend(module: nn.Module, x, **more) -> torch.Tensor:
    return attend(module, x, x, x, **more)


def cross_attend(module: nn.Module, x, memory, **more) -> torch.Tensor:
    return attend(module, x, memory, memory, **more)


def tokens(batch: int, length: int, batch_first: bool, width: int = WIDTH) -> torch.Tensor:
    x = torch.randn(batch, length, width)
    return x if batch_first else x.transpose(0, 1).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_self_and_cross_attention(batch: int, batch_first: bool, dtype: torch.dtype) -> None:
    module = randomised(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first))
    x, memory = tokens(batch, QUERIES, batch_first), tokens(batch, KEYS, batch_first)
    assert_same(module, dtype, x, run=self_attend)
    assert_same(module, dtype, x, memory, run=cross_attend)
    assert_same(module, dtype, x, memory, memory.clone(), run=attend)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_separate_projections(bias: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, kdim=24, vdim=40, batch_first=True)
    x = tokens(2, QUERIES, True)
    key, value = tokens(2, KEYS, True, 24), tokens(2, KEYS, True, 40)
    assert_same(randomised(module), torch.float32, x, key, value, run=attend)


def masks(batch: int) -> dict[str, dict[str, torch.Tensor | bool]]:
    """True leaves a key out. No row loses all of its keys: the originals differ in that case."""
    torch.manual_seed(1)
    square = torch.rand(QUERIES, QUERIES) > 0.6
    square.fill_diagonal_(False)
    each = torch.rand(batch * HEADS, QUERIES, QUERIES) > 0.6
    each[..., torch.arange(QUERIES), torch.arange(QUERIES)] = False
    padding = torch.arange(QUERIES) >= torch.tensor([4, 7, 5])[:batch, None]
    either = square & ~torch.eye(QUERIES, dtype=torch.bool)
    either[:, 0] = False
    causal = torch.full((QUERIES, QUERIES), float("-inf")).triu(1)
    return {
        "bool": {"attn_mask": square},
        "bool-per-head": {"attn_mask": each},
        "float": {"attn_mask": torch.randn(QUERIES, QUERIES)},
        "float-per-head": {"attn_mask": torch.randn(batch * HEADS, QUERIES, QUERIES)},
        "causal": {"attn_mask": causal},
        "causal-hint": {"attn_mask": causal, "is_causal": True},
        "padding": {"key_padding_mask": padding},
        "padding-float": {"key_padding_mask": torch.randn(batch, QUERIES)},
        "both": {"attn_mask": either, "key_padding_mask": padding},
        "both-float": {"attn_mask": causal, "key_padding_mask": torch.randn(batch, QUERIES)},
        "hint-and-padding": {
            "attn_mask": causal.isinf(), "key_padding_mask": padding, "is_causal": True,
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", list(masks(1)))
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "length-first"])
@torch.no_grad()
def test_masks(name: str, batch_first: bool) -> None:
    module = randomised(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first))
    x = tokens(3, QUERIES, batch_first)
    assert_same(module, torch.float32, x, run=self_attend, **masks(3)[name])


@torch.no_grad()
def test_without_a_batch() -> None:
    module = randomised(nn.MultiheadAttention(WIDTH, HEADS))
    x, memory = torch.randn(QUERIES, WIDTH), torch.randn(KEYS, WIDTH)
    assert_same(module, torch.float32, x, run=self_attend)
    assert_same(module, torch.float32, x, memory, run=cross_attend)
    padding = torch.arange(KEYS) > 5
    assert_same(module, torch.float32, x, memory, run=cross_attend, key_padding_mask=padding)


def test_a_causal_hint_needs_its_mask() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS)
    patch(module)
    with pytest.raises(RuntimeError, match="attn_mask"):
        self_attend(module, torch.randn(QUERIES, 2, WIDTH), is_causal=True)


REFUSED = {
    "batches": ({}, 1),
    "a row for all queries": ({"attn_mask": torch.zeros(1, KEYS)}, 2),
    "a mask for all heads": ({"attn_mask": torch.zeros(2, QUERIES, KEYS)}, 2),
    "integers to add": ({"attn_mask": torch.ones(QUERIES, KEYS).byte()}, 2),
    "one row of padding": ({"key_padding_mask": torch.zeros(1, KEYS).bool()}, 2),
    "padding in integers": ({"key_padding_mask": torch.ones(2, KEYS).long()}, 2),
    "padding of queries": ({"key_padding_mask": torch.zeros(2, QUERIES).bool()}, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_is_refused(name: str) -> None:
    """The operator would broadcast such masks and batches, and add integers to the scores."""
    masks, batch = REFUSED[name]
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    query, key = torch.randn(2, QUERIES, WIDTH), torch.randn(batch, KEYS, WIDTH)
    with pytest.raises((RuntimeError, AssertionError)):
        module(query, key, key, need_weights=False, **masks)
    patch(module)
    with pytest.raises(ArgumentError):
        module(query, key, key, need_weights=False, **masks)


@pytest.mark.parametrize("average", [True, False])
@torch.no_grad()
def test_weights_are_returned_where_they_are_wanted(average: bool) -> None:
    for options in ({}, {"kdim": WIDTH, "vdim": 16}):
        module = randomised(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options))
        x, value = tokens(2, KEYS, True), tokens(2, KEYS, True, options.get("vdim", WIDTH))
        expected = module(x, x, value, average_attn_weights=average)
        patch(module)
        found = module(x, x, value, average_attn_weights=average)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_appended_keys_are_kept_with_the_reason(options: dict[str, bool]) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, **options)
    (site,) = find_sites(module)
    assert not site.patchable and "bias_k" in site.reason
    with pytest.raises(NothingPatchedError, match="bias_k"):
        patch(module)


def test_gradients_dropout_copies_and_unpatching() -> None:
    module = randomised(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5)).double()
    x = torch.randn(QUERIES, 2, WIDTH, dtype=torch.float64)
    weights = list(module.parameters())
    expected = torch.autograd.grad(self_attend(module, x).square().sum(), weights)
    patch(module)
    found = torch.autograd.grad(self_attend(module, x).square().sum(), weights)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is type(module)
            torch.testing.assert_close(self_attend(other, x), self_attend(module, x))
        module.train()
        assert not torch.equal(self_attend(module, x), self_attend(module, x))
    unpatch(module)
    assert type(module) is nn.MultiheadAttention and module._qkv_same_embed_dim is True


ENCODER = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 48, "batch_first": True}


def encode(module: nn.Module, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    out = module(x, src_key_padding_mask=padding)
    # What a padded token gives is nobody's promise: PyTorch's fast path makes it zero.
    return out if padding is None else out.masked_fill(padding[..., None], 0.0)


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm-last", "norm-first"])
@torch.no_grad()
def test_the_encoder_layer_leaves_its_fast_path(norm_first: bool) -> None:
    layer = randomised(nn.TransformerEncoderLayer(**ENCODER, norm_first=norm_first))
    x = tokens(3, QUERIES, True)
    assert_same(layer, torch.float32, x, run=encode)
    padding = torch.arange(QUERIES) >= torch.tensor([4, 7, 5])[:, None]
    assert_same(layer, torch.float32, x, padding, run=encode)


@torch.no_grad()
def test_the_encoder_with_its_nested_tensors() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER), 2)
    padding = torch.arange(QUERIES) >= torch.tensor([4, 7, 5])[:, None]
    assert_same(randomised(encoder), torch.float32, tokens(3, QUERIES, True), padding, run=encode)


@torch.no_grad()
def test_the_encoder_layer_compiles_and_exports() -> None:
    layer = randomised(nn.TransformerEncoderLayer(**ENCODER))
    x, more = tokens(2, QUERIES, True), tokens(5, QUERIES, True)
    expected = layer(x)
    patch(layer)
    torch.testing.assert_close(layer(x), expected)
    assert_recorded("compile", layer, x)
    called = assert_recorded("export", layer, x, more)
    assert any(name.startswith("elsa.attention") for name in called)


def test_autocast_computes_in_its_dtype() -> None:
    module = randomised(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    x = torch.randn(2, QUERIES, WIDTH)
    mask = torch.full((QUERIES, QUERIES), float("-inf")).triu(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = self_attend(module, x, attn_mask=mask)
        patch(module)
        found = self_attend(module, x, attn_mask=mask)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)


@torch.no_grad()
def test_torchvision() -> None:
    models = pytest.importorskip("torchvision.models")
    vit = models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48
    )
    randomised(vit)
    assert_same(vit, torch.float32, torch.randn(3, 3, 32, 32), run=lambda model, x: model(x))


VISION = {"image_size": 32, "patch_size": 8, "layers": 2, "width": 64, "head_width": 32}
TEXT = {"context_length": 9, "vocab_size": 20, "width": 64, "heads": 2, "layers": 2}


@pytest.mark.parametrize("pooler", [False, True], ids=["token", "attentional-pooler"])
@torch.no_grad()
def test_open_clip_towers(pooler: bool) -> None:
    open_clip = pytest.importorskip("open_clip")
    options = {"attentional_pool": True, "attn_pooler_heads": 2} if pooler else {}
    model = open_clip.CLIP(64, VISION | options, TEXT).eval()
    assert_same(model, torch.float32, torch.randn(3, 3, 32, 32), run=lambda m, x: m.encode_image(x))
    ids = torch.randint(1, 20, (3, 9))
    assert_same(model, torch.float32, run=lambda m: m.encode_text(ids))
    patch(model, strict=True)
    image = torch.randn(2, 3, 32, 32)
    program = torch.export.export(model, (image, ids[:2]))
    for a, b in zip(program.module()(image, ids[:2]), model(image, ids[:2]), strict=True):
        torch.testing.assert_close(a, b)


@torch.no_grad()
def test_coca_with_its_cross_attention() -> None:
    coca = pytest.importorskip("open_clip.coca_model")
    multimodal = {"context_length": 8, "vocab_size": 20, "width": 64, "heads": 2, "layers": 2}
    vision = VISION | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    text = TEXT | {"embed_cls": True, "output_tokens": True, "context_length": 8}
    model = coca.CoCa(64, multimodal, text, vision).eval()
    nn.init.normal_(model.text_decoder.text_projection)  # open_clip leaves it as allocated
    ids = torch.randint(1, 20, (2, 8))
    assert_same(
        model, torch.float32, torch.randn(2, 3, 32, 32), run=lambda m, x: m(x, ids)["logits"]
    )


def test_inspect_says_where_the_weights_are_wanted() -> None:
    class Wants(nn.Sequential):
        def forward(self, image):
            x = image.flatten(1, 2)
            return self[0](x, x, x)[0]

    model = Wants(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    (site,) = inspect(model, (3, 5, WIDTH)).sites
    assert "returns weights" in site.extra
