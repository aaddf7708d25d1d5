"""Every exception becomes one line and the right exit code."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from processes import environment, python, signalled, started
from sampling import some

from elsa_cli.commands import inspect
from elsa_cli.errors import VerdictError, describe
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError, UnavailableError

from .conftest import Elsa


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (NothingPatchedError("nothing"), 1, "nothing"),
        (VerdictError("check failed: a"), 1, "check failed: a"),
        (ArgumentError("image_size=0:\n  must be positive"), 2, "image_size=0: must be positive"),
        (click.UsageError("bad."), 2, "bad"),
        (UnavailableError("no gpu"), 3, "no gpu"),
        (MemoryError(), 3, "out of memory: try a smaller --img"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 3, "out of memory"),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate"), 3, "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 3, "out of memory"),
        (RuntimeError("can't start new thread"), 3, "out of memory"),
        (RuntimeError("could not create a memory object"), 3, "out of memory"),
        (RuntimeError("CUDA error: out of memory"), 3, "out of memory"),
        (OSError(errno.ENOSPC, "No space left", "/x/y"), 3, "cannot use /x/y: No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 3, "cannot use /x"),
        (ModuleNotFoundError("No module named 'timm'", name="timm"), 3, "timm cannot be imported"),
        (ModelError("unreadable"), 4, "unreadable"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
        (ZeroDivisionError("x\ny"), 1, "internal error: ZeroDivisionError: x y (run with --debug"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_describe(error: BaseException, code: int, words: str) -> None:
    got, line = describe(error)
    assert got == code and words in line and "\n" not in line


def _raise(error: BaseException) -> None:
    raise error


def test_an_internal_error_shows_its_traceback_only_with_debug(
    elsa: Elsa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect.command, "callback", lambda **given: _raise(KeyError("lost")))
    line = "error: internal error: KeyError: 'lost' (run with --debug for the traceback)\n"
    assert elsa("inspect", "vit") == (1, "", line)
    answer = elsa("inspect", "vit", "--debug")
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("error: internal error")
    monkeypatch.setenv("ELSA_DEBUG", "1")
    assert "Traceback" in elsa("inspect", "vit").err


def test_interrupted(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect.command, "callback", lambda **given: _raise(KeyboardInterrupt()))
    assert elsa("inspect", "vit") == (130, "", "interrupted; nothing was written\n")


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("inspect vit_tiny_patch16_224", signal.SIGHUP, 129),
        ("inspect vit_tiny_patch16_224", signal.SIGINT, 130),
        ("inspect vit_tiny_patch16_224", signal.SIGTERM, 143),
        ("inspect --all", signal.SIGINT, 130),
        ("bench attention --quick", signal.SIGINT, 130),
        ("bench models", signal.SIGINT, 130),
        ("doctor", signal.SIGINT, 130),
        ("verify .", signal.SIGINT, 130),
    ],
)
def test_a_long_import_is_no_reason_to_wait(
    tmp_path: Path, words: str, number: int, code: int
) -> None:
    """On a cold disk an import of torch takes tens of seconds; Ctrl-C waited for its end."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{signal.Signals(number).name} is ignored here, as `nohup` has it")
    begun = tmp_path / "begun"
    (tmp_path / "torch.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)\n"
    )
    places = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    child = started("-m", "elsa_cli", *words.split(), env=environment(PYTHONPATH=places))
    ended = signalled(child, begun.exists, number, within=20)  # 0.1 s when idle, 60 s before
    line = "interrupted; nothing was written\n" if number == signal.SIGINT else ""
    assert ended == (code, "", line)


@pytest.mark.parametrize("words", ["inspect test_vit", "doctor"])
def test_a_limit_of_memory_is_no_broken_package(words: str) -> None:
    """torch could not be mapped, and the line said to repair it."""
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    done = python("-m", "elsa_cli", *words.split(), preexec_fn=limit)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: out of memory: raise this process's limit (ulimit -v)")
    assert len(done.stderr.splitlines()) == 1 and "repair" not in done.stderr


@pytest.mark.parametrize("size", [10, 290, 300, 5000])
def test_lines_are_cut_in_their_middle(size: int) -> None:
    line = f"error: {describe(ModelError('a' * size + '; run elsa build'))[1]}"
    assert len(line) <= 300
    assert line.endswith("; run elsa build") and line.startswith("error: aaaaaaaaaa")
    assert (" ... " in line) is (size >= 290)


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    shell = 'cd gone && rmdir "$PWD" && exec "$0" -m elsa_cli doctor'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable], capture_output=True, text=True, timeout=60,
        check=False, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    line = "error: the current directory cannot be used: No such file or directory; change into one"
    assert done.stderr == f"{line} that is there\n"


SLOW = """
import importlib.abc, pathlib, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            pathlib.Path({begun!r}).touch()
            time.sleep(60)

sys.meta_path.insert(0, Slow())
sys.argv = ["elsa", *{words!r}]
from elsa_cli.main import main
main()
"""


LATER = [
    ("export test_vit --formats onnx -o out", "onnxscript"),
    ("export test_vit --formats pt2 -o out", "torch._inductor.utils"),
    ("check test_vit", "torch._dynamo"),
    ("check test_vit --path compile", "torch._inductor.compile_fx"),
]


@pytest.mark.parametrize(("words", "module"), some(LATER, one_in=4))
def test_a_long_import_of_a_later_step_is_no_reason_to_wait(
    tmp_path: Path, words: str, module: str
) -> None:
    """An interruption waited for the end of these imports, as it did for that of torch."""
    begun = tmp_path / "begun"
    child = started("-c", SLOW.format(module=module, begun=str(begun), words=words.split()))
    ended = signalled(child, begun.exists, within=20)
    assert ended == (130, "", "interrupted; nothing was written\n")
    assert not (tmp_path / "out").exists()
