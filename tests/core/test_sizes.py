"""Functions on the host stay under 65 lines of code, files under 480, rooms within their budgets;
limits are said once."""

import ast
import csv
import re
from pathlib import Path

import elsa_core
from elsa_core.base.limits import LARGEST_HEAD_DIM

ROOT = Path(elsa_core.__file__).parent.parent
FILES = [path for name in ("elsa_core", "elsa_cli") for path in (ROOT / name).rglob("*.py")]
LINES, FILE_LINES = 65, 480
# Longer: kernels, which are one unit each, and what a pending tensor answers.
EXEMPT = ("elsa_core/backends/triton/", "elsa_core/patching/recognition/pending.py")


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _code_lines(function: ast.FunctionDef) -> int:
    """Lines of the body, the docstring left out."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {_code_lines(node)} lines"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and not _is_kernel(node) and _code_lines(node) >= LINES
    ]
    assert not long


def test_files_are_short() -> None:
    names = {path: path.relative_to(ROOT).as_posix() for path in FILES}
    long = [
        name
        for path, name in names.items()
        if not name.startswith(EXEMPT)
        and len(path.read_text(encoding="utf-8").splitlines()) > FILE_LINES
    ]
    assert not long


def test_rooms_keep_their_budgets() -> None:
    """Lines of Python, C++ and CUDA; `rooms.csv` beside this file says how many a room may have."""
    with Path(__file__).with_name("rooms.csv").open(encoding="utf-8", newline="") as file:
        budgets = {row["room"]: int(row["lines"]) for row in csv.DictReader(file)}
    over = {}
    for room, budget in budgets.items():
        own = (p for p in (ROOT / room).rglob("*") if p.suffix in (".py", ".cpp", ".h", ".cu"))
        lines = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in own)
        if not 0 < lines <= budget:
            over[room] = lines
    assert not over
    rooms = {
        path.name for path in (ROOT / "elsa_core").iterdir() if (path / "__init__.py").exists()
    }
    assert {f"elsa_core/{name}" for name in rooms} <= budgets.keys()


def test_the_largest_head_dimension_is_said_once_in_each_language() -> None:
    sources = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sources}
    said = [
        int(n) for text in texts.values() for n in re.findall(r"kLargestHeadDim = (\d+);", text)
    ]
    assert said == [LARGEST_HEAD_DIM]
    bare = rf"(?:dim|heads|size\[3\]) [<>]=? {LARGEST_HEAD_DIM}\b|1 to {LARGEST_HEAD_DIM}\b"
    assert not [name for name, text in texts.items() if re.search(bare, text)]
