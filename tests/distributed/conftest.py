"""What the ranks found, started once for all tests: most of their time goes to imports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from . import ranks

Results = dict[int, list[Any]]


@pytest.fixture(scope="session")
def results(once: Callable[[str, Callable[[Path], None]], Path]) -> Results:
    """By the number of ranks, what each of them found."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    return ranks.found((2, 3), once("ranks", lambda folder: ranks.start((2, 3), folder)))
