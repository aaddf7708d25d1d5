"""What a result document of `elsa bench` says in a few sentences."""

from __future__ import annotations

from collections import Counter
from typing import Final

from elsa_core.measuring.documents import Document
from elsa_core.measuring.environment import label
from elsa_core.measuring.intervals import FASTER, NO_DIFFERENCE, SLOWER, UNSURE
from elsa_core.profiling.bench import families

_NAMED: Final = 8  # cases that a summary names; the table has them all


def of_attention(document: Document) -> str:
    """How many cases won, and which ones missed their goal."""
    cases = document["results"]["cases"]
    judged = [
        (case["case"]["name"], case["case"]["goal"], own["ratio"])
        for case in cases
        for own in case["measurements"]
        if own["precision"] == case["case"]["precisions"][0]
        and own["ratio"] is not None
        and own["contender"] not in case["wrong"]
    ]
    faster = sum(ratio >= 1 for _, _, ratio in judged)
    text = f"At least as fast as the best peer in {faster} of {len(judged)} cases."
    missed = [(ratio / goal, name, ratio, goal) for name, goal, ratio in judged if goal]
    missed = sorted(each for each in missed if each[0] < 1)
    if missed:
        named = [f"{name} ({ratio:.2f} of {goal:g})" for _, name, ratio, goal in missed[:_NAMED]]
        more = f" and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
        text += f" Under their goals: {', '.join(named)}{more}."
    notes = [(m["contender"], m.get("notes") or {}) for c in cases for m in c["measurements"]]
    others = {name for name, said in notes if "computes" in said}  # as they say themselves
    wrong = [f"{c['case']['name']}: {n}" for c in cases for n in c["wrong"] if n not in others]
    packages = {said["package"] for _, said in notes if "package" in said}
    if packages:
        text += f" With {', '.join(sorted(packages))}."
    if others:
        text += f" Shown for comparison, of another function: {', '.join(sorted(others))}."
    if wrong:
        text += f" Wrong results: {', '.join(wrong)}."
    if document["results"].get("busy"):
        text += f" The machine was not free: {document['results']['busy']}."
    return text


def of_models(document: Document) -> str:
    """Where patching won, and what lost, failed or was wrong."""
    results = document["results"]
    cases = [c for c in results["cases"] if c["gain"] is not None and not c["wrong"]]
    counts = Counter(case["gain"]["verdict"] for case in cases)
    text = (
        f"Patched models are faster than the fastest baseline in {counts[FASTER]} of {len(cases)} "
        f"cases, slower in {counts[SLOWER]}; no difference in {counts[NO_DIFFERENCE]}"
    )
    text += f", undecided in {counts[UNSURE]} for want of rounds." if counts[UNSURE] else "."
    lost = [c for c in cases if c["gain"]["verdict"] == SLOWER]
    if lost and document["command"] == "bench training":
        named = ", ".join(f"{c['case']['name']} ({c['gain']['value']:.2f})" for c in lost)
        text += f" Slower: {named}."
    failed = [c for c in results["cases"] if c["gain"] is None]
    if failed:
        named = ", ".join(
            f"{c['case']['name']} ({next(iter(c['left_out'].values()), '')})" for c in failed
        )
        text += f" Not measured: {named}."
    wrong = [c["case"]["name"] for c in results["cases"] if c["wrong"]]
    if wrong:
        text += f" Wrong results: {', '.join(wrong)}."
    if results["busy"]:
        text += f" The machine was not free: {results['busy']}."
    text += families.summary(document)
    if document["command"] == "bench training":  # errors are of what was timed, gradients alone
        return text
    cases = [case for case in results["cases"] if case["errors"] is not None]
    known = [
        (case["case"]["batch"] == 1 and case["best_own"] == "patched")
        or any(m.get("error") is not None for m in case["measurements"])
        for case in cases
    ]
    if results.get("errors_measured"):
        where = label(results["errors_measured"])
        text += f" Errors of the same calls were measured apart, on {where}."
    if not all(known):
        some = f"In {known.count(False)} of {len(known)} cases errors" if any(known) else "Errors"
        text += f" {some} are of the first image of the batch, run eagerly."
    return text
