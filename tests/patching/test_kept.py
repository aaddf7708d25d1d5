"""Biases that timm keeps of its weights: one gather for a model in small calls on a GPU."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core.patching.adapters import host, kept
from elsa_core.patching.adapters import model as adapter
from elsa_core.patching.rewrite import original

timm = pytest.importorskip("timm")

FAMILIES = {
    "levit_128s": {"img_size": 64},
    "efficientformer_l1": {},
    "efficientvit_m0": {"img_size": 64},
    "tiny_vit_5m_224": {},
}


def images(name, batch=1):
    side = FAMILIES[name].get("img_size", 224)
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


def made(name):
    """A model whose biases matter."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **FAMILIES[name]).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and scales that hide the attention at first
            parameter.data.uniform_(0.3, 0.6)
    for table in tables(model):
        table.data.normal_()
    return model


def tables(model):
    return [p for name, p in model.named_parameters() if "attention_biases" in name]


def keepers(model):
    return [m for m in model.modules() if hasattr(m, "attention_bias_cache")]


def settled_calls(model):
    return [each for each in adapter._SETTLED[model].values() if each is not None]


def settled(name):
    model, x = made(name), images(name)
    elsa.patch(model, scope="attention")
    with torch.no_grad():
        for _ in range(3):
            model(x)
    return model, x


def by_original(model, x):
    """What a model that was never patched computes with the same weights and indexes."""
    plain = plain_of(model)
    with torch.no_grad():
        return plain(x)


def plain_of(model):
    plain = made(model.default_cfg["architecture"]).to(x_dtype(model))
    held = dict(model.named_buffers()) | dict(model.named_parameters())
    for name, own in (*plain.named_parameters(), *plain.named_buffers()):
        own.data.copy_(held[name])
    return plain


def x_dtype(model):
    return next(model.parameters()).dtype


@pytest.fixture
def gathers(monkeypatch):
    """The tensors that are gathered of, in order."""
    seen, select = [], torch.Tensor.index_select

    def counted(self, *given):
        seen.append(self)
        return select(self, *given)

    monkeypatch.setattr(torch.Tensor, "index_select", counted)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_one_gather_for_all_of_the_weights_as_they_are(on_gpu, gathers, name):
    model, x = settled(name)
    for _ in range(2):
        for table in tables(model):
            table.data.normal_()  # a write that PyTorch does not count
        gathers.clear()
        with torch.no_grad():
            found = model(x)
        assert len(gathers) == 1
        assert torch.equal(found, by_original(model, x))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_keeper_is_asked(on_gpu, monkeypatch, name):
    model, x = settled(name)
    asked, own = [], host.own_method
    monkeypatch.setattr(host, "own_method", lambda *given: asked.append(given) or own(*given))
    with torch.no_grad():
        model(x)
    assert not asked


def test_results_are_aligned(on_gpu):
    """Attention takes other kernels for a mask at an odd address."""
    model, x = settled("tiny_vit_5m_224")
    seen = []

    def look(*_):
        seen.extend(kept._CURRENT.biases.values())

    model.head.register_forward_hook(look)
    with torch.no_grad():
        model(x)
    assert len(seen) == len(tables(model)) > 1
    assert all(view.is_contiguous() and view.storage_offset() % 256 == 0 for view in seen)


@pytest.mark.parametrize("where", ["", "stages.1", "stages.1.blocks.0", "stages.1.blocks.0.attn"])
def test_a_hook_around_a_keeper_may_write_its_table(on_gpu, gathers, where):
    model, x = settled("tiny_vit_5m_224")
    table, wanted = tables(model)[0], torch.randn(())

    def writes(*_):
        table.data.copy_(wanted.expand_as(table))

    handle = model.get_submodule(where).register_forward_pre_hook(writes)
    for _ in range(2):
        wanted.add_(1)
        gathers.clear()
        with torch.no_grad():
            found = model(x)
        assert len(gathers) == len(tables(model))
        assert torch.equal(found, by_original(model, x))
    handle.remove()


def test_a_table_put_in_place_within_the_call_is_read(on_gpu):
    model, x = settled("levit_128s")
    keeper, act = keepers(model)[-1], model.stem.act1

    def puts(*_):
        keeper.attention_biases = nn.Parameter(torch.randn_like(keeper.attention_biases))

    act.register_forward_hook(puts)
    with torch.no_grad():
        found = model(x)
    act._forward_hooks.clear()
    assert torch.equal(found, by_original(model, x))


def test_gradients_within_the_call(on_gpu):
    """A hook may want some, say of a regulariser."""
    model, x = settled("levit_128s")
    keeper = keepers(model)[0]

    def wants(*_):
        with torch.enable_grad():
            keeper.get_attention_biases(x.device).sum().backward()

    model.head.register_forward_pre_hook(wants)
    with torch.no_grad():
        model(x)
    assert keeper.attention_biases.grad.any()


def test_tables_of_another_kind_of_tensor(on_gpu, gathers):
    class Own(torch.Tensor):
        pass

    model, x = settled("levit_128s")
    keeper = keepers(model)[0]
    keeper.attention_biases = nn.Parameter(keeper.attention_biases.detach().as_subclass(Own))
    gathers.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(x).as_subclass(torch.Tensor), by_original(model, x))
    assert len(gathers) >= len(tables(model))


def test_inference_mode_and_no_grad_share_a_gather(on_gpu):
    model, x = made("levit_128s"), images("levit_128s")
    elsa.patch(model, scope="attention")
    with torch.inference_mode():
        for _ in range(3):
            model(x)
    with torch.no_grad():
        assert torch.equal(model(x), by_original(model, x))


def test_an_index_that_changed_is_read(on_gpu):
    model, x = settled("levit_128s")
    keeper = keepers(model)[0]
    for change in (
        lambda: keeper.attention_bias_idxs.copy_(keeper.attention_bias_idxs.flip(0)),
        lambda: setattr(keeper, "attention_bias_idxs", keeper.attention_bias_idxs.flip(1)),
    ):
        change()
        with torch.no_grad():
            assert torch.equal(model(x), by_original(model, x))


def test_other_dtypes(on_gpu):
    model, x = settled("levit_128s")
    model.double()
    with torch.no_grad():
        for _ in range(3):
            found = model(x.double())
        torch.testing.assert_close(found, by_original(model, x.double()))
        keepers(model)[0].float()  # of two dtypes
        own = next(each for each in settled_calls(model) if each.keepers.sites)
        assert own.keepers._gathered() == {}


def test_a_gather_that_would_be_large_is_left_to_each(on_gpu, gathers, monkeypatch):
    monkeypatch.setattr(kept, "_MOST", 100)
    model, x = settled("levit_128s")
    gathers.clear()
    with torch.no_grad():
        assert torch.equal(model(x), by_original(model, x))
    assert len(gathers) == len(tables(model))


def test_an_attention_put_in_the_place_of_a_keeper(on_gpu):
    model, x = settled("tiny_vit_5m_224")
    block = model.stages[1].blocks[0]
    other = plain_of(model).stages[1].blocks[0].attn
    block.attn = other
    with torch.no_grad():
        for _ in range(2):
            other.attention_biases.data.normal_()
            assert torch.equal(model(x), by_original(model, x))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_in_another_thread(on_gpu, name):
    """It meets original methods and biases of a call without gradients, and takes its own."""
    model, x = settled(name)
    plain = plain_of(model)
    plain(x).sum().backward()

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: model(x).sum().backward())
            thread.start()
            thread.join()

    norm = next(m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, nn.BatchNorm1d)))
    norm.register_forward_hook(meanwhile)
    with torch.no_grad():
        model(x)
    for found, expected in zip(tables(model), tables(plain), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_another_thread_empties_no_cache_that_is_read(on_gpu):
    """Between each two lines of timm's that read the cache, another thread runs the model."""
    model, x = settled("levit_128s")
    with torch.no_grad():
        expected = model(x)
    others = []

    def other():
        with torch.no_grad():
            others.append(model(x))
            others.append(model(torch.cat([x, x])))

    def trace(frame, event, _):
        if frame.f_code.co_name != "get_attention_biases":
            return None
        if event == "line":
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return trace

    sys.settrace(trace)
    try:
        with torch.no_grad():
            found = model(x)
    finally:
        sys.settrace(None)
    assert torch.equal(found, expected)
    assert len(others) > 4 and all(torch.allclose(o[0], expected[0], atol=1e-5) for o in others)


def test_an_error_ends_the_call(on_gpu):
    model, x = settled("levit_128s")
    handle = model.head.register_forward_pre_hook(lambda *_: kept._CURRENT.biases["no id"])
    with torch.no_grad(), pytest.raises(KeyError, match="no id"):
        model(x)
    handle.remove()
    assert not kept._CURRENT.biases


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_have_a_cache_of_timms_own(on_gpu, name):
    model, x = settled(name)
    file, copies = io.BytesIO(), []

    def copies_once(*_):
        if not copies:
            copies.append(None)
            copies.append(copy.deepcopy(model))
            copies.append(pickle.loads(pickle.dumps(keepers(model)[0])))

    class Hook:
        def __call__(self, *_):
            copies_once()

        def __deepcopy__(self, _):
            return Hook()

    handle = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    handle = handle.register_forward_hook(Hook())
    with torch.no_grad():
        expected = model(x)
    handle.remove()
    torch.save(model, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    for other in copies[1:]:
        assert all(type(keeper.attention_bias_cache) is dict for keeper in keepers(other))
    for other in (copies[1], copies[3], copy.copy(model)):
        with torch.no_grad():
            assert torch.equal(other(x), expected)


def test_a_shallow_copy_of_a_keeper_has_its_own(on_gpu):
    model, x = settled("levit_128s")
    name, keeper = next((n, m) for n, m in model.named_modules() if m in keepers(model))
    other = copy.copy(keeper)
    other._parameters = dict(keeper._parameters)
    other.attention_biases = nn.Parameter(torch.randn_like(keeper.attention_biases))
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, other)
    with torch.no_grad():
        assert torch.equal(model(x), by_original(model, x))


def test_the_original_has_its_own_cache(on_gpu):
    model, x = settled("tiny_vit_5m_224")
    with torch.no_grad(), original(model):
        assert all(type(keeper.attention_bias_cache) is dict for keeper in keepers(model))
        expected = model(x)
    with torch.no_grad():
        for table in tables(model):
            table.data.neg_()
        model(x)
        for table in tables(model):
            table.data.neg_()
        assert torch.equal(model(x), expected)
    elsa.unpatch(model)
    assert all(type(keeper.attention_bias_cache) is dict for keeper in keepers(model))


def test_what_is_kept_ends_with_the_model(on_gpu):
    before = len(kept._PLANS)
    model, x = settled("levit_128s")
    with torch.no_grad():
        model(x)
        model(torch.cat([x, x]))
    assert len(kept._PLANS) == before + 1
    del model
    assert len(kept._PLANS) == before


def test_an_original_beside_the_operator_follows_the_weights():
    """A hook within TinyViT's attention keeps the block's original, on a CPU too."""
    model, x = made("tiny_vit_5m_224"), images("tiny_vit_5m_224")
    elsa.patch(model, scope="attention")
    for keeper in keepers(model):
        keeper.qkv.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        model(x)
        for table in tables(model):
            table.data.normal_()
        torch.testing.assert_close(model(x), by_original(model, x))
