"""Other packages import what a package's `__init__` exports, and nothing else of it."""

import ast
import functools
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from processes import python

import elsa_core

PACKAGE = Path(elsa_core.__file__).parent
ROOT = PACKAGE.parent

LAZY = ("loading", "patching", "proof")
DOORS = (*LAZY, "dispatch")
# Backends, which dispatch imports, read its shipped table.
TABLES = ("elsa_core.dispatch.measured.", "measured.")
# The survey of all architectures is a module of its own.
MODULES = ("coverage.", "elsa_core.proof.coverage.")


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Those of a file that import something, or may name a module for `import_module`."""
    kinds = (ast.Import, ast.ImportFrom, ast.Constant)
    return tuple(
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
        and (not isinstance(node, ast.Constant) or str(node.value).startswith("elsa_core."))
    )


def imports(package: str) -> Iterator[tuple[str, str]]:
    """(file, what it imports of the package) for every import from outside it, wherever it is.

    A name that the package exports stands alone, anything else with its module.
    """
    door = f"elsa_core.{package}"
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "elsa_cli").rglob("*.py")]
    for path in files:
        name = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()
        if name.startswith(f"{package}/"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module == door:
                yield from ((name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{door}."):
                yield from ((name, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names if alias.name.startswith(door)]
                yield from ((name, one) for one in found)
            elif isinstance(node, ast.Constant) and f"{node.value}".startswith(f"{door}."):
                yield name, str(node.value)  # for import_module


@pytest.mark.parametrize("package", DOORS)
def test_others_import_what_is_exported(package: str) -> None:
    exported = {*import_module(f"elsa_core.{package}").__all__}
    past = {(file, name) for file, name in imports(package) if name not in exported}
    assert not {each for each in past if not f"{each[1]}.".startswith((*TABLES, *MODULES))}


@pytest.mark.parametrize("package", LAZY)
def test_what_is_exported_is_there_and_used(package: str) -> None:
    door = import_module(f"elsa_core.{package}")
    asked = {name for _, name in imports(package)}
    public = {*elsa_core._HOMES[package]}
    assert {*door.__all__} <= asked | public
    homes = [name for names in door._HOMES.values() for name in names]
    assert sorted(homes) == sorted(door.__all__)
    for home, names in door._HOMES.items():
        module = import_module(f"elsa_core.{package}.{home}")
        assert all(getattr(door, name) is getattr(module, name) for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = door.nothing


@pytest.mark.parametrize("package", LAZY)
def test_no_module_has_the_name_of_an_export(package: str) -> None:
    """The import of such a module would put it where the function is asked for."""
    modules = {path.stem for path in (PACKAGE / package).iterdir()}
    assert not modules & {*import_module(f"elsa_core.{package}").__all__}


def test_a_door_imports_nothing_behind_it() -> None:
    code = (
        "import sys\n"
        "from elsa_core import loading, patching, proof\n"
        f"rooms = tuple(f'elsa_core.{{name}}.' for name in {LAZY!r})\n"
        "print([name for name in sys.modules if name.startswith(rooms)])\n"
        "print('timm' in sys.modules)\n"
    )
    done = python("-c", code)
    assert done.stdout.split() == ["[]", "False"]
