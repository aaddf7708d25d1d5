"""The environment variable of the CUDA library; `elsa_core.backends.cuda` says what it means."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "ELSA_CUDA_LIBRARY"


def is_asked_for() -> bool:
    """Whether the environment asks for the library by name."""
    return os.environ.get(VARIABLE) == "1"


def is_off() -> bool:
    """Whether the environment switches it off."""
    return os.environ.get(VARIABLE) == "0"


def wrong() -> str:
    """What is wrong with the variable's value; empty if nothing is."""
    given = os.environ.get(VARIABLE, "")
    return "" if given in ("", "0", "1") else f"{VARIABLE}={given!r} is neither 0 nor 1: ignored"
