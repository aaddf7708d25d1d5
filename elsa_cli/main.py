"""The entry point: a command group that imports a command only when it runs.

`elsa --help` and `elsa --version` import Click alone, so that they answer at once.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import click

from elsa_cli import signals
from elsa_cli.console import Session, version
from elsa_cli.errors import describe

# The order is the order of the help page. The text stands here so that help imports no command.
COMMANDS = {
    "list": "List models by name, with what can be patched of each.",
    "inspect": "List every attention site of a model, and what can be patched.",
    "patch": "Replace a model's attention by exact ELSA kernels.",
    "check": "Prove that the patched model computes what the original does.",
    "profile": "Show what patching a model gains here, and where.",
    "eval": "Measure accuracy on your labelled images, before and after patching.",
    "export": "Write a patched model as a bundle that runs without elsa.",
    "verify": "Check a bundle: its files, and that it still computes the model.",
    "bench": "Measure ELSA against its peers on this machine.",
    "doctor": "Show what this machine offers and why a backend is off.",
    "build": "Compile the native library, or GPU kernels, ahead of their use.",
    "completion": "Print the completion script of a shell.",
    "help": "Show this page, or the one of a command.",
}
_EXAMPLES = """\b
Start here:
  elsa list swin                           (names of models)
  elsa inspect vit_base_patch16_224
  elsa patch vit_base_patch16_224 --check
  elsa patch vit_base_patch16_224 -o DIR   (saves a model that loads again)
  elsa export vit_base_patch16_224 -o DIR  (a bundle that runs without elsa)"""


class LazyGroup(click.Group):
    """Commands by name; each is imported from `elsa_cli.commands.<name>` when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return all_commands(cmd_name)[cmd_name] if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            ctx.fail(f"no such command '{name}'{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def all_commands(*names: str) -> dict[str, click.Command]:
    """Commands by name, imported; every one, against which a config file is judged, by default."""
    modules = {name: f"elsa_cli.commands.{name}" for name in names or COMMANDS}
    return {name: importlib.import_module(module).command for name, module in modules.items()}


@click.group(
    "elsa",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EXAMPLES,
)
@click.version_option(version(), message="elsa %(version)s")
def cli() -> None:
    """Exact linear-scan attention for vision models: patch a model, prove that its outputs
    agree, see what was gained.

    A site is a module that computes attention. A backend is what computes it on a device."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Prints; never exits."""
    session = Session()
    session.arguments = list(arguments)
    session.debug = "--debug" in arguments
    session.json = "--json" in arguments  # also of an error before the options are read
    try:
        with cli.make_context("elsa", list(arguments) or ["--help"], obj=session) as context:
            cli.invoke(context)
            signals.check()
        return 0
    except BaseException as caught:
        error = caught
        try:
            signals.check()
        except BaseException as stop:  # what a signal asked for; `caught` is how it came through
            error = stop
        if isinstance(error, SystemExit):
            raise error from None
        code, line = describe(error)
        session.fail(code, line, error)
        return code


def main() -> NoReturn:
    # Open what the caller has closed (`>&-`): the next file would be taken for it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # by compilers and fresh processes
    os.close(descriptor)
    signals.install()
    if instruction := os.environ.get("_ELSA_COMPLETE"):  # a shell asks for completions
        from click.shell_completion import shell_complete

        import elsa_cli.completion  # noqa: F401  # our bash script in place of Click's

        sys.exit(shell_complete(cli, {}, "elsa", "_ELSA_COMPLETE", instruction))
    code = run(sys.argv[1:])
    # End the process without taking torch's modules apart, which takes as long as importing timm.
    # What was registered to run at the end runs.
    if "torch" in sys.modules and threading.active_count() == 1:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the plain way says why
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
