"""timm's and open_clip's eager attentions, patched: each against its class in float64."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from judging import assert_same, randomised
from seen import Calls
from torch import nn

from elsa_core.patching.rewrite import patch

pytest.importorskip("timm")

from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.models import (
    convit,
    crossvit,
    efficientformer,
    efficientvit_msra,
    gcvit,
    levit,
    mvitv2,
    shvit,
    twins,
    visformer,
    vision_transformer_sam,
    volo,
)

from elsa_core.patching.adapters import timm_decomposed


class Case(NamedTuple):
    """How to make a module, and what it takes: a shape after the batch, further arguments."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    further: Callable[[int], tuple[Any, ...]] = lambda batch: ()


def sam(size: tuple[int, int], **options) -> Case:
    options = {"use_rel_pos": True, "input_size": (5, 4), **options}
    return Case(lambda: vision_transformer_sam.Attention(32, num_heads=2, **options), (*size, 32))


def mvit(size: int, token: bool = True, **options) -> Case:
    def make() -> nn.Module:
        return mvitv2.MultiScaleAttention(
            24, 32, (size, size), num_heads=2, has_cls_token=token, **options
        )

    return Case(make, (size * size + token, 24), lambda batch: ([size, size],))


POOL = {"kernel_q": (3, 3), "kernel_kv": (3, 3), "stride_q": (2, 2), "stride_kv": (4, 4)}
CASES: dict[str, Case] = {
    "sam": sam((5, 4)),
    "sam-resized": sam((7, 6), qk_norm=True),
    "sam-one-row": sam((1, 4)),
    "sam-plain": sam((5, 4), use_rel_pos=False),
    "mvit": mvit(8, **POOL),
    "mvit-no-token": mvit(8, token=False, **POOL),
    "mvit-fine-keys": mvit(8, kernel_q=(3, 3), stride_q=(4, 4), kernel_kv=(3, 3)),
    "mvit-unpooled": mvit(4, residual_pooling=False),
    "mvit-odd": mvit(7, mode="max", rel_pos_type="", **POOL),
    "bottleneck": Case(
        lambda: BottleneckAttn(16, feat_size=(4, 6), num_heads=2, stride=2, qk_ratio=0.5),
        (16, 4, 6),
    ),
    "halo": Case(
        lambda: HaloAttn(16, 32, num_heads=2, block_size=4, halo_size=1, dim_head=8), (16, 8, 12)
    ),
    "levit-down-conv": Case(
        lambda: levit.AttentionDownsample(24, 32, 8, 3, 4.0, 2, (3, 5), use_conv=True), (24, 3, 5)
    ),
    "efficientformer": Case(lambda: efficientformer.Attention(24, 8, 3, 2, 4), (16, 24)),
    "efficientvit": Case(
        lambda: efficientvit_msra.CascadedGroupAttention(24, 4, 3, 2, 5, (7, 5, 3)), (24, 5, 5)
    ),
    "crossvit": Case(lambda: crossvit.CrossAttention(24, 3, qkv_bias=True), (9, 24)),
    "volo": Case(lambda: volo.ClassAttention(24, 3, qkv_bias=True), (9, 24)),
    "convit": Case(lambda: convit.MHSA(24, 3, qkv_bias=True), (9, 24)),
    "gcvit": Case(
        lambda: gcvit.WindowAttentionGlobal(24, 3, (3, 4), use_global=False), (12, 24)
    ),
    "shvit": Case(lambda: shvit.SHSA(24, 4, 8), (24, 3, 5)),
    "visformer": Case(lambda: visformer.Attention(24, 3), (24, 3, 5)),
    "twins": Case(
        lambda: twins.LocallyGroupedAttn(24, num_heads=3, ws=4), (64, 24), lambda batch: ((8, 8),)
    ),
}  # fmt: skip


COMPILED = ("sam", "mvit", "levit-down-conv", "shvit")  # the compiler takes seconds


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_agrees(name: str, dtype: torch.dtype) -> None:
    module = randomised(CASES[name].make())
    for batch in (1, 3):
        inputs = (torch.randn(batch, *CASES[name].shape), *CASES[name].further(batch))
        assert_same(module, dtype, *inputs)


@pytest.mark.parametrize("name", CASES)
def test_gradients_copies_and_capture(name: str) -> None:
    """float64 gradients are the original's; copies and pickles work; it compiles in one graph."""
    torch._dynamo.reset()
    module = randomised(CASES[name].make()).double()
    x = torch.randn(2, *CASES[name].shape, dtype=torch.float64)
    more = CASES[name].further(2)
    original = copy.deepcopy(module)  # LeViT keeps the graph of its biases, which has no copy
    expected = first(original(x, *more))
    grads = torch.autograd.grad(expected.square().sum(), list(original.parameters()))
    patch(module)
    out = first(module(x, *more))
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.square().sum(), list(module.parameters()))
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    for mode in (True, False):  # LeViT's forgets the biases that it gathered, and their graph
        module.train(mode)
    with torch.no_grad():
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is type(module)
            assert torch.equal(first(other(x, *more)), first(module(x, *more)))
        if name in COMPILED:
            compiled = torch.compile(module, fullgraph=True, backend="eager")
            torch.testing.assert_close(first(compiled(x, *more)), expected.detach())
            torch.testing.assert_close(first(module(x, *more)), expected.detach())


def test_global_queries_stay_with_their_image() -> None:
    """timm 1.0.31 mends an order that 1.0.29 had wrong; the adapter follows the installed one."""
    module = randomised(gcvit.WindowAttentionGlobal(24, 3, (3, 3)))
    with torch.no_grad():
        assert_same(module, torch.float32, torch.randn(6, 9, 24), torch.randn(2, 3, 3, 24))
        assert_same(module, torch.float32, torch.randn(4, 9, 24), torch.randn(1, 3, 3, 24))


def test_decomposed_positions_need_no_mask() -> None:
    for case in ("sam", "mvit"):
        module = randomised(CASES[case].make())
        patch(module)
        with torch.no_grad(), Calls() as calls:
            module(torch.randn(2, *CASES[case].shape), *CASES[case].further(2))
        assert calls.elsa[0][0][3] is None


@torch.no_grad()
def test_positions_too_many_for_the_head_dim_become_a_mask(monkeypatch) -> None:
    monkeypatch.setattr(timm_decomposed, "_WIDEST", 16)
    for name in ("sam", "mvit", "mvit-no-token"):
        module = randomised(CASES[name].make())
        inputs = (torch.randn(2, *CASES[name].shape), *CASES[name].further(2))
        assert_same(module, torch.float32, *inputs)
        patch(module)
        with Calls() as calls:
            module(*inputs)
        assert calls.elsa[0][0][3] is not None


@pytest.mark.parametrize("name", ["crossvit", "volo", "sam", "visformer", "twins"])
@torch.no_grad()
def test_dropout_stays_dropout(name: str) -> None:
    module = randomised(CASES[name].make())
    module.attn_drop.p = 0.5
    patch(module)
    inputs = (torch.randn(2, *CASES[name].shape), *CASES[name].further(2))
    assert torch.equal(module(*inputs), module(*inputs))
    module.train()
    assert not torch.equal(module(*inputs), module(*inputs))


@torch.no_grad()
def test_open_clip_attention_pool() -> None:
    resnet = pytest.importorskip("open_clip.modified_resnet")
    module = randomised(resnet.AttentionPool2d(3, 24, 3, 10))
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(module, dtype, torch.randn(3, 24, 3, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [(3, 4), (1, 5), (7, 7)])
@pytest.mark.parametrize(("more", "prefix"), [(0, 0), (3, 0), (0, 1), (5, 2)])
def test_places_in_few_launches(keys, more, prefix):
    """On a GPU they are built in another way, to the same numbers."""
    like = torch.randn(2, 2, 5, 6, dtype=torch.float16)
    expected = timm_decomposed._places(keys, more, prefix, like)
    found = timm_decomposed._places(keys, more, prefix, like.cuda()).cpu()
    assert torch.equal(found, expected) and found.dtype == expected.dtype
