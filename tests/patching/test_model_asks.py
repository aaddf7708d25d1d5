"""A patched model asks once for all sites: by kind of eager call on a GPU."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import elsa_core as elsa
from elsa_core import calls
from elsa_core.patching.adapters import base_class, host, is_companion, timm_sharded
from elsa_core.patching.adapters import model as adapter
from elsa_core.patching.rewrite import original

timm = pytest.importorskip("timm")


def made(**options):
    torch.manual_seed(0)
    options = {"depth": 2, "img_size": 32, "embed_dim": 24, "num_heads": 3, **options}
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **options).eval()


def images(batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def patched(on_gpu):
    model = made()
    with torch.no_grad():
        expected = model(images())
        elsa.patch(model, scope="model")
        assert torch.equal(model(images()), expected)
        assert on_gpu and all(on_gpu)
        on_gpu.clear()
        assert torch.equal(model(images()), expected)
        assert not on_gpu
    return model


def asks(model, asked, x=None):
    asked.clear()
    with torch.no_grad():
        model(images() if x is None else x)
    return bool(asked)


@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("beit_base_patch16_224", {"depth": 2, "img_size": 32, "embed_dim": 24, "num_heads": 3}),
        ("eva02_tiny_patch14_224", {"depth": 2, "img_size": 28, "embed_dim": 24, "num_heads": 3}),
        ("vit_relpos_small_patch16_224", {"depth": 2, "img_size": 32, "embed_dim": 24}),
        ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}),
        ("davit_tiny", {"embed_dims": (8, 16), "num_heads": (1, 2), "depths": (1, 1)}),
        ("levit_128s", {"img_size": 32}),
        ("samvit_base_patch16", {"depth": 2, "img_size": 32, "embed_dim": 24, "num_heads": 3}),
        ("gcvit_xxtiny", {"img_size": 32}),
        ("tnt_s_patch16_224", {"depth": 2, "img_size": 32}),
    ],
)  # fmt: skip
def test_the_second_call_of_a_kind_asks_nothing(on_gpu, name, options, scope):
    torch.manual_seed(0)
    size = options.get("img_size", 32)
    model = timm.create_model(name, num_classes=5, **options).eval()
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        expected = model(x)
        elsa.patch(model, scope=scope)
        assert torch.equal(model(x), expected)
        assert on_gpu and all(on_gpu)
        on_gpu.clear()
        assert torch.equal(model(x), expected)
    assert not on_gpu


@pytest.mark.parametrize("name", ["mha", "encoder", "torchvision"])
def test_pytorchs_fused_paths_stay(on_gpu, name):
    """Within their originals, modules take the C++ operators that they take unpatched."""
    torch.manual_seed(0)
    if name == "torchvision":
        vision = pytest.importorskip("torchvision.models")
        model, given = vision.VisionTransformer(32, 16, 2, 2, 24, 48).eval(), (images(),)
    else:
        x = torch.randn(2, 7, 24)
        layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        alone = nn.ModuleList([nn.MultiheadAttention(24, 2, batch_first=True)]).eval()
        model, given = (encoder, (x,)) if name == "encoder" else (alone[0], (x, x, x))
    with torch.no_grad():
        expected = model(*given)
        elsa.patch(model, scope="attention")
        for _ in range(2):
            found = model(*given)
            if name == "mha":
                found, expected = found[0], expected[0] if type(expected) is tuple else expected
            assert torch.equal(found, expected)


def test_another_kind_asks_anew(patched, on_gpu):
    assert not asks(patched, on_gpu)
    assert asks(patched, on_gpu, images(3)) and not asks(patched, on_gpu, images(3))
    patched(images())  # with gradients
    assert on_gpu and not asks(patched, on_gpu)
    patched.train()
    assert asks(patched, on_gpu)
    patched.eval().bfloat16()
    half = images().bfloat16()
    assert asks(patched, on_gpu, half) and not asks(patched, on_gpu, half)
    calls.forget_kinds()  # what serves calls has changed
    assert asks(patched, on_gpu, half)


def test_kinds_are_bounded(patched, on_gpu, monkeypatch):
    monkeypatch.setattr(adapter, "_MOST", 3)
    for batch in range(1, 6):
        asks(patched, on_gpu, images(batch))
    assert len(adapter._SETTLED[patched]) <= 3


def test_a_graph_under_capture_goes_site_by_site(patched, on_gpu, monkeypatch):
    monkeypatch.setattr(host, "_capturing", lambda: True)
    assert asks(patched, on_gpu) and not any(on_gpu)


def test_one_site_that_is_not_original_keeps_all_asking(on_gpu):
    for named in ({"precision": "ieee"}, {"backend": "eager"}, {"sparsity": "exact"}):
        model = made()
        elsa.patch(model, scope="attention")
        asks(model, on_gpu)
        assert not asks(model, on_gpu)
        elsa.patch(model, include="blocks.1.attn", scope="attention", **named)
        for _ in range(3):
            assert asks(model, on_gpu)


def test_large_calls_ask_twice(on_gpu, monkeypatch):
    monkeypatch.setattr(host.routing, "eager_least", lambda *_: 0)
    model = made()
    elsa.patch(model, scope="attention")
    for _ in range(2):
        assert asks(model, on_gpu) and not any(on_gpu)
    waits = []
    monkeypatch.setattr(host, "_waits", lambda *given: waits.append(given))
    asks(model, on_gpu)
    assert not waits
    asks(model, on_gpu, images(3))  # another kind
    assert waits


def test_hooks_see_every_call(patched, on_gpu):
    seen = []
    for name in ("", "blocks.0", "blocks.1.attn.qkv", "blocks.1.mlp.act"):
        patched.get_submodule(name).register_forward_hook(lambda *_, n=name: seen.append(n))
    for _ in range(2):
        seen.clear()
        asks(patched, on_gpu)
        assert seen == ["blocks.0", "blocks.1.attn.qkv", "blocks.1.mlp.act", ""]


def test_weights_are_read_at_each_call(patched):
    with torch.no_grad():
        for parameter in patched.parameters():
            parameter.mul_(1.5)
        found = patched(images())
        with original(patched):
            assert torch.equal(found, patched(images()))
        weights = {name: torch.zeros_like(p) for name, p in patched.named_parameters()}
        assert not torch.func.functional_call(patched, weights, (images(),)).any()


def test_other_threads_and_calls_after_an_error(patched, on_gpu):
    seen, act = [], patched.blocks[1].mlp.act

    def look():
        seen.append(host.is_within_original(patched.blocks[0].attn))

    def hook(*_):
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        raise ValueError

    handle = act.register_forward_hook(hook)
    with pytest.raises(ValueError), torch.no_grad():
        patched(images())
    handle.remove()
    look()
    assert seen == [True, False, False]


def test_a_model_within_a_model_asks_for_itself(on_gpu):
    inner = made()
    outer = nn.Sequential(inner, nn.Linear(5, 5)).eval()
    elsa.patch(inner, scope="attention")
    elsa.patch(outer, scope="model")
    asks(outer, on_gpu)
    assert type(outer).elsa_asks and type(inner).elsa_asks and not asks(outer, on_gpu)
    elsa.unpatch(outer)
    assert type(outer) is nn.Sequential and type(inner).__dict__.get("elsa_asks") is None


def test_the_class_is_known_by_its_name():
    model = made()
    plain, before = type(model), repr(model)
    keys = set(vars(model))
    elsa.patch(model, scope="attention")
    assert isinstance(model, plain) and type(model) is not plain and base_class(model) is plain
    assert (
        is_companion(model)
        and str(type(model)) == str(plain)
        and repr(model).startswith(plain.__name__)
    )
    same = made()
    elsa.patch(same, scope="attention")
    assert type(same) is type(model)
    assert not any(site.path == "" for site in elsa.inspect(model).sites)
    elsa.unpatch(model)
    assert type(model) is plain and repr(model) == before and set(vars(model)) == keys


def test_copies_and_pickles():
    model, x = made(), images()
    elsa.patch(model, scope="model")
    expected = model(x)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        pickle.loads(pickle.dumps(model, protocol=2)),
        torch.load(saved, weights_only=False),
    ]
    for other in copies:
        assert type(other) is type(model) and torch.equal(other(x), expected)
    elsa.unpatch(copies[0])
    assert b"elsa" not in pickle.dumps(copies[0]) and type(model) is type(copies[1])


def test_classes_derived_since():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = made()
    elsa.patch(model, scope="attention")
    parametrize.register_parametrization(model, "pos_embed", Doubled())
    assert type(model).__name__.startswith("Parametrized")
    other = copy.deepcopy(model)
    assert torch.equal(other(images()), model(images()))
    elsa.unpatch(model)
    parametrize.remove_parametrizations(model, "pos_embed")
    assert type(model) is type(made())


class Calls(nn.Module):
    """Calls itself in its own way."""

    def __init__(self):
        super().__init__()
        self.model = made()

    def __call__(self, x):
        return self.model(x)


class Reduces(Calls):
    """Pickles itself in its own way."""

    __call__ = nn.Module.__call__

    def forward(self, x):
        return self.model(x)

    def __reduce__(self):
        return Reduces, ()


class Meta(type):
    """Of a library that makes its own classes."""


class Registers(Reduces, metaclass=Meta):
    """Made by a metaclass."""

    __reduce__ = nn.Module.__reduce__


@pytest.mark.parametrize("cls", [Calls, Reduces, Registers])
def test_unusual_classes_keep_theirs(cls, on_gpu):
    model = cls()
    expected = model(images())
    elsa.patch(model, scope="attention")
    assert type(model) is cls
    assert torch.equal(model(images()), expected)
    elsa.unpatch(model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_recorded_programs_are_as_before():
    model, x = made(), images()
    with torch.no_grad():
        expected = model(x)
        elsa.patch(model, scope="attention")
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)
        outer = torch.compile(nn.Sequential(model), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(outer(x), expected)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("b")},))
        assert [node.name for node in program.graph.nodes if node.name == "x"]
        torch.testing.assert_close(program.module()(images(3)), model(images(3)))
        strict = torch.export.export(model, (x,), strict=True)
        torch.testing.assert_close(strict.module()(x), expected)
        traced = torch.jit.trace(model, x, check_trace=False)
        torch.testing.assert_close(traced(x), expected)
        batched = torch.func.vmap(model)(x[:, None])
        torch.testing.assert_close(batched[:, 0], expected)


def test_methods_called_in_the_models_place(patched, on_gpu):
    given = images()
    with torch.no_grad():
        for method in (patched.forward_features, patched.forward_intermediates):
            expected = method(given)
            assert on_gpu
            on_gpu.clear()
            found = method(given)
            assert not on_gpu
            if isinstance(found, tuple):
                found, expected = found[0], expected[0]
            assert torch.equal(found, expected)
    assert "x" in inspect.signature(patched.forward_features).parameters
    assert not hasattr(patched, "encode_image")


def test_what_a_watched_call_finds_is_not_kept(on_gpu):
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = made()
    elsa.patch(model, scope="attention")
    with Mode():
        assert asks(model, on_gpu) and not any(on_gpu)
    assert asks(model, on_gpu) and not asks(model, on_gpu)
    with Mode():
        assert asks(model, on_gpu)


def test_arguments_of_other_kinds_ask_each_time(on_gpu):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = made()

        def forward(self, given, scale=1.0):
            return self.model(given["x"] if isinstance(given, dict) else given.x) * scale

    class Given:
        x = images()

    model = Takes()
    elsa.patch(model, scope="attention")
    with torch.no_grad():
        for _ in range(2):
            on_gpu.clear()
            model(Given())
            assert on_gpu
        for scale in (1.0, 2.0):
            for first in (True, False):
                on_gpu.clear()
                model({"x": images()}, scale=scale)
                assert bool(on_gpu) is first


def test_pooled_keys_are_counted_as_they_are(on_gpu):
    """3 137 queries meet 50 keys in MViTv2's first stage; with 3 137 it would be no small call."""
    model = timm.create_model("mvitv2_tiny").eval()
    elsa.patch(model, scope="attention")
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        model(x)
        assert on_gpu
        on_gpu.clear()
        model(x)
    assert not on_gpu


@pytest.mark.parametrize("name", ["levit_128s", "efficientformer_l1", "efficientvit_m0",
                                  "tiny_vit_5m_224"])  # fmt: skip
def test_originals_that_keep_something_of_the_weights(on_gpu, name):
    """timm keeps gathered biases of eval mode, which a checkpoint loaded since does not change."""
    torch.manual_seed(0)
    size = {} if name in ("efficientformer_l1", "tiny_vit_5m_224") else {"img_size": 64}
    model = timm.create_model(name, num_classes=5, **size).eval()
    x = torch.randn(1, 3, size.get("img_size", 224), size.get("img_size", 224))
    other = timm.create_model(name, num_classes=5, **size).eval()
    for key, weight in other.named_parameters():
        if "attention_biases" in key:
            weight.data.normal_()
    with torch.no_grad():
        expected = other(x)
        elsa.patch(model, scope="attention")
        model(x)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(x), expected)
    for _ in range(2):  # nor a graph, which could be gone through once
        model(x).sum().backward()
    copy.deepcopy(model)


def test_a_method_that_is_replaced_later_is_the_one_that_runs(on_gpu):
    class Own(type(made())):
        pass

    model = made()
    model.__class__ = Own
    elsa.patch(model, scope="attention")
    Own.forward_features = lambda self, x: torch.ones(len(x), 5, 24)
    assert torch.equal(model.forward_features(images()), torch.ones(2, 5, 24))


def test_a_traced_model_keeps_a_patched_one_as_a_leaf():
    layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    whole = nn.Sequential(encoder)
    elsa.patch(encoder)
    graph = torch.fx.symbolic_trace(whole).graph
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0"]


def test_arguments_that_cannot_be_told_apart(on_gpu):
    """They ask site by site, as before."""
    layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    elsa.patch(encoder)
    nested = torch.nested.nested_tensor([torch.randn(3, 24), torch.randn(5, 24)])
    endless = []
    endless.append(endless)

    class Unhashable(str):
        __hash__ = None

    kind = adapter._kind_of
    for given in ((nested,), (images(), endless), (images(), Unhashable("a"))):
        assert kind(encoder, given, {}) is None
    with torch.no_grad():
        assert encoder(nested).is_nested


def test_what_begins_within_a_settled_call_is_seen(patched, on_gpu):
    """Selective checkpoints, for example: what they record must be what runs again."""

    class Watches(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    assert not asks(patched, on_gpu)
    block = patched.blocks[0]
    real = block.forward

    def forward(x):
        with Watches():
            return real(x)

    block.__dict__["forward"] = forward
    assert asks(patched, on_gpu)


def test_sparsity_that_is_asked_for_later(patched, on_gpu):
    assert not asks(patched, on_gpu)
    patched.blocks[0].attn.elsa_sparsity = "exact"
    with torch.no_grad():
        assert not host.all_original(host.is_within_original, patched.blocks[0].attn)
        assert host.all_original(host.is_within_original, patched.blocks[1].attn)


def test_classes_that_must_have_no_subclass():
    names = []

    class Registers(nn.Module):
        def __init_subclass__(cls):
            names.append(cls)

    class Named(Registers):
        def forward(self, x):
            return x

    class Above(type(made())):
        def forward(self, x):
            return super(type(self), self).forward(x)

    assert names == [Named] and not adapter.may_ask(Named()) and adapter.may_ask(made())
    model = made()
    expected = model(images())
    model.__class__ = Above
    elsa.patch(model)
    assert type(model) is Above
    torch.testing.assert_close(model(images()), expected)


def test_a_class_derived_from_a_patched_model_stays(patched):
    class Derived(type(patched)):
        def forward(self, x):
            return 2 * super().forward(x)

    patched.__class__ = Derived
    assert elsa.unpatch(patched) and type(patched) is Derived
    assert not any(hasattr(type(m), "elsa_base") for m in list(patched.modules())[1:])
    assert torch.equal(patched(images()), 2 * made()(images()))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle(protocol):
    model = made()
    elsa.patch(model)
    again = pickle.loads(pickle.dumps(model, protocol))
    assert type(again) is type(model)
    assert torch.equal(again(images()), model(images()))


def test_a_sequence_whose_layers_were_replaced(on_gpu):
    """By LoRA, for example: no linear layer is left to judge by."""

    class Scaled(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return 2 * self.layer(x)

    sequence = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleDict({"attention": attention, "mlp": sequence}).eval()
    elsa.patch(model, scope="model")
    for i in (0, 2):
        sequence[i] = Scaled(nn.Linear(*(8, 16) if i == 0 else (16, 8)))
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = sequence[2](nn.functional.gelu(sequence[0](x)))
        torch.testing.assert_close(sequence(x), expected)


def test_lengths_stay_open_where_pooled_keys_are_counted():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = timm.create_model("mvitv2_tiny").stages[0].blocks[0].attn

        def forward(self, x):
            return self.attn(x, [8, 8])[0]

    model = Alone().eval()
    elsa.patch(model, scope="attention")
    x = torch.randn(2, 65 if model.attn.has_cls_token else 64, 96)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("b")},))
    found = program.module()(x[:1].repeat(3, 1, 1))
    torch.testing.assert_close(found, model(x[:1]).repeat(3, 1, 1))


def test_sharded_attention_never_keeps_its_original(monkeypatch):
    """The original attends within a rank's own tokens."""
    model, x = made(), torch.randn(2, 5, 24)
    elsa.patch(model, scope="attention")
    block = model.blocks[0]
    block.attn.__class__ = timm_sharded.ShardedAttention

    def added(self, x, *given):
        return torch.full_like(x, 7.0)

    monkeypatch.setattr(timm_sharded.ShardedAttention, "elsa_added", added)
    with torch.no_grad():
        assert (host.all_original(block.attn, x) == 7).all()
        expected = x + 7
        expected = expected + block.mlp(block.norm2(expected))
        torch.testing.assert_close(host.all_original(block, x), expected)
