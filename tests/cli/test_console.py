"""stdout and stderr: what goes where, in every terminal, pipe and encoding."""

import io
import json
import logging
import math
import os
import pty
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from processes import environment
from sampling import some

from elsa_cli import console
from elsa_cli.console import Session, jsonable
from elsa_cli.main import run

from .conftest import Elsa, without_beats


class Sink(io.TextIOWrapper):
    """A text file in memory with an encoding."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)


def session(monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> tuple[Session, Sink, Sink]:
    out, err = Sink(encoding), Sink(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return Session(), out, err


def test_ascii_where_the_encoding_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one, out, _ = session(monkeypatch, "ascii")
    one.line("12 of 12 · 21.3 ms → 19.8 ms ✓ größer")
    one.table(["a", ">b"], [["✓", "·"]])
    assert "12 of 12 - 21.3 ms -> 19.8 ms ok gr\\xf6\\xdfer\n" in out.text()
    assert "ok" in out.text() and out.text().isascii()


def test_no_text_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name out of a file may hold escape sequences, or marks that turn the text around."""
    one, out, err = session(monkeypatch)
    hostile = "a\x1b]0;title\x07\x1b[2Jb\r\u202ec\x9b1m"
    one.line(hostile)
    one.table(["a"], [[hostile]])
    one.warn(hostile)
    one.fail(4, hostile, ValueError())
    assert "a\\x1b]0;title\\x07\\x1b[2Jb\\r\\u202ec\\x9b1m\n" in out.text()
    for text in (out.text(), err.text()):
        assert all(line.isprintable() for line in text.splitlines()), text


def test_no_colour_and_no_markup_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    one, out, _ = session(monkeypatch)
    one.line("[bold]blocks[0][/bold]", "bold red")
    one.table(["t"], [["[red]x"], ["✗ a"]])
    assert "\x1b" not in out.text()
    one.line("a · b")
    assert "[bold]blocks[0][/bold]\n" in out.text() and out.text().endswith("a · b\n")
    assert "[red]x" in out.text()


LONG = "stages.0-3.blocks.0-17.attention.very_long_name_of_a_module." * 3


def test_a_table_fits_in_80_columns_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    one, out, _ = session(monkeypatch)
    one.table(["site", ">error"], [[f"✓ {LONG}", "3.1e-07"]], wrap=0)
    lines = out.text().splitlines()
    assert max(map(len, lines)) <= 80
    folded = "".join(line.split("3.1e-07")[0].strip() for line in lines[2:])
    assert folded == f"✓ {LONG}"


@pytest.mark.parametrize("width", ["1", "20", "40", "80"])
def test_no_terminal_is_too_narrow_for_the_numbers(
    monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    """Columns vanished and exponents were cut: 3.1e-0."""
    monkeypatch.setenv("COLUMNS", width)
    one, out, _ = session(monkeypatch)
    titles = ["  relative error", ">", ">elsa", ">original", ">allowed", "worst input"]
    numbers = ["12x", "3.8e-07", "4.3e-07", "1.1e-06", "constant"]
    one.table(titles, [[f"✓ {LONG}", *numbers]], wrap=0)
    head, _, first, *others = out.text().splitlines()
    assert " ".join(head.split()) == "relative error elsa original allowed worst input"
    assert first.split()[-len(numbers) :] == numbers and first.startswith("✓ stages.0-3")
    assert "".join([first[: first.index("12x")], *others]).replace(" ", "") == f"✓{LONG}"


def test_paths_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in two lines could not be copied: only the column that is named is folded."""
    monkeypatch.setenv("COLUMNS", "60")
    one, out, _ = session(monkeypatch)
    path = "layers.2.blocks.0,2..4.attention"
    one.table(["site", ">error", "why"], [[path, "3.1e-07", "some words and more words"]], wrap=2)
    one.table(["site", ">error"], [[path * 2, "3.1e-07"]])
    lines = out.text().splitlines()
    assert max(map(len, lines[:4])) <= 60 and lines[2].startswith(f"{path}  3.1e-07")
    assert any(line.startswith(f"{path * 2}  3.1e-07") for line in lines)


def test_a_pipe_is_as_wide_as_a_table_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    one, out, _ = session(monkeypatch)
    one.table(["site", ">error"], [[LONG[:150], "3.1e-07"]])
    assert f"{LONG[:150]}  3.1e-07" in out.text()
    one.table(["a", "why"], [["x", "word " * 100]], wrap=1)
    assert max(map(len, out.text().splitlines())) <= 200
    one.line("word " * 50)
    assert out.text().splitlines()[-1] == "word " * 49 + "word"


def test_quiet_and_json_silence_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    one, out, err = session(monkeypatch)
    one.quiet = True
    one.line("no")
    one.table(["a"], [["no"]])
    one.line("verdict", even_quiet=True)
    one.warn("no")
    assert (out.text(), err.text()) == ("verdict\n", "")
    one.json = True
    one.line("no", even_quiet=True)
    assert out.text() == "verdict\n"


def test_json_has_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    one, out, _ = session(monkeypatch)
    one.json = True
    one.document("x", {"a": math.nan, "b": [math.inf, Path("p")], 3: (True, None)}, {})
    results = json.loads(out.text())["results"]
    assert results == {"a": None, "b": [None, "p"], "3": [True, None]}
    assert jsonable({1: {2.5}}) == {"1": [2.5]}


def test_libraries_cannot_reach_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    one, out, err = session(monkeypatch)
    with one.guarded():
        print("a library prints")
        logging.getLogger("timm").warning("chatter")
        logging.getLogger("elsa_core.x").warning("real")
        warnings.warn("chatter of a library", stacklevel=1)
    assert out.text() == ""
    assert err.text().splitlines() == ["a library prints", "warning: real"]


def test_verbose_shows_what_libraries_say(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, err = session(monkeypatch)
    one.verbose = True
    with one.guarded(), one.stage("step"):
        logging.getLogger("timm").warning("chatter")
        warnings.warn("caution", stacklevel=1)
    assert "timm: chatter" in err.text() and "warning: caution" in err.text()
    assert "step: " in err.text()


def test_progress_on_a_terminal_leaves_nothing_behind(process: Elsa) -> None:
    """stderr is a terminal: the bar is drawn there and wiped; stdout stays the result."""
    leader, follower = pty.openpty()
    program = (
        "import time; from elsa_cli.console import Session; s = Session()\n"
        "with s.stage('loading') as update:\n"
        "    update('blocks.0', 1, 2); time.sleep(0.3)\n"
        "print('result')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=follower,
        env=environment(TERM="xterm"), timeout=60, check=False,
    )  # fmt: skip
    os.close(follower)
    drawn = os.read(leader, 65536).decode()
    os.close(leader)
    assert done.stdout == b"result\n"
    assert "loading 1/2 blocks.0" in drawn and drawn.rstrip().endswith("\x1b[2K")


def test_broken_pipe_for_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who leaves early is no error."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        assert run(["completion", "bash"]) == 0


def in_bash(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, timeout=60, check=False,
        env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize("arguments", some(["completion bash", "list", "doctor --json"], one_in=3))
def test_a_closed_stdout_is_one_line(arguments: str) -> None:
    done = in_bash(f"{sys.executable} -m elsa_cli {arguments} >&-")
    assert done.returncode == 3
    line = "error: cannot write the result: stdout is closed\n"
    assert without_beats(done.stderr) == line


def test_a_closed_stderr_takes_nothing_away() -> None:
    elsa = f"{sys.executable} -m elsa_cli"
    done = in_bash(f"{elsa} inspect test_vit 2>&-; {elsa} nothing 2>&-")
    assert done.returncode == 2 and "sites can be patched" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "elsa_cli", "completion", "bash"], stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environment(),
        )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == "error: cannot write the result: No space left on device\n"


def test_a_file_gets_a_line_of_progress_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """191 s without a word looked like a hang; --quiet stays quiet."""
    monkeypatch.setattr(console, "_BEAT_SECONDS", 0.02)
    one, out, err = session(monkeypatch)
    with one.stage("profiling") as update:
        update("rounds", 3, 20)
        for _ in range(500):
            if err.text().count("\n") >= 2:
                break
            time.sleep(0.01)
    lines = err.text().splitlines()
    assert len(lines) >= 2 and set(lines[1:]) == {"profiling 3/20 rounds (0 s)"}
    assert out.text() == ""


@pytest.mark.parametrize(
    ("quiet", "how"), [(True, {}), (False, {"drawn": False}), (False, {"imports": True})]
)
def test_not_every_stage_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, quiet: bool, how: dict[str, bool]
) -> None:
    monkeypatch.setattr(console, "_BEAT_SECONDS", 0.02)
    one, out, err = session(monkeypatch)
    one.quiet = quiet
    with one.stage("importing", **how) as update:
        update("blocks.0", 1, 2)
        time.sleep(0.1)
    assert (out.text(), err.text()) == ("", "")


def test_optional_columns_go_before_paths_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    one, out, _ = session(monkeypatch)
    titles = ["site", "class", "~kind", ">error", "~>heads"]
    row = [f"{'layers.0.blocks.0.attention.proj':_<42}", "A", "window", "3.1e-07", "12x64"]
    one.table(titles, [row], wrap=1)
    one.table(titles, [["layers.0", *row[1:]]], wrap=1)
    head, _, narrow, *rest = out.text().splitlines()
    assert narrow.split() == [row[0], "A", "3.1e-07"] and head.split() == ["site", "class", "error"]
    assert rest[-1].split() == ["layers.0", *row[1:]]
    assert max(map(len, [head, narrow, *rest])) <= 60
