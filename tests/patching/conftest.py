"""What tests of patched models share: which calls of packed attention a model made."""

from typing import Any

import pytest
from torch import Tensor

import elsa_core as elsa
from elsa_core.patching.adapters import padding


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many queries and keys each call of packed attention had."""
    seen: list[tuple[int, int]] = []

    def attention(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append((query.shape[0], key.shape[0]))
        return elsa.varlen_attention(query, key, *rest, **options)

    monkeypatch.setattr(padding, "varlen_attention", attention)
    return seen
