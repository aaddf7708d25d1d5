"""What the ranks found, started once for all tests: most of their time goes to imports."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from filelock import FileLock

from . import ranks

Results = dict[int, list[Any]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By the number of ranks, what each of them found; started by one process of pytest-xdist."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    place = tmp_path_factory.getbasetemp()
    folder = (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "ranks"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            ranks.start((2, 3), folder)
            (folder / "done").touch()
        return ranks.found((2, 3), folder)
