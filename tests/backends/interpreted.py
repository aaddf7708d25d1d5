"""Rows that a program of Triton's interpreter prints, each read when a test asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent


class Rows(Mapping[str, dict]):
    """What the program has printed, by each row's name; looking further waits for it."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process, self._errors, self._read = process, errors, {}

    def _next(self) -> bool:
        line = self._process.stdout.readline()
        if line:
            row = json.loads(line)
            self._read[row["name"]] = row
            return True
        if self._process.wait() != 0:
            self._errors.seek(0)
            raise AssertionError(self._errors.read()[-2000:])
        return False

    def __getitem__(self, name: str) -> dict:
        while name not in self._read and self._next():
            pass
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        while self._next():
            pass
        return iter(self._read)

    def __len__(self) -> int:
        return len(list(iter(self)))


@contextmanager
def rows_of(script: str, *names: str) -> Iterator[Rows]:
    """Run a program of this folder, with cases of these names alone if there are any; where a test
    has failed, what is left of it is not waited for.

    TRITON_INTERPRET must be set before Triton is imported: hence a process of its own.
    """
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    env = {
        **os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable, "-u", str(HERE / script), *names]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield Rows(process, errors)
        finally:
            process.kill()
