"""Programs in processes forked from one that has imported torch, which most of them wait for.

For programs that need a process of their own, but not an import of torch of their own. Variables
that the loader or torch's import reads (LD_PRELOAD, LD_LIBRARY_PATH) come too late for them.

    python warm.py MODULE...

imports the modules, reads a line of JSON for each program, and writes two lines: the number of its
process, then its exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Warm:
    """Runs programs one after another, as `python -c` does."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def run(
        self, code: str, *arguments: str, env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a program with these variables alone, else with those of this process."""
        with tempfile.TemporaryDirectory() as name:
            out, errors = Path(name) / "out", Path(name) / "errors"
            asked = {
                "code": code, "arguments": arguments, "env": dict(env or os.environ),
                "cwd": str(Path.cwd()), "out": str(out), "errors": str(errors),
            }  # fmt: skip
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            child = self._line(timeout)
            try:
                status = self._line(timeout)
            except subprocess.TimeoutExpired:
                os.kill(child, 9)
                self._line(timeout)
                raise
            return subprocess.CompletedProcess(
                ["-c", *arguments], status, out.read_text(), errors.read_text()
            )

    def _line(self, timeout: float) -> int:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("python", timeout)
        return int(self._process.stdout.readline())


@contextmanager
def warm(*modules: str) -> Iterator[Warm]:
    """A process that has imported `modules`."""
    command = [sys.executable, "-u", __file__, *modules]
    # What asks whether there is a GPU must not start its driver, which no fork survives.
    env = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env
    ) as process:
        try:
            yield Warm(process)
        finally:
            process.kill()


def _serve() -> dict[str, Any]:
    """Fork for each program; returns, in the process forked, what it is to run."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answers.close()
            return dict(json.loads(line))
        answers.write(f"{child}\n")
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    sys.exit()


def _become(asked: dict[str, Any]) -> None:
    """Take on the program's variables, streams, folder, arguments and path."""
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = ["-c", *asked["arguments"]]
    places = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[0:1] = ["", *places]
    for number, path in ((0, os.devnull), (1, asked["out"]), (2, asked["errors"])):
        given = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(given, number)
        os.close(given)


def _run(code: str) -> None:
    """Run a program and end the process as Python does, but leave what was imported as it is: to
    take it apart takes longer than most programs, and nanobind's modules say that it was leaked.
    """
    status: Any = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # those that are no daemons end first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # what was imported is no garbage
    program = _serve()
    _become(program)
    _run(program["code"])
