"""Ctrl-C and `kill` unwind the stack, so that no temporary file outlives the command.

An exception that a signal handler raises inside an import or a destructor may be swallowed there.
The request is therefore remembered, and `check` raises it again at the next step.
"""

from __future__ import annotations

import signal
from types import FrameType

_requested: list[int] = []


def install() -> None:
    """Handle SIGTERM, and SIGINT unless the caller had it ignored (`nohup`, a job of a shell)."""
    signal.signal(signal.SIGTERM, _handle)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def check() -> None:
    """Raise what a signal asked for and nobody has seen.

    Raises: KeyboardInterrupt for SIGINT, SystemExit for SIGTERM.
    """
    if _requested:
        _raise(_requested[0])


def cause(error: BaseException) -> BaseException:
    """What a signal asked for where there was one: `error` is then only how it came through."""
    try:
        check()
    except BaseException as stop:
        return stop
    return error


def _handle(number: int, frame: FrameType | None) -> None:
    _requested.append(number)
    _raise(number)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
