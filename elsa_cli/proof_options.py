"""The options of `elsa check` alone: which runs are judged."""

from __future__ import annotations

from collections.abc import Callable

import click

from elsa_cli.options import Function, Listed, apply

# As `elsa_core.proof.paths.PATHS`, which a command line that only helps does not import: it needs
# torch. A test compares them.
PATHS = ("eager", "graph", "compile")


def proof_options(function: Function) -> Function:
    """--path and --grad."""
    options: list[Callable[[Function], Function]] = [
        click.option(
            "--path", "paths", type=Listed(click.Choice(PATHS), "|".join(PATHS)),
            help="How the whole patched model runs: as it is, as a CUDA graph, through "
            "torch.compile.  [default: eager; on CUDA eager,graph]",
        ),
        click.option(
            "--grad", is_flag=True,
            help="Also compare the gradients of every parameter and input, of each site and of the "
            "model.",
        ),
    ]  # fmt: skip
    return apply(options)(function)
