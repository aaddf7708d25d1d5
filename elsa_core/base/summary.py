"""A result as a table, for `print` and the Python prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GAP = "  "


@dataclass(frozen=True)
class Summary:
    """What is shown of a result: a title above a table of `rows` (none: no table) under `columns`,
    whose titles with ">" are aligned to the right; lines below it, and then a second table."""

    title: str
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    then: Summary | None = None

    def text(self) -> str:
        """Plain text, columns in line."""
        below = [] if self.then is None else [self.then.text()]
        table: list[str] = []
        if self.rows:
            titles = [title.lstrip(">") for title in self.columns]
            widths = [max(map(len, column)) for column in zip(titles, *self.rows, strict=True)]
            table = [
                _GAP.join(
                    cell.rjust(width) if title.startswith(">") else cell.ljust(width)
                    for cell, width, title in zip(row, widths, self.columns, strict=True)
                ).rstrip()
                for row in (titles, *self.rows)
            ]
        return "\n".join([self.title, *table, *self.lines, *below])


class Summarised:
    """A result that shows itself as its `summary`, wherever Python shows it."""

    def summary(self) -> Summary:
        """What is shown of the result."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary().text()
