"""GPU architectures as options take them."""

from __future__ import annotations

import re
from typing import Any

import click
from click.shell_completion import CompletionItem

from elsa_cli import completion


class Architecture(click.ParamType):  # type: ignore[type-arg]  # generic in new Clicks only
    """`sm_90`, or `90`."""

    name = "arch"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """90 for sm_90; a usage error for anything else."""
        found = re.fullmatch(r"(?:sm_)?(\d{2,3})", str(value).strip().lower())
        if found is None:
            self.fail(f"{str(value)[:60]!r} is no architecture (like sm_90)", param, ctx)
        return int(found[1])

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return completion.starting(completion.ARCHS, incomplete)


class Known(Architecture):
    """One that kernels can be compiled for without its GPU."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """90 for sm_90; a usage error for one that is unknown."""
        arch = super().convert(value, param, ctx)
        if f"sm_{arch}" not in completion.ARCHS:
            self.fail(f"sm_{arch} is unknown: choose of {', '.join(completion.ARCHS)}", param, ctx)
        return arch
