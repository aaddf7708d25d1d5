"""What must be instant is instant, and says nothing of torch."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import click
import pytest
from processes import python

from elsa_cli.console import Session
from elsa_cli.main import COMMANDS, all_commands
from elsa_cli.options import EXAMPLES

from .conftest import Elsa

HEAVY = ("torch", "timm", "open_clip", "triton", "numpy", "rich", "onnx", "elsa_core")
WATCH = """
import atexit, json, sys
sys.argv = ["elsa", *{arguments!r}]
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from elsa_cli.main import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["-h"], ["--version"], [], ["patch", "--help"], ["nonsense"], ["patch"]],
    ids=str,
)
def test_imports_nothing_heavy(arguments: list[str]) -> None:
    done = python("-c", WATCH.format(arguments=arguments))
    modules = json.loads(done.stderr.splitlines()[-1])
    assert "elsa_cli.main" in modules
    assert not [name for name in modules if name.split(".")[0] in HEAVY]


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
    assert answer.code == 0
    assert answer.err == ""
    assert all(name in answer.out for name in COMMANDS)
    assert max(map(len, answer.out.splitlines())) <= 80
    assert elsa().out == answer.out


@pytest.mark.parametrize("command", ["inspect", "patch", "check", "profile", "export"])
def test_help_says_what_a_model_is(elsa: Elsa, command: str) -> None:
    text = " ".join(elsa(command, "--help").out.split())
    assert text.count("MODEL is a timm name or the beginning of one") == 1
    assert all(suffix in text for suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt"))
    assert ("--images implies it" in text) == (command == "patch")


@pytest.mark.parametrize("command", [("profile", "vit_tiny"), ("bench", "attention")], ids=str)
def test_a_plot_without_matplotlib_fails_at_once(command: tuple[str, ...], tmp_path: Path) -> None:
    """It failed after the imports of torch, which take seconds."""
    hidden = "import sys; sys.modules['matplotlib'] = None\n" + WATCH.format(
        arguments=[*command, "--plot", str(tmp_path / "a.png")]
    )
    done = python("-c", hidden)
    line, modules = done.stderr.splitlines()[0], json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == 3 and "pip install 'elsa-attention[plot]'" in line
    assert not [name for name in modules if name.split(".")[0] in ("torch", "elsa_core")]


def test_version(process: Elsa) -> None:
    from elsa_core.base.version import __version__

    assert process("--version").out == f"elsa {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(elsa: Elsa, name: str) -> None:
    answer = elsa(name, "--help")
    assert answer.code == 0
    assert answer.err == ""
    assert answer.out.startswith(f"Usage: elsa {name}")
    assert all(flag in answer.out for flag in ("--json", "--quiet", "--verbose", "--debug"))
    assert max(map(len, answer.out.splitlines())) <= 100


def test_unknown_command_names_the_close_one(elsa: Elsa) -> None:
    elsa("pach").fails(2, "'pach'", "did you mean 'patch'?")


def test_unknown_option_names_the_close_one(elsa: Elsa) -> None:
    elsa("patch", "vit", "--chek").fails(2, "--chek", "--check", "elsa patch --help")


def test_missing_model(elsa: Elsa) -> None:
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
