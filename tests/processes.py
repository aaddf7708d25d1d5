"""Processes and threads that tests start, and which processes run, as Linux tells it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

seen_from_proc = pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="sees from /proc what runs"
)


def alive(word: str) -> list[int]:
    """Processes whose command line holds `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended since
            continue
    return found


def gone(word: str) -> bool:
    """No such process is alive; what was killed takes a moment to go."""
    end = time.monotonic() + 5
    while alive(word) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(word)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, with the source tree importable."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return os.environ | own | extra


def ports(count: int) -> list[int]:
    """As many free ports, held at once: one that is given back could be given out again."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def without(*packages: str) -> str:
    """The beginning of a program for which these packages are not installed: no finder has them."""
    return f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {packages!r}:
            return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def stand_in(folder: Path, action: str, version: str = "1.0") -> str:
    """A compiler that answers `--version` and then does `action`, a line of sh with $output."""
    path = folder / "stand-in"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && printf "{version}\\n" && exit\n'
        f"for output; do :; done\n{action}\n"
    )
    path.chmod(0o755)
    return str(path)


def python(
    *words: object, env: dict[str, str] | None = None, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words: its exit code and what it wrote."""
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False,
        env=environment() if env is None else env, timeout=timeout, **options,
    )  # fmt: skip


_FORKS = """
import json, os, sys
import torch
folder = sys.argv[1]
for number, (program, arguments, variables) in enumerate(json.load(sys.stdin)):
    if os.fork() == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{folder}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        os.environ.update(variables)
        sys.argv[1:] = arguments
        exec(program, {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def forked(
    folder: Path, *rows: tuple[str, list[str], dict[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Run programs, each with its arguments and variables in a process of its own: children of one
    that has imported torch, which takes most of a short program's time. folder: for what they say.
    """
    done = python("-c", _FORKS, folder, input=json.dumps(rows), timeout=600)
    codes = list(map(int, done.stdout.split()))
    assert len(codes) == len(rows), done.stderr
    return [
        subprocess.CompletedProcess([], code, *(
            folder.joinpath(f"{number}.{stream}").read_text() for stream in (1, 2)
        ))
        for number, code in enumerate(codes)
    ]  # fmt: skip


def started(*words: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Python with these words, which goes on beside the test."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment() if env is None else env,
    )  # fmt: skip


def signalled(
    child: subprocess.Popen[str], ready: Callable[[], object], number: int = signal.SIGINT,
    within: float = 60,
) -> tuple[int, str, str]:  # fmt: skip
    """Send a signal once `ready()`: exit code, stdout and stderr of what ends within seconds."""
    deadline = time.monotonic() + 300
    try:
        while not ready():
            assert child.poll() is None and time.monotonic() < deadline, child.communicate()
            time.sleep(0.01)
        child.send_signal(number)
        out, err = child.communicate(timeout=within)
    finally:
        child.kill()
    return child.returncode, out, err


def at_once(work: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """Call `work` with each argument in a thread of its own, all of them begun together."""
    given = list(arguments)
    barrier = threading.Barrier(len(given))

    def begin(argument: Any) -> Any:
        barrier.wait()
        return work(argument)

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(begin, given))
