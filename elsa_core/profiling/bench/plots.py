"""Latency and memory against tokens, drawn from a result document. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from elsa_core.errors import ArgumentError
from elsa_core.measuring.environment import label
from elsa_core.measuring.plots import check, save

_Series = dict[str, list[tuple[int, Any]]]


def plot(document: dict[str, Any], path: Path, *, force: bool = False) -> Path:
    """Draw the largest family of cases that differ in their length alone.

    Left: median time of a call with the 10th to 90th percentile. Right: workspace beyond the
    output. Both axes are logarithmic.

    Args:
        document: as `elsa_core.profiling.bench.attention.document` gives it.
        path: a .png or .svg file; written whole or not at all.
        force: replace an existing file.

    Raises:
        ArgumentError: another suffix, an existing file, or fewer than two lengths to draw.
        UnavailableError: matplotlib is not installed.
    """
    check(path, force=force)
    title, times, memory = family(document)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, points in times.items():
        x = [tokens for tokens, _ in points]
        y = [m["seconds"] * 1e3 for _, m in points]
        low = [m["seconds_p10"] * 1e3 for _, m in points]
        high = [m["seconds_p90"] * 1e3 for _, m in points]
        own = name.startswith("elsa")
        line = left.plot(x, y, "o-" if own else "s--", markersize=4, label=name, zorder=2 + own)
        left.fill_between(x, low, high, alpha=0.15, color=line[0].get_color(), linewidth=0)
        kept = [(n, m) for n, m in memory.get(name, []) if m > 0]
        if kept:
            right.plot(
                [n for n, _ in kept], [m / 2**20 for _, m in kept],
                "o-" if own else "s--", markersize=4, label=name, color=line[0].get_color(),
            )  # fmt: skip
    for axes, what in ((left, "time of a call, ms"), (right, "memory beyond the output, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=what)
        axes.grid(True, which="both", alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(f"{title}\n{label(document['environment'])}", fontsize=9)
    return save(figure, path)


def family(document: dict[str, Any]) -> tuple[str, _Series, _Series]:
    """The cases to draw: those equal in all but length, with the most lengths.

    Returns:
        (title, {contender: [(tokens, measurement)]}, {contender: [(tokens, workspace bytes)]}),
        ordered by tokens.

    Raises:
        ArgumentError: no two cases differ in length alone.
    """
    families: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for result in document["results"]["cases"]:
        case = result["case"]
        decode = case["queries"] == 1
        key = (case["batch"], case["heads"], case["head_dim"], case["dtype"], case["mask"], decode)
        families[key].append(result)

    def rank(key: tuple[Any, ...]) -> tuple[int, bool, bool]:
        lengths = {result["case"]["keys"] for result in families[key]}
        return len(lengths), key[2] == 64, key[4] == "none"

    best = max(families, key=rank, default=None)
    if best is None or rank(best)[0] < 2:
        raise ArgumentError("plot: no two of these cases differ in length alone; measure a sweep")
    batch, heads, head_dim, dtype, mask, decode = best
    title = f"{dtype} attention, batch {batch}, {heads} heads, head_dim {head_dim}"
    title += ", additive mask" if mask != "none" else ""
    title += ", one query" if decode else ""
    times: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
    memory: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
    drawn: set[int] = set()
    for result in sorted(families[best], key=lambda r: int(r["case"]["keys"])):
        tokens = result["case"]["keys"]
        if tokens in drawn:
            continue
        drawn.add(tokens)
        for measured in result["measurements"]:
            times[measured["contender"]].append((tokens, measured))
            if measured["workspace_bytes"] is not None:
                memory[measured["contender"]].append((tokens, measured["workspace_bytes"]))
    return title, dict(times), dict(memory)
