"""Names of a package that are imported at their first use (PEP 562)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def attribute(package: str, homes: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """What `package.name` is, of `homes`: modules of the package, and the names of each."""
    for home, names in homes.items():
        if name in names:
            return getattr(import_module(f"{package}.{home}"), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
