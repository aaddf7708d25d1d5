"""How the tests run the command: in this process where only the answer counts, else in its own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import environment, python

from elsa_cli import console
from elsa_cli.main import run

ROOT = Path(__file__).parents[2]
TINY = ("vit_tiny_patch16_224", "--img", "64")


@dataclass
class Answer:
    """What one run of the command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def fails(self, code: int, *words: str) -> None:
        """The run ended with `code` and one line on stderr that holds all `words`."""
        assert self.code == code, (self.code, self.out, self.err)
        if self.out:  # --json
            assert json.loads(self.out)["exit_code"] == code
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), self.err
        assert "Traceback" not in self.err
        assert "internal error" not in self.err
        for word in words:
            assert word in lines[0], (word, lines[0])


Elsa = Callable[..., Answer]


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, no settings from outside, no network, and no lines of progress."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_BEAT_SECONDS", 3600.0)
    for name in os.environ:
        if name.startswith("ELSA_") and name != "ELSA_CACHE_DIR":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.fixture
def elsa(capsys: pytest.CaptureFixture[str]) -> Elsa:
    """Run the command in this process; torch and timm are imported once for all tests."""

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call


def without_beats(text: str) -> str:
    """What a process wrote on stderr, without the lines of progress of a slow machine."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not re.search(r" \(\d+ s\)$", line))


@pytest.fixture
def process() -> Elsa:
    """Run the command in a process of its own, as a user does."""

    def call(*arguments: object, env: dict[str, str] | None = None, **options: Any) -> Answer:
        done = python("-m", "elsa_cli", *arguments, env=environment(**(env or {})), **options)
        return Answer(done.returncode, done.stdout, without_beats(done.stderr))

    return call
