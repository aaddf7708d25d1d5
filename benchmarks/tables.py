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
from elsa_core.measuring import environment
from elsa_core.measuring.intervals import FEWEST_ROUNDS
from elsa_core.profiling.bench import families, published, summary

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
Table = tuple[list[str], list[list[str]]]


def rendered(text: str) -> str:
    """`text` with every marked table as the results give it."""
    paired, found = 2 * len(_BLOCK.findall(text)), _MARKER.findall(text)
    if len(found) != paired:
        raise ArgumentError(f"{len(found)} bench markers, but {paired} stand in begin/end pairs")
    return _BLOCK.sub(lambda b: b["begin"] + render(b["file"], b["table"]) + b["end"], text)


def render(name: str, table: str) -> str:
    """The Markdown of one table of `results/NAME.csv`."""
    if name == "gains":
        return markdown(*gains.table(table))
    if (name, table) in STUDIES:
        return markdown(*STUDIES[name, table](rows_of(name)))
    return of_document(published.read(published.RESULTS / f"{name}.csv"), table)


def of_document(document: Document, table: str) -> str:
    """The Markdown of one table of a result document."""
    cases = document["results"]["cases"]
    whole = document["command"] != "bench attention"
    if table == "summary":
        return summarised(document) + "\n"
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
        return markdown(*sweep_table(cases))
    made = families_table if table == families.TABLE else models_table
    return markdown(*(made if whole else attention_table)(cases))


def summarised(document: Document) -> str:
    """Where it was measured, and what it says in a few sentences."""
    place, limits = document["environment"], document["results"].get("ceilings", {})
    text = f"Measured on {environment.label(place)}. "
    # two threads that share a core have the arithmetic of one
    one, every = limits.get("gemm_fp32_one_thread"), limits.get("gemm_fp32")
    if one and every:
        text += f"Its {place.get('threads')} threads reach {every / one:.1f}x the matrix products "
        text += f"of one ({every / 1e9:.0f} GFLOP/s). "
    if document["command"] == "bench attention":
        return text + summary.of_attention(document)
    return text + summary.of_models(document)


def rows_of(name: str) -> list[Row]:
    """The rows of a study's file."""
    with (published.RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a column whose title starts with ">" is aligned to the right."""
    lines = ["| " + " | ".join(title.lstrip(">") for title in columns) + " |"]
    lines.append("|" + "|".join("---:" if c.startswith(">") else "---" for c in columns) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


# Tables of documents


def own_of(case: Document) -> Document | None:
    """What elsa's first precision measured in a case."""
    first = case["case"]["precisions"][0]
    return next((m for m in case["measurements"] if m["precision"] == first), None)


def attention_table(cases: Sequence[Document]) -> Table:
    """Times of elsa and of every peer, ratio, rate, errors, memory."""
    runs = [m for case in cases for m in case["measurements"]]
    names = [f"elsa-{p}" for p in dict.fromkeys(p for c in cases for p in c["case"]["precisions"])]
    names += dict.fromkeys(m["contender"] for m in runs if m["precision"] is None)
    decode = any(m["bytes_per_second"] for m in runs)
    fast = any(m["flops_per_second"] >= 1e13 for m in runs)
    rate = "TB/s" if decode else "TFLOP/s" if fast else "GFLOP/s"
    pairs = [("error", "error", "{:.1e}", 1.0), ("extra MB", "workspace_bytes", "{:.1f}", 1e-6),
             ("host us", "host_seconds", "{:.0f}", 1e6)]  # fmt: skip
    pairs = [each for each in pairs if any(m[each[1]] is not None for m in runs)]
    mixed = len({c["case"]["dtype"] for c in cases}) > 1
    columns = ["B,H,N,D", *(f">{name.removesuffix('-strict')}, ms" for name in names)]
    columns += [">ratio (10 to 90%)", f">{rate}", *(f">{what} elsa / peer" for what, *_ in pairs)]
    rows = []
    for case in cases:
        asked, found = case["case"], {m["contender"]: m for m in case["measurements"]}
        own, best = own_of(case), found.get(case["best_peer"])
        tokens = f"{asked['queries']}:" if asked["keys"] != asked["queries"] else ""
        shape = f"{asked['batch']},{asked['heads']},{tokens}{asked['keys']},{asked['head_dim']}"
        shape += f" {asked['dtype']}" if mixed or asked["table"] in ("decode", "lengths") else ""
        row = [shape + (" + mask" if asked["mask"] != "none" else "")]
        for name in names:
            other = "computes" in ((found.get(name) or {}).get("notes") or {})
            row.append(_time(found.get(name), () if other else case["wrong"], case["best_peer"]))
        span = "" if own is None or own["ratio"] is None else (
            f" ({own['ratio_p10']:.2f} to {own['ratio_p90']:.2f})"
        )  # fmt: skip
        row += [_ratio(own) + span, _rate(own, rate)]
        for _, key, form, factor in pairs:
            row.append(" / ".join(
                "-" if m is None or m[key] is None else form.format(m[key] * factor)
                for m in (own, best)
            ))  # fmt: skip
        rows.append(row)
    return columns, rows


def _time(measured: Document | None, wrong: Sequence[str], *best: str) -> str:
    """Milliseconds, those of the best ones marked."""
    if measured is None:
        return "-"
    if measured["contender"] in wrong:
        return "wrong"
    text = milliseconds(measured["seconds"])
    return f"**{text}**" if measured["contender"] in best else text


def _ratio(own: Document | None) -> str:
    return "-" if own is None or own["ratio"] is None else f"{own['ratio']:.2f}"


def _rate(own: Document | None, unit: str) -> str:
    if own is None:
        return "-"
    if unit == "TB/s":
        return f"{own['bytes_per_second'] / 1e12:.2f}" if own["bytes_per_second"] else "-"
    rate = f"{own['flops_per_second'] / (1e12 if unit == 'TFLOP/s' else 1e9):.3g}"
    share = own["ceiling_share"]
    return rate if share is None else f"{rate} ({share:.0%} of GEMM)"


def sweep_table(cases: Sequence[Document]) -> Table:
    """Ratios against the best peer: rows are tokens, columns head_dim with and without a mask."""
    cells = {
        (c["case"]["keys"], c["case"]["mask"] != "none", c["case"]["head_dim"]): own_of(c)
        for c in cases
    }
    kinds = sorted({key[1:] for key in cells})
    rows = [
        [str(n), *(_ratio(cells.get((n, mask, dim))) for mask, dim in kinds)]
        for n in sorted({key[0] for key in cells})
    ]
    return ["N", *(f">D {dim}{', mask' if mask else ''}" for mask, dim in kinds)], rows


def models_table(cases: Sequence[Document], *, points: bool = False) -> Table:
    """Time of every run, the gain with its interval, memory, errors.

    points: of `elsa profile`, whose rows always name the dtype and have no errors.
    """
    cases = [case for case in cases if case["measurements"] or not points]
    names = list(dict.fromkeys(m["contender"] for c in cases for m in c["measurements"]))
    names.sort(key=lambda name: name.startswith("patched"))
    mixed = points or len({case["case"]["dtype"] for case in cases}) > 1
    parts = any("parts" in m for case in cases for m in case["measurements"])
    columns = ["model", ">px", ">batch", *(["dtype"] if mixed else [])]
    columns += [*(f">{name}, ms" for name in names), ">gain (95%)", ">MB best baseline / elsa"]
    columns += [] if points else [">error elsa / original"]
    columns += [">forward + backward + optimizer of elsa, ms"] if parts else []
    rows = []
    for case in cases:
        asked, gain = case["case"], case["gain"]
        found = {m["contender"]: m for m in case["measurements"]}
        best = (case["best_peer"], case["best_own"])
        row = [asked["label"], str(asked["image_size"]), str(asked["batch"])]
        row += [asked["dtype"]] if mixed else []
        row += [_time(found.get(name), case["wrong"], *best) for name in names]
        if gain is None:
            row.append("-")
        elif gain["rounds"] < FEWEST_ROUNDS:
            row.append(f"{gain['value']:.2f} ({gain['rounds']} rounds)")
        else:
            row.append(f"{gain['value']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})")
        held = [found.get(name, {}).get("memory_bytes") for name in best]
        row.append(" / ".join("-" if size is None else f"{size / 1e6:.0f}" for size in held))
        if not points:
            errors = case["errors"] or [None]
            row.append(" / ".join("-" if each is None else f"{each:.1e}" for each in errors))
        if parts:
            own = found.get(case["best_own"])
            row.append("-" if own is None else " + ".join(map(milliseconds, own["parts"].values())))
        rows.append(row)
    return columns, rows


def families_table(cases: Sequence[Document]) -> Table:
    """Times and ratios of each kind of run, the slowest marked."""
    ran = {each["contender"] for case in cases for each in case["measurements"]}
    kinds = [pair for pair in families.PAIRS if pair[0] in ran]
    columns = ["family", "architecture", ">px", ">batch", "dtype", ">sites"]
    for peer, own in kinds:
        columns += [f">{peer}, ms", f">{own}, ms", ">gain"]
    compiled = any(peer.startswith("compile") for peer, _ in kinds)
    columns += [">gain, best of both"] if compiled else []

    def marked(case: Document, ratio: float | None) -> str:
        if ratio is None:
            return "-"
        if case["wrong"]:
            return "wrong"
        return f"**{ratio:.2f}**" if ratio < families.GOAL else f"{ratio:.2f}"

    rows = []
    for case in cases:
        asked, found = case["case"], families.pairs(case)
        runs = {each["contender"]: each for each in case["measurements"]}
        row = [asked["label"], asked["model"].partition(":")[2], str(asked["image_size"])]
        row += [str(asked["batch"]), asked["dtype"], "/".join(map(str, case["sites"]))]
        for peer, own in kinds:
            row += [_time(runs.get(name), ()) for name in (peer, own)]
            row.append(marked(case, found.get(peer)))
        row += [marked(case, case["gain"] and case["gain"]["value"])] if compiled else []
        rows.append(row)
    return columns, rows


# Tables of studies


def steps_table(rows: Sequence[Row]) -> Table:
    """Training steps; MB beyond weights."""
    columns = ["model", ">px", ">batch", "dtype", ">original, ms", ">patched, ms", ">gain (95%)",
               ">MB original / patched"]  # fmt: skip
    made = []
    for members in _cases(rows):
        pair = [members["eager"], members["patched"]]
        patched = pair[1]
        known = f"{float(patched['ratio_low']):.2f} to {float(patched['ratio_high']):.2f}"
        if int(patched["n"]) < FEWEST_ROUNDS:
            known = f"{patched['n']} rounds"
        made.append([
            *(pair[0][name] for name in ("label", "px", "batch", "dtype")),
            *(milliseconds(float(each["median"])) for each in pair),
            f"{float(patched['ratio']):.2f} ({known})", _megabytes(pair),
        ])  # fmt: skip
    return columns, made


def backward_table(rows: Sequence[Row]) -> Table:
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
    return ["B,H,N,D", "dtype", "mask", ">elsa, ms", ">fastest peer, ms", ">ratio"], made


def layers_table(rows: Sequence[Row]) -> Table:
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
    return columns, made


def compiled_table(rows: Sequence[Row]) -> Table:
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
    return columns, made


def products_table(rows: Sequence[Row]) -> Table:
    """Linear layers, product by product."""
    made = []
    for members in _cases(row for row in rows if row["case"].startswith("products/")):
        own, peer = _ms(members["elsa"]), _ms(members["pytorch"])
        shape = members["elsa"]["case"].partition("/")[2]
        made.append([shape, f"{peer:.3g}", f"{own:.3g}", f"{peer / own:.2f}"])
    return ["rows x channels x columns", ">PyTorch, ms", ">elsa, ms", ">gain"], made


def fusions_table(rows: Sequence[Row]) -> Table:
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
    return columns, made


def distributed_table(rows: Sequence[Row]) -> Table:
    """One device beside all."""
    made = []
    for members in _cases(row for row in rows if row["contender"] in ("one", "all")):
        both = one, every = members["one"], members["all"]
        name, _, direction = every["case"].partition(", ")
        name, _, dtype = name.rpartition("-")
        if direction:
            about = f"{name.replace('x', ',')}, {direction}"
            errors = ", ".join(f"{float(each['error']):.1e}" for each in (one, every))
        else:
            model, _, size = name.rpartition("-")
            about = f"{model} at {size} px, {every['tokens']} tokens"
            errors = f"apart by {float(every['error']):.1e}"
        times = [f"{float(each['median']):.3g}" for each in both]
        gain = f"{float(every['ratio']):.2f}"
        made.append([about, dtype, *times, gain, _megabytes(both), errors])
    columns = ["what", "dtype", ">one GPU, s", ">all, s", ">gain", ">memory, MB",
               ">error, one GPU and all"]  # fmt: skip
    return columns, made


def long_table(rows: Sequence[Row]) -> Table:
    """Long rows, resident and from host memory."""
    made = []
    for row in rows:
        shape, _, few = row["case"].partition("/")[2].partition(", ")
        shape, _, dtype = shape.rpartition("-")
        about = shape.replace("x", ",") + (f" of {few}" if few else "")
        hidden = f"{float(row['hidden']):.0%}" if row.get("hidden") else "-"
        made.append([about, dtype, row["contender"], f"{float(row['median']):.3g}",
                     f"{float(row['error']):.1e}", hidden])  # fmt: skip
    return ["shape", "dtype", "by", ">seconds", ">error", ">copies under a fold"], made


def convergence_table(rows: Sequence[Row]) -> Table:
    """Accuracy after the last epoch, patched beside original, over the seeds."""
    ends: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        last = float(row["accuracy"].split()[-1])
        ends.setdefault(row["case"], {}).setdefault(row["contender"], []).append(last)
    made = []
    for case, ways in ends.items():
        data, _, model = case.partition("/")
        pair = [ways["original"], ways["patched"]]
        means = [statistics.mean(each) for each in pair]
        noise = sum(statistics.variance(each) / len(each) for each in pair) ** 0.5
        made.append([data, *model.split("-"), *(f"{mean:.2%}" for mean in means),
                     f"{means[1] - means[0]:+.2%}", f"{noise:.2%}"])  # fmt: skip
    columns = ["data", "model", "dtype", ">original", ">patched", ">difference",
               ">its standard error"]  # fmt: skip
    return columns, made


def calls_table(rows: Sequence[Row], factor: float = 1e3, unit: str = "ms") -> Table:
    """The time of every contender of every case, and the errors that were measured."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    errors = any(row["error"] for row in rows)
    made = []
    for members in _cases(rows):
        found = [members.get(name) for name in names]
        line = [next(iter(members.values()))["case"]]
        line += ["-" if m is None else f"{round(float(m['median']) * factor, 9):.3g}"
                 for m in found]  # fmt: skip
        if errors:
            shown = (f"{float(m['error']):.1e}" if m and m["error"] else "-" for m in found)
            line.append(" / ".join(shown))
        made.append(line)
    columns = ["case", *(f">{name}, {unit}" for name in names)]
    return [*columns, *([f">error {' / '.join(names)}"] if errors else [])], made


def calls_of(*names: str) -> Callable[[Sequence[Row]], Table]:
    """`calls_table` of some contenders."""
    return lambda rows: calls_table([r for r in rows if r["contender"] in names and r["median"]])


def ratios_table(rows: Sequence[Row]) -> Table:
    """The time of every contender over elsa's."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    made = []
    for members in _cases(rows):
        cells = [f"{float(members[n]['ratio']):.2f}" if n in members else "-" for n in names]
        made.append([next(iter(members.values()))["case"], *cells])
    return ["case", *(f">{name}" for name in names)], made


def _cases(rows: Iterable[Row]) -> Iterable[dict[str, Row]]:
    """The rows of each case by contender."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["contender"]] = row
    return found.values()


def _ms(row: Row) -> float:
    return round(float(row["median"]) * 1e3, 9)


def _megabytes(rows: Sequence[Row]) -> str:
    sizes = (row["memory_bytes"] for row in rows)
    return " / ".join(f"{float(size) / 1e6:.0f}" if size else "-" for size in sizes)


_SPARSE: Final = calls_of("nothing left out", "exact, order", "1e-4, order", "elsa", "pytorch")
_CALLS: Final = (
    "eager_h200", "graphed_steps_h200", "portable_h200", "linear_forms_h200", "entmax_packed_h200",
    "first_call_h200", "llama_h200",
)  # fmt: skip
_STEPS: Final = ("h200", "h100", "cpu", "cpu_avx512")
STUDIES: Final[dict[tuple[str, str], Callable[[Sequence[Row]], Table]]] = {
    ("layers_h200", "models"): layers_table,
    ("layers_h200", "products"): products_table,
    ("layers_compiled_h200", "models"): compiled_table,
    ("fusions_h200", "models"): fusions_table,
    **{(f"training_steps_{where}", "steps"): steps_table for where in _STEPS},
    ("backward_h200", "calls"): backward_table,
    ("distributed_2xh100", "calls"): distributed_table,
    ("long_context_h100", "calls"): long_table,
    ("convergence", "accuracy"): convergence_table,
    ("graphed_calls_h200", "calls"): calls_of(
        "original eager", "original graphed", "original compiled", "patched graphed"
    ),
    ("recognised_h200", "calls"): calls_of("original", "attention", "model"),
    ("host_h200", "calls"): lambda rows: calls_table(rows, 1e6, "us"),
    **{(name, "calls"): calls_table for name in _CALLS},
    ("entmax_peers_h200", "ratios"): ratios_table,
    ("sparsity_h200", "calls"): _SPARSE,
    ("sparsity_cpu", "calls"): _SPARSE,
    ("stream_k_h200", "calls"): calls_of(
        "stream-k", "packed", "fixed split, padded", "sdpa-efficient", "each-sdpa", "today"
    ),
}

if __name__ == "__main__":
    for page in map(Path, sys.argv[1:] or [PAGE, GAINS]):
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
