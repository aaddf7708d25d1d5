"""Words of messages, and what other libraries say: kept off the terminal, or cut to one line."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

Progress = Callable[[str, int, int], None]
_LONGEST_LINE: Final = 240
_CLEAR: Final = "\r\x1b[2K"  # a terminal's line


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """While it lasts, libraries' warnings and their log lines up to `level` show nowhere."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def shown(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """What a long call tells its steps to, for the length of a `with` block: `progress` itself, or
    where none is given a line on stderr if that is a terminal. False: nothing."""
    if callable(progress):
        yield progress
    elif progress is False or sys.stderr is None or not sys.stderr.isatty():
        yield None
    else:
        try:
            yield _draw
        finally:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()


def _draw(what: str, done: int, total: int) -> None:
    line = f"{what} {done}/{total}" if total else what
    line = "".join(each if each.isprintable() else "?" for each in line)
    sys.stderr.write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])
    sys.stderr.flush()


def first_line(error: BaseException) -> str:
    """The first line of an exception's text that says something; its class where none does."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:_LONGEST_LINE]


def listed(names: Sequence[str]) -> str:
    """The first two names, and how many more there are."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def side(size: Sequence[int]) -> str:
    """An image size in words: `384`, or `384x256`."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def milliseconds(seconds: float) -> str:
    """Three digits and no power of ten: "0.568", "36.3", "1290"."""
    value = float(f"{seconds * 1e3:.3g}")
    return f"{value:.0f}" if value >= 100 else f"{value:g}"
