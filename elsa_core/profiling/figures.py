"""Charts of a profile's document, by matplotlib: for --plot, and inside the page of --html."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from elsa_core.errors import UnavailableError
from elsa_core.measuring.documents import side
from elsa_core.measuring.environment import label
from elsa_core.measuring.plots import check as check_target
from elsa_core.measuring.plots import save
from elsa_core.profiling.document import DONE, Document

SLOWEST: Final = 10
_METRICS: Final = (
    ("latency, ms", "seconds", 1e3),
    ("throughput, images/s", "images_per_second", 1.0),
    ("memory of a call, MB", "memory_bytes", 1e-6),
)
_OURS_COLOUR, _BEFORE_COLOUR = "#0b6e4f", "#9aa5b1"
_COLOURS: Final = ("#5b6770", "#c27c0e", "#8b5fbf", "#2f7ebc", "#b23a48", "#7f6a55")
_OURS_COLOURS: Final = (_OURS_COLOUR, "#3aa76d", "#12355b", "#5bc0be")


def check() -> None:
    """Raise where charts cannot be drawn.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("charts need matplotlib: pip install 'elsa-attention[plot]'")


def check_plot(path: Path, *, force: bool) -> None:
    """Raise what `plot` would raise for `path`, before anything is measured.

    Raises:
        ArgumentError, UnavailableError: as `elsa_core.measuring.plots.check`.
    """
    check_target(path, force=force)


def plot(document: Document, path: Path) -> Path:
    """Latency, throughput and memory of the document's points in one .png or .svg file."""
    rows = finished(document)
    figure = _figure(12.5, 4.2)
    for axes, metric in zip(figure.subplots(1, 3), _METRICS, strict=True):
        _draw_metric(axes, rows, *metric)
    figure.suptitle(
        f"{document['results']['model'].get('name', '')}\n{_where(document)}", fontsize=9
    )
    return save(figure, path)


def metric_charts(document: Document) -> list[tuple[str, str]]:
    """(title, SVG) of latency, throughput and memory against the image size."""
    rows = finished(document)
    found = []
    for metric in _METRICS:
        if all(run[metric[1]] is None for row in rows for run in row["profile"]["runs"]):
            continue
        figure = _figure(5.4, 3.7)
        _draw_metric(figure.subplots(), rows, *metric)
        found.append((metric[0], _svg(figure)))
    return found


def site_chart(row: Document) -> str:
    """SVG of the slowest sites' time before and after, and of the rest of the model."""
    sites = row["profile"]["sites"]
    shown = [*sites[:-1][:SLOWEST], sites[-1]]
    figure = _figure(7.6, 0.9 + 0.36 * len(shown))
    axes = figure.subplots()
    places = range(len(shown))
    for offset, key, colour, name in (
        (-0.2, "seconds_before", _BEFORE_COLOUR, "before"),
        (0.2, "seconds_after", _OURS_COLOUR, "patched"),
    ):
        values = [site[key] * 1e3 for site in shown]
        axes.barh([p + offset for p in places], values, 0.38, color=colour, label=name)
    axes.set_yticks(list(places), [_plain(site["path"] or "the model") for site in shown])
    axes.invert_yaxis()
    axes.set_xlabel("time in one forward, ms")
    axes.grid(True, axis="x", alpha=0.25)
    axes.legend(fontsize=8)
    return _svg(figure)


def finished(document: Document) -> list[Document]:
    """The points that were measured."""
    return [row for row in document["results"]["points"] if row["status"] == DONE]


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


def _axis(rows: Sequence[Document]) -> str:
    """What varies along x: the image size, or the batch where only that varies."""
    sizes = {str(row["profile"]["image_size"]) for row in rows}
    batches = {row["configuration"]["batch"] for row in rows}
    return "batch" if len(sizes) == 1 and len(batches) > 1 else "image_size"


def _draw_metric(axes: Any, rows: Sequence[Document], title: str, key: str, factor: float) -> None:
    axis = _axis(rows)
    lines: dict[tuple[str, str, bool], list[tuple[int, str, float]]] = {}
    for row in rows:
        shape = row["profile"]["image_size"] or [0, 0]
        x, text = (
            (row["profile"]["batch"], str(row["profile"]["batch"]))
            if axis == "batch"
            else (shape[0] * shape[1], side(shape))
        )
        extra = series_name(row, rows, axis)
        for run in row["profile"]["runs"]:
            if run[key] is not None:
                line = lines.setdefault((run["name"], extra, run["patched"]), [])
                line.append((x, text, run[key] * factor))
    ticks = dict(sorted({(x, text) for line in lines.values() for x, text, _ in line}))
    if len(ticks) < 2:
        _bars(axes, lines)
    else:
        _lines(axes, lines, ticks)
        axes.set_xlabel("batch" if axis == "batch" else "image size, pixels a side")
    axes.set_title(title, fontsize=10)
    axes.grid(True, axis="y", alpha=0.25)


def _bars(axes: Any, lines: dict[tuple[str, str, bool], list[tuple[int, str, float]]]) -> None:
    names = [" ".join(filter(None, key[:2])) for key in lines]
    values = [points[0][2] for points in lines.values()]
    colours = [_OURS_COLOUR if key[2] else _BEFORE_COLOUR for key in lines]
    bars = axes.bar(range(len(names)), values, color=colours)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8)
    axes.set_xticks(range(len(names)), [_plain(n) for n in names], rotation=20, ha="right",
                    fontsize=8)  # fmt: skip


def _lines(
    axes: Any,
    lines: dict[tuple[str, str, bool], list[tuple[int, str, float]]],
    ticks: dict[int, str],
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    counts = [0, 0]
    for (name, extra, is_ours), points in lines.items():
        points.sort()
        palette = _OURS_COLOURS if is_ours else _COLOURS
        colour = palette[counts[is_ours] % len(palette)]
        counts[is_ours] += 1
        axes.plot(
            [x for x, _, _ in points], [y for _, _, y in points], "o-" if is_ours else "s--",
            color=colour, markersize=4, label=_plain(" ".join(filter(None, (name, extra)))),
        )  # fmt: skip
    positive = all(y > 0 for points in lines.values() for _, _, y in points)
    axes.set(xscale="log", yscale="log" if positive else "linear")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    if positive:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=7)


def _where(document: Document) -> str:
    return _plain(label(document["environment"]))


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return text.replace("$", "\\$")


def _figure(width: float, height: float) -> Any:
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _svg(figure: Any) -> str:
    """The figure as an <svg> element, its texts kept as text."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    return text[text.index("<svg") :]
