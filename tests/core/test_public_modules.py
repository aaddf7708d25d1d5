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
    "loading": {"load", "save", "spec", "plan", "recipe", "reading"},
    "patching": {
        "patch",
        "sites",
        "layers",
        "freeze",
        "copies",
        "adapters",
        "adapters.table",
        "labels",
        "text",
    },
    "proof": {"check", "report", "cases", "compare", "images"},
}
# Who imports more than these, and why. A line that is no longer true fails.
FURTHER = {
    # a model built again: at another size, or with fewer blocks
    ("profiling/sweep.py", "loading"): {"fromfile", "imagesize", "libraries", "shards"},
    ("surveying/coverage.py", "loading"): {"alike", "libraries"},
    # all names, and what a user did not say
    ("elsa_cli/known_models.py", "loading"): {"libraries"},
    ("elsa_cli/render.py", "loading"): {"unsaid"},
    # the page that shows an inspection
    ("elsa_cli/commands/inspect.py", "patching"): {"page"},
    # weights that share memory, before a bundle writes them
    ("exporting/bundle.py", "loading"): {"fill"},
    # images: what --mean and its like say of them, the size of an input
    ("elsa_cli/options.py", "loading"): {"preprocessing"},
    ("exporting/export_target.py", "patching"): {"probe"},
    # the adapter that attends over ranks
    ("distributed/vit.py", "patching"): {"adapters.common", "adapters.timm_attention"},
    # what the original's fused branch depends on
    ("model_runs/variants.py", "patching"): {"adapters.redirect"},
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
    past: dict[tuple[str, str], set[str]] = {}
    for file, module in imports(package):
        if module not in PUBLIC[package]:
            past.setdefault((file, package), set()).add(module)
    assert past == {key: modules for key, modules in FURTHER.items() if key[1] == package}


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_module_is_there_and_used(package: str) -> None:
    used = {module for _, module in imports(package)}
    assert PUBLIC[package] <= used
