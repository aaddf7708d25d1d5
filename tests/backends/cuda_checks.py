"""What the programs beside it share that check the CUDA library over a stub driver."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

LOG = "STUB_LOG"


def lines() -> list[str]:
    """What the stub driver was called with since the last time."""
    path = Path(os.environ[LOG])
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def main(*checks: Callable[[str], None]) -> None:
    """`python PROGRAM STUB [CHECK...]`: every check, or those named, each in a child of this
    process, which has imported all that they need: a library's operators and driver are for the
    life of a process."""
    importlib.import_module("torch._dynamo")  # what the first call of an operator imports
    failed = []
    named = sys.argv[2:]
    checks = tuple(check for check in checks if not named or check.__name__ in named)
    for check in checks:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                check(sys.argv[1])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            failed.append(check.__name__)
        lines()
    print("failed: " + ", ".join(failed) if failed else f"{len(checks)} done")
