"""The tables of the documentation, rendered from the result documents that a run wrote.

A page marks where a table goes:

    <!-- begin:bench:attention_cpu:vit -->
    <!-- end:bench:attention_cpu:vit -->

The middle names the document (`results/attention_cpu.json`), the last part a table of
`elsa_core.bench.cases.all_tables`, `summary` (one line on where it was measured and what missed its
goal), `sweep` (ratios by tokens and head_dim) or `command` (what wrote it, from its settings).
Where the middle names a folder, its documents are those of `elsa profile`, and the last part is
`points` (every model and size) or `command`.
`python -m elsa_core.bench.tables docs/benchmarks.md` rewrites what stands between them.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from elsa_core.bench import cases as attention_cases
from elsa_core.bench import families, model_tables, models, training
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.measuring.environment import label
from elsa_core.messages import milliseconds, side
from elsa_core.reading import RESULT_BYTES, json_problem, read_text

RESULTS: Final = Path(__file__).parent / "results"
"""Where a checkout keeps the published results; an installed package has none."""
_BLOCK: Final = re.compile(
    r"(?P<begin><!-- begin:bench:(?P<document>[\w.-]+):(?P<table>[\w-]+) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<end><!-- end:bench:(?P=document):(?P=table) -->)",
    re.DOTALL,
)
_MARKER: Final = re.compile(r"<!-- (?:begin|end):bench:[^\n]*?-->")

_MODELS: Final = {bench.COMMAND: bench.TABLES for bench in (models, training)}
_COMMANDS: Final = ("bench attention", *_MODELS, "profile")
_NAMED: Final = 8  # cases that a summary names; the table has them all

Document = dict[str, Any]


def published() -> Path:
    """The folder of the published results.

    Raises:
        ArgumentError: the package was installed without them.
    """
    if not RESULTS.is_dir():
        raise ArgumentError(
            "the published results are in elsa's repository, not in the installed package: "
            "run this from a checkout, or name a result file"
        )
    return RESULTS


def update(readme: Path, results: Path | None = None) -> bool:
    """Rewrite the tables of `readme` from the documents in `results`; True if anything changed.

    Raises:
        ArgumentError: a marker without its partner, or one that names no document or table; no
            folder is given, and this is no checkout.
    """
    before = readme.read_text(encoding="utf-8")
    after = rendered(before, results)
    if after == before:
        return False
    readme.write_text(after, encoding="utf-8")
    return True


def rendered(text: str, results: Path | None = None) -> str:
    """`text` with every marked table as the documents in `results` give it.

    Raises:
        ArgumentError: as `update`.
    """
    folder = published() if results is None else results
    paired = sum(2 for _ in _BLOCK.finditer(text))
    found = _MARKER.findall(text)
    if len(found) != paired:
        raise ArgumentError(
            f"{len(found)} bench markers, but {paired} of them stand in begin/end pairs"
        )

    def replace(block: re.Match[str]) -> str:
        profiles = folder / block["document"]
        if profiles.is_dir():
            documents = [load(path) for path in sorted(profiles.glob("*.json"))]
            return block["begin"] + render_profiles(documents, block["table"]) + block["end"]
        path = folder / f"{block['document']}.json"
        document = load(path)
        return block["begin"] + render(document, block["table"]) + block["end"]

    return _BLOCK.sub(replace, text)


def load(path: Path) -> Document:
    """Read a result document.

    Raises:
        ArgumentError: the file is missing, or is no document of `elsa bench`.
    """
    if not path.exists():
        raise ArgumentError(f"{path}: no such result; `elsa bench -o` writes it")
    try:
        document = json.loads(read_text(path, RESULT_BYTES))
    except ModelError as error:
        raise ArgumentError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: not a result document: {json_problem(error)}") from error
    if not isinstance(document, dict) or document.get("command") not in _COMMANDS:
        raise ArgumentError(f"{path}: not a result document of `elsa bench`")
    return document


def render(document: Document, table: str) -> str:
    """The Markdown of one table (or `summary`) of a document, with a line break at its end.

    Raises:
        ArgumentError: the document has no such table.
    """
    whole = document["command"] in _MODELS
    if table == "summary":
        return (model_tables.summary if whole else summary)(document) + "\n"
    if table == "command":
        return f"Written by `{command_line(document)}`.\n"
    cases = [case for case in document["results"]["cases"] if case["case"]["table"] == table]
    if not cases:
        known = ", ".join(_tables_in(document))
        raise ArgumentError(
            f"table: the document has no {table!r}; it has {known}, summary, command"
        )
    if table == "sweep":
        return _sweep(cases)
    columns, rows = (model_tables.table_of if whole else table_of)(cases)
    return markdown(columns, rows)


def render_profiles(documents: Sequence[Document], table: str) -> str:
    """The Markdown of what `elsa profile` measured: `points`, or each `command`.

    Raises:
        ArgumentError: another table, or a document of another command.
    """
    known = ("points", "command")
    if table not in known or any(d["command"] != "profile" for d in documents):
        raise ArgumentError(f"table: a folder of profiles has points, command, not {table!r}")
    if table == "command":
        lines = "".join(f"{command_line(document)}\n" for document in documents)
        return f"Written by\n\n```\n{lines}```\n"
    return markdown(*model_tables.table_of_profiles(documents))


def command_line(document: Document) -> str:
    """The command that measures what the document holds, the way it was measured.

    Rounds, budget and baselines are always named: their defaults may change after the document.
    What it does not keep (globs of cases) is not there.
    """
    results = document["results"]
    settings = results["settings"]
    profiled = document["command"] == "profile"
    words = ["elsa", document["command"]]
    words += _profile_words(results) if profiled else _bench_words(document)
    if settings.get("baselines"):
        words += ["--baselines", ",".join(settings["baselines"])]
    words += ["--rounds", str(settings["rounds"]), "--budget", f"{settings['budget_seconds']:g}"]
    seed = results["model"]["seed"] if profiled else settings["seed"]
    words += ["--seed", str(seed)] if seed else []
    words += ["--backend", settings["backend"]] if settings["backend"] != "auto" else []
    for flag, present in (
        ("--flex", settings.get("flex", False)),
        ("--train", settings.get("train", False)),
        ("--no-sites", settings.get("sites", True) is False),
        ("--sites", settings.get("sites") is True and settings.get("device") == "cpu"),
        ("--no-errors", settings.get("sites", False) and not settings.get("errors", True)),
    ):
        words += [flag] if present else []
    return " ".join([*words[:2], shlex.join(words[2:])])


def _bench_words(document: Document) -> list[str]:
    """The device, and the tables where they are not all of it."""
    device, held = document["environment"]["device"], _tables_in(document)
    known = _MODELS.get(document["command"]) or attention_cases.all_tables()
    words = ["--device", device]
    if set(held) != {*known.get(device, ())} - {families.TABLE}:  # type: ignore[attr-defined]
        words += [word for table in held for word in ("--table", table)]
    return words


def _profile_words(results: Document) -> list[str]:
    """MODEL and the grid of its points."""
    model, settings = results["model"], results["settings"]
    words = [str(model["given"]), "--device", settings["device"]]
    words += ["--pretrained"] if model["pretrained"] else []
    words += ["--arch", model["arch"]] if model["arch"] else []
    asked = [point["configuration"] for point in results["points"]]
    sizes = [each["image_size"] for each in asked if each["image_size"] is not None]
    for flag, values, default in (
        ("--img", [side(size) for size in sizes], ""),
        ("--batch-size", [str(each["batch"]) for each in asked], "1"),
        ("--dtype", [each["dtype"] for each in asked], "fp32"),
        ("--precision", [each["precision"] for each in asked], "strict"),
    ):
        text = ",".join(dict.fromkeys(values))
        words += [flag, text] if text != default else []
    scope = settings.get("scope", "auto")
    words += ["--scope", scope] if scope != "auto" else []
    for flag in ("include", "exclude"):
        words += [word for glob in settings[flag] for word in (f"--{flag}", glob)]
    return words


def _tables_in(document: Document) -> list[str]:
    return list(dict.fromkeys(case["case"]["table"] for case in document["results"]["cases"]))


def summary(document: Document) -> str:
    """Where and when it was measured, how many cases won, and which ones missed their goal."""
    cases = document["results"]["cases"]
    judged = [
        (case["case"]["name"], case["case"]["goal"], own["ratio"])
        for case in cases
        if (own := _own(case)) is not None
        and own["ratio"] is not None
        and own["contender"] not in case["wrong"]
    ]
    faster = sum(ratio >= 1 for _, _, ratio in judged)
    text = f"Measured on {label(document['environment'])}. "
    text += _threads_line(document)
    text += f"At least as fast as the best peer in {faster} of {len(judged)} cases."
    missed = [(ratio / goal, name, ratio, goal) for name, goal, ratio in judged if goal]
    missed = sorted(each for each in missed if each[0] < 1)
    if missed:
        named = [f"{name} ({ratio:.2f} of {goal:g})" for _, name, ratio, goal in missed[:_NAMED]]
        more = f" and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
        text += f" Under their goals: {', '.join(named)}{more}."
    others = _of_other_functions(cases)
    wrong = [f"{c['case']['name']}: {n}" for c in cases for n in c["wrong"] if n not in others]
    packages = {m["notes"]["package"] for m in _measured(cases) if "package" in m["notes"]}
    if packages:
        text += f" With {', '.join(sorted(packages))}."
    if others:
        text += f" Beside them stands what computes another function: {', '.join(sorted(others))}."
    if wrong:
        text += f" Wrong results: {', '.join(wrong)}."
    if document["results"].get("busy"):
        text += f" The machine was not free: {document['results']['busy']}."
    return text


def _of_other_functions(cases: Sequence[Document]) -> set[str]:
    """Contenders that say themselves that they compute something else."""
    return {m["contender"] for m in _measured(cases) if "computes" in m["notes"]}


def _measured(cases: Sequence[Document]) -> list[Document]:
    return [m | {"notes": m.get("notes") or {}} for case in cases for m in case["measurements"]]


def _threads_line(document: Document) -> str:
    """How much the threads add: two that share a core have the arithmetic of one."""
    limits = document["results"].get("ceilings", {})
    one, all_threads = limits.get("gemm_fp32_one_thread"), limits.get("gemm_fp32")
    if not one or not all_threads:
        return ""
    return (
        f"Its {document['environment'].get('threads')} threads reach {all_threads / one:.1f}x the "
        f"matrix products of one ({all_threads / 1e9:.0f} GFLOP/s). "
    )


def table_of(cases: Sequence[Document]) -> tuple[list[str], list[list[str]]]:
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
        own, best = _own(case), found.get(case["best_peer"])
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
        (c["case"]["keys"], c["case"]["mask"] != "none", c["case"]["head_dim"]): _own(c)
        for c in cases
    }
    columns = ["N", *(f">D {dim}{', mask' if mask else ''}" for mask, dim in keys)]
    rows = [
        [str(n), *(_short_ratio(cells.get((n, mask, dim))) for mask, dim in keys)] for n in tokens
    ]
    return markdown(columns, rows)


def _own(case: Document) -> Document | None:
    """What elsa's first precision measured in a case."""
    first = case["case"]["precisions"][0]
    return next((m for m in case["measurements"] if m["precision"] == first), None)


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


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["docs/benchmarks.md"]:
        update(Path(argument))
