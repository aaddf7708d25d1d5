"""Sites with their original methods on themselves, for the time of one small call on a GPU."""

from __future__ import annotations

import copy
import gc
import io
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import elsa_core as elsa
from elsa_core.patching.adapters import direct, host, timm_swin, timm_swin_v2
from elsa_core.patching.adapters import model as adapter

timm = pytest.importorskip("timm")


@pytest.fixture
def model(on_gpu):
    """A patched model whose calls of two images are settled."""
    torch.manual_seed(0)
    options = {"depth": 2, "img_size": 32, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    made = timm.create_model("beit_base_patch16_224", **options).eval()
    elsa.patch(made, scope="model")
    with torch.no_grad():
        for _ in range(3):
            made(images())
    return made


def images(batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def with_own(model):
    return [name for name, m in model.named_modules() if "forward" in vars(m)]


def during(model, look):
    """A call within which `look` is called."""
    handle = model.blocks[1].norm2.register_forward_hook(lambda *_: look())
    try:
        with torch.no_grad():
            return model(images())
    finally:
        handle.remove()


def test_methods_are_there_for_one_call(model):
    seen = []
    during(model, lambda: seen.extend(with_own(model)))
    assert {"blocks.0", "blocks.1.attn", "blocks.1.mlp", "head"} <= set(seen)
    assert not with_own(model)


def test_no_site_asks(model, monkeypatch):
    asked = []
    answers = host.is_unasked
    monkeypatch.setattr(host, "is_unasked", lambda space: asked.append(space) or answers(space))
    with torch.no_grad():
        model(images())
    assert not asked


def test_no_function_is_called_for_each_module(model):
    own = next(each for each in adapter._SETTLED[model].values() if each is not None)
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        found = own(with_own, model)
    finally:
        sys.setprofile(None)
    assert len(found) > 10 and len(entered[: entered.index("with_own")]) < 5


def test_they_go_with_an_error(model):
    def fails():
        raise ValueError("a hook's")

    with pytest.raises(ValueError, match="a hook's"):
        during(model, fails)
    assert not with_own(model)


def test_a_method_of_the_users_own_stays(model):
    attn = model.blocks[1].attn
    attn.forward = lambda x, **_: torch.zeros_like(x)
    with torch.no_grad():
        found = model(images())
        del attn.forward
        expected = model(images())
    assert not torch.equal(found, expected)
    before = attn.forward

    def replaces():
        attn.forward = before

    during(model, replaces)
    assert attn.__dict__.pop("forward") is before


def test_a_class_derived_since_has_the_say(model):
    layer = model.head

    class Doubled(type(layer)):
        def forward(self, x):
            return 2 * super().forward(x)

    with torch.no_grad():
        expected = model(images())
        layer.__class__ = Doubled
        assert torch.equal(model(images()), 2 * expected)


def test_a_module_put_in_its_place_is_called(model):
    model.head = nn.Linear(24, 7)
    with torch.no_grad():
        assert model(images()).shape == (2, 7)


def test_no_module_is_kept_alive(model):
    with torch.no_grad():
        model(images())
    head = weakref.ref(model.head)
    gc.disable()
    try:
        model.head = nn.Linear(24, 7)
        assert head() is None
        whole = weakref.ref(model.blocks[0].attn)
        del model.blocks[0]
        assert whole() is None
    finally:
        gc.enable()


def test_other_threads_compute_the_same(model):
    with torch.no_grad():
        expected = [model(images(batch)) for batch in (2, 3)]
    found = []

    def other():
        with torch.no_grad():
            found.extend(model(images(batch)) for batch in (2, 3))

    def meanwhile():
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    found.append(during(model, meanwhile))
    for out, right in zip(found, (expected[0], expected[1], expected[0]), strict=True):
        assert torch.equal(out, right)
    assert not with_own(model)


def test_what_may_be_left_alone():
    from elsa_core.patching.adapters import timm_levit, timm_mlp, torch_layers

    assert direct.replaced(torch_layers.ElsaLinear) == ("forward",)
    assert direct.replaced(timm_mlp.ElsaMlp) == ("forward",)
    assert direct.replaced(timm_levit.ElsaLevitAttention) == ("forward",)
    assert direct.replaced(timm_swin_v2.ElsaSwinTransformerV2Block) == ()
    assert direct.replaced(nn.Linear) == ()


def test_kept_biases_follow_the_weights(on_gpu):
    torch.manual_seed(0)
    model = timm.create_model("levit_128s", img_size=32, num_classes=5).eval()
    reference = timm.create_model("levit_128s", img_size=32, num_classes=5).eval()
    elsa.patch(model, scope="attention")
    x = images()
    with torch.no_grad():
        for _ in range(4):
            model(x)
            for name, parameter in model.named_parameters():
                if "attention_biases" in name:
                    parameter.data.add_(torch.randn_like(parameter))
        reference.load_state_dict(model.state_dict())
        assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_a_copy_from_within_a_call_is_clean(model, how):
    """The methods would be another module's, and keep `patch` from the copy."""
    made = []

    def copies():
        if how == "deepcopy":
            made.append(copy.deepcopy(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            made.append(torch.load(file, weights_only=False))

    handle = model.blocks[1].norm2.register_forward_hook(Once(copies))
    with torch.no_grad():
        expected = model(images())
        handle.remove()
        other = made[0]
        assert not with_own(other) and not with_own(model)
        assert torch.equal(other(images()), expected)
    elsa.unpatch(other)
    elsa.patch(other, scope="model")


class Once:
    """A hook that acts in its first call, and is copied as one that has acted."""

    def __init__(self, act):
        self.act = act

    def __call__(self, *_):
        act, self.act = self.act, None
        if act is not None:
            act()

    def __reduce__(self):
        return Once, (None,)


@pytest.mark.parametrize(
    ("site", "name", "value"),
    [
        ("head", "elsa_precision", "ieee"),
        ("head", "elsa_backend", "eager"),
        ("blocks.1.attn", "elsa_sparsity", "exact"),
    ],
)
def test_a_name_given_since_is_heard(model, site, name, value):
    layer, seen = model.get_submodule(site), []
    setattr(layer, name, value)
    during(model, lambda: seen.extend(with_own(model)))
    assert site not in seen and "blocks.0" in seen


def test_a_thread_of_other_calls_meets_its_own_answers(on_gpu):
    """torchvision's ViT: an original of nn.MultiheadAttention reads a property of the patched one,
    which answers by the thread."""
    vision = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    made = vision.VisionTransformer(32, 16, 2, 2, 24, 48, num_classes=5).eval()
    with torch.no_grad():
        expected = made(images(3))
    elsa.patch(made, scope="model")
    found = []

    def other():
        with torch.no_grad():
            found.append(made(images(3)))

    def meanwhile(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    with torch.no_grad():
        for _ in range(3):
            made(images())
        made.encoder.layers[0].ln_1.register_forward_hook(meanwhile)
        made(images())
    assert found and all(torch.allclose(out, expected, atol=1e-5) for out in found)


def test_biases_written_by_a_late_hook_are_read(on_gpu):
    """A hook of the attention within TinyViT's block writes its table: spectral norm, for one."""
    torch.manual_seed(0)
    model = timm.create_model("tiny_vit_5m_224", num_classes=5).eval()
    elsa.patch(model, scope="attention")
    block = next(m for m in model.modules() if hasattr(m, "elsa_kept"))
    table = block.attn.attention_biases
    wanted = torch.randn_like(table)
    x = torch.randn(1, 3, 64, 64)

    def writes(*_):
        table.data.copy_(wanted)

    with torch.no_grad():
        for _ in range(3):
            model(x)
        block.attn.register_forward_pre_hook(writes)
        model(x)
        wanted.mul_(3)
        found = model(x)
        elsa.unpatch(model)
        for each in model.modules():
            if hasattr(each, "attention_bias_cache"):
                each.attention_bias_cache.clear()
        torch.testing.assert_close(found, model(x))


def settled(name, scope="model", **options):
    torch.manual_seed(0)
    made = timm.create_model(name, num_classes=5, **options).eval()
    elsa.patch(made, scope=scope)
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for _ in range(4):
            made(x)
    return made, x


def test_a_block_that_is_no_row_has_its_original(on_gpu):
    """A block with a gated MLP: its class may run as a row, this one does not."""
    options = {"depth": 2, "img_size": 64, "embed_dim": 48, "num_heads": 3}
    made, x = settled("vit_tiny_patch16_224", mlp_layer=timm.layers.SwiGLU, **options)
    seen = []
    handle = made.blocks[1].norm2.register_forward_hook(lambda *_: seen.extend(with_own(made)))
    with torch.no_grad():
        made(x)
    handle.remove()
    assert {"blocks.0", "blocks.1", "blocks.1.mlp"} <= set(seen)


SWIN = {"img_size": 64, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}


@pytest.mark.parametrize(
    ("name", "scope", "module", "operator"),
    [
        ("swin_tiny_patch4_window7_224", "attention", timm_swin, "window_attention"),
        ("swin_tiny_patch4_window7_224", "model", timm_swin, "window_attention"),
        ("swinv2_tiny_window8_256", "model", timm_swin_v2, "attend_block"),
    ],
)
def test_windows_stay_one_operator(on_gpu, monkeypatch, name, scope, module, operator):
    """The originals of these blocks call twenty in its place."""
    made, x = settled(name, scope, **SWIN)
    called, written = [], getattr(module, operator)
    monkeypatch.setattr(
        module, operator, lambda *args, **named: called.append(1) or written(*args, **named)
    )
    with torch.no_grad():
        made(x)
    assert len(called) == 4
