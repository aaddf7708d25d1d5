"""Hiera's blocks as functions in a row: the original's bits, and the original wherever a module is
seen.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

timm = pytest.importorskip("timm")

from timm.models.hiera import HieraBlock, MaskUnitAttention  # noqa: E402

import elsa_core as elsa  # noqa: E402
from elsa_core import short_calls  # noqa: E402
from elsa_core.patching.adapters import flat, flat_hiera, host, timm_folded  # noqa: E402

WINDOWED, GLOBAL = {"use_mask_unit_attn": True}, {"use_mask_unit_attn": False}
VARIANTS = {
    "windows": {"window_size": 4, **WINDOWED},
    "global": {"window_size": 4, **GLOBAL},
    "pooled windows": {"dim_out": 48, "q_stride": 4, "window_size": 4, **WINDOWED},
    "pooled": {"dim_out": 48, "q_stride": 4, "window_size": 4, **GLOBAL},
    "mean": {"dim_out": 48, "q_stride": 4, "window_size": 4, "use_expand_proj": False, **WINDOWED},
    "scaled": {"window_size": 4, "init_values": 0.5, "drop_path": 0.1, **GLOBAL},
    "wider": {"dim_out": 48, "window_size": 4, **WINDOWED},
    "odd": {"dim_out": 27, "window_size": 4, **GLOBAL},
}


def block(dim_out=24, **options):
    torch.manual_seed(0)
    options.setdefault("window_size", 4)
    made = HieraBlock(24, dim_out, 3, **options).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def tokens(batch=2, count=32):
    return torch.randn(batch, count, 24, generator=torch.Generator().manual_seed(1))


def model(**options):
    torch.manual_seed(0)
    sizes = {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1)}
    return timm.create_model("hiera_tiny_224", num_classes=3, **sizes, **options).eval()


def image(dtype=torch.float32, batch=1):
    x = torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    return x.to(dtype)


@pytest.fixture
def in_a_row(monkeypatch):
    """The blocks that ran in a row."""
    found, read = [], flat.run_of

    def noted(module, reader):
        run = read(module, reader)
        if reader is flat_hiera.block and run is not None:
            found.append(module)
        return run

    monkeypatch.setattr(flat, "run_of", noted)
    return found


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_original_bit_by_bit(options, dtype, batch):
    module, x = block(**options).to(dtype), tokens(batch).to(dtype)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.equal(flat.served(module, flat_hiera.block, x), module(x))


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_gradients_and_autocast_are_the_originals(options):
    module, x = block(**options), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flat.served(module, flat_hiera.block, x), module(x))
    if "drop_path" not in options:
        module.train()  # nothing in it drops
    grads = []
    for forward in (module, lambda y: flat.served(module, flat_hiera.block, y)):
        module.zero_grad()
        forward(x).square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scope", ["attention", "model"])
def test_a_model_in_small_calls_is_the_original(scope, dtype, on_gpu, in_a_row):
    """From the first call on, patched in another scope before."""
    made, x = model().to(dtype), image(dtype)
    with torch.no_grad():
        before = made(x)
        elsa.patch(made, scope="model" if scope == "attention" else "attention")
        elsa.unpatch(made)
        elsa.patch(made, scope=scope)
        for _ in range(4):
            in_a_row.clear()
            assert torch.equal(made(x), before)
            assert len(in_a_row) == 5
        on_gpu.clear()
        made(x)
        assert not on_gpu
    assert torch.equal(host.all_original(made, x), before)


def test_a_call_on_a_cpu_is_the_blocks_own(monkeypatch):
    made, x = model(), image()
    elsa.patch(made, scope="attention")
    assert type(made.blocks[0]) is timm_folded.ElsaHieraBlock
    monkeypatch.setattr(timm_folded, "added", None)
    monkeypatch.setattr(flat, "run_of", None)
    called, own = [], HieraBlock.forward
    monkeypatch.setattr(HieraBlock, "forward", lambda *given: called.append(1) or own(*given))
    with torch.no_grad():
        made(x)
    assert len(called) == 5


NAMES = ["norm1", "attn", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.act", "proj", "drop_path1"]


@pytest.mark.parametrize("name", NAMES)
def test_hooks_are_called(name):
    module, x = block(**VARIANTS["pooled"]), tokens()
    elsa.patch(nn.Sequential(module), scope="model")
    assert flat.served(module, flat_hiera.block, x) is not None
    hooked, seen = module.get_submodule(name), []
    for register in (hooked.register_forward_hook, hooked.register_forward_pre_hook):
        handle = register(lambda *_: seen.append(1))
        assert flat.served(module, flat_hiera.block, x) is None
        host.all_original(module, x)
        handle.remove()
    assert len(seen) == 2
    hooked.forward = hooked.forward
    assert flat.served(module, flat_hiera.block, x) is None
    del hooked.forward
    assert flat.served(module, flat_hiera.block, x) is not None


class Doubled(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


@pytest.mark.parametrize("name", ["attn.qkv", "attn", "proj", "mlp", "norm2", "ls1"])
def test_replaced_parts_are_called(name):
    module, x = block(**VARIANTS["pooled"]), tokens()
    before = flat.served(module, flat_hiera.block, x)
    own = module.get_submodule(name)
    module.set_submodule(name, Doubled(own))
    if name == "attn":
        module.attn.q_stride = own.q_stride
    assert flat.served(module, flat_hiera.block, x) is None
    assert not torch.equal(module(x), before)
    module.set_submodule(name, own)
    assert torch.equal(flat.served(module, flat_hiera.block, x), before)


def test_what_drops_runs_itself():
    x = tokens()
    module = block(drop_path=0.2).train()
    assert flat.served(module, flat_hiera.block, x) is None
    module = block()
    module.mlp.drop1 = nn.Dropout(0.2).train()
    assert flat.served(module, flat_hiera.block, x) is None
    module.mlp.drop1.eval()
    assert flat.served(module, flat_hiera.block, x) is not None


@pytest.mark.parametrize("patched", [False, True])
def test_the_unfused_branch_is_the_modules_own(patched):
    module, x = block(**VARIANTS["pooled"]), tokens()
    module.attn.fused_attn = False
    expected = module(x)
    if patched:
        elsa.patch(nn.Sequential(module), scope="attention")
    assert torch.equal(host.all_original(flat.served, module, flat_hiera.block, x), expected)


@pytest.mark.parametrize("cls", [HieraBlock, MaskUnitAttention])
def test_a_forward_put_in_a_class_later(cls, on_gpu, monkeypatch):
    module, x = nn.Sequential(block()), tokens()
    elsa.patch(module, scope="attention")
    with torch.no_grad():
        before, own = module(x), cls.forward
        monkeypatch.setattr(cls, "forward", lambda *given: 2 * own(*given))
        assert flat.served(module[0], flat_hiera.block, x) is None
        if cls is HieraBlock:  # a redirected method is the one that was there
            assert not torch.equal(module(x), before)
        monkeypatch.setattr(cls, "forward", own)
        assert torch.equal(flat.served(module[0], flat_hiera.block, x), before)


def test_other_adapters_and_names_are_called():
    module, x = block(), tokens()
    elsa.patch(nn.Sequential(module), scope="attention")
    assert flat.served(module, flat_hiera.block, x) is not None
    cls = type(module.attn)
    module.attn.__class__ = type("Other", (cls,), {"elsa_base": MaskUnitAttention})
    assert flat.served(module, flat_hiera.block, x) is None
    module.attn.__class__ = cls
    module.attn.elsa_precision = "ieee"
    assert flat.served(module, flat_hiera.block, x) is None


@pytest.mark.parametrize("pool", [1, 4])
def test_windows_of_one_image_in_half_precision(pool, on_gpu, monkeypatch):
    """They are loaded once, then go the short way without the dimension of the batch."""
    loaded, served = [], []

    def serve(q, k, v, *rest):
        served.append(rest)
        return F.scaled_dot_product_attention(q, k, v)

    def load(run):
        loaded.append(run())
        monkeypatch.setattr(short_calls.ATTENTION, "serve", serve)

    monkeypatch.setattr(flat_hiera, "warm_up", load)
    options = {"window_size": 4, "q_stride": pool, **WINDOWED}
    module, x = block(**options, dim_out=24 * (1 if pool == 1 else 2)).half(), tokens(1).half()
    with torch.inference_mode():
        expected = module(x)
        for _ in range(3):
            found = flat.served(module, flat_hiera.block, x)
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert len(loaded) == 1 and loaded[0].dim() == 4
    assert served == [(None, False, None, "strict")] * 2
    with torch.inference_mode():
        flat.served(module, flat_hiera.block, x.repeat(2, 1, 1))
        flat.served(module.float(), flat_hiera.block, x.float())
    assert len(served) == 2 and len(loaded) == 1


def test_nothing_is_loaded_while_gradients_are_wanted(on_gpu, monkeypatch):
    monkeypatch.setattr(flat_hiera, "warm_up", None)
    module, x = block(**WINDOWED).half(), tokens(1).half()
    assert torch.equal(flat.served(module, flat_hiera.block, x), module(x))
    monkeypatch.setattr(flat_hiera, "is_captured", lambda: True)
    with torch.no_grad():
        assert torch.equal(flat.served(module, flat_hiera.block, x), module(x))


def test_one_copy_is_made_of_three():
    """Each operand begins as it would by itself, without gaps."""
    packed, space = torch.randn(2, 8, 48), {"q_stride": 1, "heads": 2, "head_dim": 8}
    for stride in (1, 4):
        space["q_stride"] = stride
        with torch.no_grad():
            one = flat_hiera._in_one(packed, space)
        apart = flat_hiera._in_one(packed, space)
        assert all(map(torch.equal, one, apart)) and all(t.is_contiguous() for t in one)
        assert one[1].untyped_storage().data_ptr() == one[2].untyped_storage().data_ptr()
        assert apart[1].untyped_storage().data_ptr() != apart[2].untyped_storage().data_ptr()


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
    seen = weakref.ref(made.blocks[0])
    del made
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("scope", ["model", "attention"])
def test_a_compiler_reads_no_table_and_no_length(scope, compiled_once):
    compiled_once(model, scope, 64)


def test_a_redirected_method_has_its_classes_name():
    module = nn.Sequential(block())
    elsa.patch(module, scope="attention")
    cls = type(module[0].attn)
    forward = cls.forward
    assert (forward.__module__, forward.__qualname__) == (
        cls.__module__,
        f"{cls.__qualname__}.forward",
    )
    assert flat._has_own_forward(cls)
