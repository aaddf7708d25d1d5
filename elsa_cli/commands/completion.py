"""`elsa completion`: the script that completes commands, options and model names."""

from __future__ import annotations

import os
from pathlib import Path

import click

from elsa_cli.options import Command

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.pass_context
def command(ctx: click.Context, shell: str | None) -> None:
    """Print the completion script of a SHELL (default: the one of $SHELL).

    \b
      bash   elsa completion bash >> ~/.bashrc
      zsh    elsa completion zsh >> ~/.zshrc
      fish   elsa completion fish > ~/.config/fish/completions/elsa.fish
    """
    from click.shell_completion import get_completion_class

    from elsa_cli import completion
    from elsa_cli.console import Session

    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        ctx.fail(f"SHELL is needed: one of {', '.join(SHELLS)} (no such shell: {name!r})")
    completion.register()
    kind = get_completion_class(name)
    assert kind is not None
    session = ctx.find_object(Session) or ctx.ensure_object(Session)
    session.text(kind(ctx.find_root().command, {}, "elsa", "_ELSA_COMPLETE").source())
