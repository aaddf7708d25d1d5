"""Checks of the CUDA library over a stub driver: `python cuda_checks.py STUB MODULE...`.

Every function of a module's CHECKS runs in a child of this process, which has imported all that
they need: a library's operators and driver are for the life of a process.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode

LOG = "STUB_LOG"


def lines() -> list[str]:
    """What the stub driver was called with since the last time."""
    path = Path(os.environ[LOG])
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


class Seeing(TorchFunctionMode):
    """Notes the functions that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def main(stub: str, *modules: str) -> None:
    """`cuda_first` is named first: it checks that nothing imports what later calls import."""
    failed, count = [], 0
    for name in modules:
        for check in importlib.import_module(name).CHECKS:
            if name != "cuda_first":
                importlib.import_module(
                    "torch._dynamo"
                )  # what the first call of an operator imports
            count += 1
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                try:
                    check(stub)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            if os.waitpid(child, 0)[1] != 0:
                failed.append(check.__name__)
            lines()
    print("failed: " + ", ".join(failed) if failed else f"{count} done")


if __name__ == "__main__":
    main(*sys.argv[1:])
