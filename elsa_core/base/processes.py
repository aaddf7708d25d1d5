"""Child processes in a process group of their own: what they start ends with them.

`environment_kept` is for compilers that run inside this process.

While `uninterrupted`, no signal handler may raise: a child would be there that no code knows of, or
one that nobody ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

uninterrupted = False
# For a compiler to remove its temporary files, once it is asked to end.
GRACE_SECONDS = 2.0


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A child process of `subprocess.Popen` (UTF-8, stdin empty unless given). Where it still runs
    at the end, its whole process group is ended, since a compiler starts others: by SIGTERM, and by
    SIGKILL when the child has ended or `GRACE_SECONDS` are over."""
    started: list[subprocess.Popen[str]] = []
    options = {"stdin": subprocess.DEVNULL, "encoding": "utf-8", "errors": "replace", **options}
    try:
        with _uninterrupted():
            started.append(subprocess.Popen(command, start_new_session=True, **options))
        yield started[0]
    finally:
        for process in started:
            _end(process)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Undo at the end what is done to the environment's variables: torch's compilers set some."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({n: v for n, v in before.items() if os.environ.get(n) != v})


@contextmanager
def _uninterrupted() -> Iterator[None]:
    global uninterrupted  # noqa: PLW0603  # read by signal handlers
    uninterrupted = True
    try:
        yield
    finally:
        uninterrupted = False


def _end(process: subprocess.Popen[str]) -> None:
    with _uninterrupted():
        if process.poll() is None:
            # SIGKILL is for what is left of the group
            for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
                try:
                    os.killpg(process.pid, number)
                except (AttributeError, ProcessLookupError, PermissionError):  # has no groups
                    process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
