"""`elsa help`: the help page of elsa, or of one command."""

from __future__ import annotations

from typing import Any

import click

from elsa_cli.completion import among
from elsa_cli.console import Session
from elsa_cli.main import COMMANDS
from elsa_cli.options import elsa_command


@elsa_command(
    "help",
    click.argument(
        "name", metavar="[COMMAND]", required=False,
        shell_complete=lambda ctx, param, incomplete: among(COMMANDS, incomplete),
    ),
    click.argument("kind", metavar="[KIND]", required=False),
)  # fmt: skip
def command(session: Session, /, name: str | None, kind: str | None, **_: Any) -> None:
    """Show the help page of COMMAND, as `elsa COMMAND --help` does, or the list of commands.

    A command with KINDs (`elsa help bench models`) has one page for all of them.
    """
    here = click.get_current_context().find_root()
    if name is not None:
        assert isinstance(here.command, click.Group)
        found = here.command.resolve_command(here, [name])[1]
        assert found is not None
        types = [param.type for param in found.params if isinstance(param, click.Argument)]
        words = (one.choices for one in types if isinstance(one, click.Choice))
        kinds = [str(each) for choices in words for each in choices]
        if kind is not None and kind not in kinds:
            hint = f"; it takes {', '.join(kinds)}" if kinds else ""
            raise click.UsageError(f"{found.name} takes no {kind!r}{hint}")
        here = click.Context(found, here, info_name=name)
    text = here.get_help()
    session.document("help", {"command": here.command_path, "text": text})
    session.text(text)
