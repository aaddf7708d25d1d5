"""What an eager call on a GPU makes the host do, counted: operators, and functions of Python.

`test_host_time_gpu.py` times it.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

import elsa_core as elsa
from elsa_core import calls, routing
from elsa_core.backends.triton.linear import gate
from elsa_core.operators.linear import plain
from elsa_core.patching.adapters import host, timm_plain

timm = pytest.importorskip("timm")

MODELS = {
    "qwen3_vit_88m": {"img_size": 64, "embed_dim": 48, "num_heads": 2, "pos_embed_grid_size": 4},
    "deepseek_vit_412m": {"img_size": 56, "embed_dim": 48, "num_heads": 2},
    "eva02_small_patch14_336": {"img_size": 56, "embed_dim": 48, "num_heads": 2},
    "convit_small": {"local_up_to_layer": 1, "embed_dim": 48, "num_heads": 2, "img_size": 32},
    "xcit_small_12_p16_224": {"img_size": 32, "embed_dim": 48, "num_heads": 2},
}
# What asks a tensor how it lies in memory, and dispatches nothing.
QUESTIONS = {"__get__", "stride", "numel", "size", "dim", "data_ptr", "get_device", "is_contiguous",
             "is_floating_point", "storage_offset"}  # fmt: skip
# What a model asks for all of its sites, whatever their number: calls of Python for one forward.
ONCE = 50


def made(name: str, **options):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=3, depth=2, **MODELS[name], **options).eval()


def image(name: str, batch: int = 1, dtype: torch.dtype = torch.float32):
    size = MODELS[name]["img_size"]
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def python_calls(model, x, within: str = "") -> int:
    """How many functions of Python, of files whose name holds `within`, a forward calls."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event == "call" and within in frame.f_code.co_filename

    with torch.inference_mode():
        sys.setprofile(note)
        try:
            model(x)
        finally:
            sys.setprofile(None)
    return count


class Operators(TorchFunctionMode):
    """Counts calls of PyTorch's operators, whose callers take it for no tracer."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") not in QUESTIONS
        return func(*args, **(kwargs or {}))


def operators(model, x) -> int:
    with torch.inference_mode(), Operators() as seen:
        model(x)
    return seen.count


def settled(model, x, calls: int = 3):
    """A model after the calls in which its sites ask."""
    with torch.inference_mode():
        for _ in range(calls):
            model(x)
    return model


@pytest.fixture
def least(monkeypatch):
    """The table's multiply-adds, by operator; those of the table where none are given."""
    given, own = {}, routing.eager_least

    def found(operator, dtype):
        return given.get(operator, own(operator, dtype))

    monkeypatch.setattr(host.routing, "eager_least", found)
    monkeypatch.setattr(gate, "eager_least", found)
    return given


@pytest.fixture
def kernels(monkeypatch):
    """Products that say they are of a kernel, by PyTorch's own."""
    products = []

    def product(x, weight, bias, activation, residual, scale, *_):
        products.append(weight)
        return plain(x, weight, bias, activation, residual, scale)

    monkeypatch.setattr(gate, "_least_served", lambda device: 0)
    monkeypatch.setattr(gate, "_eager", product)
    return products


@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_a_small_call_is_the_originals(on_gpu, name, scope):
    original, model, x = made(name), made(name), image(name)
    elsa.patch(model, scope=scope)
    settled(model, x)
    with torch.inference_mode():
        assert torch.equal(model(x), original(x))
    assert operators(model, x) <= operators(original, x)
    assert python_calls(model, x) <= python_calls(original, x) + ONCE


@pytest.mark.parametrize("name", ["qwen3_vit_88m", "deepseek_vit_412m"])
def test_one_image_in_half_precision_is_the_originals(on_gpu, least, name):
    """Attention that is large for a batch, and small for one image."""
    least["attention"] = 0
    original, model = made(name).half(), made(name).half()
    elsa.patch(model, scope="attention")
    x = image(name, dtype=torch.float16)
    settled(model, x)
    assert operators(model, x) <= operators(original, x)
    assert python_calls(model, x) <= python_calls(original, x) + ONCE
    on_gpu.clear()
    settled(model, image(name, 2, torch.float16), 1)
    assert on_gpu and not any(on_gpu)


@pytest.mark.parametrize(("tokens", "channels", "batch", "waits"), [
    (2304, 768, 1, True),  # qwen3_vit at 768 px
    (2304, 768, 2, False),
    (1521, 1024, 1, True),  # deepseek_vit at 546 px
    (4096, 768, 1, False),
])  # fmt: skip
def test_the_table_of_one_image(on_gpu, tokens, channels, batch, waits):
    site = made("qwen3_vit_88m").encoder.blocks[0].attn
    elsa.patch(torch.nn.Sequential(site), scope="attention")
    x = torch.empty(batch, tokens, channels, dtype=torch.float16, device="meta")
    assert host._waits(site, "attention", x, x.numel() * tokens) is waits
    heads = x.unflatten(-1, (-1, 64)).transpose(1, 2)
    assert host._is_small(heads, heads, None) is waits
    mask = torch.empty(1, 1, tokens, tokens, dtype=torch.float16, device="meta")
    assert not host._is_small(heads, heads, mask)
    site.fused_attn = False  # whose scores are all in memory
    assert not host._waits(site, "attention", x, x.numel() * tokens)
    other = timm_plain.ElsaNestAttention(48)
    assert not host._waits(other, "attention", x, x.numel() * tokens)


# 585 and 500 functions where every site and product asked in each call
@pytest.mark.parametrize(
    ("name", "most"), [("eva02_small_patch14_336", 390), ("convit_small", 300)]
)
def test_large_calls_ask_once(on_gpu, least, kernels, monkeypatch, name, most):
    """Sites that run elsa's operators are settled too, and so are their products."""
    least.update(attention=0, linear=0)
    original, model, x = made(name), made(name), image(name, 2)
    elsa.patch(model, scope="model")
    settled(model, x)
    monkeypatch.setattr(host, "_waits", None)
    monkeypatch.setattr(gate, "_suits", None)
    kernels.clear()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)
    assert len(kernels) >= 9
    # the patch embedding as a product is of five views more
    assert operators(model, x) <= operators(original, x) + 5
    assert python_calls(model, x, "elsa_core") <= most


def test_what_asks_beside_what_is_settled(on_gpu, least, monkeypatch):
    """Redirected sites keep their originals, unasked, where another site runs elsa's operators."""
    torch.manual_seed(0)
    options = {"depth": 2, "img_size": 32, "embed_dim": 48, "num_heads": 2, "num_classes": 3}
    original = timm.create_model("beit_base_patch16_224", **options).eval()
    model = timm.create_model("beit_base_patch16_224", **options).eval()
    model.load_state_dict(original.state_dict())
    elsa.patch(model, scope="model")
    own = host._waits
    embedding = type(model.patch_embed.proj)
    monkeypatch.setattr(
        host, "_waits", lambda site, *given: type(site) is not embedding and own(site, *given)
    )
    x = torch.randn(2, 3, 32, 32)
    settled(model, x)
    on_gpu.clear()
    settled(model, x, 1)
    assert not on_gpu
    assert python_calls(model, x) <= python_calls(original, x) + 2 * ONCE
    elsa.patch(model, scope="model", precision="ieee", include="patch_embed.proj")
    settled(model, x)
    on_gpu.clear()
    settled(model, x, 1)
    assert on_gpu == [False]  # what was named asks, as ever


def test_a_known_product_is_asked_about_anew(least, kernels, monkeypatch):
    """Where a setting has changed that decides who serves it, or the choice was forgotten."""
    least["linear"] = 0
    asked, suits = [], gate._suits
    monkeypatch.setattr(gate, "_suits", lambda *given: asked.append(1) or suits(*given))
    x, weight = torch.randn(3, 8), torch.randn(5, 8)

    def asks(*given, **named):
        asked.clear()
        out = gate.serve(*given or (x, weight, None), **named)
        return bool(asked), out is not None

    calls.forget_kinds()
    with torch.no_grad():
        assert asks() == (True, True) and asks() == (False, True)
        assert asks(x[:2], weight, None) == (True, True)
        assert asks(x, weight, weight[:, 0]) == (True, True)
        assert asks(activation="gelu") == (True, True)
        assert asks(precision="ieee") == (True, False)
        assert asks(x.double(), weight.double(), None) == (True, False)
        with monkeypatch.context() as under_autocast:
            under_autocast.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
            assert asks() == (True, False)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            assert asks() == (True, False)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        asks()  # PyTorch may have another word for what was before
        assert asks() == (False, True)
        with routing.unmeasured(routing.PADDED):
            assert asks() == (True, True)
        assert asks() == (True, True)
    assert asks() == (True, True)  # gradients may be wanted


@pytest.mark.parametrize("work", [0, 1 << 62])
def test_nested_tensors_have_no_kind(on_gpu, least, kernels, work):
    """Those that lie in one memory say no shape when they are asked: products are PyTorch's."""
    least["linear"] = work
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)).eval()
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with torch.no_grad():
        expected = model(x).to_padded_tensor(0)
        elsa.patch(model, scope="model")
        for _ in range(4):
            assert torch.equal(model(x).to_padded_tensor(0), expected)
    assert not kernels


@pytest.mark.parametrize("other", ["scope", "width"])
def test_a_graph_of_a_second_model_finds_its_kernels_loaded(on_gpu, kernels, monkeypatch, other):
    """Where one of another scope or width warmed up for calls of the same shapes."""
    swin = {"img_size": 56, "embed_dim": 48, "depths": (2, 2), "num_heads": (2, 4)}
    wider = {"mlp_ratio": 2.0} if other == "width" else {}
    monkeypatch.setattr(gate, "_gains", lambda input, weight: True)
    first, second = (
        timm.create_model("swin_tiny_patch4_window7_224", num_classes=8, **swin, **more).eval()
        for more in (wider, {})
    )
    elsa.patch(second, scope="model")
    elsa.patch(first, scope="attention" if other == "scope" else "model")
    x = torch.randn(2, 3, 56, 56)
    settled(first, x)
    settled(second, x)
    loaded = {weight.shape for weight in kernels}
    kernels.clear()
    monkeypatch.setattr(host, "_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    settled(second, x, 1)
    asked = {weight.shape for weight in kernels}
    assert {(192, 48), (384, 96)} <= asked  # of MLPs
    assert asked <= loaded


def test_autocast_is_warmed_up_apart(on_gpu, monkeypatch):
    """Its products are of another dtype, whose kernels a graph must find loaded."""
    loaded = []
    monkeypatch.setattr(host, "warm_up", loaded.append)
    model = torch.nn.Sequential(timm_plain.VisformerAttention(24, 4)).eval()
    elsa.patch(model, scope="attention")
    (site,) = model
    q = torch.randn(1, 2, 9, 8)
    with torch.no_grad():
        for most in (2, 2):
            site(torch.randn(1, 24, 3, 5))
            assert host.by_sdpa(q, q, q, "auto", "strict") and len(loaded) == most
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for most in (4, 4):
                site(torch.randn(1, 24, 3, 5))
                assert host.by_sdpa(q, q, q, "auto", "strict") and len(loaded) == most
