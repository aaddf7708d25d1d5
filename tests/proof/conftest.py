"""What the tests of the check share."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile as on a machine without a compiler: it traces and runs the trace as it is."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()
