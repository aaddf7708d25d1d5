"""What the ranks found, started once for all tests: most of their time goes to imports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import ranks

Results = dict[int, list[Any]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By the number of ranks, what each of them found."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    return ranks.start((2, 3), folder)
