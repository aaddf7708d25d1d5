"""The options of `elsa check` alone: which runs are judged."""

from __future__ import annotations

from collections.abc import Callable

import click

from elsa_cli.options import Function, Listed, apply

# As `elsa_core.proof.paths.PATHS`, which a command line that only helps does not import: it needs
# torch. A test compares them.
PATHS = ("eager", "graph", "compile", "compile+graph")


class Sparsity(click.ParamType):  # type: ignore[type-arg]
    """ "exact", or a number in (0, 1)."""

    name = "exact|NUMBER"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | float:
        """The word or the number."""
        if isinstance(value, float) or value == "exact":
            return value
        try:
            number = float(str(value))
        except ValueError:
            number = 0.0
        if not 0.0 < number < 1.0:
            self.fail(f"{value!r} is neither exact nor a number in (0, 1)", param, ctx)
        return number


def proof_options(function: Function) -> Function:
    """--path, --grad, --sparsity and --sparsity-bound."""
    options: list[Callable[[Function], Function]] = [
        click.option(
            "--path", "paths", type=Listed(click.Choice(PATHS), "|".join(PATHS)),
            help="How the whole patched model runs: as it is, as a CUDA graph, through "
            "torch.compile, as a CUDA graph of the compiled model.  [default: eager; on CUDA "
            "eager,graph,compile]",
        ),
        click.option(
            "--grad", is_flag=True,
            help="Also compare the gradients of every parameter and input, of each site and of the "
            "model.",
        ),
        click.option(
            "--sparsity", type=Sparsity(), default=None,
            help="Let attention leave out tiles of negligible weights: exact, or weights up to a "
            "number in (0, 1), which costs an error.",
        ),
        click.option(
            "--sparsity-bound", type=click.FloatRange(min=0.0), default=0.0, show_default=True,
            help="The relative error that a number as --sparsity may add to what is allowed.",
        ),
    ]  # fmt: skip
    return apply(options)(function)
