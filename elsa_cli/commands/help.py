"""`elsa help`: the help page of elsa, or of one command."""

from __future__ import annotations

from typing import Any

import click

from elsa_cli import completion
from elsa_cli.console import Session
from elsa_cli.options import elsa_command


@elsa_command(
    "help",
    click.argument("name", metavar="[COMMAND]", required=False, shell_complete=completion.commands),
)
def command(session: Session, /, name: str | None, **_: Any) -> None:
    """Show the help page of COMMAND, as `elsa COMMAND --help` does, or the list of commands."""
    here = click.get_current_context().find_root()
    if name is not None:
        assert isinstance(here.command, click.Group)
        found = here.command.resolve_command(here, [name])[1]
        assert found is not None
        here = click.Context(found, here, info_name=name)
    text = here.get_help()
    session.document("help", {"command": here.command_path, "text": text})
    if not session.json:
        session.text(text)
