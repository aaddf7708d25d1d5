"""Packages import those below them alone; what a wheel holds."""

import ast
import graphlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python

import elsa_core
from elsa_core.dispatch import BACKENDS

PACKAGE = Path(elsa_core.__file__).parent
ROOT = PACKAGE.parent
# From the bottom to the top: a room imports none of those above it, not even in a function. An
# operator's record lies below the one that chooses, its public function above.
FLOORS = (
    "errors", "base", "precision", "monoid", "reference", "backends", "records", "dispatch", "ops",
    "nn", "distributed", "offload", "patching", "graphs", "measuring", "loading", "proof",
    "exporting", "profiling",
)  # fmt: skip
RECORDS = re.compile(
    r"elsa_core\.ops(\.(factory|formulas|flops|\w+\.(\w+_)?record|\w+\.portable)\b|\.[A-Z]|$)"
)
# The ways up that are meant: what shards models is also `elsa.distributed.shard`, and
# `elsa.attention(offload=...)`.
DOORS = {
    ("distributed", "elsa_core.patching"), ("ops", "elsa_core.offload"),
    ("backends", "elsa_core.ops.linear."),
}  # fmt: skip
# What backends share, and those that use another one: Triton's kernels in a library without Python
# (cuda), and its call for shapes that its window kernels refuse (eager).
SHARED = ("cache", "compiler", "partition", "philox", "processor", "support", "window_call")
BESIDE = {("triton", "cuda"), ("cuda", "triton"), ("triton", "eager")}
# A string that names a module, or an attribute of it; the first part of an f-string ends in a dot.
NAMED = re.compile(r"elsa_core(\.\w+)+(\.|:\w+)?")


def names_in(node: ast.AST) -> list[str]:
    """The modules that a node imports or, as a string for `import_module`, names."""
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    value = node.value if isinstance(node, ast.Constant) else None
    return [value] if isinstance(value, str) and NAMED.fullmatch(value) else []


def goes_to(name: str) -> str:
    """The room of elsa_core that the dotted name lies in."""
    return "records" if RECORDS.match(name) else "".join(re.split("[.:]", name)[1:2])


def imported(room: str) -> Iterator[tuple[str, str]]:
    """Every module of elsa's that the modules of a room import, wherever the import stands.

    Left out are `DOORS`, and the parts of an operator's record
    ("module:attribute"), which the packages that they lie in ask for.
    """
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        if goes_to(module.removesuffix(".__init__")) != room:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in names_in(node):
                is_part = room == "records" and ":" in name
                is_door = any(room == one and name.startswith(door) for one, door in DOORS)
                if name.startswith("elsa_") and not (is_part or is_door):
                    yield path.relative_to(PACKAGE).as_posix(), name


def test_every_room_has_its_floor() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__", "csrc", "packs"} == {*FLOORS} - {"records"}


@pytest.mark.parametrize("room", FLOORS)
def test_imports_go_one_way(room: str) -> None:
    above = FLOORS[FLOORS.index(room) + 1 :]
    for module, name in imported(room):
        assert not name.startswith("elsa_cli"), module
        assert goes_to(name) not in above, f"{module} imports {name}"


@pytest.mark.parametrize(
    "climb",
    [
        "import elsa_core.patching",
        "def late():\n    from elsa_core import patching",
        "import_module('elsa_core.patching')",
        "HOMES = {'shard': 'elsa_core.patching.sharding'}",
        "PART = 'elsa_core.patching:shard'",
        "import_module(f'elsa_core.patching.{name}')",
    ],
)
def test_a_way_up_is_seen_however_it_is_written(climb: str) -> None:
    found = [name for node in ast.walk(ast.parse(climb)) for name in names_in(node)]
    assert [goes_to(name) for name in found] == ["patching"]


SHARED_WITH_OPS = ("elsa_core.backends.support.", "elsa_core.backends.philox")


def test_public_operators_know_no_backend() -> None:
    backends = [found for _, found in imported("ops") if goes_to(found) == "backends"]
    assert all(found.startswith(SHARED_WITH_OPS) for found in backends), backends


def test_a_backend_imports_no_other_backend() -> None:
    """A backend is a package, or the modules whose names begin alike."""
    found = {
        (module.split("/")[1].removesuffix(".py").split("_")[0], name.split(".")[2].split("_")[0])
        for module, name in imported("backends")
        if goes_to(name) == "backends" and name.split(".")[2] not in SHARED
    }
    assert {pair for pair in found if pair[0] != pair[1]} == BESIDE


def run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module without what type checkers alone read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from run_time(node)


def test_no_module_leads_back_to_itself() -> None:
    """An import in a function that goes up again would close a circle of modules."""
    files = {}
    for package in ("elsa_core", "elsa_cli"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    graph = {}
    for name, path in files.items():
        nodes = list(run_time(ast.parse(path.read_text(encoding="utf-8"))))
        pairs = [
            (node.module, f"{node.module}.{alias.name}")
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        ]
        graph[name] = {full if full in files else module for module, full in pairs} & {*files}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_only_dispatch_names_a_backend() -> None:
    """A backend knows its own name, a measurement those that it compares, and no one else any."""
    named = {backend.name for backend in BACKENDS}
    apart = ("backends", "measuring", "profiling", "dispatch", "proof")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in apart and path.name != "hf_transformers.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in named
    ]
    assert not found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    (found,) = folder.glob("*.whl")
    return found


def test_a_wheel_holds_the_code_and_no_results(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in names if "/results/" in name]
    assert {
        "elsa_core/dispatch/measured.json",
        "elsa_core/measuring/timing.py",
        "elsa_core/profiling/bench/published.py",
        "elsa_core/profiling/bench/tune.py",
        "elsa_core/csrc/elsa/attention.cpp",
        "elsa_cli/main.py",
    } <= names
    assert any(name.startswith("elsa_core/backends/triton/tuning/") for name in names)


INSTALLED = """
import sys, torch
import elsa_core as elsa
assert "site" in elsa.__file__, elsa.__file__
query = torch.empty(1, 8, 1024, 64)
print(elsa.explain(query, query, query).backend)
sys.argv = ["elsa", "bench", "attention", "--compare", "attention_cpu", "--quick"]
from elsa_cli.main import main
main()
"""


def test_an_installed_wheel_says_where_the_results_are(wheel: Path, tmp_path: Path) -> None:
    """`explain` works from a wheel; what needs the results ends with one line and exit code 2."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    done = python("-c", INSTALLED, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)})
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip() in ("native", "eager") and "from a checkout" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
