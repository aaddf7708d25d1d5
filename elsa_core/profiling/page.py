"""The page of `elsa profile --html`: one file with charts, tables and environment, no network.

Charts are bars as inline SVG, at any width: positions along x are percentages and texts have their
own size, so that a chart is as readable on a telephone as on a wide screen. Colours are classes of
the page's style, in light and in dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from elsa_core.base import pages
from elsa_core.measuring.documents import Document
from elsa_core.measuring.environment import label
from elsa_core.profiling.document import DONE
from elsa_core.profiling.words import (
    bound_text,
    duration,
    place,
    point_name,
    ratio_text,
    shares,
    three,
    tokens_text,
    verdict_text,
    warning_lines,
)

_METRICS: Final = (
    ("latency, ms", "seconds", 1e3),
    ("throughput, images/s", "images_per_second", 1.0),
    ("memory of a call, MB", "memory_bytes", 1e-6),
)
"""Title, key of a run, and factor from its unit to the title's."""
_WIDEST: Final = 78.0  # percent of the width that the longest bar takes; its value stands behind it
_STYLE: Final = """
.ours { fill: var(--ours); } .before { fill: var(--before); }
.b1 { fill: var(--b1); } .b2 { fill: var(--b2); } .b3 { fill: var(--b3); }
svg text { font: 13px system-ui, sans-serif; fill: var(--text); } svg .dim { fill: var(--dim); }
"""
Bar = tuple[Sequence[tuple[str, float]], str]
"""Parts side by side, each with its class and length, and the text behind them."""


def page(document: Document) -> str:
    """The whole page as HTML."""
    results = document["results"]
    name = str(results["model"].get("name", "model"))
    rows = [row for row in results["points"] if row["status"] == DONE]
    parts = [
        f"<h1>{pages.text(name)}: what patching gains</h1>",
        f'<p class="dim">{pages.text(label(document["environment"]))}</p>',
        "" if results["complete"] else '<p class="warning">This sweep is not complete.</p>',
    ]
    for row in rows:
        verdict, bound = verdict_text(row["profile"]), bound_text(row["profile"])
        point = f"<b>{pages.text(point_name(row))}</b>: {pages.text(verdict)}"
        parts += [f'<p class="gain">{point}</p>', f"<p>{pages.text(bound)}</p>" if bound else ""]
    parts += [f'<p class="warning">{pages.text(line)}</p>' for line in warning_lines(rows)]
    if rows:
        parts.append("<h2>Against what one would otherwise run</h2>")
        drawn = [
            (title, [(name, [([("ours" if patched else "before", value)], three(value))])
                     for name, value, patched in bars])
            for title, bars in metrics(rows)
        ]  # fmt: skip
        charts = (pages.figure(title, _chart(bars)) for title, bars in drawn)
        parts += ['<div class="charts">', *charts, "</div>"]
    parts += [_points(results["points"])]
    for row in rows:
        if all(run.get("parts") for run in row["profile"]["runs"]):  # training steps
            parts += [f"<h2>{pages.text(point_name(row))}</h2>", *_steps(row["profile"]["runs"])]
    with_sites = [row for row in rows if len(row["profile"]["sites"]) > 1]
    if with_sites:
        parts.append("<h2>Where the time goes</h2>")
    for row in with_sites:
        sites = row["profile"]["sites"]
        parts += [
            f"<h3>{pages.text(point_name(row))}</h3>",
            pages.figure("time of each site in one call", site_chart(sites)),
            _sites(sites),
        ]
    facts = {"elsa": str(document.get("elsa_version", ""))}
    for part in (results["model"], results["settings"], document["environment"]):
        facts |= dict(_facts(part))  # the device is both asked for and described
    parts += ["<h2>Environment</h2>", pages.table((".what", ".value"), facts.items())]
    return pages.document(f"elsa profile: {name}", parts, _STYLE)


def _points(rows: Sequence[Document]) -> str:
    columns = (".configuration", ".run", "time of a call", "10th to 90th percentile",
               "images per second", "memory of a call", ".times as fast as eager",
               ".times as fast as the fastest baseline")  # fmt: skip
    lines = []
    for row in rows:
        if row["status"] != DONE:
            lines.append([point_name(row), f"{row['status']}: {row['reason']}"])
            continue
        for i, run in enumerate(row["profile"]["runs"]):
            size = run["memory_bytes"]
            memory = "" if size is None else f"{three(size / 1e6)} MB"
            lines.append([
                point_name(row) if i == 0 else "", run["name"], duration(run["seconds"]),
                f"{duration(run['seconds_p10'])} to {duration(run['seconds_p90'])}",
                three(run["images_per_second"]), memory,
                ratio_text(run["ratio"]), ratio_text(run["ratio_to_best"]),
            ])  # fmt: skip
        lines += [["", name, f"left out: {why}"]
                  for name, why in row["profile"]["left_out"].items()]  # fmt: skip
    return "<h2>All runs</h2>" + pages.table(columns, lines)


def _steps(runs: Sequence[Document]) -> tuple[str, str]:
    """Every run's training step: forward, backward and optimizer side by side, and as a table."""
    lines, rows = [], list[tuple[str, list[Bar]]]()
    for run in runs:
        spans = run["parts"].values()
        bars = [(f"b{k}", seconds) for k, seconds in enumerate(spans, 1)]
        rows.append((run["name"], [(bars, duration(sum(spans)))]))
        lines.append([run["name"], *map(duration, spans)])
    names = list(runs[0]["parts"])
    chart = _chart(rows, [(f"b{k}", name) for k, name in enumerate(names, 1)])
    table = pages.table((".run", *names), lines)
    return pages.figure("parts of a training step", chart), table


def _sites(sites: Sequence[Document]) -> str:
    columns = (".site", ".kind", "tokens", "heads x channels", "time before",
               "time after", "share of the model before", ".times as fast",
               "relative error against float64", ".served by")  # fmt: skip
    lines = []
    for site, share in zip(sites, shares(sites), strict=True):
        within = [each.removeprefix(f"{site['path']}.") for each in site.get("within", ())]
        name = (site["path"] or "the model") + (f" with {', '.join(within)}" if within else "")
        sizes = [site[key] for key in ("num_heads", "head_dim") if site[key] is not None]
        served = filter(None, (site["backend"], site["schedule"], site["precision"]))
        lines.append([
            name, site["kind"], tokens_text(site), "x".join(map(str, sizes)),
            duration(site["seconds_before"]), duration(site["seconds_after"]),
            share, ratio_text(site["ratio"]),
            "" if site["error"] is None else f"{site['error']:.1e}", ", ".join(served),
        ])  # fmt: skip
    return pages.table(columns, lines)


def _facts(part: Document) -> Iterable[tuple[str, str]]:
    for key, value in part.items():
        if isinstance(value, dict):
            # what is installed and a model's own arguments keep their names
            if key in ("packages", "model_kwargs"):
                yield from ((str(name), str(each)) for name, each in value.items())
            else:
                yield from _facts(value)
        elif value not in (None, "", [], ()):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield str(key).replace("_", " "), {"True": "yes", "False": "no"}.get(text, text)


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


def _chart(
    rows: Sequence[tuple[str, Sequence[Bar]]], legend: Sequence[tuple[str, str]] = ()
) -> str:
    longest = max(sum(size for _, size in parts) for _, bars in rows for parts, _ in bars)
    drawn, top = [], 0
    for heading, bars in rows:
        drawn.append(f'<text x="0" y="{top + 13}">{html.escape(heading)}</text>')
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
