"""Latency, throughput and memory of a profile in one picture, by matplotlib: for --plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from elsa_core.measuring.environment import label
from elsa_core.measuring.plots import save
from elsa_core.profiling.document import Document
from elsa_core.profiling.series import METRICS, Series, axis_of, finished, series_of, ticks_of

_OURS_COLOUR, _BEFORE_COLOUR = "#0b6e4f", "#9aa5b1"
_COLOURS: Final = ("#5b6770", "#c27c0e", "#8b5fbf", "#2f7ebc", "#b23a48", "#7f6a55")
_OURS_COLOURS: Final = (_OURS_COLOUR, "#3aa76d", "#12355b", "#5bc0be")


def plot(document: Document, path: Path) -> Path:
    """Write the picture, whole or not at all; `elsa_core.measuring.plots.check` comes before.

    Args:
        document: with at least one measured point.
        path: a .png or .svg file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = finished(document)
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, metric in zip(figure.subplots(1, 3), METRICS, strict=True):
        _draw_metric(axes, rows, *metric)
    name, where = document["results"]["model"].get("name", ""), label(document["environment"])
    figure.suptitle(_plain(f"{name}\n{where}"), fontsize=9)
    return save(figure, path)


def _draw_metric(axes: Any, rows: Sequence[Document], title: str, key: str, factor: float) -> None:
    series = series_of(rows, key, factor)
    ticks = ticks_of(series)
    if len(ticks) < 2:
        _bars(axes, series)
    else:
        _lines(axes, series, ticks)
        axes.set_xlabel("batch" if axis_of(rows) == "batch" else "image size, pixels a side")
    axes.set_title(title, fontsize=10)
    axes.grid(True, axis="y", alpha=0.25)


def _bars(axes: Any, series: Sequence[Series]) -> None:
    values = [one.points[0][2] for one in series]
    colours = [_OURS_COLOUR if one.patched else _BEFORE_COLOUR for one in series]
    bars = axes.bar(range(len(series)), values, color=colours)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8)
    axes.set_xticks(range(len(series)), [_plain(one.name) for one in series], rotation=20,
                    ha="right", fontsize=8)  # fmt: skip


def _lines(axes: Any, series: Sequence[Series], ticks: dict[int, str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    counts = [0, 0]
    for one in series:
        palette = _OURS_COLOURS if one.patched else _COLOURS
        colour = palette[counts[one.patched] % len(palette)]
        counts[one.patched] += 1
        axes.plot(
            [x for x, _, _ in one.points], [y for _, _, y in one.points],
            "o-" if one.patched else "s--", color=colour, markersize=4, label=_plain(one.name),
        )  # fmt: skip
    positive = all(y > 0 for one in series for _, _, y in one.points)
    axes.set(xscale="log", yscale="log" if positive else "linear")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    if positive:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=7)


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return text.replace("$", "\\$")
