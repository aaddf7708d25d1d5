"""Child processes in a process group of their own: what they start ends with them.

While `starting`, no signal handler may raise: a child would be there that no code knows of.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

starting = False


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A child process; where it still runs at the end, its whole process group is killed.

    A compiler starts others: killing it alone would leave those behind.

    Args:
        command: the program and its arguments.
        options: of `subprocess.Popen`. Text is read as UTF-8, and stdin is empty unless given.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        _start(started, command, options)
        yield started[0]
    finally:
        for process in started:
            _end(process)


def _start(
    started: list[subprocess.Popen[str]], command: Sequence[str], options: dict[str, Any]
) -> None:
    global starting  # noqa: PLW0603  # read by signal handlers
    options.setdefault("stdin", subprocess.DEVNULL)
    starting = True
    try:
        started.append(
            subprocess.Popen(
                command, start_new_session=True, encoding="utf-8", errors="replace", **options
            )
        )
    finally:
        starting = False


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (AttributeError, ProcessLookupError, PermissionError):  # a system without groups
            process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
