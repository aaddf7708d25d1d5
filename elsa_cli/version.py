"""The version, read without importing elsa_core."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def version() -> str:
    """The text of `elsa_core/base/version.py`."""
    package = importlib.util.find_spec("elsa_core")
    folders = package.submodule_search_locations if package else None
    if not folders:
        return "unknown"
    return Path(folders[0], "base/version.py").read_text(encoding="utf-8").split('"')[-2]
