"""The worked examples of CONTRIBUTING.md, applied to a copy of the sources as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^`([\w/.]+\.py)`:\n\n```(python|diff)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def apply(path: Path, kind: str, block: str) -> None:
    """Write a new file, or replace the lines that begin with "-" by the "+" lines behind them."""
    if kind == "python":
        assert not path.exists(), f"{path}: an example's file is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    for old, new in re.findall(r"^-(.*\n)((?:\+.*\n)+)", block, re.MULTILINE):
        assert text.count(old) == 1, f"{path.name}: {old}"
        text = text.replace(old, re.sub(r"^\+", "", new, flags=re.MULTILINE))
    path.write_text(text, encoding="utf-8")


def test_the_worked_examples_work(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "elsa_core", tmp_path / "elsa_core", ignore=shutil.ignore_patterns("__pycache__")
    )
    steps = STEP.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    for name, kind, block in steps:
        apply(tmp_path / name, kind, block)
    tests = [name for name, *_ in steps if name.startswith("tests/")]
    assert len(tests) == 3
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": places, "ELSA_NATIVE": "0"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "3 passed" in done.stdout
