"""Files that a command is to write, looked at before it spends time on what goes into them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from elsa_cli.errors import TargetError


def check_new(path: Path, force: bool, hint: str = "") -> None:
    """Refuse a file that exists, unless `force`, and one that cannot be written.

    Raises: TargetError; `hint` is another way out of an existing file.
    """
    if path.exists() and not force:
        raise TargetError(f"{path} exists; use --force to replace it{hint}")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Refuse a file in whose folder nothing can be written.

    Raises: TargetError.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise TargetError(f"{path} cannot be written: {error.strerror}") from None
