"""Which sites of a model a command is about: --include, --exclude and --scope."""

from __future__ import annotations

from collections.abc import Callable

import click

from elsa_cli.options import Function, apply

SCOPES = ("auto", "attention", "model")


def site_options(function: Function) -> Function:
    """--include, --exclude and --scope."""
    options: list[Callable[[Function], Function]] = [
        click.option(
            "--include", multiple=True, metavar="GLOB",
            help="Only sites whose path matches (repeatable), like 'blocks.*'.",
        ),
        click.option(
            "--exclude", multiple=True, metavar="GLOB",
            help="Leave sites whose path matches as they are (repeatable).",
        ),
    ]  # fmt: skip
    return apply(options)(scope_option(function))


def scope_option(function: Function) -> Function:
    """--scope alone."""
    option: Callable[[Function], Function] = click.option(
        "--scope", type=click.Choice(SCOPES), default="auto", show_default=True,
        help="attention: the sites. model: linear layers, MLPs and patch embedding too. auto: what "
        "was measured to be faster on the device.",
    )  # fmt: skip
    return option(function)
