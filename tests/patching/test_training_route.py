"""A patched site trains by its original forward where the shipped table finds that faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn

from elsa_core.patching.adapters import windows
from elsa_core.patching.patch import patch, unpatch
from elsa_core.routing import measured


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
    monkeypatch.setattr(measured, "originals", lambda operator: ("cpu",))
    x = torch.randn(1, 8, 8, 32, requires_grad=wanted == "input")
    model.requires_grad_(wanted in ("weights", "by name"))
    out = model(x)
    assert len(calls) == (wanted in ("nothing", "by name"))
    if not calls:
        unpatch(model)
        assert torch.equal(out, model(x))


def test_the_table_names_devices() -> None:
    assert measured.originals("window_attention") == ("cuda",)
    assert measured.originals("attention") == ()
