"""Tables of `elsa bench models` and `elsa bench training`, and of results of `elsa profile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elsa_core.bench import families
from elsa_core.measuring.environment import label
from elsa_core.measuring.intervals import FEWEST_ROUNDS, NO_DIFFERENCE, SLOWER, UNSURE
from elsa_core.messages import milliseconds

Document = dict[str, Any]


def table_of(cases: Sequence[Document]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: time of every run, the gain with its interval, memory, errors."""
    if cases and all(case["case"]["table"] == families.TABLE for case in cases):
        return families.table_of(cases)
    names = list(dict.fromkeys(m["contender"] for c in cases for m in c["measurements"]))
    names.sort(key=lambda name: (name.startswith("patched"), 0))
    dtypes = {case["case"]["dtype"] for case in cases}
    columns = ["model", ">px", ">batch", *(["dtype"] if len(dtypes) > 1 else [])]
    columns += [f">{name}, ms" for name in names]
    columns += [">gain (95%)", ">MB best baseline / elsa", ">error elsa / original"]
    parts = any("parts" in m for case in cases for m in case["measurements"])
    columns += [">forward + backward + optimizer of elsa, ms"] if parts else []
    rows = []
    for case in cases:
        asked = case["case"]
        row = [asked["label"], str(asked["image_size"]), str(asked["batch"])]
        row += [asked["dtype"]] if len(dtypes) > 1 else []
        found = {m["contender"]: m for m in case["measurements"]}
        row += [_time(found.get(name), case) for name in names]
        best = (case["best_peer"], case["best_own"])
        row += [_gain(case), _memory_of(found, best), _errors(case)]
        rows.append([*row, *([_parts(found.get(case["best_own"]))] if parts else [])])
    return columns, rows


def summary(document: Document) -> str:
    """Where it was measured, where patching won, and by how much at most."""
    cases = [c for c in document["results"]["cases"] if c["gain"] is not None and not c["wrong"]]
    verdicts = [case["gain"]["verdict"] for case in cases]
    text = f"Measured on {label(document['environment'])}. Patched models are faster than the "
    text += f"fastest baseline in {verdicts.count('faster')} of {len(cases)} cases, slower in "
    text += f"{verdicts.count('slower')}; no difference in {verdicts.count(NO_DIFFERENCE)}"
    unsure = verdicts.count(UNSURE)
    text += f", undecided in {unsure} for want of rounds." if unsure else "."
    lost = [c for c in cases if c["gain"]["verdict"] == SLOWER]
    if lost and document["command"] == "bench training":
        named = ", ".join(f"{c['case']['name']} ({c['gain']['value']:.2f})" for c in lost)
        text += f" Slower: {named}."
    failed = [c for c in document["results"]["cases"] if c["gain"] is None]
    if failed:
        named = ", ".join(
            f"{c['case']['name']} ({next(iter(c['left_out'].values()), '')})" for c in failed
        )
        text += f" Not measured: {named}."
    wrong = [c["case"]["name"] for c in document["results"]["cases"] if c["wrong"]]
    if wrong:
        text += f" Wrong results: {', '.join(wrong)}."
    if document["results"]["busy"]:
        text += f" The machine was not free: {document['results']['busy']}."
    return text + families.summary(document) + _of_errors(document)


def _of_errors(document: Document) -> str:
    """What the column of errors is of, where it is not of the calls that were timed."""
    results = document["results"]
    if document["command"] == "bench training":  # of the batch that was timed, gradients alone
        return ""
    cases = [case for case in results["cases"] if case["errors"] is not None]
    known = [
        (case["case"]["batch"] == 1 and case["best_own"] == "patched")
        or any(m.get("error") is not None for m in case["measurements"])
        for case in cases
    ]
    text = ""
    if results.get("errors_measured"):
        where = label(results["errors_measured"])
        text = f" Errors of the same calls were measured apart, on {where}."
    if not all(known):
        some = f"In {known.count(False)} of {len(known)} cases errors" if any(known) else "Errors"
        text += f" {some} are of the first image of the batch, run eagerly."
    return text


def table_of_profiles(documents: Sequence[Document]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of sweeps: time of every run, the gain with its interval, memory."""
    points = [
        (_named(document["results"]), point["profile"])
        for document in documents
        for point in document["results"]["points"]
        if point["status"] == "done"
    ]
    runs = {run["name"]: run["patched"] for _, profile in points for run in profile["runs"]}
    names = sorted(runs, key=lambda name: runs[name])
    columns = ["model", ">px", ">batch", "dtype", *(f">{name}, ms" for name in names)]
    columns += [">gain (95%)", ">MB best baseline / elsa"]
    rows = []
    for model, profile in points:
        best = (profile["best_baseline"], profile["best_patched"])
        found = {run["name"]: run for run in profile["runs"]}
        sides = [str(side) for side in profile["image_size"]]
        row = [model, sides[0] if sides[0] == sides[1] else "x".join(sides)]
        row += [str(profile["batch"]), profile["dtype"]]
        row += [_milliseconds(found.get(name), name in best) for name in names]
        rows.append([*row, _gain(profile), _memory_of(found, best)])
    return columns, rows


def _named(results: Document) -> str:
    """The model, and the scope that it was patched with where that was asked for."""
    scope = results.get("settings", {}).get("scope", "auto")
    name: str = results["model"]["name"]
    return name if scope == "auto" else f"{name}, scope {scope}"


def _time(measured: Document | None, case: Document) -> str:
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
