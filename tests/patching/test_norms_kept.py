"""Norms that nothing takes: the part is called once, with what its norm made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core import calls, routing
from elsa_core.patching.adapters import flat_mvitv2, handing, host, residual

timm = pytest.importorskip("timm")


def swin() -> tuple[nn.Module, Tensor]:
    swins = pytest.importorskip("torchvision.models.swin_transformer")
    torch.manual_seed(0)
    model = swins.SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [7, 7], dropout=0.0, stochastic_depth_prob=0.0, num_classes=5
    )
    return randomised(model.eval()), torch.randn(2, 3, 32, 32)


def randomised(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5, 0.2)
    return model


class Seen(list[Any]):
    """The first argument of each call of a function."""

    def watch(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = getattr(owner, name)

        def called(*given: Any, **named: Any) -> Any:
            self.append(given[0])
            return inner(*given, **named)

        monkeypatch.setattr(owner, name, called)


def test_attention_that_is_not_patched_runs_once(monkeypatch):
    """torchvision's Swin reads the weight of its first layer, which is patched as a layer."""
    from torchvision.models import swin_transformer

    model, x = swin()
    elsa.patch(model, scope="model", exclude=["*.attn"])
    assert type(model.features[1][0].attn) is swin_transformer.ShiftedWindowAttention
    seen = Seen()
    with torch.no_grad():
        wanted = model(x)
        seen.watch(swin_transformer, "shifted_window_attention", monkeypatch)
        with routing.unmeasured(routing.NORM):
            torch.testing.assert_close(model(x), wanted)
    assert len(seen) == 4


@pytest.mark.parametrize("way", ["training", "gradients"])
def test_attention_that_trains_by_the_original_runs_once(monkeypatch, way):
    """Only the projections want gradients; or it drops weights, without gradients."""
    from torchvision.models import swin_transformer

    model, x = swin()
    elsa.patch(model, scope="model")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(way == "gradients" and name.endswith("qkv.weight"))
    for site in model.modules():
        if hasattr(site, "attention_dropout"):
            site.attention_dropout = 0.0 if way == "gradients" else 1e-9
    model.train(way == "training")
    monkeypatch.setattr(routing, "trains_original", lambda *given: True)
    seen = Seen()
    wanted = model(x).detach()
    seen.watch(swin_transformer, "shifted_window_attention", monkeypatch)
    with routing.unmeasured(routing.NORM):
        torch.testing.assert_close(model(x).detach(), wanted)
    assert len(seen) == 4


def bind_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention alone is bound by the host, as on a GPU."""

    def bound(
        site: Any, operator: str, x: Tensor, work: int, by_elsa: Any, form: Any = None
    ) -> bool:
        if operator != "attention":
            return False
        if calls.first_of_kind((type(site), x.shape, work, form)):
            with handing.for_nothing():
                by_elsa()
        return True

    for module in (host, residual):
        monkeypatch.setattr(module, "is_host_bound", bound)
    calls.forget_kinds()


def test_attention_that_waits_for_the_host_reads_what_is_normalised(monkeypatch):
    """In the first call of its kind, which loads kernels, and in later ones."""
    torch.manual_seed(0)
    model = randomised(timm.create_model("mvitv2_tiny", img_size=64, num_classes=5).eval())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        bind_attention(monkeypatch)
        seen = Seen()
        seen.watch(host, "all_original", monkeypatch)
        with routing.unmeasured(routing.NORM):
            torch.testing.assert_close(model(x), wanted)
            seen.clear()
            torch.testing.assert_close(model(x), wanted)
    assert len(seen) == 10


def test_a_part_within_an_original_forward_runs_once(monkeypatch):
    torch.manual_seed(0)
    model = randomised(timm.create_model("mvitv2_tiny", img_size=64, num_classes=5).eval())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = model(x)
        elsa.patch(model, scope="model")
        seen = Seen()
        for block in model.modules():  # with a hook it is called by its own forward
            if isinstance(block, timm.models.mvitv2.MultiScaleBlock):
                block.norm2.register_forward_hook(lambda *_: None)
        seen.watch(flat_mvitv2, "_images", monkeypatch)
        host.all_original(model, x)
        once = len(seen)
        seen.clear()
        with routing.unmeasured(routing.NORM):
            torch.testing.assert_close(host.all_original(model, x), wanted)
    assert len(seen) == once > 0
