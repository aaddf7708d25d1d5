"""`elsa completion`: the script that completes commands, options and model names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from elsa_cli.console import Session
from elsa_cli.options import elsa_command

SHELLS = ("bash", "zsh", "fish")


@elsa_command("completion", click.argument("shell", type=click.Choice(SHELLS), required=False))
def command(session: Session, /, shell: str | None, **_: Any) -> None:
    """Print the completion script of a SHELL (default: the one of $SHELL).

    \b
      bash   elsa completion bash >> ~/.bashrc
      zsh    elsa completion zsh >> ~/.zshrc
      fish   elsa completion fish > ~/.config/fish/completions/elsa.fish
    """
    from click.shell_completion import get_completion_class

    ctx = click.get_current_context()
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        ctx.fail(f"SHELL is needed: one of {', '.join(SHELLS)} (no such shell: {name!r})")
    kind = get_completion_class(name)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "elsa", "_ELSA_COMPLETE").source()
    session.document("completion", {"shell": name, "script": script})
    session.text(script)
