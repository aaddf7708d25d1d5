"""Child processes in a process group of their own: what they start ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A child process; where it still runs at the end, its whole process group is killed.

    A compiler starts others: killing it alone would leave those behind.

    Args:
        command: the program and its arguments.
        options: of `subprocess.Popen`. Text is read as UTF-8, and stdin is empty unless given.
    """
    options.setdefault("stdin", subprocess.DEVNULL)
    process: subprocess.Popen[str] = subprocess.Popen(
        command, start_new_session=True, encoding="utf-8", errors="replace", **options
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):  # a system without groups
        process.kill()
    process.wait()
