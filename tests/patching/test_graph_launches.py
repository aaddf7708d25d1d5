"""What a CUDA graph of a patched model records: few launches, and the originals of a few sites.

Tensors of a CPU that say they lie on a GPU; a capture is said to be under way.
"""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

import elsa_core as elsa
from elsa_core import calls, routing
from elsa_core.patching.adapters import decomposed, host, kept
from elsa_core.patching.adapters import model as adapter

timm = pytest.importorskip("timm")

from timm.models import efficientvit_msra, levit, mvitv2, shvit  # noqa: E402

HALF, SINGLE = torch.float16, torch.float32


@pytest.fixture
def capture(on_gpu, monkeypatch):
    """Says whether one is under way."""
    now = {"under": False}
    monkeypatch.setattr(host, "_capturing", lambda: now["under"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["under"])
    yield lambda under=True: now.update(under=under)


class Named(TorchFunctionMode):
    """Counts PyTorch's functions by name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))

    def count(self, *names):
        return sum(self.seen.count(name) for name in names)


class Sites(torch.nn.Module):
    """A model of some sites, one after another."""

    def __init__(self, *sites):
        super().__init__()
        self.sites = torch.nn.ModuleList(sites)

    def forward(self, x):
        for site in self.sites:
            x = site(x)
        return x


def randomised(module, dtype=SINGLE):
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.4)
    return module.eval().to(dtype)


MADE = {
    "shvit": (lambda: shvit.SHSA(24, 4, 8), (1, 24, 3, 5)),
    "efficientvit": (
        lambda: efficientvit_msra.CascadedGroupAttention(24, 4, 3, 2, 5, (7, 5, 3)), (4, 24, 5, 5)
    ),
    "levit": (lambda: levit.Attention(24, 8, 3, 2.0, (3, 5)), (1, 15, 24)),
}  # fmt: skip


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, SINGLE], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_originals_of_the_table_are_captured(on_gpu, capture, monkeypatch, name, dtype, warm):
    make, shape = MADE[name]
    model, x = randomised(Sites(make()), dtype), torch.randn(shape).to(dtype)
    with torch.no_grad():
        expected = model(x)
    elsa.patch(model, scope="attention")
    with torch.no_grad():
        for _ in range(3 * warm):
            model(x)
        capture()
        on_gpu.clear()
        monkeypatch.setattr(host, "warm_up", None)  # nothing can be loaded now
        found = model(x)
    assert set(on_gpu) == {name != "levit" and dtype != SINGLE}
    if on_gpu[0]:
        assert torch.equal(found, expected)


def test_what_the_table_leaves_to_elsa_in_graphs(capture):
    model = randomised(Sites(shvit.SHSA(24, 4, 8)), HALF)
    elsa.patch(model, scope="attention")
    (site,) = model.sites
    least = routing.graphs_least("timm.models.shvit.SHSA", HALF)
    assert least > 0 and not routing.graphs_least("timm.models.levit.Attention", HALF)
    x = torch.randn(1, 24, 3, 5, dtype=HALF)
    capture()
    with torch.no_grad():
        assert host._waits(site, "attention", x, least - 1)
        assert not host._waits(site, "attention", x, least)
        assert not host._waits(site, "linear", x, 1)
        site.elsa_precision = "ieee"
        assert not host._waits(site, "attention", x, 1)
        site.elsa_precision = "strict"
        site.train()
        assert not host._waits(site, "attention", x, 1)
        site.eval()
    assert not host._waits(site, "attention", x, 1)  # gradients may be wanted


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("name", ["efficientvit", "levit"])
def test_one_gather_for_all_biases(capture, name, dtype):
    make, shape = MADE[name]
    model = randomised(Sites(*(make() for _ in range(4))), dtype)
    plain = randomised(Sites(*(make() for _ in range(4))), dtype)
    elsa.patch(model, scope="attention")
    x = torch.randn(shape).to(dtype)
    with torch.no_grad():
        model(x)  # one call that warms up
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            own.data.mul_(0.7)  # a write that PyTorch does not count
            other.data.copy_(own)
        capture()
        with Named() as seen:
            found = model(x)
        expected = plain(x)
    assert seen.count("index_select") == 1
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert kept._CURRENT.biases == {} and kept._CURRENT.later is None
    plans = kept._AHEAD[model.sites[0].attention_bias_idxs]
    assert len(plans) == 1
    with torch.no_grad():
        capture(False)
        for _ in range(3):
            model(x[:1])
        capture()
        with Named() as seen:
            model(x)
    assert seen.count("index_select") == 1
    assert kept._AHEAD[model.sites[0].attention_bias_idxs] == plans


def test_each_gathers_its_own_where_nothing_was_planned(capture):
    make, shape = MADE["levit"]
    model = randomised(Sites(*(make() for _ in range(4))))
    elsa.patch(model, scope="attention")
    capture()
    with torch.no_grad(), Named() as seen:
        model(torch.randn(shape))
    assert seen.count("index_select") == 4
    two = randomised(Sites(*(make() for _ in range(2))))
    assert kept.keepers_of(two) is None


def test_nothing_is_gathered_that_none_reads(capture):
    """Kernels of windows read the table."""
    model = timm.create_model("tiny_vit_5m_224", depths=(1, 1, 1, 1), num_classes=3).eval()
    elsa.patch(model, scope="attention")
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        model(x)
        capture()
        with Named() as seen:
            model(x)
    assert kept.keepers_of(model) is not None and not seen.count("index_select")


def mvit(token):
    pool = {"kernel_q": (3, 3), "kernel_kv": (3, 3), "stride_q": (2, 2), "stride_kv": (4, 4)}
    made = mvitv2.MultiScaleAttention(24, 32, (8, 8), num_heads=2, has_cls_token=token, **pool)
    return randomised(made)


@pytest.mark.parametrize(("batch", "small"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("token", [False, True])
def test_a_graph_fills_no_constants(capture, monkeypatch, token, batch, small):
    monkeypatch.setattr(decomposed, "_CONSTANTS", {})
    monkeypatch.setattr(decomposed, "_SMALL", decomposed._SMALL if small else 0)
    module = mvit(token)
    x = torch.randn(batch, 64 + token, 24)
    with torch.no_grad():
        expected, _ = module(x, [8, 8])
        elsa.patch(module)
        monkeypatch.setattr(host, "_waits", lambda *_: False)
        capture(False)
        with Named() as eager:
            found, _ = module(x, [8, 8])
        torch.testing.assert_close(found, expected)
        capture()
        with Named() as seen:
            found, _ = module(x, [8, 8])
    torch.testing.assert_close(found, expected)
    fills = ("zeros", "new_zeros", "fill_", "zero_")
    assert eager.count(*fills) == 4
    assert seen.count(*fills) == (token or not small)
    assert seen.count("cat") == eager.count("cat")


def test_constants_are_bounded_and_never_dropped(capture, monkeypatch):
    monkeypatch.setattr(decomposed, "_CONSTANTS", {})
    monkeypatch.setattr(decomposed, "_LARGEST", 64)
    monkeypatch.setattr(decomposed, "_MOST", 100)
    like = torch.randn(2, dtype=HALF)
    make = decomposed._filled

    def asked(*shape):
        return decomposed._constant(make, like, shape)

    with torch.inference_mode():
        first = asked(8, 8)
    assert not first.is_inference() and first.dtype == HALF
    assert asked(8, 8) is not first  # of another stream, maybe
    asked(9, 8)  # too large
    asked(7, 7)  # too many
    asked(6, 6)
    assert [key[1] for key in decomposed._CONSTANTS] == [((8, 8),), ((6, 6),)]

    def late(shape, like):  # another thread makes the same one meanwhile, which a graph reads
        return decomposed._CONSTANTS.setdefault((late, (shape,), HALF, like.device), first).clone()

    monkeypatch.setattr(decomposed, "_MOST", 1000)
    decomposed._constant(late, like, (3,))
    assert decomposed._CONSTANTS.popitem()[1] is first
    capture()
    assert asked(8, 8) is first and torch.equal(asked(7, 7), torch.zeros(7, 7, dtype=HALF))
    assert len(decomposed._CONSTANTS) == 2


def test_calls_on_a_cpu_ask_for_no_capture(monkeypatch):
    """Without a driver the question raises."""
    model = randomised(Sites(shvit.SHSA(24, 4, 8)))
    elsa.patch(model, scope="attention")
    monkeypatch.setattr(host, "_capturing", None)
    monkeypatch.setattr(adapter, "is_captured", None)
    calls.forget_kinds()
    with torch.no_grad():
        model(torch.randn(1, 24, 3, 5))
