"""What the documentation shows runs as written, and its chart is that of the results."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import some

import elsa_core

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
@pytest.mark.parametrize("page", some(TUTORIALS, one_in=12), ids=lambda page: page.stem)
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


@pytest.mark.parametrize("script", ["chart", "convergence_chart"])
def test_charts_are_drawn_from_the_results(script: str, tmp_path: Path) -> None:
    made = runpy.run_path(str(DOCS / f"{script}.py"))
    chart = made["CHART"].read_text(encoding="utf-8")
    assert made["drawn"]() == chart, f"run: python docs/{script}.py"


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    lists = re.findall(r"^\.\. (?:api|autoclass):: (.+)", page, re.MULTILINE)
    named = {
        name.removeprefix("elsa_core.").partition(".")[0] for line in lists for name in line.split()
    }
    assert set(elsa_core.__all__) - {"__version__"} <= named


def test_options_keep_their_two_dashes_on_the_site() -> None:
    """Sphinx makes a dash of "--" where its smart quotes have the action "D"."""
    conf = (DOCS / "conf.py").read_text(encoding="utf-8")
    assert set(re.findall(r'^smartquotes_action = "(\w+)"', conf, re.MULTILINE)) == {"qe"}


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert len(targets) > 5
    assert [target for target in targets if not (ROOT / target).exists()] == []
