"""What the charts of a profile draw: the measured points as series along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from elsa_core.base.messages import side
from elsa_core.profiling.document import DONE, Document

METRICS: Final = (
    ("latency, ms", "seconds", 1e3),
    ("throughput, images/s", "images_per_second", 1.0),
    ("memory of a call, MB", "memory_bytes", 1e-6),
)
"""Title, key of a run, and factor from its unit to the title's."""


@dataclass
class Series:
    """One run over the points: (position, its text, value), by position."""

    name: str
    patched: bool
    points: list[tuple[int, str, float]]


def finished(document: Document) -> list[Document]:
    """The points that were measured."""
    return [row for row in document["results"]["points"] if row["status"] == DONE]


def axis_of(rows: Sequence[Document]) -> str:
    """What varies along x: "image_size", or "batch" where only that varies."""
    sizes = {str(row["profile"]["image_size"]) for row in rows}
    batches = {row["configuration"]["batch"] for row in rows}
    return "batch" if len(sizes) == 1 and len(batches) > 1 else "image_size"


def series_of(rows: Sequence[Document], key: str, factor: float) -> list[Series]:
    """The runs that have this figure, in the order of the document."""
    axis = axis_of(rows)
    found: dict[tuple[str, str, bool], Series] = {}
    for row in rows:
        shape = row["profile"]["image_size"] or [0, 0]
        batch = row["profile"]["batch"]
        at = (batch, str(batch)) if axis == "batch" else (shape[0] * shape[1], side(shape))
        extra = series_name(row, rows, axis)
        for run in row["profile"]["runs"]:
            if run[key] is None:
                continue
            name = " ".join(filter(None, (run["name"], extra)))
            one = found.setdefault(
                (run["name"], extra, run["patched"]), Series(name, run["patched"], [])
            )
            one.points.append((*at, run[key] * factor))
    for one in found.values():
        one.points.sort()
    return list(found.values())


def ticks_of(series: Sequence[Series]) -> dict[int, str]:
    """Positions along x and their texts."""
    return dict(sorted({(x, text) for one in series for x, text, _ in one.points}))


def series_name(row: Document, rows: Sequence[Document], axis: str) -> str:
    """What tells this point's series from the others: whatever varies except the x axis."""
    parts = []
    for key, form in (("image_size", "{}"), ("batch", "batch {}"), ("dtype", "{}"),
                      ("precision", "{}")):  # fmt: skip
        values = [str(each["configuration"][key]) for each in rows]
        if key != axis and len(set(values)) > 1:
            value = row["configuration"][key]
            parts.append(form.format(side(value) if key == "image_size" and value else value))
    return ", ".join(parts)
