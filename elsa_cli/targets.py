"""Files that a command is to write, looked at before it spends time on what goes into them."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from elsa_cli.errors import PlaceError, TargetError

PLOTS = (".png", ".svg")


def check_new(path: Path, force: bool, hint: str = "") -> None:
    """Refuse a file that exists, unless `force`, and one that cannot be written; `hint` is another
    way out."""
    if path.exists() and not force:
        raise TargetError(f"{path} exists; use --force to replace it{hint}")
    check_writable(path)


def check_folder(output: Path, force: bool, *, zipped: bool = False) -> Path:
    """Refuse a directory that exists, unless `force`, and one that cannot be made; with `zipped` a
    file, whose name ends in .zip. Returns what is to be written."""
    if zipped and output.suffix != ".zip":
        output = Path(f"{output}.zip")
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError:  # safetensors and TorchScript could not read it
        raise TargetError(f"{output}: this name is no UTF-8 text; give another -o") from None
    if zipped and output.is_dir():
        raise TargetError(f"{output} is a directory; with --zip, -o names a file")
    if output.exists() and not force:
        raise TargetError(f"{output} exists; give another -o, or --force to replace it")
    if output.exists() and not zipped and not output.is_dir():
        raise TargetError(f"{output} is not a directory; --force replaces directories only")
    check_writable(output, next(p for p in output.absolute().parents if os.path.lexists(p)))
    return output


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything heavy is imported."""
    if path.suffix.lower() not in PLOTS:
        raise TargetError(f"{path}: a plot is a {' or '.join(PLOTS)} file")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlaceError("plots need matplotlib: pip install 'elsa-attention[plot]'")


def check_writable(path: Path, folder: Path | None = None) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix=".elsa-", dir=folder or path.parent):
            pass
    except OSError as error:
        raise TargetError(f"{path} cannot be written: {error.strerror}") from None
