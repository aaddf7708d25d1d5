"""Other packages import loading, patching and proof by a few public modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elsa_core

PACKAGE = Path(elsa_core.__file__).parent
ROOT = PACKAGE.parent

# The modules that others import.
PUBLIC = {
    "loading": {"load", "save", "spec", "plan", "recipe", "architecture"},
    "patching": {
        "patch",
        "sites",
        "layers",
        "freeze",
        "adapters",
        "adapters.table",
        "text",
        "page",
        "sharding",
    },
    "proof": {"check", "compare", "samples"},
}


def imports(package: str) -> Iterator[tuple[str, str]]:
    """(file, module of the package) for every import from outside it, wherever it stands."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "elsa_cli").rglob("*.py")]
    for path in files:
        name = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()
        if name.startswith(f"{package}/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            inside = f"{node.module}.".removeprefix(f"elsa_core.{package}.").removesuffix(".")
            if node.module == f"elsa_core.{package}":
                yield from ((name, alias.name) for alias in node.names)
            elif node.module.startswith(f"elsa_core.{package}."):
                yield name, inside


@pytest.mark.parametrize("package", PUBLIC)
def test_others_import_the_public_modules(package: str) -> None:
    past = {(file, module) for file, module in imports(package) if module not in PUBLIC[package]}
    assert not past


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_module_is_there_and_used(package: str) -> None:
    used = {module for _, module in imports(package)}
    assert PUBLIC[package] <= used
