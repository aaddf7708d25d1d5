"""Ctrl-C, `kill` and a closed terminal unwind the stack: no temporary file outlives the command.

An exception that a signal handler raises inside a destructor may be swallowed there. The request is
therefore remembered, and `check` raises it again at the next step. Inside an import it may end the
process (C++ that runs Python while a library is loaded lets no exception through), and a child that
is just being started or ended would be left behind: there it waits for the end of either. Where
nothing has been begun yet that would have to be undone, the process ends inside the import at once.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_RETRY_SECONDS = 0.02
_requested: list[int] = []
_leave: list[Callable[[int], None]] = []


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. CPython notes a plain KeyboardInterrupt that leaves code run by a C extension, even
    where it is caught further up, and at the end kills the process instead of exiting with a code.
    """


def install() -> None:
    """Handle SIGTERM, and SIGINT and SIGHUP unless the caller had them ignored (a job, `nohup`)."""
    signal.signal(signal.SIGALRM, _handle)
    signal.signal(signal.SIGTERM, _handle)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _handle)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


@contextmanager
def importing(leave: Callable[[int], None]) -> Iterator[None]:
    """While it lasts nothing but imports runs: a signal inside one calls `leave`, which ends the
    process, with the exit code. No cycles are looked for meanwhile: modules stay, and looking is a
    fifth of their import."""
    collects = gc.isenabled()
    gc.disable()
    _leave.append(leave)
    try:
        yield
    finally:
        _leave.pop()
        if collects:
            gc.enable()


def check() -> None:
    """Raise what a signal asked for and no code has raised yet: KeyboardInterrupt for SIGINT,
    SystemExit for SIGTERM and SIGHUP."""
    if _requested:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Interrupted if _requested[0] == signal.SIGINT else SystemExit(128 + _requested[0])


def _handle(number: int, frame: FrameType | None) -> None:
    """Raise what was asked for, unless this is no moment for it: then look again a little later."""
    if number != signal.SIGALRM:
        _requested.append(number)
    importing = False
    while frame is not None and not importing:
        importing = frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    if _leave and importing:
        _leave[-1](128 + _requested[0])  # what a process that a signal ends exits with
    processes = sys.modules.get("elsa_core.base.processes")
    if importing or getattr(processes, "uninterrupted", False):
        signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)
    else:
        check()
