"""Every artefact of a bundle in fresh processes, in each runtime it is for, and the verdicts."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsa_core.exporting import reference as references
from elsa_core.exporting.fresh import FreshRun, fresh_run
from elsa_core.measuring.documents import finite

INT8 = "onnx-int8"
_OPENVINO = "openvino"
# Above this an artefact runs alone: each process holds the weights once more.
_SIDE_BY_SIDE_BYTES = 1 << 30
# What takes longest begins first.
_ORDER = ("aoti", "pt2", "torchscript", "onnx", INT8)


@dataclass(frozen=True)
class ArtefactReport:
    """What became of one artefact.

    Attributes:
        format: "torchscript", "onnx", "pt2", "aoti" or "onnx-int8".
        status: "ok", "failed", or "skipped" where its runtime is not installed.
        reason: why not ok, one line; empty for ok.
        batches: the largest relative error and what is allowed, by batch size. What is allowed to
            onnx-int8 is twice the error that was measured as it was exported, without elsa's
            library where it runs so.
        openvino: "ok" where OpenVINO reproduces the model too, else why not; empty where it is not
            installed, or the format is none of ONNX.
    """

    format: str
    status: str
    reason: str
    batches: dict[int, tuple[float, float]]
    openvino: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "status": self.status,
            "reason": self.reason,
            "batches": {
                str(size): {"error": finite(error), "allowed": finite(allowed)}
                for size, (error, allowed) in self.batches.items()
            },
            "openvino": self.openvino,
        }


@dataclass(frozen=True)
class Answer:
    """One run of an artefact: in which runtime, with the bundle's library or not, what came."""

    runtime: str
    library: bool
    run: FreshRun


def run_all(
    directory: Path,
    artefacts: Mapping[str, Mapping[str, Any]],
    device: str,
    say: Callable[[str], None],
    further: Path | None = None,
) -> dict[str, list[Answer]]:
    """Run artefacts of a bundle, two processes at a time where that is no question of memory.

    Args:
        directory: the bundle, with its manifest.
        artefacts: the manifest's entries of those to run.
        device: "cpu" or "cuda".
        say: called with one line before they start.
        further: a file of more inputs that each of them runs.

    Returns:
        The answers of each artefact: a file that runs with and without the library gives two.
    """
    if artefacts:
        say(f"running {', '.join(artefacts)} in fresh processes")
    jobs = [
        (name, runtime, library)
        for name in sorted(artefacts, key=_ORDER.index)
        for runtime, library in _ways(name, artefacts[name])
    ]
    largest = max((_size(directory, one) for one in artefacts.values()), default=0)
    together = 2 if device == "cpu" and largest < _SIDE_BY_SIDE_BYTES else 1
    answers: dict[str, list[Answer]] = {name: [] for name in artefacts}
    waiting: deque[tuple[str, str, bool, Callable[[], FreshRun]]] = deque()

    def collect() -> None:
        name, runtime, library, answer = waiting.popleft()
        answers[name].append(Answer(runtime, library, answer()))

    with ExitStack() as stack:
        for name, runtime, library in jobs:
            if len(waiting) == together:
                collect()
            begun = fresh_run(directory, name, runtime=runtime, device=device, library=library,
                              further=further)  # fmt: skip
            waiting.append((name, runtime, library, stack.enter_context(begun)))
        while waiting:
            collect()
    return answers


def plain_run(answers: Sequence[Answer]) -> FreshRun | None:
    """The run of ONNX Runtime that the others are judged by: without elsa's library, where it is
    there. None where it gave nothing.
    """
    given = [each for each in answers if each.runtime == "onnxruntime"]
    run = min(given, key=lambda each: each.library).run if given else None
    return run if run is not None and run.outputs else None


def judged(
    name: str,
    artefact: Mapping[str, Any],
    answers: Sequence[Answer],
    reference: references.Reference,
) -> ArtefactReport:
    """The verdict over the runs of one artefact; of several runs the larger errors count.

    Raises:
        ModelError: the errors that the manifest says onnx-int8 has are malformed.
    """
    if name == INT8:
        reference = references.with_norms(reference, artefact.get("norms"))
    report, openvino = ArtefactReport(name, "ok", "", {}), ""
    batches: dict[int, tuple[float, float]] = {}
    for answer in answers:
        status, reason, errors = _judged(answer, reference)
        if answer.runtime == _OPENVINO:
            openvino = reason or "ok"
            continue
        for batch, (error, allowed) in errors.items():
            if error > batches.get(batch, (-1.0, 0.0))[0]:
                batches[batch] = (error, allowed)
        if status != "ok" and report.status == "ok":
            prefix = "" if answer.library or status == "skipped" else "without the library, "
            report = ArtefactReport(name, status, prefix + reason, {})
    return ArtefactReport(name, report.status, report.reason, batches, openvino)


def _judged(
    answer: Answer, reference: references.Reference
) -> tuple[str, str, dict[int, tuple[float, float]]]:
    """Status, reason and errors of one run."""
    run = answer.run
    if run.missing:
        return "skipped", f"{run.missing} is not installed", {}
    if run.failure:
        return "failed", run.failure, {}
    verdicts = references.judge(reference, run.outputs)
    errors: dict[int, tuple[float, float]] = {}
    for each in verdicts:
        if each.error > errors.get(each.batch, (-1.0, 0.0))[0]:
            errors[each.batch] = (each.error, each.allowed)
    bad = next((each for each in verdicts if each.reason), None)
    return ("failed", f"at batch {bad.batch}: {bad.reason}", errors) if bad else ("ok", "", errors)


def _ways(name: str, artefact: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Runtimes of an artefact, each with the bundle's library or without."""
    if not name.startswith("onnx"):
        return [("torch", True)]
    ways = [("onnxruntime", True)]
    if artefact.get("mode") == "custom":
        ways.append(("onnxruntime", False))
    # OpenVINO reads no functions of a model.
    if artefact.get("mode") == "standard" and importlib.util.find_spec(_OPENVINO) is not None:
        ways.append((_OPENVINO, False))
    return ways


def _size(directory: Path, artefact: Mapping[str, Any]) -> int:
    return (directory / str(artefact["file"])).stat().st_size
