"""The processes that the tests of several ranks start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessRaisedException

from . import ranks


def one_fails(rank: int, port: int, world: int, folder: str) -> None:
    """The second world fails when the first one runs, which would go on for longer than a test."""
    Path(folder, f"{world}-{rank}.pid").write_text(str(os.getpid()))
    if world == 1:
        while len(list(Path(folder).glob("2-*.pid"))) < 2:
            time.sleep(0.05)
        raise ValueError("this rank fails")
    time.sleep(1000)


def test_no_process_is_left_where_one_fails(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="this rank fails"):
        ranks.start((2, 1), tmp_path, one_fails)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
