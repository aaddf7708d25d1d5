"""Models on a GPU that pack their tokens, among calls and threads that keep original forwards."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import test_adapters_naflex as naflex
import test_adapters_siglip2 as siglip2
import torch
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core import routing
from elsa_core.patching.adapters import padding

KINDS = {
    "NaFlexViT": (naflex.model, naflex.batch, lambda: naflex.batch((12, 12, 11), 12)),
    "SigLIP 2": (
        siglip2.model, siglip2.batch, lambda: siglip2.batch(((3, 4), (3, 4)), 12)
    ),
}  # fmt: skip


class Holder(nn.Module):
    """A model around: a patched one asks once for all sites within it."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *values: Tensor) -> Tensor:
        names = ("patches", "patch_coord", "patch_valid")
        flexible = hasattr(self.tower, "blocks")
        found = self.tower(dict(zip(names, values, strict=True))) if flexible else None
        return found if flexible else self.tower(*values).last_hidden_state


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of packed attention had."""
    from elsa_core.patching.adapters import transformers_siglip2

    seen: list[int] = []

    def attention(query: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(query.shape[0])
        return elsa.varlen_attention(query, *rest, **options)

    for module in (padding, transformers_siglip2):
        monkeypatch.setattr(module, "varlen_attention", attention)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("scope", ["model", "attention"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_a_kind_is_packed(
    kind: str, scope: str, on_gpu: Any, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small MLPs keep their originals; for the model around, it once seemed as if all did."""
    monkeypatch.setattr(routing, "eager_least", lambda op, _: 0 if op == "attention" else 1 << 62)
    make, batch, _ = KINDS[kind]
    model = Holder(make())
    elsa.patch(model, scope=scope)
    expected = model(*batch().values())
    calls = len(packed)
    assert calls
    for _ in range(3):
        assert torch.equal(model(*batch().values()), expected)
    assert len(packed) == 4 * calls


@torch.no_grad()
@pytest.mark.parametrize("scope", ["model", "attention"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_with_original_methods(
    kind: str, scope: str, on_gpu: Any, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They once stood on the modules that another thread gave packed tokens."""
    monkeypatch.setattr(routing, "eager_least", lambda *_: 1 << 62)
    make, batch, small = KINDS[kind]
    model = Holder(make())
    elsa.patch(model, scope=scope)
    expected = model(*batch().values())
    alone = model(*small().values())
    monkeypatch.setattr(padding, "lengths", lambda valid, least=1, own=padding.lengths: (
        own(valid, least) if valid.shape[1] > 12 else None
    ))  # fmt: skip
    for _ in range(3):
        model(*small().values())
    begun, may_go, found = threading.Event(), threading.Event(), []
    bounds = padding.bounds

    def waiting(counts: Tensor) -> Tensor:
        begun.set()
        may_go.wait(5)
        return bounds(counts)

    def other() -> None:
        with torch.no_grad():
            found.append(model(*batch().values()))

    def meanwhile(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            may_go.set()
            thread.join()

    monkeypatch.setattr(padding, "bounds", waiting)
    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(5)
    head = model.tower.norm if hasattr(model.tower, "norm") else model.tower.post_layernorm
    packed.clear()
    handle = head.register_forward_pre_hook(meanwhile)
    own = model(*small().values())
    handle.remove()
    may_go.set()
    thread.join()
    assert packed and torch.equal(found[0], expected) and torch.allclose(own, alone, atol=1e-5)


TOKENS: Any = SimpleNamespace(
    device=torch.device("cuda"), shape=(16, 576, 384), dtype=torch.float32
)  # fmt: skip


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a GPU would say of its current stream."""
    said = {"capturing": False, "current": 0}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: said["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: said["current"])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: 0)
    return said


@pytest.mark.parametrize("backend", routing.names("attention"))
def test_a_backend_without_packed_sequences(
    backend: str, streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was patched with its name failed on a GPU, where padding is asked about."""
    monkeypatch.setattr(routing, "name_of", lambda *kind: kind[-1])
    site = SimpleNamespace(elsa_precision="strict", elsa_backend=backend)
    packs = backend in routing.names("varlen_attention") and backend != routing.PLAIN
    assert padding.may_wait(TOKENS, 6, 64, site) == packs


def test_a_warm_up_is_as_the_graph(
    streams: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph holds masked attention; calls ahead of it packed, and loaded other kernels."""
    monkeypatch.setattr(routing, "name_of", lambda *kind: "triton")
    site = SimpleNamespace(elsa_precision="strict", elsa_backend="auto")
    assert padding.may_wait(TOKENS, 6, 64, site)
    streams["current"] = 7
    assert not padding.may_wait(TOKENS, 6, 64, site)
    streams.update(capturing=True, current=0)
    assert not padding.may_wait(TOKENS, 6, 64, site)
