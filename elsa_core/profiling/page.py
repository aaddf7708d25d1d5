"""The page of `elsa profile --html`: one file with charts, tables and environment, no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from elsa_core.errors import UnavailableError
from elsa_core.files import write_text
from elsa_core.measuring.environment import label
from elsa_core.profiling import charts
from elsa_core.profiling.document import DONE, Document
from elsa_core.profiling.series import finished
from elsa_core.profiling.words import (
    bound_text,
    duration,
    heads_text,
    is_step,
    megabytes,
    point_name,
    ratio_text,
    three,
    tokens_text,
    verdict_text,
    warning_lines,
)

_LIGHT: Final = """
  --text: #1d2830; --dim: #5b6770; --page: #f5f6f7; --card: #fff; --line: #dde2e6; --head: #eceff1;
  --warn: #fff3d6; --ours: #0b6e4f; --before: #9aa5b1; --b0: #5b6770; --b1: #a8660a; --b2: #7d4fb3;
  --b3: #2069a3; --p1: #2f8f5b; --p2: #12355b; --p3: #1b7f86;
"""
_DARK: Final = """
  --text: #e4e9ed; --dim: #9fb0bd; --page: #14191d; --card: #1d242a; --line: #34404a;
  --head: #27313a; --warn: #40330f; --ours: #3fc795; --before: #71808d; --b0: #a5b2bd;
  --b1: #e2a64b; --b2: #bd98e6; --b3: #74b6ea; --p1: #86dfb0; --p2: #9dbfe8; --p3: #6fd3d9;
"""
_STYLE: Final = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  margin: 0; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 20px; }}
h1, h2, h3, p, li, td {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px; }}
h2 {{ font-size: 18px; margin: 32px 0 8px; }}
h3 {{ font-size: 15px; margin: 20px 0 6px; }} p {{ margin: 4px 0; }}
.dim {{ color: var(--dim); }} .gain {{ font-size: 18px; margin: 14px 0; }}
.warning {{ background: var(--warn); border-left: 4px solid #c27c0e; padding: 6px 12px;
  margin: 6px 0; }}
.charts {{ display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); }}
figure {{ background: var(--card); border: 1px solid var(--line); border-radius: 6px; margin: 0;
  padding: 12px; min-width: 0; }}
figure > svg {{ display: block; overflow: visible; }}
figcaption {{ font-weight: 600; margin-bottom: 8px; }}
.legend {{ list-style: none; display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 8px 0 0;
  padding: 0; font-size: 13px; }} .legend svg {{ vertical-align: -2px; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; background: var(--card); font-size: 14px; }}
th, td {{ padding: 4px 10px; border: 1px solid var(--line); text-align: right;
  white-space: nowrap; }}
th {{ background: var(--head); }} .text {{ text-align: left; }}
.facts td {{ white-space: normal; }}
@media print {{ body {{ background: none; }} main {{ max-width: none; padding: 0; }}
  figure, tr {{ break-inside: avoid; }} .table {{ overflow: visible; }}
  th, td {{ white-space: normal; }} }}
{charts.STYLE}"""


def write(document: Document, path: Path) -> Path:
    """Write the page, whole or not at all.

    Raises:
        UnavailableError: the file cannot be written.
    """
    text = page(document)
    try:
        return write_text(text, path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written: {error.strerror or error}") from error


def page(document: Document) -> str:
    """The whole page as HTML."""
    results = document["results"]
    name = str(results["model"].get("name", "model"))
    rows = finished(document)
    parts = [
        f"<h1>{_text(name)}: what patching gains</h1>",
        f'<p class="dim">{_text(label(document["environment"]))}</p>',
        "" if results["complete"] else '<p class="warning">This sweep is not complete.</p>',
        *(_gain(row) for row in rows),
    ]
    parts += [f'<p class="warning">{_text(line)}</p>' for line in warning_lines(rows)]
    if rows:
        parts.append("<h2>Against what one would otherwise run</h2>")
        drawn = (_figure(title, chart) for title, chart in charts.metric_charts(rows))
        parts += ['<div class="charts">', *drawn, "</div>"]
    parts += [_points(results["points"])]
    for row in rows:
        runs = row["profile"]["runs"]
        if is_step(row["profile"]):
            chart = _figure("parts of a training step", charts.parts_chart(runs))
            parts += [f"<h2>{_text(point_name(row))}</h2>", chart, _steps(runs)]
    with_sites = [row for row in rows if len(row["profile"]["sites"]) > 1]
    if with_sites:
        parts.append("<h2>Where the time goes</h2>")
    for row in with_sites:
        sites = row["profile"]["sites"]
        chart = _figure("time of each site in one call", charts.site_chart(sites))
        parts += [f"<h3>{_text(point_name(row))}</h3>", chart, _sites(sites)]
    parts.append(_environment(document))
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>elsa profile: {_text(name)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _gain(row: Document) -> str:
    found = row["profile"]
    bound = bound_text(found)
    lines = [f'<p class="gain"><b>{_text(point_name(row))}</b>: {_text(verdict_text(found))}</p>']
    return "".join(lines + ([f"<p>{_text(bound)}</p>"] if bound else []))


def _figure(title: str, chart: str) -> str:
    caption = f"<figcaption>{_text(title)}</figcaption>"
    return f'<figure role="group" aria-label="{_text(title)}">{caption}{chart}</figure>'


def _points(rows: Sequence[Document]) -> str:
    columns = (".configuration", ".run", "time of a call", "10th to 90th percentile",
               "images per second", "memory of a call", ".times as fast as eager",
               ".times as fast as the fastest baseline")  # fmt: skip
    lines = []
    for row in rows:
        if row["status"] != DONE:
            lines.append([point_name(row), f"{row['status']}: {row['reason']}", *[""] * 6])
            continue
        for i, run in enumerate(row["profile"]["runs"]):
            lines.append([
                point_name(row) if i == 0 else "", run["name"], duration(run["seconds"]),
                f"{duration(run['seconds_p10'])} to {duration(run['seconds_p90'])}",
                three(run["images_per_second"]), megabytes(run["memory_bytes"]),
                ratio_text(run["ratio"]), ratio_text(run["ratio_to_best"]),
            ])  # fmt: skip
        lines += [["", name, f"left out: {why}", *[""] * 5]
                  for name, why in row["profile"]["left_out"].items()]  # fmt: skip
    return "<h2>All runs</h2>" + _table(columns, lines)


def _steps(runs: Sequence[Document]) -> str:
    names = list(runs[0]["parts"])
    lines = [[run["name"], *(duration(run["parts"][name]) for name in names)] for run in runs]
    return _table((".run", *names), lines)


def _sites(sites: Sequence[Document]) -> str:
    columns = (".site", ".kind of attention", "tokens", "heads x channels", "time before",
               "time after", "share of the model before", ".times as fast",
               "relative error against float64", ".backend", ".schedule", ".precision")  # fmt: skip
    lines = [
        [
            site["path"] or "the model", site["kind"], tokens_text(site), heads_text(site),
            duration(site["seconds_before"]), duration(site["seconds_after"]),
            f"{site['share']:.1%}", ratio_text(site["ratio"]),
            "" if site["error"] is None else f"{site['error']:.1e}", site["backend"],
            site["schedule"], site["precision"],
        ]
        for site in sites
    ]  # fmt: skip
    return _table(columns, lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    kinds = [' class="text"' if title.startswith(".") else "" for title in columns]
    head = "".join(
        f"<th{kind}>{_text(title.lstrip('.'))}</th>"
        for kind, title in zip(kinds, columns, strict=True)
    )
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>"
                         for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )  # fmt: skip
    inner = f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    return f'<div class="table {name}"><table>{inner}</table></div>'


_WORDS: Final = {
    "given": "model as typed", "name": "model", "source": "where the model comes from",
    "alias": "short name", "pretrained": "published weights", "seed": "seed of the weights",
    "arch": "architecture given", "architecture": "architecture", "weights": "weights",
    "weights_sha256": "SHA-256 of the weights", "baselines": "measured against",
    "backend": "kernels asked for", "include": "sites included", "exclude": "sites excluded",
    "scope": "what may be patched",
    "rounds": "rounds at least", "budget_seconds": "budget, seconds", "sites": "sites timed",
    "errors": "errors checked", "device": "device", "date": "measured on (UTC)",
    "python": "Python", "platform": "system", "machine": "architecture of the processor",
    "cpu": "processor", "cpu_count": "logical processors", "isa": "PyTorch's CPU instruction set",
    "kernels": "elsa's CPU instruction set", "threads": "threads", "gpu": "GPU",
    "compute_capability": "GPU compute capability", "multiprocessors": "GPU multiprocessors",
    "memory_bytes": "GPU memory, bytes", "cuda": "CUDA", "driver": "GPU driver",
}  # fmt: skip


def _environment(document: Document) -> str:
    facts = [("elsa", str(document.get("elsa_version", "")))]
    results = document["results"]
    for part in (results["model"], results["settings"], document["environment"]):
        facts += _facts(part)
    unique = dict(facts)  # the device is both asked for and described
    return "<h2>Environment</h2>" + _table((".what", ".value"), unique.items(), "facts")


def _facts(part: Document) -> Iterable[tuple[str, str]]:
    """Keys in words and values as text; what is not known or not set is left out."""
    for key, value in part.items():
        if isinstance(value, dict):
            yield from _facts(value)
        elif value not in (None, "", [], ()):
            yield _WORDS.get(str(key), str(key).replace("_", " ")), _value(value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _text(text: object) -> str:
    return html.escape(str(text))
