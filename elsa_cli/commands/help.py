"""`elsa help`: the help page of elsa, or of one command."""

from __future__ import annotations

from typing import Any

import click

from elsa_cli import completion
from elsa_cli.console import Session
from elsa_cli.options import Command, output_options, pass_session


@click.command("help", cls=Command)
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=completion.commands)
@click.argument("kind", metavar="[KIND]", required=False)
@output_options
@pass_session
@click.pass_context
def command(
    ctx: click.Context, session: Session, /, name: str | None, kind: str | None, **_: Any
) -> None:
    """Show the help page of COMMAND, as `elsa COMMAND --help` does, or the list of commands.

    A command with KINDs (`elsa help bench models`) has one page for all of them.
    """
    here = ctx.find_root()
    if name is not None:
        group = here.command
        assert isinstance(group, click.Group)
        found = group.resolve_command(here, [name])[1]
        assert found is not None
        if kind is not None:
            _check_kind(found, kind)
        here = click.Context(found, here, info_name=name)
    text = here.get_help()
    if session.json:
        from elsa_cli.probes import environment

        session.document("help", environment(), {"command": here.command_path, "text": text})
    else:
        session.text(text)


def _check_kind(found: click.Command, kind: str) -> None:
    """Refuse a second word that is none of the command's own."""
    types = [param.type for param in found.params if isinstance(param, click.Argument)]
    kinds = [str(each) for one in types if isinstance(one, click.Choice) for each in one.choices]
    if kind not in kinds:
        hint = f"; it takes {', '.join(kinds)}" if kinds else ""
        raise click.UsageError(f"{found.name} takes no {kind!r}{hint}")
