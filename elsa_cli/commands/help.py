"""`elsa help`: the help page of elsa, or of one command."""

from __future__ import annotations

from typing import Any

import click

from elsa_cli import completion
from elsa_cli.console import Session
from elsa_cli.options import Command, output_options, pass_session


@click.command("help", cls=Command)
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=completion.commands)
@output_options
@pass_session
@click.pass_context
def command(ctx: click.Context, session: Session, /, name: str | None, **_: Any) -> None:
    """Show the help page of COMMAND, as `elsa COMMAND --help` does, or the list of commands."""
    here = ctx.find_root()
    if name is not None:
        group = here.command
        assert isinstance(group, click.Group)
        found = group.resolve_command(here, [name])[1]
        assert found is not None
        here = click.Context(found, here, info_name=name)
    text = here.get_help()
    if session.json:
        from elsa_cli.probes import environment

        session.document("help", environment(), {"command": here.command_path, "text": text})
    else:
        session.text(text)
