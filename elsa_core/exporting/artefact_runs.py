"""Every artefact of a bundle in fresh processes, in each runtime it is for, and the verdicts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from elsa_core.base.files import scratch
from elsa_core.base.processes import running
from elsa_core.exporting import reference as references
from elsa_core.exporting import replay
from elsa_core.exporting.templates import load as template
from elsa_core.measuring.documents import finite

INT8 = "onnx-int8"
_SECONDS = 3600
_BLOCKED = ("elsa_core", "elsa_cli", "timm", "open_clip", "torchvision")
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
class Run:
    """One run of an artefact: in which runtime, with the bundle's library or not, and what came
    back: outputs by batch size and the first output of the further inputs, or why there are none.

    `missing` names the runtime, or its provider, that is not installed; `failure` is one line.
    """

    runtime: str
    library: bool
    outputs: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    further: np.ndarray[Any, Any] | None = None
    failure: str = ""
    missing: str = ""


def run_all(
    directory: Path,
    artefacts: Mapping[str, Mapping[str, Any]],
    device: str,
    say: Callable[[str], None],
    further: Path | None = None,
) -> dict[str, list[Run]]:
    """Run artefacts of a bundle, two processes at a time where that is no question of memory.

    `artefacts` are the manifest's entries of those to run; `further` is a file of more inputs for
    each. ONNX with elsa's nodes and bodies runs with the bundle's library and without; of standard
    operators alone it runs in OpenVINO too, which reads no functions.
    """
    if artefacts:
        say(f"running {', '.join(artefacts)} in fresh processes")
    sizes = [(directory / str(one["file"])).stat().st_size for one in artefacts.values()]
    together = 2 if device == "cpu" and max(sizes, default=0) < _SIDE_BY_SIDE_BYTES else 1
    runs: dict[str, list[Run]] = {name: [] for name in artefacts}
    waiting: deque[tuple[str, Callable[[], Run]]] = deque()
    with ExitStack() as stack:
        for name in sorted(artefacts, key=_ORDER.index):
            onnx, mode = name.startswith("onnx"), artefacts[name].get("mode")
            ways = [("onnxruntime" if onnx else "torch", True)]
            if onnx and mode == "custom":
                ways.append(("onnxruntime", False))
            if onnx and mode == "standard" and importlib.util.find_spec(_OPENVINO):
                ways.append((_OPENVINO, False))
            for runtime, library in ways:
                if len(waiting) == together:
                    first, answer = waiting.popleft()
                    runs[first].append(answer())
                begun = _fresh_run(directory, name, runtime, library, device, further)
                waiting.append((name, stack.enter_context(begun)))
        for name, answer in waiting:
            runs[name].append(answer())
    return runs


@contextmanager
def _fresh_run(
    bundle: Path, format: str, runtime: str, library: bool, device: str, further: Path | None
) -> Iterator[Callable[[], Run]]:
    """Start one artefact of a bundle on its own reference inputs, by the template of load.py, in a
    process that cannot import this package nor the model libraries.

    This runs the bundle's libraries: its code has the rights of this user. What is yielded waits
    for the process, which is killed where the block ends before. On a GPU the package itself is let
    in where the bundle needs its Triton kernels.
    """
    libraries = template.manifest(bundle)["artefacts_libraries"]
    alone = device == "cpu" or format.startswith("onnx") or bool(libraries.get("cuda"))
    with scratch("elsa-verify-") as folder:
        output = folder / "outputs.npz"
        how = {
            "blocked": [name for name in _BLOCKED if alone or not name.startswith("elsa")],
            "script": str(Path(template.__file__).resolve()), "format": format,
            "folder": str(bundle.resolve()), "output": str(output), "runtime": runtime,
            "library": library, "further": "" if further is None else str(further.resolve()),
        }  # fmt: skip
        program = Path(replay.__file__).read_text(encoding="utf-8")
        # The working directory comes first in the path of `-c`: it must hold no module.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        with running([sys.executable, "-c", program, json.dumps(how)], cwd=folder, env=environment,
                     stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:  # fmt: skip
            yield lambda: _answer(process, Run(runtime, library), output)


def _answer(process: subprocess.Popen[str], run: Run, output: Path) -> Run:
    try:
        _, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return replace(run, failure=f"no answer in {_SECONDS} s")
    code = process.returncode
    if code == replay.MISSING_RUNTIME:
        provider = f" with its {replay.PROVIDER}" * errors.endswith(replay.PROVIDER)
        return replace(run, missing=run.runtime + provider)
    if code != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        failure = f"the process ended with {'signal' if code < 0 else 'exit code'} {abs(code)}: "
        failure += lines[-1][:300] if lines else "it said nothing"
        if said := [line for line in lines if line.startswith("failed: ")]:
            failure = said[-1].removeprefix("failed: ")[:400]
        return replace(run, failure=failure)
    with np.load(output, allow_pickle=False) as stored:
        further = stored.get("further")
        for name in (each for each in stored.files if each != "further"):
            run.outputs.setdefault(int(name.partition(".")[0]), []).append(stored[name])
    return replace(run, further=further)


def judged(
    name: str,
    artefact: Mapping[str, Any],
    runs: Sequence[Run],
    reference: references.Reference,
) -> ArtefactReport:
    """The verdict over the runs of one artefact; of several runs the larger errors count. Raises
    ModelError where the manifest's errors of onnx-int8 are malformed."""
    if name == INT8:
        reference = references.with_norms(reference, artefact.get("norms"))
    verdict, openvino = ("ok", ""), ""
    batches: dict[int, tuple[float, float]] = {}
    for run in runs:
        reason = run.failure
        found = [] if reason or run.missing else references.judge(reference, run.outputs)
        if bad := next((each for each in found if each.reason), None):
            reason = f"at batch {bad.batch}: {bad.reason}"
        absent = f"{run.missing} is not installed" if run.missing else ""
        if run.runtime == _OPENVINO:
            openvino = reason or absent or "ok"
            continue
        for each in found:
            if each.error > batches.get(each.batch, (-1.0, 0.0))[0]:
                batches[each.batch] = (each.error, each.allowed)
        if verdict[0] == "ok" and absent:
            verdict = "skipped", absent
        elif verdict[0] == "ok" and reason:
            verdict = "failed", reason if run.library else f"without the library, {reason}"
    return ArtefactReport(name, *verdict, batches, openvino)
