"""MViTv2's blocks as functions in a row: the original's bits, with distances that are kept."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

timm = pytest.importorskip("timm")

from timm.models.mvitv2 import (  # noqa: E402
    MultiScaleAttention,
    MultiScaleBlock,
    MultiScaleVit,
    MultiScaleVitCfg,
)

import elsa_core as elsa  # noqa: E402
from elsa_core import calls  # noqa: E402
from elsa_core.patching.adapters import direct, flat, flat_mvitv2, host, small  # noqa: E402
from elsa_core.patching.adapters.timm_mvitv2 import ElsaMultiScaleAttention  # noqa: E402

NO_TOKEN = {"has_cls_token": False}
VARIANTS = {
    "plain": {},
    "no token": NO_TOKEN,
    "no positions": {"rel_pos_type": "none"},
    "no residual": {"residual_pooling": False, **NO_TOKEN},
    "mean": {"mode": "avg"},
    "most": {"mode": "max", **NO_TOKEN},
    "fewer queries": {"stride_q": (2, 2), **NO_TOKEN},
    "fewer keys": {"stride_kv": (4, 4)},
    "more keys": {"stride_q": (2, 2), "stride_kv": (1, 1), "drop_path": 0.1},
    "wider": {"dim_out": 48, "expand_attn": True},
    "wider at last": {"dim_out": 48, "stride_q": (2, 2)},
}
SIZE = [6, 8]  # smaller than that of the embeddings


def block(dim_out=24, **options):
    torch.manual_seed(0)
    usual = {"kernel_q": (3, 3), "kernel_kv": (3, 3), "stride_kv": (2, 2), "feat_size": (8, 8)}
    made = MultiScaleBlock(24, dim_out, 3, **{**usual, **options}).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def tokens(module, batch=2):
    count = SIZE[0] * SIZE[1] + int(module.has_cls_token)
    return torch.randn(batch, count, 24, generator=torch.Generator().manual_seed(1))


def in_row(module, x):
    reader = flat_mvitv2.block if hasattr(module, "attn") else flat_mvitv2.attention
    run = flat.run_of(module, reader)
    return None if run is None else run(x, SIZE)


def equal(found, expected):
    return torch.equal(found[0], expected[0]) and list(found[1]) == list(expected[1])


def model(**options):
    torch.manual_seed(0)
    sizes = {"depths": (1, 2, 1, 1), "embed_dim": 32, **options}
    made = MultiScaleVit(MultiScaleVitCfg(**sizes), img_size=(64, 64), num_classes=3).eval()
    for name, parameter in made.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(parameter)
    return made


def image(dtype=torch.float32):
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    return x.to(dtype)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_the_original_bit_by_bit(options, dtype, batch):
    module = block(**options).to(dtype)
    x = tokens(module, batch).to(dtype)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert equal(in_row(module, x), module(x, SIZE))
            assert equal(in_row(module.attn, x), module.attn(x, SIZE))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_gradients_and_autocast_are_the_originals(options, batch):
    module = block(**options)
    x = tokens(module, batch)
    for grad in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grad):
            assert equal(in_row(module, x), module(x, SIZE))
    grads = []
    for forward in (module, lambda y, _: in_row(module, y)):
        module.zero_grad()
        forward(x, SIZE)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("cls_token", [False, True])
def test_a_model_in_small_calls_is_the_original(cls_token, scope, dtype, on_gpu):
    made, x = model(use_cls_token=cls_token).to(dtype), image(dtype)
    with torch.no_grad():
        before = made(x)
        elsa.patch(made, scope=scope)
        for _ in range(4):
            assert torch.equal(made(x), before)
        on_gpu.clear()
        made(x)
        assert not on_gpu
    assert torch.equal(host.all_original(made, x), before)


def test_what_is_called_in_small_calls():
    assert direct.replaced(ElsaMultiScaleAttention) == ("forward",)
    found = small.small_method(ElsaMultiScaleAttention, "forward")
    assert found is ElsaMultiScaleAttention.elsa_small_forward
    site = block().attn
    site.__class__ = ElsaMultiScaleAttention
    assert small.own_method(site, "forward") is found


def test_attention_by_itself_is_in_a_row(on_gpu, monkeypatch):
    """Within a block that a hook keeps from being one; the method is there for one call."""
    made, x, seen, ran = model(), image(), [], []
    read = flat_mvitv2._images
    monkeypatch.setattr(flat_mvitv2, "_images", lambda *given: ran.append(1) or read(*given))
    with torch.no_grad():
        before = made(x)
        elsa.patch(made, scope="attention")
        made(x)
        first = made.stages[0].blocks[0]
        first.norm2.register_forward_hook(lambda *_: seen.append("forward" in vars(first.attn)))
        for _ in range(3):
            ran.clear()
            assert torch.equal(made(x), before)
    assert len(ran) == 5 and seen[-1] and "forward" not in vars(first.attn)
    assert vars(copy.deepcopy(first.attn)).keys() == vars(first.attn).keys()


NAMES = ["attn.qkv", "attn.pool_q", "attn.norm_k", "attn.proj", "attn", "norm1", "mlp.fc2",
         "shortcut_pool_attn", "shortcut_proj_mlp"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_hooks_are_called(name):
    module = block(dim_out=48, stride_q=(2, 2))
    x = tokens(module)
    elsa.patch(nn.Sequential(module), scope="model")
    expected = in_row(module, x)
    hooked, seen = module.get_submodule(name), []
    for register in (hooked.register_forward_hook, hooked.register_forward_pre_hook):
        handle = register(lambda *_: seen.append(1))
        assert in_row(module, x) is None
        assert equal(host.all_original(module, x, SIZE), expected)
        assert seen
        handle.remove()
    assert len(seen) >= 2
    assert equal(in_row(module, x), expected)


class Doubled(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *given):
        return 2 * self.layer(*given)


@pytest.mark.parametrize("name", ["attn.qkv", "attn.pool_k", "attn.norm_v", "mlp", "norm1"])
def test_replaced_parts_are_called(name):
    module = block()
    x = tokens(module)
    elsa.patch(nn.Sequential(module), scope="attention")
    before = host.all_original(module, x, SIZE)
    assert equal(in_row(module, x), before)
    own = module.get_submodule(name)
    module.set_submodule(name, Doubled(own))
    assert in_row(module, x) is None
    changed = host.all_original(module, x, SIZE)
    assert equal(changed, MultiScaleBlock.forward(module, x, SIZE)) and not equal(changed, before)
    module.set_submodule(name, own)
    assert equal(in_row(module, x), before)


def test_changes_of_the_module_are_seen():
    module = block()
    x = tokens(module)
    before = in_row(module, x)
    module.load_state_dict({k: 1.5 * v for k, v in module.state_dict().items()}, assign=True)
    after = in_row(module, x)
    assert equal(after, module(x, SIZE)) and not equal(after, before)
    module.attn.rel_pos_type = "none"
    assert equal(in_row(module, x), module(x, SIZE))
    module.attn.residual_pooling = False
    assert equal(in_row(module, x), module(x, SIZE))
    nn.utils.parametrizations.weight_norm(module.attn.pool_q)
    assert in_row(module, x) is None


def test_what_drops_runs_itself():
    module = block(drop_path=0.2).train()
    assert in_row(module, tokens(module)) is None
    assert in_row(module.attn, tokens(module)) is not None
    module.eval()
    assert in_row(module, tokens(module)) is not None


@pytest.mark.parametrize("name", ["attn.pool_q", "attn"])
def test_a_weight_that_is_no_parameter_any_more(name):
    module = block()
    x = tokens(module)
    elsa.patch(nn.Sequential(module), scope="attention")
    owner, weight = module.get_submodule(name), "weight" if name != "attn" else "rel_pos_h"
    term = getattr(owner, weight).detach()
    delattr(owner, weight)
    setattr(owner, weight, 2 * term)
    with pytest.raises(KeyError):
        in_row(module, x)
    found = host.all_original(module, x, SIZE)
    assert equal(found, MultiScaleBlock.forward(module, x, SIZE))
    assert equal(host.all_original(module.attn, x, SIZE), MultiScaleAttention.forward(
        module.attn, x, SIZE))  # fmt: skip


@pytest.fixture
def kept(monkeypatch):
    found = {}
    monkeypatch.setattr(flat_mvitv2, "_DISTANCES", found)
    return found


def test_distances_are_made_once(kept, monkeypatch):
    """For each pair of lengths, as tensors that gradients may keep; by default dtype."""
    module = block()
    x = tokens(module)
    with torch.inference_mode():
        expected = in_row(module, x)
    assert len(kept) == 2 and not any(each.is_inference() for each in kept.values())
    in_row(module, x)[0].sum().backward()
    made = flat_mvitv2._made
    monkeypatch.setattr(flat_mvitv2, "_made", None)
    assert equal(in_row(module, x), expected)
    monkeypatch.setattr(flat_mvitv2, "_made", made)
    torch.set_default_dtype(torch.float64)
    try:
        in_row(module, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(kept) == 4


def test_distances_are_bounded(kept, monkeypatch):
    monkeypatch.setattr(flat_mvitv2, "_MOST", 30)
    module = block()
    x = tokens(module)
    for _ in range(2):
        assert equal(in_row(module, x), module(x, SIZE))
    assert [each.numel() for each in kept.values()] == [18]


def test_a_graph_keeps_no_distances(kept, monkeypatch):
    """What it would fill in each replay is for itself."""
    monkeypatch.setattr(flat_mvitv2, "is_captured", lambda: True)
    found = flat_mvitv2._distances(4, 2, torch.device("meta"))
    assert found.shape == (8,)
    kept.clear()
    with FakeTensorMode():
        flat_mvitv2._distances(4, 2, torch.device("cuda"))
    assert not kept


def test_a_mode_that_began_within_a_call_sees_the_original(monkeypatch):
    site = block().attn
    x = torch.randn(1, 49, 24)
    elsa.patch(nn.Sequential(site), scope="attention")
    monkeypatch.setattr(flat, "run_of", None)
    monkeypatch.setattr(calls, "traced", lambda: True)
    assert equal(site.elsa_small_forward(x, SIZE), MultiScaleAttention.forward(site, x, SIZE))


def test_a_step_with_checkpoints_is_the_originals(on_gpu):
    """What a backward runs again, outside of the model's call, is what ran before."""
    grads, x = [], image()
    for patched in (False, True):
        made = model().train()
        made.set_grad_checkpointing()
        if patched:
            elsa.patch(made, scope="attention")
        for _ in range(3):
            made.zero_grad()
            made(x).square().sum().backward()
        grads.append([p.grad for p in made.parameters()])
    assert all(map(torch.equal, *grads))


def test_copies_pickles_and_what_is_kept():
    made, x = model(), image()
    elsa.patch(made, scope="attention")
    with torch.no_grad():
        expected = host.all_original(made, x)
        for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert torch.equal(host.all_original(other, x), expected)
    seen = weakref.ref(made.stages[0].blocks[0].attn)
    del made
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("scope", ["model", "attention"])
def test_a_compiler_reads_no_table_and_no_length(scope, compiled_once):
    compiled_once(model, scope, 64)
