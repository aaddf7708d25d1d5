"""Runs an artefact in a fresh process that cannot import this package nor the model libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elsa_core.base.files import scratch
from elsa_core.base.processes import running
from elsa_core.exporting import replay
from elsa_core.exporting.templates import load as template

SECONDS = 3600
_BLOCKED = ("elsa_core", "elsa_cli", "timm", "open_clip", "torchvision")


@dataclass(frozen=True)
class FreshRun:
    """What came back: outputs by batch size and of the further inputs, or why there are none.

    `missing` names the runtime, or its provider, that is not installed; `failure` is one line.
    """

    outputs: dict[int, list[np.ndarray[Any, Any]]]
    further: tuple[np.ndarray[Any, Any], ...] = ()
    failure: str = ""
    missing: str = ""


@contextmanager
def fresh_run(
    bundle: Path,
    format: str,
    *,
    runtime: str,
    device: str = "cpu",
    library: bool = True,
    further: Path | None = None,
    python: str = sys.executable,
) -> Iterator[Callable[[], FreshRun]]:
    """Start one artefact of a bundle on its own reference inputs, by the template of load.py.

    This runs the bundle's libraries: its code has the rights of this user. What is yielded waits
    for the process, which is killed where the block ends before.

    Args:
        bundle: the directory.
        format: one of the manifest's artefacts.
        runtime: the package that runs it: "torch", "onnxruntime" or "openvino".
        device: on "cuda" the package itself is let in where the bundle needs its Triton kernels.
        library: False leaves the library for ONNX Runtime out.
        further: a file of more inputs, "input.INDEX" each, that are run too.
        python: the interpreter.
    """
    libraries = template.manifest(bundle)["artefacts_libraries"]
    alone = device == "cpu" or format.startswith("onnx") or bool(libraries.get("cuda"))
    blocked = [name for name in _BLOCKED if alone or not name.startswith("elsa")]
    with scratch("elsa-verify-") as folder:
        output = folder / "outputs.npz"
        script = str(Path(template.__file__).resolve())
        program = Path(replay.__file__).read_text(encoding="utf-8")
        command = [
            python, "-c", program, ",".join(blocked), script, format, str(bundle.resolve()),
            str(output), runtime, "library" if library else "bodies",
            "" if further is None else str(further.resolve()),
        ]  # fmt: skip
        # The working directory comes first in the path of `-c`: it must hold no module.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        with running(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL,
                     stderr=subprocess.PIPE) as process:  # fmt: skip
            yield lambda: _answer(process, runtime, output)


def _answer(process: subprocess.Popen[str], runtime: str, output: Path) -> FreshRun:
    try:
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return FreshRun({}, failure=f"no answer in {SECONDS} s")
    if process.returncode == replay.MISSING_RUNTIME:
        provider = f"{runtime} with its {replay.PROVIDER}"
        return FreshRun({}, missing=provider if errors.endswith(replay.PROVIDER) else runtime)
    if process.returncode != 0:
        return FreshRun({}, failure=_failure(process.returncode, errors))
    return _outputs(output)


def _failure(code: int, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("failed: ")]
    if said:
        return said[-1].removeprefix("failed: ")[:400]
    last = lines[-1][:300] if lines else "it said nothing"
    return f"the process ended with {'signal' if code < 0 else 'exit code'} {abs(code)}: {last}"


def _outputs(path: Path) -> FreshRun:
    results: dict[int, list[np.ndarray[Any, Any]]] = {}
    further: dict[int, list[np.ndarray[Any, Any]]] = {}
    with np.load(path, allow_pickle=False) as stored:
        names = sorted(stored.files, key=lambda name: [int(n) for n in name.split(".")[1:]])
        for name in names:
            kind, place, index = name.split(".")
            if kind == "output":
                results.setdefault(int(place), []).append(stored[name])
            else:
                further.setdefault(int(index), []).append(stored[name])
    return FreshRun(results, tuple(np.concatenate(parts) for parts in further.values()))
