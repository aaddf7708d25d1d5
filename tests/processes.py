"""Which processes run, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

seen_from_proc = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="sees from /proc what runs"
)


def alive(word: str) -> list[int]:
    """Processes whose command line holds `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended since
            continue
    return found
