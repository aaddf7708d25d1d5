"""The page of `elsa profile --html`: one file with charts, tables and environment, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elsa_core.base import pages
from elsa_core.measuring.environment import label
from elsa_core.profiling import charts
from elsa_core.profiling.document import DONE, Document
from elsa_core.profiling.words import (
    bound_text,
    duration,
    point_name,
    ratio_text,
    shares,
    three,
    tokens_text,
    verdict_text,
    warning_lines,
)


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
        drawn = (pages.figure(title, chart) for title, chart in charts.metric_charts(rows))
        parts += ['<div class="charts">', *drawn, "</div>"]
    parts += [_points(results["points"])]
    for row in rows:
        runs = row["profile"]["runs"]
        if all(run.get("parts") for run in runs):  # training steps
            chart = pages.figure("parts of a training step", charts.parts_chart(runs))
            lines = [[run["name"], *map(duration, run["parts"].values())] for run in runs]
            table = pages.table((".run", *runs[0]["parts"]), lines)
            parts += [f"<h2>{pages.text(point_name(row))}</h2>", chart, table]
    with_sites = [row for row in rows if len(row["profile"]["sites"]) > 1]
    if with_sites:
        parts.append("<h2>Where the time goes</h2>")
    for row in with_sites:
        sites = row["profile"]["sites"]
        parts += [
            f"<h3>{pages.text(point_name(row))}</h3>",
            pages.figure("time of each site in one call", charts.site_chart(sites)),
            _sites(sites),
        ]
    facts = {"elsa": str(document.get("elsa_version", ""))}
    for part in (results["model"], results["settings"], document["environment"]):
        facts |= dict(_facts(part))  # the device is both asked for and described
    parts += ["<h2>Environment</h2>", pages.table((".what", ".value"), facts.items())]
    return pages.document(f"elsa profile: {name}", parts, charts.STYLE)


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
