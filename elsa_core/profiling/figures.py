"""Pictures by matplotlib, for --plot: of `elsa profile` and of `elsa bench attention`."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from elsa_core.base.files import staged_file
from elsa_core.errors import ArgumentError
from elsa_core.measuring.documents import Document
from elsa_core.measuring.environment import label
from elsa_core.profiling.bench.cases import OTHER_TABLES
from elsa_core.profiling.document import DONE
from elsa_core.profiling.page import metrics

_OURS: Final = ("#0b6e4f", "#3aa76d", "#12355b", "#5bc0be")
_OTHERS: Final = ("#5b6770", "#c27c0e", "#8b5fbf", "#2f7ebc", "#b23a48", "#7f6a55")
_DOLLAR: Final = r"\$"  # matplotlib reads formulas between bare dollars
Points = list[tuple[int, Any]]


def of_profile(document: Document, path: Path) -> Path:
    """Draw latency, throughput and memory of the measured points, as the page has them."""
    drawn = metrics([row for row in document["results"]["points"] if row["status"] == DONE])
    most = max(len(bars) for _, bars in drawn)
    name, size = document["results"]["model"].get("name", ""), (12.5, max(3.0, 1.4 + 0.3 * most))
    with _figure(document, path, str(name), size, len(drawn)) as panels:
        for axes, (title, bars) in zip(panels, drawn, strict=True):
            names, values, patched = zip(*bars, strict=True)
            colours = [_OURS[0] if own else "#9aa5b1" for own in patched]
            found = axes.barh(range(len(bars)), values, color=colours)
            axes.bar_label(found, [f"{value:.3g}" for value in values], fontsize=8, padding=2)
            labels = [name.replace("$", _DOLLAR) for name in names]
            axes.set_yticks(range(len(bars)), labels, fontsize=8)
            axes.invert_yaxis()
            axes.margins(x=0.25)
            axes.set_title(title, fontsize=10)
            axes.grid(True, axis="x", alpha=0.25)
    return path


def of_attention(document: Document, path: Path) -> Path:
    """Draw the largest family of cases that differ in their length alone.

    Left: median time of a call with the 10th to 90th percentile. Right: workspace beyond the
    output.
    """
    title, times, memory = family(document)
    spans = {
        name: [(n, m["seconds_p10"] * 1e3, m["seconds_p90"] * 1e3) for n, m in points]
        for name, points in times.items()
    }
    held = {name: [(n, size / 2**20) for n, size in p if size] for name, p in memory.items()}
    middles = {k: [(n, m["seconds"] * 1e3) for n, m in p] for k, p in times.items()}
    with _figure(document, path, title, (11, 4.6), 2) as panels:
        _lines(panels[0], middles, spans)
        _lines(panels[1], {name: points for name, points in held.items() if points}, {})
        for axes, what in zip(panels, ("time of a call, ms", "memory beyond the output, MiB"),
                              strict=True):  # fmt: skip
            axes.set(xlabel="tokens", ylabel=what)
            axes.grid(True, which="both", alpha=0.25)
    return path


def family(document: Document) -> tuple[str, dict[str, Points], dict[str, Points]]:
    """The cases to draw: those equal in all but length, with the most lengths.

    Returns:
        (title, {contender: [(tokens, measurement)]}, {contender: [(tokens, workspace bytes)]}),
        ordered by tokens.
    """
    families: defaultdict[tuple[Any, ...], dict[int, Document]] = defaultdict(dict)
    for result in document["results"]["cases"]:
        case = result["case"]
        kind = case["table"] if case["table"] in OTHER_TABLES else ""
        decode = case["queries"] == 1
        key = (case["batch"], case["heads"], case["head_dim"], case["dtype"], case["mask"], decode,
               kind)  # fmt: skip
        families[key].setdefault(int(case["keys"]), result)
    best = max(families, default=None,
               key=lambda key: (len(families[key]), key[2] == 64, key[4] == "none"))  # fmt: skip
    if best is None or len(families[best]) < 2:
        raise ArgumentError("plot: no two of these cases differ in length alone; measure a sweep")
    batch, heads, head_dim, dtype, mask, decode, kind = best
    title = f"{dtype} attention, batch {batch}, {heads} heads, head_dim {head_dim}"
    title += ", additive mask" if mask != "none" else ""
    title += ", one query" if decode else ""
    title += f", {kind}" if kind else ""
    times: defaultdict[str, Points] = defaultdict(list)
    memory: defaultdict[str, Points] = defaultdict(list)
    for tokens, result in sorted(families[best].items()):
        for measured in result["measurements"]:
            times[measured["contender"]].append((tokens, measured))
            if measured["workspace_bytes"] is not None:
                memory[measured["contender"]].append((tokens, measured["workspace_bytes"]))
    return title, dict(times), dict(memory)


@contextlib.contextmanager
def _figure(
    document: Document, path: Path, title: str, size: tuple[float, float], panels: int
) -> Iterator[Sequence[Any]]:
    """The axes of a figure, which is saved at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(1, panels, squeeze=False)[0]
    text = f"{title}\n{label(document['environment'])}"
    figure.suptitle(text.replace("$", _DOLLAR), fontsize=9)
    with staged_file(path) as staging:
        figure.savefig(staging, format=path.suffix.lower().lstrip("."), dpi=160)


def _lines(
    axes: Any, series: dict[str, Points], spans: dict[str, list[tuple[int, float, float]]]
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    palettes = {True: itertools.cycle(_OURS), False: itertools.cycle(_OTHERS)}
    for name, points in series.items():
        own = name.startswith("elsa")
        colour = next(palettes[own])
        axes.plot(*zip(*points, strict=True), "o-" if own else "s--", color=colour, markersize=4,
                  label=name.replace("$", _DOLLAR), zorder=2 + own)  # fmt: skip
        if name in spans:
            axes.fill_between(*zip(*spans[name], strict=True), alpha=0.15, color=colour,
                              linewidth=0)  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if series:
        axes.legend(fontsize=7)
