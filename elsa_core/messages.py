"""Words of messages, and what other libraries say: kept off the terminal, or cut to one line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

_LONGEST_LINE: Final = 240


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


def first_line(error: BaseException) -> str:
    """The first line of an exception's text that says something; its class where none does."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:_LONGEST_LINE]


def side(size: Sequence[int]) -> str:
    """An image size in words: `384`, or `384x256`."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def milliseconds(seconds: float) -> str:
    """Three digits and no power of ten: "0.568", "36.3", "1290"."""
    value = float(f"{seconds * 1e3:.3g}")
    return f"{value:.0f}" if value >= 100 else f"{value:g}"
