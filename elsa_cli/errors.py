"""What ends a command: exit codes, and one line for every exception.

| exit | meaning |
|---|---|
| 0 | done |
| 1 | a check failed or nothing was patched; also an error inside elsa itself |
| 2 | usage: a flag, a variable, a config file |
| 3 | environment: a backend, device, extra, memory, disk or the network is missing |
| 4 | the model or file cannot be read, or is not supported |
| 5 | an export failed or does not reproduce the model |
| 129, 143 | ended by SIGHUP or SIGTERM; like 130, nothing half-written remains |
| 130 | interrupted |
"""

from __future__ import annotations

import errno
import resource
import sys

import click

FAILED, USAGE, ENVIRONMENT, MODEL, EXPORT, INTERRUPTED = 1, 2, 3, 4, 5, 130

_BY_CLASS = {
    "NothingPatchedError": FAILED, "ArgumentError": USAGE, "UnavailableError": ENVIRONMENT,
    "ModelError": MODEL, "ExportError": EXPORT,
}  # fmt: skip
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE}
# Of a line on stderr, "error: " included.
LONGEST_LINE = 300
_MEMORY_HINT = "try a smaller --img or --batch-size, or --dtype bf16"
# What libraries say where the system gave them no memory.
_NO_MEMORY = (
    "DefaultCPUAllocator", "std::bad_alloc", "can't start new thread", "Cannot allocate memory",
    "failed to map segment", "CUDA error: out of memory", "could not create a memory",  # oneDNN's
)  # fmt: skip


class CommandError(Exception):
    """An end that the command line itself decides; the message is the line."""

    exit_code = FAILED


class ModelFileError(CommandError):
    """A file, a folder or a model that a command is to read is not there."""

    exit_code = MODEL


class VerdictError(CommandError):
    """The command did its work and the verdict is bad: the result is on stdout, exit code 1."""


class TargetError(CommandError):
    """What --output names cannot be written there."""

    exit_code = USAGE


class PlaceError(CommandError):
    """What is around the process: the current directory, stdout, memory, a package."""

    exit_code = ENVIRONMENT


def first_of(failures: tuple[str, ...]) -> str:
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return (failures[0] if failures else "no reason given") + more


def printable(text: str) -> str:
    """`text` with what is no visible character as its escape: names and texts out of files must
    not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def one_line(text: object) -> str:
    """`text`, printable, with every run of white space, line breaks included, made one space."""
    return printable(" ".join(str(text).split()))


def cut(line: str, longest: int = LONGEST_LINE - len("warning: ")) -> str:
    """`line`, without its middle where it is too long: what to do stands at the end."""
    if len(line) <= longest:
        return line
    head = 2 * longest // 3
    return f"{line[:head]} ... {line[head + 5 - longest :]}"


def describe(error: BaseException) -> tuple[int, str]:
    """The exit code and the one line for `error`. An empty line means that nothing is said."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code, ""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED, "interrupted"
    for cls in type(error).__mro__:
        if cls.__module__ == "elsa_core.errors" and cls.__name__ in _BY_CLASS:
            return _BY_CLASS[cls.__name__], cut(one_line(error))
    if isinstance(error, click.UsageError):
        found = USAGE, _usage(error)
    elif isinstance(error, CommandError):
        found = error.exit_code, one_line(error)
    elif out_of_memory(error):
        limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        limit = "raise this process's limit (ulimit -v), " * limited
        detail = one_line(error).split(". ")[0][:160]
        line = f"out of memory: {limit}{_MEMORY_HINT}" + (f" ({detail})" if detail else "")
        found = ENVIRONMENT, line
    elif isinstance(error, ImportError) and not str(error.name).startswith("elsa"):
        hint = "install it again; `elsa doctor` shows what is there"
        line = f"{error.name or 'a package'} cannot be imported: {error}; {hint}"
        found = ENVIRONMENT, line
    elif isinstance(error, OSError) and error.errno in _NO_ROOM:
        where = one_line(error.filename) if error.filename else "the file system"
        found = ENVIRONMENT, f"cannot use {where}: {error.strerror}"
    else:
        what = f"{type(error).__name__}: {one_line(error)[:300]}"
        found = FAILED, f"internal error: {what} (run with --debug for the traceback)"
    return found[0], cut(found[1])


def _usage(error: click.UsageError) -> str:
    """The message, and where a bad value came from if it was not typed on the command line."""
    message = one_line(error.format_message()).rstrip(".")
    if isinstance(error, click.MissingParameter) and "MODEL" in message:
        message += "; `elsa list` names models"
    param, ctx = getattr(error, "param", None), error.ctx
    if param is not None and ctx is not None and param.name is not None:
        origin = ctx.get_parameter_source(param.name)
        if origin is click.core.ParameterSource.ENVIRONMENT:
            return f"{message} (from the variable {param.envvar})"
        if origin is click.core.ParameterSource.DEFAULT_MAP:
            return f"{message} (from {ctx.meta.get('elsa.config', 'the config file')})"
    return message + (f" (see {ctx.command_path} --help)" if ctx else "")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory, or the process's limit of it, is what was missing."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # Only a process that has imported torch can have run out of its memory.
    gpu = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if gpu is not None and isinstance(error, gpu):
        return True
    # without a limit a library is not mapped for other reasons
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    kinds = (RuntimeError, OSError, *[ImportError] * limited)
    return isinstance(error, kinds) and any(words in str(error) for words in _NO_MEMORY)
