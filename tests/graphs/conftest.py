"""The fixture of tests on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elsa_core.graphs import model as graphs

from .tape import Tape


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    tape = Tape()
    monkeypatch.setattr(graphs, "BACKEND", tape)
    with torch.inference_mode():
        yield tape
