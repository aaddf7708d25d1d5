"""A wheel of this package with packs in it, built from a copy of the checkout."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from elsa_core.backends.triton.pack import store
from elsa_core.base.files import flush, parents_made, scratch, staged_file
from elsa_core.base.processes import running
from elsa_core.errors import UnavailableError

# What pyproject.toml builds a wheel of.
_FOLDERS = ("elsa_core", "elsa_cli", "csrc")
_FILES = ("pyproject.toml", "README.md", "LICENSE")
# `packs` are those that someone put into the checkout.
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.py[co]", "*.so", ".*", "packs")
_LONGEST_LINE = 300


def require() -> Path:
    """The checkout that this package lies in, of which wheels are built.

    Raises:
        UnavailableError: hatchling is not installed, or the package is no checkout.
    """
    if importlib.util.find_spec("hatchling") is None:
        raise UnavailableError("hatchling is not installed, and it builds wheels: install it")
    root = Path(__file__).parents[4]
    missing = [name for name in (*_FOLDERS, *_FILES) if not (root / name).exists()]
    if missing:
        raise UnavailableError(
            f"a wheel is built from a checkout of elsa: {root} has no {missing[0]}"
        )
    return root


def wheel(packs: Sequence[Path], out: Path) -> Path:
    """Build a wheel whose `elsa_core/packs` holds packs; every installation of it has them.

    The wheel appears in one step, in place of one with the same name.

    Args:
        packs: folders of one architecture each, as `build` writes them.
        out: where the wheel goes.

    Raises:
        UnavailableError: as `require`; hatchling fails, or the wheel cannot be written.
    """
    root = require()
    try:
        with scratch(".elsa-wheel-") as place:
            copy = place / "source"
            for name in _FOLDERS:
                shutil.copytree(root / name, copy / name, ignore=_NOT_COPIED)
            for name in _FILES:
                shutil.copyfile(root / name, copy / name)
            for pack in packs:
                target = copy / "elsa_core" / "packs" / pack.name
                target.mkdir(parents=True)
                shutil.copyfile(pack / store.NAME, target / store.NAME)
            made = _built(copy, place)
            target = out / made.name
            with parents_made(target), staged_file(target) as staging:
                shutil.copyfile(made, staging)
                flush(staging)
            return target
    except OSError as error:
        raise UnavailableError(
            f"the wheel cannot be written to {out}: {error.strerror or error}"
        ) from None


def _built(copy: Path, place: Path) -> Path:
    """The wheel that hatchling makes of a copy."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place / "dist")]
    said = place / "said"
    with said.open("w") as output, running(command, cwd=copy, stdout=output, stderr=output) as run:
        code = run.wait()
    found = list((place / "dist").glob("*.whl"))
    if code != 0 or len(found) != 1:
        lines = said.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        raise UnavailableError(f"hatchling builds no wheel: {last[:_LONGEST_LINE]}")
    return found[0]
