"""Defaults from `elsa.toml` or `[tool.elsa]` in `pyproject.toml`, the nearest one upwards.

Top-level keys serve every command that has such an option; a table named like a command serves that
command alone and wins. Keys are the long flags without their dashes.

    [tool.elsa]
    device = "cuda"
    img-size = 384
    [tool.elsa.check]
    batch-size = 8
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import click


class ConfigError(click.UsageError):
    """A config file that cannot be used: which file, what, and where in it."""


def find(start: Path) -> tuple[Path, dict[str, Any]] | None:
    """The nearest settings at or above `start`, as (file, table); None where there are none.

    In one folder `elsa.toml` wins over `pyproject.toml`; a pyproject without `[tool.elsa]` is
    passed over.

    Raises: ConfigError for a file that is unreadable or not TOML.
    """
    for folder in (start, *start.parents):
        own = folder / "elsa.toml"
        if own.is_file():
            return own, _read(own)
        shared = folder / "pyproject.toml"
        if shared.is_file():
            tool = _read(shared).get("tool", {})
            if isinstance(tool, dict) and "elsa" in tool:
                if not isinstance(tool["elsa"], dict):
                    raise ConfigError(f"{shared}: [tool.elsa] must be a table")
                return shared, tool["elsa"]
    return None


def _read(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def defaults(
    path: Path, table: dict[str, Any], command: click.Command, commands: dict[str, click.Command]
) -> dict[str, Any]:
    """The settings of `table` that serve `command`, as Click's default map (parameter -> value).

    `commands` are all commands: a key that none of them knows is an error, and so is a key in a
    command's own table that this command lacks.
    """
    known = set().union(*(_keys(each) for each in commands.values()))
    own = _keys(command)
    result: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            if key not in commands:
                raise ConfigError(_unknown(path, f"[{key}]", key, list(commands)))
            _check_keys(path, key, value, commands[key])
        elif _plain(key) not in known:
            raise ConfigError(_unknown(path, f"'{key}'", _plain(key), sorted(known)))
        elif _plain(key) in own:
            param = own[_plain(key)]
            result[str(param.name)] = _value(path, key, value, param)
    for key, value in table.get(command.name or "", {}).items():
        param = own[_plain(key)]
        result[str(param.name)] = _value(path, key, value, param)
    return result


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


def _check_keys(path: Path, name: str, table: dict[str, Any], command: click.Command) -> None:
    own = _keys(command)
    for key in table:
        if _plain(key) not in own:
            raise ConfigError(_unknown(path, f"'{key}' in [{name}]", _plain(key), sorted(own)))


def _unknown(path: Path, what: str, key: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(key, candidates, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"{path}: unknown key {what}{hint}"


def _value(path: Path, key: str, value: Any, param: click.Option) -> Any:
    if param.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: '{key}' must be true or false, not {value!r}")
        return value
    if param.multiple and isinstance(value, list):
        return [_scalar(path, key, item, param) for item in value]
    scalar = _scalar(path, key, value, param)
    return [scalar] if param.multiple else scalar


def _scalar(path: Path, key: str, value: Any, param: click.Option) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{path}: '{key}' must be a text or a number, not {value!r}")
    # A path in a config file is relative to that file, not to where the command runs.
    if isinstance(param.type, click.Path) and not str(value).startswith("~"):
        return str(path.parent / str(value))
    return str(value)
