"""`elsa completion`: the script that completes commands, options and model names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from elsa_cli.console import Session
from elsa_cli.options import Command, output_options, pass_session

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@output_options
@pass_session
@click.pass_context
def command(ctx: click.Context, session: Session, /, shell: str | None, **_: Any) -> None:
    """Print the completion script of a SHELL (default: the one of $SHELL).

    \b
      bash   elsa completion bash >> ~/.bashrc
      zsh    elsa completion zsh >> ~/.zshrc
      fish   elsa completion fish > ~/.config/fish/completions/elsa.fish
    """
    from click.shell_completion import get_completion_class

    from elsa_cli import completion
    from elsa_cli.probes import environment

    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        ctx.fail(f"SHELL is needed: one of {', '.join(SHELLS)} (no such shell: {name!r})")
    completion.register()
    kind = get_completion_class(name)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "elsa", "_ELSA_COMPLETE").source()
    if session.json:
        session.document("completion", environment(), {"shell": name, "script": script})
    else:
        session.text(script)
