"""Charts of a profile's page: bars as inline SVG, without a package or a script, at any width.

Positions along x are percentages and texts have their own size, so that a chart is as readable on a
telephone as on a wide screen. Colours are classes of the page's style, in light and in dark.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from elsa_core.profiling.document import Document
from elsa_core.profiling.words import duration, place, point_name, three

_METRICS: Final = (
    ("latency, ms", "seconds", 1e3),
    ("throughput, images/s", "images_per_second", 1.0),
    ("memory of a call, MB", "memory_bytes", 1e-6),
)
"""Title, key of a run, and factor from its unit to the title's."""
_WIDEST: Final = 78.0  # percent of the width that the longest bar takes; its value stands behind it
STYLE: Final = """
.ours { fill: var(--ours); } .before { fill: var(--before); }
.b1 { fill: var(--b1); } .b2 { fill: var(--b2); } .b3 { fill: var(--b3); }
svg text { font: 13px system-ui, sans-serif; fill: var(--text); } svg .dim { fill: var(--dim); }
"""
Bar = tuple[Sequence[tuple[str, float]], str]
"""Parts side by side, each with its class and length, and the text behind them."""


def metrics(rows: Sequence[Document]) -> list[tuple[str, list[tuple[str, float, bool]]]]:
    """Latency, throughput and memory of measured points: (title, [(run, value, whether it is
    patched)]); where there are several points, a run's name has its point's."""
    found = []
    for title, key, factor in _METRICS:
        bars = [
            (
                run["name"] + (f", {point_name(row)}" if len(rows) > 1 else ""),
                float(run[key] * factor), bool(run["patched"]),
            )
            for row in rows
            for run in row["profile"]["runs"]
            if run[key] is not None
        ]  # fmt: skip
        if bars:
            found.append((title, bars))
    return found


def metric_charts(rows: Sequence[Document]) -> list[tuple[str, str]]:
    """(title, chart) of `metrics`."""
    return [
        (
            title,
            _chart([
                (name, [([("ours" if patched else "before", value)], three(value))])
                for name, value, patched in bars
            ]),
        )
        for title, bars in metrics(rows)
    ]  # fmt: skip


def site_chart(sites: Sequence[Document]) -> str:
    """Every site's time before and after in the model's order, then the rest of the model.

    Sites come slowest first; their paths say where they stand in the model.
    """
    ordered = [*sorted(sites[:-1], key=lambda site: place(site["path"])), sites[-1]]
    kinds = (("before", "seconds_before"), ("ours", "seconds_after"))
    rows: list[tuple[str, list[Bar]]] = [
        (
            site["path"] or "the model",
            [([(name, site[key])], duration(site[key])) for name, key in kinds],
        )
        for site in ordered
    ]
    return _chart(rows, [("before", "before"), ("ours", "patched")])


def parts_chart(runs: Sequence[Document]) -> str:
    """Every run's training step: forward, backward and optimizer side by side."""
    rows: list[tuple[str, list[Bar]]] = []
    for run in runs:
        parts = [(f"b{k}", seconds) for k, seconds in enumerate(run["parts"].values(), 1)]
        rows.append((run["name"], [(parts, duration(sum(run["parts"].values())))]))
    return _chart(rows, [(f"b{k}", name) for k, name in enumerate(runs[0]["parts"], 1)])


def _chart(
    rows: Sequence[tuple[str, Sequence[Bar]]], legend: Sequence[tuple[str, str]] = ()
) -> str:
    longest = max(sum(size for _, size in parts) for _, bars in rows for parts, _ in bars)
    drawn, top = [], 0
    for label, bars in rows:
        drawn.append(f'<text x="0" y="{top + 13}">{html.escape(label)}</text>')
        top += 18
        for parts, text in bars:
            left = 0.0
            for name, size in parts:
                width = _WIDEST * max(size, 0.0) / (longest or 1.0)
                place = f"{left:.2f}%" if left else "0"
                drawn.append(
                    f'<rect x="{place}" y="{top}" width="{max(width, 0.2):.2f}%" height="13" '
                    f'rx="2" class="{name}"/>'
                )
                left += width
            said = html.escape(text)
            drawn.append(f'<text x="{left:.2f}%" y="{top + 11}" dx="6" class="dim">{said}</text>')
            top += 15
        top += 6
    items = "".join(
        f'<li><svg width="14" height="14"><rect width="14" height="14" rx="2" class="{name}"/>'
        f"</svg> {html.escape(text)}</li>"
        for name, text in legend
    )
    below = f'<ul class="legend">{items}</ul>' if items else ""
    return f'<svg width="100%" height="{top}" role="presentation">{"".join(drawn)}</svg>{below}'
