"""The fixture of tests on a CPU."""

from collections.abc import Iterator

import pytest
import torch

from .tape import Tape, taped


@pytest.fixture
def tape() -> Iterator[Tape]:
    with taped() as tape, torch.inference_mode():
        yield tape
