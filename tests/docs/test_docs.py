"""What the documentation shows runs as written, and its chart is that of the results."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import some

import elsa_core
from elsa_core.bench import training_tables
from elsa_core.errors import ArgumentError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def steps(text: str) -> list[tuple[str, str]]:
    """The commands of a page in order; its Python blocks are one program, run at the last one."""
    blocks = BLOCK.findall(text)
    commands = [("bash", line) for kind, code in blocks if kind == "bash" for line in lines(code)]
    program = "\n".join(code for kind, code in blocks if kind == "python")
    return [*commands, ("python", program)] if program else commands


def lines(code: str) -> list[str]:
    return [line for line in code.splitlines() if line.strip()]


@pytest.mark.long
@pytest.mark.parametrize("page", some(TUTORIALS, one_in=6), ids=lambda page: page.stem)
def test_a_tutorial_runs_in_an_empty_folder(page: Path, tmp_path: Path) -> None:
    found = steps(page.read_text(encoding="utf-8"))
    assert found
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PATH": path, "PYTHONPATH": places}
    for kind, code in found:
        command = ["bash", "-euo", "pipefail", "-c", code]
        if kind == "python":
            (tmp_path / "tutorial.py").write_text(code, encoding="utf-8")
            command = [sys.executable, "tutorial.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_every_block_of_a_page_is_a_step() -> None:
    page = "```bash\ntrue\nfalse\n```\n\n```python\nx = 1\n```\n```python\nassert x\n```\n"
    assert steps(page) == [("bash", "true"), ("bash", "false"), ("python", "x = 1\n\nassert x\n")]


def test_the_chart_is_drawn_from_the_results() -> None:
    drawn = runpy.run_path(str(DOCS / "chart.py"))["drawn"]()
    assert (DOCS / "speed.svg").read_text(encoding="utf-8") == drawn, "run: python docs/chart.py"


def test_convergence_is_that_of_the_result() -> None:
    chart = runpy.run_path(str(DOCS / "convergence_chart.py"))
    document = json.loads((DOCS / "convergence.json").read_text(encoding="utf-8"))
    assert document["settings"]["seeds"] >= 5
    assert {run["data"] for run in document["runs"]} == {"digits", "mnist5k"}
    hint = "run: python docs/convergence_chart.py"
    assert (DOCS / "convergence.svg").read_text("utf-8") == chart["drawn"](document), hint
    page = (DOCS / "benchmarks.md").read_text("utf-8")
    assert chart["tabled"](page, document) == page, hint


def test_the_tables_of_layers_and_training_are_those_of_the_results() -> None:
    page = DOCS / "benchmarks.md"
    hint = "run: python -m elsa_core.bench.training_tables docs/benchmarks.md"
    assert training_tables.rendered(page) == page.read_text(encoding="utf-8"), hint
    assert set(training_tables.TABLES) == {
        "layers", "layers_compiled", "products", "fusions", "training", "training_h100",
        "training_cpu", "training_cpu_avx512", "gradients", "distributed", "long_context",
    }  # fmt: skip


def test_a_page_without_a_table_s_markers_is_refused(tmp_path: Path) -> None:
    for file in DOCS.glob("*.json"):
        shutil.copy(file, tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- begin:layers -->\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match="begin:layers"):
        training_tables.rendered(page)


def test_no_table_has_an_error_beside_the_time_of_another_call() -> None:
    """Errors of one image stood in the rows of batches of eight."""
    document = json.loads((DOCS / "layers_h200.json").read_text(encoding="utf-8"))
    assert "first image" in document["error"]
    for table in (training_tables.layers_table, training_tables.products_table):
        assert "error" not in table(document)


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\.\. auto\w+:: elsa_core\.(\w+)", page, re.MULTILINE))
    assert set(elsa_core.__all__) - {"__version__"} <= named


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert len(targets) > 5
    assert [target for target in targets if not (ROOT / target).exists()] == []
