"""The tables of docs/benchmarks.md and docs/gains.md, from results/*.csv.

`python -m benchmarks.tables` renews both.

A page marks where a table goes:

    <!-- begin:bench:attention_cpu:vit -->
    <!-- end:bench:attention_cpu:vit -->

The middle names the file, the last part one of its tables, or `summary` (where it was measured and
which cases missed their goal), `sweep` (ratios by tokens and head_dim), `command` (what wrote it).
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import gains
from elsa_core.base.messages import milliseconds
from elsa_core.errors import ArgumentError
from elsa_core.measuring.intervals import FEWEST_ROUNDS
from elsa_core.profiling.bench import families, published, summary
from elsa_core.profiling.bench.summary import own_of

PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
GAINS: Final = PAGE.with_name("gains.md")
_BLOCK: Final = re.compile(
    r"(?P<begin><!-- begin:bench:(?P<file>[\w.-]+):(?P<table>[\w-]+) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<end><!-- end:bench:(?P=file):(?P=table) -->)",
    re.DOTALL,
)
_MARKER: Final = re.compile(r"<!-- (?:begin|end):bench:[^\n]*?-->")
Document = dict[str, Any]
Row = dict[str, str]


def rendered(text: str) -> str:
    """`text` with every marked table as the results give it.

    Raises:
        ArgumentError: a marker without its partner, or one that names no file or table.
    """
    paired, found = 2 * len(_BLOCK.findall(text)), _MARKER.findall(text)
    if len(found) != paired:
        raise ArgumentError(f"{len(found)} bench markers, but {paired} stand in begin/end pairs")
    return _BLOCK.sub(lambda b: b["begin"] + render(b["file"], b["table"]) + b["end"], text)


def render(name: str, table: str) -> str:
    """The Markdown of one table of `results/NAME.csv`.

    Raises:
        ArgumentError: there is no such file or table.
    """
    if name == "gains":
        return markdown(*gains.table(table))
    if (name, table) in STUDIES:
        return STUDIES[name, table](rows_of(name))
    return of_document(published.read(published.RESULTS / f"{name}.csv"), table)


def of_document(document: Document, table: str) -> str:
    """The Markdown of one table of a result document.

    Raises:
        ArgumentError: it has no such table.
    """
    cases = document["results"]["cases"]
    whole = document["command"] != "bench attention"
    if table == "summary":
        return (summary.of_models if whole else summary.of_attention)(document) + "\n"
    if table == "command":
        lines = document["lines"]
        listed = "\n\n```\n" + "\n".join(lines) + "\n```" if lines[1:] else f" `{lines[0]}`."
        return f"Written by{listed}\n"
    if table == "points":
        return markdown(*models_table(cases, points=True))
    cases = [case for case in cases if case["case"]["table"] == table]
    if not cases:
        raise ArgumentError(f"table: the results have no {table!r}")
    if table == "sweep":
        return _sweep(cases)
    made = families_table if table == families.TABLE else models_table
    return markdown(*(made if whole else attention_table)(cases))


def rows_of(name: str) -> list[Row]:
    """The rows of a study's file."""
    with (published.RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def attention_table(cases: Sequence[Document]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of cases: times of elsa and of every peer, ratio, rate, errors, memory."""
    precisions = list(dict.fromkeys(p for c in cases for p in c["case"]["precisions"]))
    peers = list(
        dict.fromkeys(
            m["contender"] for c in cases for m in c["measurements"] if m["precision"] is None
        )
    )
    names = [f"elsa-{precision}" for precision in precisions] + peers
    decode = any(m["bytes_per_second"] for c in cases for m in c["measurements"])
    rate = "TB/s" if decode else "TFLOP/s" if _fast(cases) else "GFLOP/s"
    plain = [name.removesuffix("-strict") for name in names]
    memory = any(m["workspace_bytes"] is not None for c in cases for m in c["measurements"])
    host = any(m["host_seconds"] is not None for c in cases for m in c["measurements"])
    dtypes = {c["case"]["dtype"] for c in cases}
    columns = ["B,H,N,D", *(f">{name}, ms" for name in plain), ">ratio (10 to 90%)", f">{rate}"]
    columns += [">error elsa / peer"]
    columns += [">extra MB elsa / peer"] if memory else []
    columns += [">host us elsa / peer"] if host else []
    rows = []
    for case in cases:
        found = {m["contender"]: m for m in case["measurements"]}
        own, best = own_of(case), found.get(case["best_peer"])
        row = [_shape(case["case"], len(dtypes) > 1), *(_time(found.get(n), case) for n in names)]
        row += [_ratio(own), _rate(own, rate), _pair(own, best, "error", "{:.1e}", 1.0)]
        row += [_pair(own, best, "workspace_bytes", "{:.1f}", 1e-6)] if memory else []
        row += [_pair(own, best, "host_seconds", "{:.0f}", 1e6)] if host else []
        rows.append(row)
    return columns, rows


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a column whose title starts with ">" is aligned to the right."""
    lines = ["| " + " | ".join(title.lstrip(">") for title in columns) + " |"]
    lines.append("|" + "|".join("---:" if c.startswith(">") else "---" for c in columns) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _sweep(cases: Sequence[Document]) -> str:
    """Ratios against the best peer: rows are tokens, columns head_dim with and without a mask."""
    keys = sorted({(c["case"]["mask"] != "none", c["case"]["head_dim"]) for c in cases})
    tokens = sorted({c["case"]["keys"] for c in cases})
    cells = {
        (c["case"]["keys"], c["case"]["mask"] != "none", c["case"]["head_dim"]): own_of(c)
        for c in cases
    }
    columns = ["N", *(f">D {dim}{', mask' if mask else ''}" for mask, dim in keys)]
    rows = [
        [str(n), *(_short_ratio(cells.get((n, mask, dim))) for mask, dim in keys)] for n in tokens
    ]
    return markdown(columns, rows)


def _shape(case: Document, mixed: bool) -> str:
    tokens = (
        case["keys"] if case["keys"] == case["queries"] else f"{case['queries']}:{case['keys']}"
    )
    mask = " + mask" if case["mask"] != "none" else ""
    dtype = f" {case['dtype']}" if mixed or case["table"] in ("decode", "lengths") else ""
    return f"{case['batch']},{case['heads']},{tokens},{case['head_dim']}{dtype}{mask}"


def _time(measured: Document | None, case: Document) -> str:
    if measured is None:
        return "-"
    another = "computes" in (measured.get("notes") or {})
    if measured["contender"] in case["wrong"] and not another:
        return "wrong"
    text = milliseconds(measured["seconds"])
    return f"**{text}**" if measured["contender"] == case["best_peer"] else text


def _ratio(own: Document | None) -> str:
    if own is None or own["ratio"] is None:
        return "-"
    return f"{own['ratio']:.2f} ({own['ratio_p10']:.2f} to {own['ratio_p90']:.2f})"


def _short_ratio(own: Document | None) -> str:
    return "-" if own is None or own["ratio"] is None else f"{own['ratio']:.2f}"


def _rate(own: Document | None, unit: str) -> str:
    if own is None:
        return "-"
    if unit == "TB/s":
        return f"{own['bytes_per_second'] / 1e12:.2f}" if own["bytes_per_second"] else "-"
    rate = f"{own['flops_per_second'] / (1e12 if unit == 'TFLOP/s' else 1e9):.3g}"
    share = own["ceiling_share"]
    return rate if share is None else f"{rate} ({share:.0%} of GEMM)"


def _pair(own: Document | None, best: Document | None, key: str, form: str, factor: float) -> str:
    cells = [
        "-" if m is None or m[key] is None else form.format(m[key] * factor) for m in (own, best)
    ]
    return " / ".join(cells)


def _fast(cases: Sequence[Document]) -> bool:
    return any(m["flops_per_second"] >= 1e13 for c in cases for m in c["measurements"])


def models_table(
    cases: Sequence[Document], *, points: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: time of every run, the gain with its interval, memory, errors.

    points: of `elsa profile`, whose rows always name the dtype and have no errors.
    """
    cases = [case for case in cases if case["measurements"] or not points]
    names = list(dict.fromkeys(m["contender"] for c in cases for m in c["measurements"]))
    names.sort(key=lambda name: (name.startswith("patched"), 0))
    dtypes = {case["case"]["dtype"] for case in cases}
    mixed = points or len(dtypes) > 1
    columns = ["model", ">px", ">batch", *(["dtype"] if mixed else [])]
    columns += [f">{name}, ms" for name in names]
    columns += [">gain (95%)", ">MB best baseline / elsa"]
    columns += [] if points else [">error elsa / original"]
    parts = any("parts" in m for case in cases for m in case["measurements"])
    columns += [">forward + backward + optimizer of elsa, ms"] if parts else []
    rows = []
    for case in cases:
        asked = case["case"]
        row = [asked["label"], str(asked["image_size"]), str(asked["batch"])]
        row += [asked["dtype"]] if mixed else []
        found = {m["contender"]: m for m in case["measurements"]}
        row += [_model_time(found.get(name), case) for name in names]
        best = (case["best_peer"], case["best_own"])
        row += [_gain(case), _memory_of(found, best), *([] if points else [_errors(case)])]
        rows.append([*row, *([_parts(found.get(case["best_own"]))] if parts else [])])
    return columns, rows


def _model_time(measured: Document | None, case: Document) -> str:
    if measured is None:
        return "-"
    if measured["contender"] in case["wrong"]:
        return "wrong"
    return _milliseconds(measured, measured["contender"] in (case["best_peer"], case["best_own"]))


def _milliseconds(measured: Document | None, best: bool) -> str:
    if measured is None:
        return "-"
    text = milliseconds(measured["seconds"])
    return f"**{text}**" if best else text


def _gain(case: Document) -> str:
    gain = case["gain"]
    if gain is None:
        return "-"
    if gain["rounds"] < FEWEST_ROUNDS:
        return f"{gain['value']:.2f} ({gain['rounds']} rounds)"
    return f"{gain['value']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"


def _memory_of(found: dict[str, Document], best: Sequence[str]) -> str:
    cells = []
    for name in best:
        held = found.get(name, {}).get("memory_bytes")
        cells.append("-" if held is None else f"{held / 1e6:.0f}")
    return " / ".join(cells)


def _parts(measured: Document | None) -> str:
    """The parts of a training step."""
    if measured is None:
        return "-"
    return " + ".join(milliseconds(seconds) for seconds in measured["parts"].values())


def _errors(case: Document) -> str:
    if case["errors"] is None:
        return "-"
    return " / ".join("-" if error is None else f"{error:.1e}" for error in case["errors"])


def families_table(cases: Sequence[Document]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of this table: times and ratios of each kind of run, the slowest marked."""
    ran = {each["contender"] for case in cases for each in case["measurements"]}
    kinds = [peer for peer, _ in families.PAIRS if peer in ran]
    columns = ["family", "architecture", ">px", ">batch", "dtype", ">sites"]
    for peer in kinds:
        columns += [f">{peer}, ms", f">{dict(families.PAIRS)[peer]}, ms", ">gain"]
    compiled = any(peer.startswith("compile") for peer in kinds)
    columns += [">gain, best of both"] if compiled else []
    rows = []
    for case in cases:
        asked, found = case["case"], families.pairs(case)
        seconds = {each["contender"]: each["seconds"] for each in case["measurements"]}
        row = [asked["label"], asked["model"].partition(":")[2], str(asked["image_size"])]
        row += [str(asked["batch"]), asked["dtype"], "/".join(map(str, case["sites"]))]
        for peer in kinds:
            times = [seconds.get(name) for name in (peer, dict(families.PAIRS)[peer])]
            row += ["-" if each is None else milliseconds(each) for each in times]
            row.append(_family_ratio(case, found.get(peer)))
        if compiled:
            row.append(_family_ratio(case, case["gain"] and case["gain"]["value"]))
        rows.append(row)
    return columns, rows


def _family_ratio(case: Document, ratio: float | None) -> str:
    if ratio is None:
        return "-"
    if case["wrong"]:
        return "wrong"
    return f"**{ratio:.2f}**" if ratio < families.GOAL else f"{ratio:.2f}"


def steps_table(rows: Sequence[Row]) -> str:
    """Training steps; MB beyond weights."""
    columns = ["model", ">px", ">batch", "dtype", ">original, ms", ">patched, ms", ">gain (95%)",
               ">MB original / patched"]  # fmt: skip
    made = []
    for members in _cases(rows):
        eager, patched = members["eager"], members["patched"]
        times = [milliseconds(float(each["median"])) for each in (eager, patched)]
        known = f"{float(patched['ratio_low']):.2f} to {float(patched['ratio_high']):.2f}"
        if int(patched["n"]) < FEWEST_ROUNDS:
            known = f"{patched['n']} rounds"
        memory = " / ".join(_megabytes(each["memory_bytes"]) for each in (eager, patched))
        made.append([
            *(eager[name] for name in ("label", "px", "batch", "dtype")), *times,
            f"{float(patched['ratio']):.2f} ({known})", memory,
        ])  # fmt: skip
    return markdown(columns, made)


def backward_table(rows: Sequence[Row]) -> str:
    """Forward and gradients of attention against the fastest peer."""
    made = []
    for members in _cases(row for row in rows if row["median"]):
        own = members.pop("elsa")
        peer = min(members.values(), key=lambda row: float(row["median"]))
        size, _, rest = own["case"].partition("-")
        dtype, _, mask = rest.partition("-")
        made.append([
            size.replace("x", ","), dtype, mask or "none", f"{_ms(own):.3f}",
            f"{_ms(peer):.3f} ({peer['contender']})", f"{float(own['ratio']):.2f}",
        ])  # fmt: skip
    columns = ["B,H,N,D", "dtype", "mask", ">elsa, ms", ">fastest peer, ms", ">ratio"]
    return markdown(columns, made)


def layers_table(rows: Sequence[Row]) -> str:
    """Models with linear layers by elsa: CUDA graphs."""
    made = []
    for members in _cases(row for row in rows if row["case"].startswith("models/")):
        ways = ("original", "attention", "model", "original, TF32")
        times = [_ms(members[way]) for way in ways]
        about = [members["original"][name] for name in ("model", "px", "batch")]
        shown = [f"{each:.3g}" for each in times]
        made.append([*about, *shown[:3], f"{times[0] / times[2]:.2f}", shown[3]])
    columns = ["model", ">px", ">batch", ">original, ms", ">attention, ms", ">whole model, ms",
               ">gain", ">original with TF32, ms"]  # fmt: skip
    return markdown(columns, made)


def compiled_table(rows: Sequence[Row]) -> str:
    """The same, compiled: CUDA graphs."""
    ways = ("original", "original, compiled", "patched, frozen", "patched, compiled")
    tf32 = ("original, TF32", "original, TF32, compiled")
    made = []
    for members in _cases(rows):
        taken = {name: _ms(row) for name, row in members.items()}
        shown = {name: f"{taken[name]:.3g}" if name in taken else "-" for name in (*ways, *tf32)}
        original, own = (
            min(taken[way] for way in some if way in taken) for some in (ways[:2], ways[2:])
        )
        about = [members["original"][name] for name in ("model", "px", "batch")]
        made.append([*about, *(shown[w] for w in ways), f"{original / own:.2f}",
                     *(shown[w] for w in tf32)])  # fmt: skip
    columns = ["model", *(f">{name}" for name in ("px", "batch", *(f"{w}, ms" for w in ways),
               "gain", *(f"{w}, ms" for w in tf32)))]  # fmt: skip
    return markdown(columns, made)


def products_table(rows: Sequence[Row]) -> str:
    """Linear layers, product by product."""
    made = []
    for members in _cases(row for row in rows if row["case"].startswith("products/")):
        own, peer = _ms(members["elsa"]), _ms(members["pytorch"])
        shape = members["elsa"]["case"].partition("/")[2]
        made.append([shape, f"{peer:.3g}", f"{own:.3g}", f"{peer / own:.2f}"])
    columns = ["rows x channels x columns", ">PyTorch, ms", ">elsa, ms", ">gain"]
    return markdown(columns, made)


def fusions_table(rows: Sequence[Row]) -> str:
    """What each fusion gives alone, in a whole model: CUDA graphs."""
    original = {row["case"]: row["error"] for row in rows if row["contender"] == "original"}
    made = [
        [
            row["model"], row["batch"], row["contender"], f"{_ms(row):.3g}",
            f"{float(row['ratio']):.2f}", f"{float(row['over_products']):.2f}",
            f"{float(row['error']):.1e} / {float(original[row['case']]):.1e}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["model", ">batch", "variant", ">ms", ">original / it", ">products alone / it",
               ">error, it / original"]  # fmt: skip
    return markdown(columns, made)


def distributed_table(rows: Sequence[Row]) -> str:
    """One device beside all."""
    made = []
    for members in _cases(row for row in rows if row["contender"] in ("one", "all")):
        one, every = members["one"], members["all"]
        name, _, direction = every["case"].partition(", ")
        name, _, dtype = name.rpartition("-")
        if direction:
            about = f"{name.replace('x', ',')}, {direction}"
            errors = ", ".join(f"{float(each['error']):.1e}" for each in (one, every))
        else:
            model, _, size = name.rpartition("-")
            about = f"{model} at {size} px, {every['tokens']} tokens"
            errors = f"apart by {float(every['error']):.1e}"
        memory = " / ".join(_megabytes(each["memory_bytes"]) for each in (one, every))
        times = [f"{float(each['median']):.3g}" for each in (one, every)]
        made.append([about, dtype, *times, f"{float(every['ratio']):.2f}", memory, errors])
    columns = ["what", "dtype", ">one GPU, s", ">all, s", ">gain", ">memory, MB",
               ">error, one GPU and all"]  # fmt: skip
    return markdown(columns, made)


def long_table(rows: Sequence[Row]) -> str:
    """Long rows, resident and from host memory."""
    made = []
    for row in rows:
        shape, _, few = row["case"].partition("/")[2].partition(", ")
        shape, _, dtype = shape.rpartition("-")
        about = shape.replace("x", ",") + (f" of {few}" if few else "")
        hidden = f"{float(row['hidden']):.0%}" if row.get("hidden") else "-"
        made.append([about, dtype, row["contender"], f"{float(row['median']):.3g}",
                     f"{float(row['error']):.1e}", hidden])  # fmt: skip
    columns = ["shape", "dtype", "by", ">seconds", ">error", ">copies under a fold"]
    return markdown(columns, made)


def convergence_table(rows: Sequence[Row]) -> str:
    """Accuracy after the last epoch, patched beside original, over the seeds."""
    ends: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        last = float(row["accuracy"].split()[-1])
        ends.setdefault(row["case"], {}).setdefault(row["contender"], []).append(last)
    made = []
    for case, ways in ends.items():
        data, _, model = case.partition("/")
        one, other = ways["original"], ways["patched"]
        means = [statistics.mean(each) for each in (one, other)]
        noise = sum(statistics.variance(each) / len(each) for each in (one, other)) ** 0.5
        made.append([
            data, *model.split("-"), *(f"{mean:.2%}" for mean in means),
            f"{means[1] - means[0]:+.2%}", f"{noise:.2%}",
        ])  # fmt: skip
    columns = ["data", "model", "dtype", ">original", ">patched", ">difference",
               ">its standard error"]  # fmt: skip
    return markdown(columns, made)


def calls_table(rows: Sequence[Row], factor: float = 1e3, unit: str = "ms") -> str:
    """The time of every contender of every case, and the errors that were measured."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    errors = any(row["error"] for row in rows)
    made = []
    for members in _cases(rows):
        times = [
            f"{round(float(members[n]['median']) * factor, 9):.3g}" if n in members else "-"
            for n in names
        ]
        judged = [
            f"{float(members[n]['error']):.1e}" if n in members and members[n]["error"] else "-"
            for n in names
        ]
        case = next(iter(members.values()))["case"]
        made.append([case, *times, *([" / ".join(judged)] if errors else [])])
    columns = ["case", *(f">{name}, {unit}" for name in names)]
    return markdown([*columns, *([f">error {' / '.join(names)}"] if errors else [])], made)


def calls_of(*names: str) -> Callable[[Sequence[Row]], str]:
    """`calls_table` of some contenders."""
    return lambda rows: calls_table([r for r in rows if r["contender"] in names and r["median"]])


def ratios_table(rows: Sequence[Row]) -> str:
    """The time of every contender over elsa's."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    made = []
    for members in _cases(rows):
        cells = [f"{float(members[n]['ratio']):.2f}" if n in members else "-" for n in names]
        made.append([next(iter(members.values()))["case"], *cells])
    return markdown(["case", *(f">{name}" for name in names)], made)


def host_table(rows: Sequence[Row]) -> str:
    """`calls_table` in microseconds."""
    return calls_table(rows, 1e6, "us")


def _cases(rows: Iterable[Row]) -> Iterable[dict[str, Row]]:
    """The rows of each case by contender."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["contender"]] = row
    return found.values()


def _ms(row: Row) -> float:
    return round(float(row["median"]) * 1e3, 9)


def _megabytes(size: str) -> str:
    return f"{float(size) / 1e6:.0f}" if size else "-"


_SPARSE: Final = ("nothing left out", "exact, order", "1e-4, order", "elsa", "pytorch")
STUDIES: Final[dict[tuple[str, str], Callable[[Sequence[Row]], str]]] = {
    ("layers_h200", "models"): layers_table,
    ("layers_h200", "products"): products_table,
    ("layers_compiled_h200", "models"): compiled_table,
    ("fusions_h200", "models"): fusions_table,
    ("training_steps_h200", "steps"): steps_table,
    ("training_steps_h100", "steps"): steps_table,
    ("training_steps_cpu", "steps"): steps_table,
    ("training_steps_cpu_avx512", "steps"): steps_table,
    ("backward_h200", "calls"): backward_table,
    ("distributed_2xh100", "calls"): distributed_table,
    ("long_context_h100", "calls"): long_table,
    ("convergence", "accuracy"): convergence_table,
    ("host_h200", "calls"): host_table,
    ("eager_h200", "calls"): calls_table,
    ("graphed_steps_h200", "calls"): calls_table,
    ("portable_h200", "calls"): calls_table,
    ("linear_forms_h200", "calls"): calls_table,
    ("entmax_peers_h200", "ratios"): ratios_table,
    ("entmax_packed_h200", "calls"): calls_table,
    ("first_call_h200", "calls"): calls_table,
    ("llama_h200", "calls"): calls_table,
    ("sparsity_h200", "calls"): calls_of(*_SPARSE),
    ("sparsity_cpu", "calls"): calls_of(*_SPARSE),
    ("stream_k_h200", "calls"): calls_of(
        "stream-k", "packed", "fixed split, padded", "sdpa-efficient", "each-sdpa", "today"
    ),
}

if __name__ == "__main__":
    for page in map(Path, sys.argv[1:] or [PAGE, GAINS]):
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
