"""Flag, variable, file, default: in this order; and a bad file is one line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from processes import python

from elsa_cli.commands import inspect, patch
from elsa_cli.config import COMMAND_LINE_ONLY
from elsa_cli.main import all_commands
from elsa_cli.options import Options

from .conftest import Elsa


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `elsa inspect` and `elsa patch` were called with, instead of their work."""
    values: dict[str, Any] = {}
    for command in (inspect.command, patch.command):
        monkeypatch.setattr(command, "callback", lambda **given: values.update(given))
    return values


def test_defaults(elsa: Elsa, seen: dict[str, Any]) -> None:
    assert elsa("patch", "vit").code == 0
    shared = Options.SHARED.items()
    assert {name: seen[name] for name, _ in shared if name in seen}.items() <= shared


def test_precedence(elsa: Elsa, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("elsa.toml").write_text('dtype = "bf16"\nseed = 5\nimg-size = 96\n')
    monkeypatch.setenv("ELSA_DTYPE", "fp16")
    monkeypatch.setenv("ELSA_SEED", "6")
    elsa("patch", "vit", "--seed", "7")
    assert (seen["seed"], seen["dtype"], seen["img_size"]) == (7, "fp16", (96, 96))


def test_a_commands_own_table_wins(elsa: Elsa, seen: dict[str, Any]) -> None:
    Path("pyproject.toml").write_text(
        '[tool.elsa]\nseed = 1\nimg = "64x96"\nbatch_size = 2\n'
        '[tool.elsa.patch]\nseed = 2\ncheck = true\ninclude = ["a.*", "b.*"]\nexclude = "c.*"\n'
    )
    elsa("patch", "vit")
    assert (seen["seed"], seen["check"], seen["batch_size"]) == (2, True, 2)
    assert (seen["include"], seen["exclude"]) == (("a.*", "b.*"), ("c.*",))
    elsa("inspect", "vit")
    assert (seen["seed"], seen["img_size"]) == (1, (64, 96))


def test_a_default_for_another_use_of_a_command_is_no_mistake(elsa: Elsa) -> None:
    """`elsa inspect` has --check for --all alone, and `elsa check` took it for its own table."""
    Path("elsa.toml").write_text("check = true\nbackend = 'eager'\n")
    assert elsa("inspect", "test_vit").code == 0
    elsa("inspect", "test_vit", "--check").fails(2, "--check goes with --all")
    elsa("check", "vit_bas_patch16_224").fails(4, "vit_bas_patch16_224")


def test_the_nearest_file_upwards(
    elsa: Elsa, seen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsa.toml").write_text('seed = 3\nimages = "pictures"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[tool.other]\nseed = 4\n")
    monkeypatch.chdir(inner)
    elsa("patch", "vit")
    assert seen["seed"] == 3 and seen["images"] == tmp_path / "pictures"


def test_output_flags_from_the_environment(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_QUIET", "1")
    assert len(elsa("doctor").shows().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = 1\nseed = x", ("elsa.toml", "TOML", "line 2")),
        ("dtyp = 'bf16'", ("elsa.toml", "'dtyp'", "did you mean 'dtype'?")),
        ("[pach]\nseed = 1", ("elsa.toml", "[pach]", "did you mean 'patch'?")),
        ("[doctor]\nseed = 1", ("elsa.toml", "'seed' in [doctor]")),
        ("dtype = 'fp8'", ("elsa.toml", "--dtype", "'fp8'")),
        ("seed = -1", ("elsa.toml", "--seed", "-1")),
        ("seed = true", ("elsa.toml", "'seed'", "True")),
        ("check = 'maybe'", ("elsa.toml", "'check'", "true or false")),
        ("include = [1, [2]]", ("elsa.toml", "'include'")),
        ("img-size = 0", ("elsa.toml", "--img-size", "0")),
        ("a = " + "[" * 100_000, ("elsa.toml", "not valid TOML")),
        ("seed = " + "9" * 5000, ("elsa.toml", "not valid TOML")),
        ("seed = 0x" + "f" * 5000, ("elsa.toml", "'seed'", "beyond 64 bits")),
        ("check = 0x" + "f" * 5000, ("elsa.toml", "'check' must be true or false")),
        ("include = [[" + "0x" + "f" * 5000 + "]]", ("elsa.toml", "'include' must be")),
        ("dtype = " + "[" * 200 + "]" * 200, ("elsa.toml", "'dtype' must be")),
        ("dtype = '" + "x" * 100_000 + "'", ("elsa.toml", "--dtype")),
        ("# " + "x" * (1 << 20), ("elsa.toml", "larger than")),
        ("\xff\xfe\0", ("elsa.toml",)),
        ("images = '~nosuchuser/x'", ("~nosuchuser/x",)),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_bad_file_is_one_short_line(elsa: Elsa, text: str, words: tuple[str, ...]) -> None:
    Path("elsa.toml").write_bytes(text.encode("latin-1"))
    answer = elsa("patch", "vit")
    answer.fails(2, *words)
    assert len(answer.err) <= 301


def test_tool_elsa_that_is_no_table(elsa: Elsa) -> None:
    Path("pyproject.toml").write_text("[tool]\nelsa = 3\n")
    elsa("patch", "vit").fails(2, "pyproject.toml", "[tool.elsa]")


def test_help_and_doctor_work_with_a_bad_file(elsa: Elsa) -> None:
    Path("elsa.toml").write_text("seed = ")
    assert elsa("patch", "--help").code == 0
    elsa("doctor").shows("elsa.toml")


def test_every_option_has_a_variable_named_after_its_flag() -> None:
    """It was named after the parameter behind it, ELSA_TABLES for --table."""
    for command in all_commands().values():
        options = [param for param in command.params if isinstance(param, click.Option)]
        assert options
        for option in options:
            if COMMAND_LINE_ONLY.intersection(option.opts):
                assert option.envvar is None
                continue
            names = {f"ELSA_{flag.strip('-').upper().replace('-', '_')}" for flag in option.opts}
            assert option.envvar in names and len(str(option.envvar)) > len("ELSA_x")


@pytest.mark.parametrize(
    ("line", "name", "value", "words"),
    [
        (("bench", "attention"), "ELSA_TABLE", "nothing", "no table 'nothing'"),
        (("bench", "attention"), "ELSA_SHAPE", "1,2", "'1,2' is not B,H,N,D"),
        (("inspect",), "ELSA_ALL", "maybe", "(from the variable ELSA_ALL)"),
        (("check", "vit"), "ELSA_IMG_SIZE", "x", "(from the variable ELSA_IMG_SIZE)"),
        (("patch", "vit"), "ELSA_DTYPE", "fp8", "'fp8'"),
    ],
)
def test_variables_of_options(
    elsa: Elsa, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], name: str, value: str,
    words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    elsa(*line).fails(2, words)


# --- files that are not the user's, and hostile ones ---------------------------------------------


def test_a_file_of_another_user_is_ignored_with_a_line(
    elsa: Elsa, seen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    give_away: Callable[[Path], None],
) -> None:  # fmt: skip
    """In a folder that others may write to, such a file chose what was overwritten."""
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    (tmp_path / "elsa.toml").write_text("seed = 3\n")
    monkeypatch.chdir(shared / "mine")
    for name, text in (("elsa.toml", "seed = 4\n"), ("pyproject.toml", "[tool.elsa]\nseed = 5\n")):
        (shared / name).write_text(text)
        give_away(shared / name)
        answer = elsa("patch", "vit")
        assert (answer.code, seen["seed"]) == (0, 3)
        lines = answer.err.splitlines()
        assert len(lines) == 1 and f"{shared / name} is ignored: it belongs to another" in lines[0]
        (shared / name).unlink()
    (shared / "pyproject.toml").write_text("[tool.other]\nseed = 5\n")
    give_away(shared / "pyproject.toml")
    assert elsa("patch", "vit").err == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a link away, which root alone may do")
def test_a_link_of_another_user_is_ignored(
    elsa: Elsa, seen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To settings of this user's own, which were made for another folder."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "elsa.toml").write_text("seed = 4\n")
    (tmp_path / "shared").mkdir()
    monkeypatch.chdir(tmp_path / "shared")
    link = Path("elsa.toml")
    link.symlink_to(tmp_path / "other" / "elsa.toml")
    elsa("patch", "vit")
    assert seen["seed"] == 4
    os.lchown(link, 65534, -1)
    answer = elsa("patch", "vit")
    assert seen["seed"] != 4 and "is ignored: it belongs to another user" in answer.err


def test_what_overwrites_is_for_the_command_line_alone(
    elsa: Elsa, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("elsa.toml").write_text('force = true\nseed = 3\n[patch]\noutput = "precious"\n')
    monkeypatch.setenv("ELSA_FORCE", "1")
    monkeypatch.setenv("ELSA_OUTPUT", "precious")
    answer = elsa("patch", "vit")
    assert (seen["force"], seen["output"], seen["seed"]) == (False, None, 3)
    lines = answer.err.splitlines()
    assert ["'force' is ignored" in lines[0], "'output' is ignored" in lines[1]] == [True, True]
    assert len(lines) == 2
    elsa("patch", "vit", "--force", "-o", "here")
    assert (seen["force"], seen["output"]) == (True, Path("here"))


LOOKS_UP = """
import os, sys
from pathlib import Path
from elsa_cli import config
os.chdir(sys.argv[1])
here = Path.cwd()
os.chmod(here.parent, 0)
if os.geteuid() == 0:
    os.seteuid(65534)
print(config.find(here, print))
"""


def test_a_folder_that_cannot_be_looked_into_has_no_settings(tmp_path: Path) -> None:
    """`sudo -u NAME elsa` in a folder of one's own: no command could be run there."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    try:
        done = python("-c", LOOKS_UP, inner)
    finally:
        inner.parent.chmod(0o700)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
