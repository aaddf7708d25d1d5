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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

# What replaces files, says where they are written, or lets a bundle's code run: no file and no
# variable may give these options a value.
COMMAND_LINE_ONLY = frozenset((
    "--force", "--output", "--state", "--html", "--plot", "--plan", "--resume", "--trust", "--key",
    "--sign",
))  # fmt: skip
_LARGEST_BYTES = 1 << 20
_OWN = "elsa.toml"


class ConfigError(click.UsageError):
    """A config file that cannot be used: which file, what, and where in it."""


def find(start: Path, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The nearest settings at or above `start`, as (file, table); None where there are none.

    In one folder `elsa.toml` wins over `pyproject.toml`; a pyproject without `[tool.elsa]` is
    passed over, and so is, with a line to `warn`, a file of another user that has settings.
    """
    for path in (f / name for f in (start, *start.parents) for name in (_OWN, "pyproject.toml")):
        if not os.path.isfile(path):  # noqa: PTH113  # nor where the folder cannot be looked into
            continue
        # Root may do anything; of a link, both ends are asked.
        own = all(facts.st_uid in (os.geteuid(), 0) for facts in (path.stat(), path.lstat()))
        table: Any = {}
        try:
            if own or path.name != _OWN:
                table = _read(path)
        except ConfigError:
            if own:
                raise
            continue
        if path.name != _OWN:
            tool = table.get("tool", {})
            if not isinstance(tool, dict) or "elsa" not in tool:
                continue
            table = tool["elsa"]
        if own and not isinstance(table, dict):
            raise ConfigError(f"{path}: [tool.elsa] must be a table")
        if own:
            return path, table
        what = path if path.name == _OWN else f"[tool.elsa] of {path}"
        warn(f"{what} is ignored: it belongs to another user")
    return None


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
    path: Path, table: dict[str, Any], command: click.Command, commands: dict[str, click.Command],
    warn: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """The settings of `table` that serve `command`, as Click's default map (parameter -> value).

    `commands` are all commands: a key that none of them knows is an error, and so is a key in a
    command's own table that this command lacks.
    """
    keys = {
        each: {
            name.lstrip("-"): param
            for param in one.params
            if isinstance(param, click.Option)
            for name in param.opts
            if name.startswith("--")
        }
        for each, one in commands.items()
    }
    named: list[tuple[str, str, Collection[str]]] = []
    known, general = set().union(*keys.values()), {}
    for key, value in table.items():
        if isinstance(value, dict):
            named.append((f"[{key}]", key, commands))
            named += [(f"'{inner}' in [{key}]", inner.replace("_", "-"), keys.get(key, {}))
                      for inner in value]  # fmt: skip
        else:
            named.append((f"'{key}'", key.replace("_", "-"), known))
            general[key] = value
    for what, key, among in named:
        if key not in among:
            close = difflib.get_close_matches(key, sorted(among), n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"{path}: unknown key {what}{hint}")
    own, result = str(command.name), {}
    of_command = {} if own in general else table.get(own, {})  # `check` is an option too
    for key, value in (*general.items(), *of_command.items()):
        param = keys[own].get(key.replace("_", "-"))
        if param is not None and COMMAND_LINE_ONLY.intersection(param.opts):
            warn(f"{path}: '{key}' is ignored: give it on the command line")
        elif param is not None:
            result[str(param.name)] = _value(path, key, value, param)
    return result


def _value(path: Path, key: str, value: Any, param: click.Option) -> Any:
    items = value if param.multiple and isinstance(value, list) else [value]
    if param.is_flag:
        wanted, fits = "true or false", isinstance(value, bool)
    else:
        wanted = "a text or a number"
        fits = all(isinstance(x, str | int | float) and not isinstance(x, bool) for x in items)
    if not fits:
        try:
            shown = reprlib.repr(value)  # short, however deep or long it is
        except ValueError:
            shown = "a number of thousands of digits"
        raise ConfigError(f"{path}: '{key}' must be {wanted}, not {shown}")
    if param.is_flag:
        return value
    texts = []
    for item in items:
        if isinstance(item, int) and abs(item) >= 1 << 64:  # Python writes none of 5 000 digits
            raise ConfigError(f"{path}: '{key}' is a number beyond 64 bits")
        # A path in a config file is relative to that file, not to where the command runs.
        beside = isinstance(param.type, click.Path) and not str(item).startswith("~")
        texts.append(str(path.parent / str(item)) if beside else str(item))
    return texts if param.multiple else texts[0]
