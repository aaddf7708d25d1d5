"""Plain data in result documents: what JSON can hold."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from elsa_core.base.files import write_text
from elsa_core.base.version import __version__
from elsa_core.errors import UnavailableError

SCHEMA_VERSION: Final = 1
Document = dict[str, Any]


def started(command: str, environment: Document, results: Document) -> Document:
    """A result document: schema and elsa version, where it was measured, and results."""
    return {
        "schema_version": SCHEMA_VERSION, "elsa_version": __version__, "command": command,
        "environment": environment, "results": results,
    }  # fmt: skip


class Plain:
    """A dataclass that becomes plain data, with all that it holds and the properties `also`."""

    also: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> Document:
        """Plain data for JSON."""
        names = (*self.also, *(each.name for each in fields(self)))  # type: ignore[arg-type]
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def finite(value: Any) -> Any:
    """Plain data with None for numbers that are not finite: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def write(document: Document, path: Path) -> Path:
    """Write a document, whole or not at all; UnavailableError where that cannot be done."""
    try:
        return write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n", path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written: {error.strerror or error}") from error
