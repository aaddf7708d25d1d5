"""A patched site trains by its original forward where the shipped table finds that faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from elsa_core import dispatch
from elsa_core.backends.support import Request, Support
from elsa_core.base import calls
from elsa_core.dispatch import choose, implementation, measured
from elsa_core.dispatch.measured import Training
from elsa_core.patching.adapters import windows
from elsa_core.patching.adapters.common import trains_by_pytorch
from elsa_core.patching.rewrite import patch, unpatch


def trains_by_original(monkeypatch: pytest.MonkeyPatch, *backward: str) -> None:
    """As if the table left training on a CPU to the original, but for gradients by `backward`."""
    monkeypatch.setattr(measured, "originals", lambda operator: ("cpu",))
    row = Training("", "", (*backward, "eager"))
    monkeypatch.setattr(measured, "training", lambda *kind: row)


@pytest.mark.parametrize("wanted", ["input", "weights", "nothing", "by name"])
def test_windows_train_by_the_original(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    """The operator serves inference, and training where a backend is asked for by name."""
    model = nn.Sequential(SwinTransformerBlock(32, (8, 8), 2, window_size=4, shift_size=2)).eval()
    patch(model, backend="eager" if wanted == "by name" else "auto")
    calls = []
    operator = windows.window_attention

    def counted(*arguments: Any, **terms: Any) -> Any:
        calls.append(terms)
        return operator(*arguments, **terms)

    monkeypatch.setattr(windows, "window_attention", counted)
    trains_by_original(monkeypatch)
    x = torch.randn(1, 8, 8, 32, requires_grad=wanted == "input")
    model.requires_grad_(wanted in ("weights", "by name"))
    out = model(x)
    assert len(calls) == (wanted in ("nothing", "by name"))
    if not calls:
        unpatch(model)
        assert torch.equal(out, model(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("served", [False, True])
def test_windows_train_by_the_operator_where_gradients_are_measured(
    monkeypatch: pytest.MonkeyPatch, served: bool, compiled: bool
) -> None:
    """A backend that says that it has these gradients, for this dtype and window, serves them."""
    asked = []

    def gradient(request: Request) -> Support:
        asked.append(request)
        return Support(served, "" if served else "not measured")

    trains_by_original(monkeypatch, "guest")
    offered = replace(implementation("window_attention", "eager"), gradient=gradient)
    known = choose.implementation
    monkeypatch.setattr(
        choose, "implementation", lambda op, name: offered if name == "guest" else known(op, name)
    )
    model = nn.Sequential(SwinTransformerBlock(32, (8, 8), 2, window_size=4, shift_size=2)).eval()
    patch(model)
    site = model[0]
    assert isinstance(site, SwinTransformerBlock)
    x = torch.randn(1, 8, 8, 32, requires_grad=True)

    def left(x: torch.Tensor) -> torch.Tensor:
        terms = (site.attn.qkv, site.attn.num_heads, site.window_size)
        return x * float(windows.keeps_original(site, x, *terms))

    torch.compiler.reset()
    run = torch.compile(left, backend="eager", fullgraph=True) if compiled else left
    assert torch.equal(run(x), x * (not served))
    request = asked[0]
    assert (request.dtype, request.head_dim, request.tokens) == (torch.float32, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        run(x)
    assert asked[-1].dtype == torch.bfloat16


def test_the_table_names_devices() -> None:
    assert measured.originals("window_attention") == ("cuda",)
    assert measured.originals("attention") == ()


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(("tokens", "left"), [(10, True), (4000, False)])
def test_small_attention_trains_by_the_original(
    monkeypatch: pytest.MonkeyPatch, tokens: int, left: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    site = Attention(64, 4)
    site.elsa_backend, site.elsa_precision = "auto", "strict"
    x = torch.randn(1, tokens, 64).as_subclass(OnCuda)
    assert trains_by_pytorch(site, x, site.qkv) is left
    assert trains_by_pytorch(site, x.half(), site.qkv)  # half precision is PyTorch's at any size
    assert not trains_by_pytorch(site, torch.randn(1, tokens, 64), site.qkv)
    with torch.no_grad():
        assert not trains_by_pytorch(site, x, site.qkv)
    site.elsa_backend = "triton"
    assert not trains_by_pytorch(site, x, site.qkv)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_meets_the_same_dropout(
    monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    """A reentrant checkpoint runs without gradients first, and once more for them."""
    trains_by_original(monkeypatch)
    block = SwinTransformerBlock(32, (10, 10), 2, window_size=4, shift_size=2, proj_drop=0.3)
    model = nn.Sequential(block).train()
    patch(model)
    x = torch.randn(1, 10, 10, 32, requires_grad=True)
    gradients = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        out = call(x)
        x.grad = None
        out.sum().backward()
        assert x.grad is not None
        gradients.append((out.detach(), x.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Quantised(nn.Module):
    """As torch's quantised layers, whose weight is a method."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def weight(self) -> torch.Tensor:
        return self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_projection_without_a_weight_tensor() -> None:
    block = SwinTransformerBlock(32, (8, 8), 2, window_size=4, shift_size=2).eval()
    model = nn.Sequential(block)
    block.attn.qkv = Quantised(block.attn.qkv)
    x = torch.randn(1, 8, 8, 32)
    expected = model(x)
    assert patch(model).patched
    torch.testing.assert_close(model(x), expected)


def test_windows_on_a_gpu_without_kernels_keep_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain PyTorch would be slower than what the model had."""
    site = SwinTransformerBlock(32, (8, 8), 2, window_size=4)
    site.elsa_backend, site.elsa_precision = "auto", "strict"
    terms = (site.attn.qkv, 2, (4, 4))
    names = {"cuda:0": "triton", "cuda:1": dispatch.PLAIN}
    monkeypatch.setattr(dispatch, "name_of", lambda operator, place, *_: names[place])
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        old, new = (torch.empty(1, 8, 8, 32, device=place) for place in ("cuda:1", "cuda:0"))
        assert windows.keeps_original(site, old, *terms)
        assert not windows.keeps_original(site, new, *terms)
        assert not windows.keeps_original(site, old.double(), *terms)
        monkeypatch.setattr(calls, "exporting", lambda: True)
        assert not windows.keeps_original(site, old, *terms)
        monkeypatch.undo()
        site.elsa_backend = "eager"
        assert not windows.keeps_original(site, old, *terms)
