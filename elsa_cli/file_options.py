"""Options for what a weights file may not say: its architecture's arguments, its preprocessing."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import click

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")


class KeyValue(click.ParamType):  # type: ignore[type-arg]
    """`KEY=VALUE`, the value read as timm's `--model-kwargs` reads it: a Python literal, else text.
    Gives (key, value)."""

    name = "key=value"
    # Literals are parsed by Python, whose parser recurses.
    longest = 400

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "KEY=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """The key and the plain value; a usage error for anything else."""
        if isinstance(value, tuple):
            return value[0], value[1]
        key, equals, text = str(value).partition("=")
        if not equals or not key.isidentifier() or len(text) > self.longest:
            self.fail(f"{str(value)[:60]!r} is not KEY=VALUE (like window_size=8)", param, ctx)
        try:
            literal = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return key, text
        return key, list(literal) if isinstance(literal, tuple) else literal


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Finite numbers with commas or spaces between them: `0.485,0.456,0.406`. Gives a tuple."""

    name = "numbers"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NUMBER[,...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """The numbers in the order given; a usage error where one is none."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(part) for part in str(value).replace(",", " ").split())
        except ValueError:
            found = ()
        if not found or not all(map(math.isfinite, found)):
            self.fail(f"{str(value)[:60]!r} is not a list of numbers", param, ctx)
        return found


def all_of_them() -> list[Callable[[Any], Any]]:
    """--model-kwargs, and --mean, --std, --crop-pct, --interpolation: timm's names."""
    return [
        click.option(
            "--model-kwargs", type=KeyValue(), multiple=True,
            help="Argument of the library's constructor (repeatable), like window_size=8.",
        ),
        click.option(
            "--weights", metavar="KEY",
            help="Which weights of a file with several: state_dict_ema, teacher, model, ...",
        ),
        click.option(
            "--mean", type=Numbers(), help="Mean of the images' channels, scaled to 0..1."
        ),
        click.option("--std", type=Numbers(), help="Their standard deviation."),
        click.option(
            "--crop-pct", type=click.FloatRange(0.05, 2.0), metavar="SHARE",
            help="Share of the resized image that the centre crop keeps.",
        ),
        click.option(
            "--interpolation", type=click.Choice(INTERPOLATIONS),
            help="How images are resized.",
        ),
    ]  # fmt: skip
