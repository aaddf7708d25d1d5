"""Files that a command is to write, looked at before it spends time on what goes into them."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from elsa_cli.errors import ENVIRONMENT, CommandError, TargetError

PLOTS = (".png", ".svg")


class PlotError(CommandError):
    """The package that draws is missing."""

    exit_code = ENVIRONMENT


def check_new(path: Path, force: bool, hint: str = "") -> None:
    """Refuse a file that exists, unless `force`, and one that cannot be written.

    Raises: TargetError; `hint` is another way out of an existing file.
    """
    if path.exists() and not force:
        raise TargetError(f"{path} exists; use --force to replace it{hint}")
    check_writable(path)


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything heavy is imported.

    Raises: TargetError for another suffix, PlotError without matplotlib.
    """
    if path.suffix.lower() not in PLOTS:
        raise TargetError(f"{path}: a plot is a {' or '.join(PLOTS)} file")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("plots need matplotlib: pip install 'elsa-attention[plot]'")


def check_writable(path: Path) -> None:
    """Refuse a file in whose folder nothing can be written.

    Raises: TargetError.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise TargetError(f"{path} cannot be written: {error.strerror}") from None
