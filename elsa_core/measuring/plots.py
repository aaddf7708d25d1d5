"""Files that matplotlib draws: what is checked before measuring, and how they are written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from elsa_core.base.files import staged_file
from elsa_core.errors import ArgumentError, UnavailableError

FORMATS: Final = (".png", ".svg")


def check(path: Path, *, force: bool = False) -> None:
    """Raise where a plot cannot be written to `path`: before anything is measured.

    Raises:
        ArgumentError: another suffix, or an existing file without `force`.
        UnavailableError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ArgumentError(f"{path}: a plot is a {' or '.join(FORMATS)} file")
    if path.exists() and not force:
        raise ArgumentError(f"{path} exists; use --force to replace it")
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("plots need matplotlib: pip install 'elsa-attention[plot]'")


def save(figure: Any, path: Path) -> Path:
    """Write a figure of matplotlib, whole or not at all, in the format of the path's suffix."""
    with staged_file(path) as staging:
        figure.savefig(staging, format=path.suffix.lower().lstrip("."), dpi=160)
    return path
