"""Draws small models in training, patched and original: `python docs/convergence_chart.py`.

Reads results/convergence.csv and writes docs/convergence.svg. A panel is one model on one data set
in one dtype: test accuracy by epoch, the mean over the seeds as a line, their range as a band.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.tables import rows_of
from elsa_core.profiling.bench.published import ENVIRONMENTS, RESULTS

CHART = Path(__file__).with_name("convergence.svg")

WIDTH, HEIGHT, GAP, TOP, LEFT, COLUMNS = 180, 120, 34, 64, 40, 4
WAYS = ("original", "patched")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-size: 14px; font-weight: 600 } .note { fill: #57606a; font-size: 11px }
.panel { fill: none; stroke: #d0d7de } polyline { fill: none; stroke-width: 2 }
polyline.original { stroke: #57606a; stroke-dasharray: 5 3 } polyline.patched { stroke: #1a7f5a }
polygon { opacity: 0.18; stroke: none } polygon.original { fill: #57606a }
polygon.patched { fill: #1a7f5a }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .note { fill: #9da7b1 } .panel { stroke: #3d444d }
polyline.original { stroke: #9da7b1 } polyline.patched { stroke: #3fb68b }
polygon.original { fill: #9da7b1 } polygon.patched { fill: #3fb68b } }
"""


def main() -> None:
    """Write the chart."""
    CHART.write_text(drawn(), encoding="utf-8")


def drawn() -> str:
    """The chart as an SVG document."""
    panels: dict[tuple[str, ...], dict[str, list[list[float]]]] = {}
    for row in rows_of("convergence"):
        data, _, model = row["case"].partition("/")
        curves = panels.setdefault((data, *model.split("-")), {way: [] for way in WAYS})
        curves[row["contender"]].append([float(each) for each in row["accuracy"].split()])
    lines = []
    for i, (key, curves) in enumerate(panels.items()):
        x = LEFT + (i % COLUMNS) * (WIDTH + GAP)
        y = TOP + (i // COLUMNS) * (HEIGHT + 2 * GAP)
        lines += _panel(" · ".join(key), curves, x, y)
    high = -(-len(panels) // COLUMNS)
    width = LEFT + min(COLUMNS, len(panels)) * (WIDTH + GAP)
    height = TOP + high * (HEIGHT + 2 * GAP)
    environments = json.loads((RESULTS / ENVIRONMENTS).read_text(encoding="utf-8"))
    settings = environments["convergence"]["settings"]
    note = (
        f"{settings['seeds']} seeds, mean and range; original dashed, patched (elsa's "
        f"{settings['backend']} kernels) solid"
    )
    head = [
        '<text class="title" x="8" y="20">Test accuracy by epoch</text>',
        f'<text class="note" x="8" y="38">{note}</text>',
    ]
    body = "\n".join([*head, *lines])
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _panel(title: str, curves: dict[str, list[list[float]]], x: int, y: int) -> list[str]:
    epochs = len(curves["original"][0])
    lines = [
        f'<rect class="panel" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{x}" y="{y - 6}">{title}</text>',
        f'<text class="note" x="{x - 4}" y="{y + 8}" text-anchor="end">1</text>',
        f'<text class="note" x="{x - 4}" y="{y + HEIGHT}" text-anchor="end">0</text>',
        f'<text class="note" x="{x + WIDTH}" y="{y + HEIGHT + 14}" text-anchor="end">'
        f"{epochs} epochs</text>",
    ]

    def point(epoch: int, accuracy: float) -> str:
        across = x + WIDTH * epoch / max(epochs - 1, 1)
        return f"{across:.1f},{y + HEIGHT * (1 - accuracy):.1f}"

    for way, runs in curves.items():
        by_epoch = list(zip(*runs, strict=True))
        low = [point(i, min(values)) for i, values in enumerate(by_epoch)]
        high = [point(i, max(values)) for i, values in enumerate(by_epoch)]
        mean = [point(i, sum(values) / len(values)) for i, values in enumerate(by_epoch)]
        lines.append(f'<polygon class="{way}" points="{" ".join([*low, *reversed(high)])}"/>')
        lines.append(f'<polyline class="{way}" points="{" ".join(mean)}"/>')
    return lines


if __name__ == "__main__":
    main()
