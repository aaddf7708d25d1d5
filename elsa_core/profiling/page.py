"""The page of `elsa profile --html`: one file with charts, tables and environment, no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from elsa_core.errors import UnavailableError
from elsa_core.files import write_text
from elsa_core.measuring.environment import label
from elsa_core.profiling import figures
from elsa_core.profiling.document import DONE, Document
from elsa_core.profiling.words import (
    bound_text,
    heads_text,
    point_name,
    ratio_text,
    tokens_text,
    verdict_text,
    warning_lines,
)

_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2830; background: #f5f6f7; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 6px; } p { margin: 4px 0; }
.dim { color: #5b6770; } .gain { font-size: 18px; margin: 14px 0; }
.warning { background: #fff3d6; border-left: 4px solid #c27c0e; padding: 6px 12px; margin: 6px 0; }
.charts { display: flex; flex-wrap: wrap; gap: 14px; }
figure { background: #fff; border: 1px solid #dde2e6; border-radius: 6px; margin: 0; padding: 8px; }
figure svg { display: block; max-width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; background: #fff; font-size: 14px; }
th, td { padding: 4px 10px; border: 1px solid #dde2e6; text-align: right; white-space: nowrap; }
th { background: #eceff1; } .text { text-align: left; }
.faster { color: #0b6e4f; } .slower { color: #b23a48; }
"""


def write(document: Document, path: Path) -> Path:
    """Write the page, whole or not at all.

    Raises:
        UnavailableError: matplotlib is not installed, or the file cannot be written.
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
    rows = figures.finished(document)
    parts = [
        f"<h1>{_text(name)}: what patching gains</h1>",
        f'<p class="dim">{_text(label(document["environment"]))}</p>',
        "" if results["complete"] else '<p class="warning">This sweep is not complete.</p>',
        *(_gain(row) for row in rows),
    ]
    parts += [f'<p class="warning">{_text(line)}</p>' for line in warning_lines(rows)]
    if rows:
        parts.append("<h2>Against what one would otherwise run</h2>")
        charts = (_figure(title, svg) for title, svg in figures.metric_charts(document))
        parts += ['<div class="charts">', *charts, "</div>"]
    parts += [_points(results["points"])]
    with_sites = [row for row in rows if len(row["profile"]["sites"]) > 1]
    if with_sites:
        parts.append("<h2>Where the time goes</h2>")
    for row in with_sites:
        parts += [
            f"<h3>{_text(point_name(row))}</h3>",
            '<div class="charts">', _figure("attention sites", figures.site_chart(row)), "</div>",
            _sites(row["profile"]["sites"]),
        ]  # fmt: skip
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


def _figure(title: str, svg: str) -> str:
    return f'<figure role="img" aria-label="{_text(title)}">{svg}</figure>'


def _points(rows: Sequence[Document]) -> str:
    columns = (".point", ".run", "ms", "10 to 90%", "images/s", "memory, MB", ".against eager",
               ".against the fastest baseline")  # fmt: skip
    lines = []
    for row in rows:
        if row["status"] != DONE:
            lines.append([point_name(row), f"{row['status']}: {row['reason']}", *[""] * 6])
            continue
        for i, run in enumerate(row["profile"]["runs"]):
            memory = "" if run["memory_bytes"] is None else f"{run['memory_bytes'] / 1e6:.1f}"
            lines.append([
                point_name(row) if i == 0 else "", run["name"], f"{run['seconds'] * 1e3:.4g}",
                f"{run['seconds_p10'] * 1e3:.3g} to {run['seconds_p90'] * 1e3:.3g}",
                f"{run['images_per_second']:.4g}", memory, ratio_text(run["ratio"]),
                ratio_text(run["ratio_to_best"]),
            ])  # fmt: skip
        lines += [["", name, f"left out: {why}", *[""] * 5]
                  for name, why in row["profile"]["left_out"].items()]  # fmt: skip
    return "<h2>All runs</h2>" + _table(columns, lines)


def _sites(sites: Sequence[Document]) -> str:
    columns = (".site", ".kind", "tokens", "heads", "before, ms", "after, ms", "share",
               ".change", "error", ".backend", ".schedule", ".precision")  # fmt: skip
    lines = [
        [
            site["path"] or "the model", site["kind"], tokens_text(site), heads_text(site),
            f"{site['seconds_before'] * 1e3:.3g}", f"{site['seconds_after'] * 1e3:.3g}",
            f"{site['share']:.1%}", ratio_text(site["ratio"]),
            "" if site["error"] is None else f"{site['error']:.1e}", site["backend"],
            site["schedule"], site["precision"],
        ]
        for site in sites
    ]  # fmt: skip
    return _table(columns, lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
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
    return f'<div class="table"><table>{inner}</table></div>'


def _environment(document: Document) -> str:
    flat: list[list[str]] = [["elsa", str(document.get("elsa_version", ""))]]
    for part in (document["results"]["model"], document["results"]["settings"],
                 document["environment"]):  # fmt: skip
        for key, value in part.items():
            if isinstance(value, dict):
                flat += [[f"{key} {name}", str(inner)] for name, inner in value.items() if inner]
            elif value not in (None, "", [], ()):
                text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                flat.append([str(key), text])
    return "<h2>Environment</h2>" + _table((".what", ".value"), flat)


def _text(text: object) -> str:
    return html.escape(str(text))
