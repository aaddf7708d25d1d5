"""The fixture of tests on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elsa_core.graphs import capture

from .tape import Tape


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    tape = Tape()
    monkeypatch.setattr(capture, "BACKEND", tape)
    with torch.inference_mode():
        yield tape
