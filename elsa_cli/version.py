"""The version, read without importing elsa_core (which imports torch)."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def version() -> str:
    """The text of `elsa_core/base/version.py`."""
    package = importlib.util.find_spec("elsa_core")
    folders = package.submodule_search_locations if package else None
    if not folders:
        return "unknown"
    spec = importlib.util.spec_from_file_location(
        "_elsa_version", Path(folders[0], "base/version.py")
    )
    if spec is None or spec.loader is None:
        return "unknown"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)
