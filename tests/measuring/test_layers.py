"""`measuring` knows nobody above it, and `bench` and `profiling` not each other; wheels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elsa_core

PACKAGE = Path(elsa_core.__file__).parent
ROOT = PACKAGE.parent
# Above `measuring` in the house: it may know none of them, not even inside a function.
ABOVE = (
    "attention", "bench", "exporting", "linear", "loading", "model_runs", "patching", "profiling",
    "proof", "window",
)  # fmt: skip


def imported(room: str) -> Iterator[tuple[Path, str]]:
    """Every module of elsa's that the modules of a room import, wherever the import stands."""
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            yield from ((path, name) for name in names if name.startswith("elsa_"))


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("measuring", ABOVE),
        ("model_runs", ("bench", "profiling", "exporting")),
        ("bench", ("profiling",)),
        ("profiling", ("bench",)),
    ],
)
def test_imports_go_one_way(room: str, forbidden: tuple[str, ...]) -> None:
    found = list(imported(room))
    assert found
    for path, name in found:
        assert not name.startswith("elsa_cli"), path
        assert name.split(".")[1] not in forbidden, f"{path.name} imports {name}"
