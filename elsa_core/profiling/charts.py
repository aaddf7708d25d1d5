"""Charts of a profile as inline SVG, written by hand: no package, no script, any width.

Positions along x are percentages and texts have their own size, so that a chart is as readable on a
telephone as on a wide screen. Colours are classes of the page's style, in light and in dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from elsa_core.profiling.document import Document
from elsa_core.profiling.series import METRICS, Series, series_of, ticks_of
from elsa_core.profiling.words import duration, three

_WIDEST: Final = 78.0  # percent of the width that the longest bar takes; its value stands behind it
_ROW: Final = 38
_LEFT, _RIGHT, _TOP, _BOTTOM = 13.0, 97.0, 12, 26  # of the plot: percent, percent, px, px
_HEIGHT: Final = 250
_TIMES: Final = ("seconds_before", "seconds_after")
STYLE: Final = """
.ours { fill: var(--ours); stroke: var(--ours); } .before { fill: var(--before); }
.b0 { fill: var(--b0); stroke: var(--b0); } .b1 { fill: var(--b1); stroke: var(--b1); }
.b2 { fill: var(--b2); stroke: var(--b2); } .b3 { fill: var(--b3); stroke: var(--b3); }
.p0 { fill: var(--ours); stroke: var(--ours); } .p1 { fill: var(--p1); stroke: var(--p1); }
.p2 { fill: var(--p2); stroke: var(--p2); } .p3 { fill: var(--p3); stroke: var(--p3); }
line.b0, line.b1, line.b2, line.b3 { stroke-dasharray: 6 4; } line { stroke-width: 2; }
rect.ours { stroke: none; } rect.site { stroke: var(--card); stroke-width: 1; }
.s0 { fill: var(--ours); } .s1 { fill: var(--b3); } .s2 { fill: var(--b1); }
.s3 { fill: var(--b2); }
.rest { fill: var(--line); } .grid { stroke: var(--line); stroke-width: 1; }
svg text { font: 13px system-ui, sans-serif; fill: var(--text); stroke: none; }
svg .dim { fill: var(--dim); }
"""


def metric_charts(rows: Sequence[Document]) -> list[tuple[str, str]]:
    """(title, SVG and legend) of latency, throughput and memory of measured points."""
    found = []
    for title, key, factor in METRICS:
        series = series_of(rows, key, factor)
        if not series:
            continue
        ticks = ticks_of(series)
        found.append((title, _bars(series) if len(ticks) < 2 else _lines(series, ticks)))
    return found


def site_chart(sites: Sequence[Document]) -> str:
    """SVG of every site's time before and after in the model's order, then the rest of the model.

    Sites come slowest first; their paths say where they stand in the model.
    """
    ordered = [*sorted(sites[:-1], key=lambda site: _place(site["path"])), sites[-1]]
    longest = max(max(site["seconds_before"], site["seconds_after"]) for site in ordered)
    parts = []
    for i, site in enumerate(ordered):
        top = 54 * i
        parts.append(_text(0, top + 13, site["path"] or "the model"))
        for offset, key, name in ((18, "seconds_before", "before"), (33, "seconds_after", "ours")):
            width = _WIDEST * site[key] / longest
            parts.append(_bar(top + offset, width, 13, name))
            parts.append(_text(width, top + offset + 11, duration(site[key]), dx=6, dim=True))
    legend = _legend([("before", "before"), ("ours", "patched")])
    return _svg(parts, 54 * len(ordered)) + legend


def model_strips(sites: Sequence[Document]) -> str:
    """SVG of the model as two strips, before and after, on one scale of time: a stage after the
    other, its sites as boxes, then the rest of the model.

    Args:
        sites: as for `site_chart`.
    """
    ordered = [*sorted(sites[:-1], key=lambda site: _place(site["path"])), sites[-1]]
    stages = list(dict.fromkeys(_stage(site["path"]) for site in ordered[:-1]))
    totals = [sum(site[key] for site in ordered) for key in _TIMES]
    parts = []
    for i, (key, title) in enumerate(zip(_TIMES, ("before", "patched"), strict=True)):
        top, left = 66 * i, 0.0
        parts.append(_text(0, top + 13, f"{title}: {duration(totals[i])}"))
        for site in ordered:
            width = 100.0 * site[key] / max(totals)
            rest = site is ordered[-1]
            name = "rest" if rest else f"s{stages.index(_stage(site['path'])) % 4}"
            told = f"{site['path'] or 'the model'}: {duration(site[key])}"
            parts.append(
                f'<rect x="{left:.3f}%" y="{top + 20}" width="{width:.3f}%" height="30" '
                f'class="site {name}"><title>{html.escape(told)}</title></rect>'
            )
            left += width
    legend = []
    for i, stage in enumerate(stages):
        own = [site for site in ordered[:-1] if _stage(site["path"]) == stage]
        before, after = (sum(site[key] for site in own) for key in _TIMES)
        count = f"{len(own)} site{'s' * (len(own) != 1)}"
        legend.append((f"s{i % 4}", f"{stage} ({count}): {duration(before)} → {duration(after)}"))
    before, after = (ordered[-1][key] for key in _TIMES)
    legend.append(("rest", f"{ordered[-1]['path']}: {duration(before)} → {duration(after)}"))
    return _svg(parts, 66 * 2 - 12) + _legend(legend)


def _stage(path: str) -> str:
    """The part of a model that a site belongs to: its path up to the first number, and the number
    too where blocks are numbered again inside."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return path or "the model"
    return ".".join(parts[: numbers[0] + (len(numbers) > 1)])


def parts_chart(runs: Sequence[Document]) -> str:
    """SVG of every run's training step: forward, backward and optimizer side by side."""
    names = list(runs[0]["parts"])
    longest = max(sum(run["parts"].values()) for run in runs)
    parts = []
    for i, run in enumerate(runs):
        top, left = _ROW * i, 0.0
        parts.append(_text(0, top + 13, run["name"]))
        for k, seconds in enumerate(run["parts"].values()):
            width = _WIDEST * seconds / longest
            parts.append(_bar(top + 18, width, 14, f"b{k + 1}", left))
            left += width
        whole = duration(sum(run["parts"].values()))
        parts.append(_text(left, top + 30, whole, dx=6, dim=True))
    legend = _legend([(f"b{k + 1}", name) for k, name in enumerate(names)])
    return _svg(parts, _ROW * len(runs)) + legend


def _bars(series: Sequence[Series]) -> str:
    values = [one.points[0][2] for one in series]
    longest = max(*values, 1e-12)
    parts = []
    for i, (one, value) in enumerate(zip(series, values, strict=True)):
        top, width = _ROW * i, _WIDEST * max(value, 0.0) / longest
        parts.append(_text(0, top + 13, one.name))
        parts.append(_bar(top + 18, width, 14, "ours" if one.patched else "before"))
        parts.append(_text(width, top + 30, three(value), dx=6, dim=True))
    return _svg(parts, _ROW * len(series))


def _lines(series: Sequence[Series], ticks: dict[int, str]) -> str:
    values = [y for one in series for _, _, y in one.points]
    is_log = min(values) > 0
    low, high = (min(values) * 0.9 if is_log else 0.0), max(*values, 1e-12) * 1.1
    left, right = (math.log(max(x, 1)) for x in (min(ticks), max(ticks)))

    def x_of(x: int) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (math.log(max(x, 1)) - left) / max(right - left, 1e-9)

    def y_of(y: float) -> float:
        share = math.log(y / low) / math.log(high / low) if is_log else (y - low) / (high - low)
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)

    parts = []
    for value in _steps(low, high, is_log=is_log):
        parts.append(_line(_LEFT, y_of(value), _RIGHT, y_of(value), "grid"))
        parts.append(_text(_LEFT, y_of(value) + 4, three(value), dx=-6, anchor="end", dim=True))
    for x, text in ticks.items():
        parts.append(_text(x_of(x), _HEIGHT - 6, text, anchor="middle", dim=True))
    legend, counts = [], [0, 0]
    for one in series:
        name = f"{'p' if one.patched else 'b'}{counts[one.patched] % 4}"
        counts[one.patched] += 1
        legend.append((name, one.name))
        placed = [(x_of(x), y_of(y)) for x, _, y in one.points]
        for (x1, y1), (x2, y2) in pairwise(placed):
            parts.append(_line(x1, y1, x2, y2, name))
        parts += [f'<circle cx="{x:.2f}%" cy="{y:.1f}" r="4" class="{name}"/>' for x, y in placed]
    return _svg(parts, _HEIGHT) + _legend(legend)


def _steps(low: float, high: float, *, is_log: bool) -> list[float]:
    """Round numbers in between: 1, 2 and 5 times powers of ten, at most eight."""
    if not is_log:
        return [high * share for share in (0.0, 0.25, 0.5, 0.75)]
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    return found if len(found) <= 8 else found[:: -(-len(found) // 8)]


def _place(path: str) -> list[tuple[int, int, str]]:
    """A path's place in a model: numbers by value, not by their digits."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.split(".")]


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg width="100%" height="{height}" role="presentation">{"".join(parts)}</svg>'


def _bar(top: float, width: float, height: int, name: str, left: float = 0.0) -> str:
    place = f"{left:.2f}%" if left else "0"
    return (
        f'<rect x="{place}" y="{top}" width="{max(width, 0.2):.2f}%" height="{height}" rx="2" '
        f'class="{name}"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return (
        f'<line x1="{x1:.2f}%" y1="{y1:.1f}" x2="{x2:.2f}%" y2="{y2:.1f}" class="{name}"/>'
    )  # fmt: skip


def _text(
    x: float, y: float, text: str, *, dx: int = 0, anchor: str = "start", dim: bool = False
) -> str:
    name = ' class="dim"' if dim else ""
    return (
        f'<text x="{x:.2f}%" y="{y:.1f}" dx="{dx}" text-anchor="{anchor}"{name}>'
        f"{html.escape(text)}</text>"
    )


def _legend(names: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><svg width="14" height="14"><rect width="14" height="14" rx="2" class="{name}"/>'
        f"</svg> {html.escape(text)}</li>"
        for name, text in names
    )
    return f'<ul class="legend">{items}</ul>'
