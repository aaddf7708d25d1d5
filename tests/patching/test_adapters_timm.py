"""The written adapters err at most twice what the classes they replace do, term by term."""

import inspect

import pytest
import torch
from judging import assert_same, randomised
from originals import of_original
from seen import Calls
from torch import nn

from elsa_core.patching import adapters
from elsa_core.patching.rewrite import patch

pytest.importorskip("timm")

from timm.layers import RotaryEmbeddingCat
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention

TOKENS, WIDTH, HEADS = 17, 48, 3
ROPE_GRID = (4, 4)  # 16 rotated tokens after one prefix token


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


LAYER_NORM = {"norm_layer": nn.LayerNorm}
PLAIN = {"scale_norm": False}
OPTIONS = [
    *((Attention, options) for options in (
        {}, {"qkv_bias": True}, {"qk_norm": True, **LAYER_NORM},
        {"scale_norm": True, **LAYER_NORM}, {"proj_bias": False},
        {"gated": True, "qkv_bias": True}, {"attn_head_dim": 24}, {"dim_out": 30},
    )),
    *((AttentionRope, options) for options in (
        {}, {"rotate_half": True}, {"qkv_fused": False},
        {"qk_norm": True, "scale_norm": True, **LAYER_NORM}, {"gated": True},
        {"num_kv_heads": 1, "qkv_fused": False}, {"num_prefix_tokens": 0},
    )),
    *((EvaAttention, options) for options in (
        PLAIN, {**PLAIN, "qkv_bias": False}, {**PLAIN, "qkv_bias_separate": True},
        {"qkv_fused": False, **LAYER_NORM}, {**PLAIN, "qk_norm": True, **LAYER_NORM},
        {**PLAIN, "rotate_half": True}, {**PLAIN, "gated": True},
    )),
]  # fmt: skip


def build(cls: type, **options) -> nn.Module:
    missing = options.keys() - inspect.signature(cls).parameters.keys()
    if missing:
        pytest.skip(f"this timm's {cls.__name__} has no {', '.join(missing)}")
    return randomised(of_original(lambda: cls(WIDTH, num_heads=HEADS, **options)))


def rotations() -> torch.Tensor:
    return RotaryEmbeddingCat(WIDTH // HEADS, in_pixels=False, feat_shape=ROPE_GRID).get_embed()


def holes() -> torch.Tensor:
    """A mask by which every query sees the first key."""
    visible = torch.rand(2, 1, TOKENS, TOKENS) > 0.3
    visible[..., 0] = True
    return visible


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("cls", "options"), OPTIONS, ids=lambda x: "-".join(x) if isinstance(x, dict) else x.__name__
)
@torch.no_grad()
def test_attention_agrees(cls: type, options: dict, dtype: torch.dtype) -> None:
    module = build(cls, **options)
    x = torch.randn(2, TOKENS - 1 + options.get("num_prefix_tokens", 1), WIDTH)
    given = {
        Attention: [{}],
        AttentionRope: [{"rope": rotations()}, {}],
        EvaAttention: [{"rope": rotations()}, {"rope": rotations(), "attn_mask": holes()}],
    }[cls]
    of_original(lambda: module(x, **given[0]))
    for terms in given:
        assert len(assert_same(module, dtype, x, **terms).elsa) == 1


@pytest.mark.parametrize("mask", ["bool", "additive", "causal"])
@torch.no_grad()
def test_attention_takes_masks(mask: str) -> None:
    module = build(Attention, qkv_bias=True)
    x = torch.randn(2, TOKENS, WIDTH)
    if mask == "bool":
        assert_same(module, torch.float32, x, attn_mask=holes())
    elif mask == "additive":
        assert_same(module, torch.float32, x, torch.randn(1, HEADS, TOKENS, TOKENS))
    elif "is_causal" in Attention.forward.__annotations__:
        assert_same(module, torch.float32, x, is_causal=True)
    else:
        pytest.skip("this timm's Attention has no is_causal")


@torch.no_grad()
def test_attention_keeps_a_changed_scale_of_the_unfused_branch() -> None:
    module = build(Attention)
    module.fused_attn = False
    module.scale = 0.05
    assert_same(module, torch.float32, torch.randn(2, TOKENS, WIDTH))


@torch.no_grad()
def test_rotated_tokens_take_the_dtype_of_the_values() -> None:
    """A norm, and in older versions the rotation, may leave queries and keys in float32."""

    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float()

    module = build(AttentionRope).bfloat16()
    module.q_norm, module.k_norm = Wide(), Wide()
    rope = rotations()
    x = torch.randn(2, TOKENS, WIDTH).bfloat16()
    expected = module(x, rope=rope)
    patch(module)
    torch.testing.assert_close(module(x, rope=rope), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("cls", [Attention, AttentionRope, EvaAttention])
@torch.no_grad()
def test_nothing_is_copied_around_the_operator(cls: type) -> None:
    options = {"scale_norm": False} if cls is EvaAttention else {}
    module = build(cls, **options)
    patch(module)
    packed, joined = [], []
    if cls is EvaAttention:  # calls F.linear with the projection's weight
        module.q_bias = None
    module.qkv.register_forward_hook(lambda m, args, out: packed.append(out))
    module.proj.register_forward_pre_hook(lambda m, args: joined.append(args[0]))
    with Calls() as calls:
        module(torch.randn(2, TOKENS, WIDTH))
    (arguments, out), *_ = calls.elsa
    assert {storage(t) for t in arguments[:3]} == {storage(packed[0])}
    assert storage(joined[0]) == storage(out) and joined[0].is_contiguous()


@torch.no_grad()
def test_grouped_keys_are_not_repeated() -> None:
    module = build(AttentionRope, num_kv_heads=1, qkv_fused=False)
    patch(module)
    with Calls() as calls:
        module(torch.randn(2, TOKENS, WIDTH))
    query, key, value = calls.elsa[0][0][:3]
    assert (query.shape[1], key.shape[1], value.shape[1]) == (HEADS, 1, 1)


def test_a_subclass_is_not_taken_for_its_base() -> None:
    class Other(Attention):
        def forward(self, x):
            return self.proj(x)

    class Same(Attention):
        pass

    assert adapters.written(Attention) is not None and adapters.written(Other) is None
    assert adapters.written(Same) is None  # its own forward runs
    module = nn.ModuleDict({"other": build(Other), "same": build(Same)})
    report = patch(module)
    assert [site.path for site in report.patched] == ["same"]
    assert [site.adapter for site in report.patched] == ["recognised"]
    x = torch.randn(2, TOKENS, WIDTH)
    torch.testing.assert_close(module["other"](x), module["other"].proj(x))
