"""Defaults from `elsa.toml` or `[tool.elsa]` in `pyproject.toml`, the nearest one upwards.

Top-level keys serve every command that has such an option; a table named like a command serves that
command alone and wins. Keys are the long flags without their dashes.

A file that another user put into a folder above must not decide what is overwritten: files that are
neither this user's nor root's are passed over, and what replaces, writes or trusts stands on the
command line alone.

    [tool.elsa]
    device = "cuda"
    img-size = 384
    [tool.elsa.check]
    batch-size = 8
"""

from __future__ import annotations

import difflib
import os
import reprlib
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

# What replaces files, says where they are written, or lets a bundle's code run.
COMMAND_LINE_ONLY = frozenset(
    (
        *("force", "output", "page", "state", "html", "plot", "plan", "resume"),
        *("trust", "key", "sign"),
    )
)
_LARGEST_BYTES = 1 << 20


class ConfigError(click.UsageError):
    """A config file that cannot be used: which file, what, and where in it."""


def find(
    start: Path, warn: Callable[[str], None] = lambda line: None
) -> tuple[Path, dict[str, Any]] | None:
    """The nearest settings at or above `start`, as (file, table); None where there are none.

    In one folder `elsa.toml` wins over `pyproject.toml`; a pyproject without `[tool.elsa]` is
    passed over, and so is, with a line to `warn`, a file of another user that has settings.
    """
    for folder in (start, *start.parents):
        own = folder / "elsa.toml"
        if own.is_file():
            if _is_own(own):
                return own, _read(own)
            warn(f"{own} is ignored: it belongs to another user")
        shared = folder / "pyproject.toml"
        if shared.is_file() and _is_own(shared):
            tool = _read(shared).get("tool", {})
            if isinstance(tool, dict) and "elsa" in tool:
                if not isinstance(tool["elsa"], dict):
                    raise ConfigError(f"{shared}: [tool.elsa] must be a table")
                return shared, tool["elsa"]
        elif shared.is_file():
            _warn_foreign(shared, warn)
    return None


def _is_own(path: Path) -> bool:
    """Whether a file is this user's, or root's, who may do anything; of a link, both ends."""
    return all(facts.st_uid in (os.geteuid(), 0) for facts in (path.stat(), path.lstat()))


def _warn_foreign(path: Path, warn: Callable[[str], None]) -> None:
    """Say that a pyproject of another user is ignored where it has, or may have, settings."""
    try:
        tool = _read(path).get("tool", {})
        if isinstance(tool, dict) and "elsa" not in tool:
            return
    except ConfigError:
        return
    warn(f"[tool.elsa] of {path} is ignored: it belongs to another user")


def _read(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        # A pipe or a device under this name must not hold the command up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123  # of a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path}: is not a plain file")
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise ConfigError(f"{path}: is larger than {_LARGEST_BYTES} bytes")
        return tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # also numbers too long and tables too deep
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def defaults(
    path: Path,
    table: dict[str, Any],
    command: click.Command,
    commands: dict[str, click.Command],
    warn: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The settings of `table` that serve `command`, as Click's default map (parameter -> value).

    `commands` are all commands: a key that none of them knows is an error, and so is a key in a
    command's own table that this command lacks.
    """
    known = set().union(*(_keys(each) for each in commands.values()))
    own = _keys(command)
    result: dict[str, Any] = {}
    general = {key: value for key, value in table.items() if not isinstance(value, dict)}
    for key, value in table.items():
        if key in general:
            _check_key(path, f"'{key}'", _plain(key), known)
            continue
        _check_key(path, f"[{key}]", key, commands)
        for inner in value:
            _check_key(path, f"'{inner}' in [{key}]", _plain(inner), _keys(commands[key]))
    for settings in (general, table.get(command.name or "", {})):
        for key, value in settings.items():
            param = own.get(_plain(key))
            if param is None:
                continue
            if is_command_line_only(param):
                warn(f"{path}: '{key}' is ignored: give it on the command line")
                continue
            result[str(param.name)] = _value(path, key, value, param)
    return result


def is_command_line_only(param: click.Parameter) -> bool:
    """Whether neither a file nor a variable may give this option a value."""
    return any(name.lstrip("-") in COMMAND_LINE_ONLY for name in param.opts)


def _plain(key: str) -> str:
    return key.replace("_", "-")


def _keys(command: click.Command) -> dict[str, click.Option]:
    return {
        name.lstrip("-"): param
        for param in command.params
        if isinstance(param, click.Option)
        for name in param.opts
        if name.startswith("--")
    }


def _check_key(path: Path, what: str, key: str, known: Iterable[str]) -> None:
    if key not in known:
        close = difflib.get_close_matches(key, sorted(known), n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"{path}: unknown key {what}{hint}")


def _value(path: Path, key: str, value: Any, param: click.Option) -> Any:
    if param.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: '{key}' must be true or false, not {_shown(value)}")
        return value
    if param.multiple and isinstance(value, list):
        return [_scalar(path, key, item, param) for item in value]
    scalar = _scalar(path, key, value, param)
    return [scalar] if param.multiple else scalar


def _scalar(path: Path, key: str, value: Any, param: click.Option) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{path}: '{key}' must be a text or a number, not {_shown(value)}")
    if isinstance(value, int) and abs(value) >= 1 << 64:  # Python writes no number of 5 000 digits
        raise ConfigError(f"{path}: '{key}' is a number beyond 64 bits")
    # A path in a config file is relative to that file, not to where the command runs.
    if isinstance(param.type, click.Path) and not str(value).startswith("~"):
        return str(path.parent / str(value))
    return str(value)


def _shown(value: Any) -> str:
    """A value for a message: short, however deep or long it is."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"
