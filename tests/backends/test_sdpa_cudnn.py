"""When calls go to cuDNN's forward, on the CPU: what it is given, and what it is not asked for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from elsa_core.backends import sdpa_cudnn


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """The masks that a kernel in cuDNN's place is called with; it takes every call."""
    masks: list[Tensor | None] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *terms, **named):
        masks.append(mask)
        return (q.clone(),)

    named = SimpleNamespace(default=kernel)
    ops = SimpleNamespace(aten=SimpleNamespace(_scaled_dot_product_cudnn_attention=named))
    monkeypatch.setattr(sdpa_cudnn, "torch", SimpleNamespace(**{**vars(torch), "ops": ops}))
    monkeypatch.setattr(sdpa_cudnn, "takes", lambda *operands: True)
    monkeypatch.setattr(sdpa_cudnn, "_gives_zeros", lambda place: True)
    return masks


def call(mask: Tensor | None, is_causal: bool = False) -> Tensor | None:
    q = torch.randn(2, 4, 24, 16).half()
    return sdpa_cudnn.measured_attention(q, q, q, mask, is_causal, 0.25, "strict")


MASK = torch.zeros(2, 4, 24, 24, dtype=torch.float16)
BUFFER = torch.zeros(2 * 4 * 24 * 24 + 1, dtype=torch.float16)


@pytest.mark.parametrize(
    ("mask", "served"),
    [
        (None, True),
        (MASK, True),
        (MASK[:1, :1], True),
        (MASK[:, 1:2], True),
        (MASK[:1, :1].expand(2, 4, 24, 24), True),
        (MASK.mT, False),
        (MASK[:, :, :1].expand(2, 4, 24, 24), False),
        (torch.zeros(2, 4, 24, 32, dtype=torch.float16)[..., :24], False),
        (BUFFER[1:].view(2, 4, 24, 24), False),  # it begins at no multiple of 16 bytes
        (BUFFER[:-1].view(2, 4, 24, 24), True),
    ],
)
def test_masks(mask: Tensor | None, served: bool, asked: list[Tensor | None]) -> None:
    assert (call(mask) is not None) is served
    assert len(asked) == served and all(given is mask for given in asked)
    causal = call(mask, is_causal=True)  # of calls without a mask alone
    assert (causal is not None) is (mask is None) and len(asked) == served + (mask is None)


def test_a_gpu_whose_cudnn_gives_no_zeros_is_asked_for_no_mask(
    asked: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_cudnn, "_gives_zeros", lambda place: False)
    assert call(MASK) is None and not asked
    assert call(None) is not None and len(asked) == 1


def test_explain_hears_what_a_call_would(
    asked: list[Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a GPU: elsewhere a call is described, and the layout alone counts."""
    q = torch.empty(1, 2, 130, 64, dtype=torch.float16)
    given = ((None, False), (None, True), (MASK, False), (MASK, True))
    assert [sdpa_cudnn.serves(q, q, q, *terms) for terms in given] == [True, True, True, False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [sdpa_cudnn.serves(q, q, q, *terms) for terms in given] == [True, True, True, False]
    monkeypatch.setattr(sdpa_cudnn, "_gives_zeros", lambda place: False)
    assert [sdpa_cudnn.serves(q, q, q, *terms) for terms in given] == [True, True, False, False]
    monkeypatch.setattr(sdpa_cudnn, "takes", lambda *operands: False)
    assert not any(sdpa_cudnn.serves(q, q, q, *terms) for terms in given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not sdpa_cudnn.serves(q[..., ::2], q, q, None, False)


@pytest.mark.parametrize(
    ("of_no_key", "zeros"), [(0.0, True), (math.nan, False), (1.0, False), (None, False)]
)
def test_rows_that_see_no_key_are_looked_at_once(
    of_no_key: float | None, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a CUDA graph is recorded."""
    now = {"capturing": True}
    seen = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, lse: bool):
        seen.append(mask)
        if of_no_key is None:
            raise RuntimeError("no plan")
        hidden = mask.isneginf().all(-1, keepdim=True)
        return (torch.where(hidden, torch.full_like(q, of_no_key), v),)

    named = SimpleNamespace(default=kernel)
    ops = SimpleNamespace(aten=SimpleNamespace(_scaled_dot_product_cudnn_attention=named))
    monkeypatch.setattr(sdpa_cudnn, "torch", SimpleNamespace(**{**vars(torch), "ops": ops}))
    monkeypatch.setattr(sdpa_cudnn, "_ZEROS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    assert not sdpa_cudnn._gives_zeros("cpu") and not seen
    now["capturing"] = False
    assert [sdpa_cudnn._gives_zeros("cpu") for _ in range(2)] == [zeros, zeros] and len(seen) == 1
