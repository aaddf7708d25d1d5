"""How the tests run the command: in this process where only the answer counts, else in its own."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Answer, Elsa
from processes import environment, python

from elsa_cli import console

ROOT = Path(__file__).parents[2]
TINY = ("vit_tiny_patch16_224", "--img", "64")


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
