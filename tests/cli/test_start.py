"""What must be instant is instant, and says nothing of torch."""

import json
import shlex
import subprocess
import time
from pathlib import Path

import click
import pytest
from processes import python, without

from elsa_cli.console import Session
from elsa_cli.main import COMMANDS, all_commands
from elsa_cli.options import EXAMPLES

from .conftest import Elsa

HEAVY = {"torch", "timm", "open_clip", "triton", "numpy", "onnx", "elsa_core"}
WATCH = """
import atexit, json, sys
sys.argv = ["elsa", *{arguments!r}]
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from elsa_cli.main import main
main()
"""


def watched(*words: str, first: str = "") -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """A run of the command, and the modules that it imported."""
    done = python("-c", first + WATCH.format(arguments=words))
    return done, set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        *(("--help", 0), ("-h", 0), ("--version", 0), ("", 0), ("patch --help", 0)),
        *(("help", 0), ("help patch", 0), ("list swin*", 0), ("nonsense", 2), ("patch", 2)),
    ],
)
def test_imports_nothing_heavy(line: str, code: int) -> None:
    done, modules = watched(*line.split())
    assert done.returncode == code and "elsa_cli.main" in modules
    assert not (HEAVY if line.startswith("list") else {*HEAVY, "rich"}) & modules


@pytest.mark.parametrize(
    "command", ["inspect", "patch", "check", "profile", "export", "eval --images ."]
)
@pytest.mark.parametrize("text", ["swintiny", "missing/model.safetensors"])
def test_a_misspelt_model_is_answered_at_once(command: str, text: str) -> None:
    """inspect took 10 s for a misspelt name and 3.6 s for a missing file."""
    done, modules = watched(*command.split(), text)
    line = done.stderr.splitlines()[0]
    assert done.returncode == 4 and line.startswith("error: no ") and text in line
    assert not HEAVY & modules


@pytest.mark.alone
@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_answers_within_0_4_seconds(process: Elsa, argument: str) -> None:
    process(argument)  # writes the byte code
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert process(argument).code == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 0.4, times


def test_help_lists_every_command_and_fits_in_80_columns(elsa: Elsa) -> None:
    answer = elsa("--help")
    assert answer.code == 0 and answer.err == ""
    assert all(name in answer.out for name in COMMANDS)
    assert max(map(len, answer.out.splitlines())) <= 80 and elsa().out == answer.out


@pytest.mark.parametrize("command", ["inspect", "patch", "check", "profile", "export"])
def test_help_says_what_a_model_is(elsa: Elsa, command: str) -> None:
    text = " ".join(elsa(command, "--help").out.split())
    assert text.count("MODEL is a timm name or the beginning of one") == 1
    assert all(suffix in text for suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt"))
    assert ("--images implies it" in text) == (command == "patch")


@pytest.mark.parametrize("command", [("profile", "vit_tiny"), ("bench", "attention")], ids=str)
def test_a_plot_without_matplotlib_fails_at_once(command: tuple[str, ...], tmp_path: Path) -> None:
    """It failed after the imports of torch, which take seconds."""
    plot = ("--plot", str(tmp_path / "a.png"))
    done, modules = watched(*command, *plot, first=without("matplotlib"))
    assert done.returncode == 3
    assert "pip install 'elsa-attention[plot]'" in done.stderr.splitlines()[0]
    assert not {"torch", "elsa_core"} & modules


def test_version(process: Elsa) -> None:
    from elsa_core.base.version import __version__

    assert process("--version").out == f"elsa {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(elsa: Elsa, name: str) -> None:
    answer = elsa(name, "--help")
    assert answer.code == 0 and answer.err == ""
    assert answer.out.startswith(f"Usage: elsa {name}")
    assert all(flag in answer.out for flag in ("--json", "--quiet", "--verbose", "--debug"))
    assert max(map(len, answer.out.splitlines())) <= 100


def test_what_is_misspelt_or_missing(elsa: Elsa) -> None:
    elsa("pach").fails(2, "'pach'", "did you mean 'patch'?")
    elsa("patch", "vit", "--chek").fails(2, "--chek", "--check", "elsa patch --help")
    elsa("patch").fails(2, "MODEL")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_ends_with_two_examples_that_parse(name: str) -> None:
    command = all_commands()[name]
    text = command.get_help(click.Context(command, info_name=f"elsa {name}"))
    lines = [line.strip() for line in text.splitlines()[-2:]]
    assert text.splitlines()[-3].strip() == "Examples:" and tuple(lines) == EXAMPLES[name]
    for line in lines:
        words = shlex.split(line.partition("|")[0].removeprefix('eval "$(').removesuffix(')"'))
        assert words[:2] == ["elsa", name]
        with command.make_context(name, words[2:], obj=Session()) as context:
            assert name != "bench" or context.params["kind"], "without a kind it measures nothing"
