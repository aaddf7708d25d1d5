"""What tests of patched models share."""

from __future__ import annotations

import pytest
import torch

from elsa_core import calls
from elsa_core.patching.adapters import host


@pytest.fixture
def on_gpu(monkeypatch):
    """CPU tensors that say they are on a GPU; the answers of sites are counted."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(host, "_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(calls, "is_own_stream", lambda device: False)
    calls.forget_kinds()
    asked, answered = [], host._answered
    monkeypatch.setattr(host, "_answered", lambda yes: asked.append(yes) or answered(yes))
    yield asked
    calls.forget_kinds()
