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
    return {world: ranks.start(world, folder) for world in (2, 3)}
