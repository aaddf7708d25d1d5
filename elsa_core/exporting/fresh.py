"""Runs an artefact in a fresh process that cannot import this package nor the model libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elsa_core.exporting.templates import load as template
from elsa_core.files import scratch
from elsa_core.processes import running

SECONDS = 3600
_BLOCKED = ("elsa_core", "elsa_cli", "timm", "open_clip", "torchvision")
# Blocks the imports, runs load.py's own code, and tells a missing runtime from a failure.
_PRELUDE = """
import runpy, sys
blocked, script, format, bundle, output, library = sys.argv[1].split(","), *sys.argv[2:]
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(name + " is blocked: the bundle must run without it")
sys.meta_path.insert(0, Block())
from pathlib import Path
code = runpy.run_path(script, run_name="load")
try:
    __import__("onnxruntime" if format == "onnx" else "torch")
except ImportError as error:
    sys.exit((sys.stderr.write(str(error).splitlines()[0]), code["MISSING_RUNTIME"])[1])
try:
    code["run_reference"](format, Path(bundle), Path(output), library=library == "library")
except BaseException as error:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sys.stderr.write(chr(10) + "failed: " + type(error).__name__ + ": " + (lines or [""])[0])
    sys.exit(1)
"""


@dataclass(frozen=True)
class FreshRun:
    """What came back: outputs by batch size, or why there are none.

    `missing` names the runtime that is not installed; `failure` is one line.
    """

    outputs: dict[int, list[np.ndarray[Any, Any]]]
    failure: str = ""
    missing: str = ""


def run_fresh(
    bundle: Path,
    format: str,
    *,
    device: str = "cpu",
    library: bool = True,
    python: str = sys.executable,
) -> FreshRun:
    """Run one artefact of a bundle on its own reference inputs, by the template of load.py.

    This runs the bundle's libraries: its code has the rights of this user.

    Args:
        bundle: the directory.
        format: one of the manifest's artefacts.
        device: on "cuda" the package itself is let in where the bundle needs its Triton kernels.
        library: False leaves the library for ONNX Runtime out.
        python: the interpreter.
    """
    alone = device == "cpu" or bool(template.manifest(bundle)["artefacts_libraries"].get("cuda"))
    blocked = [name for name in _BLOCKED if alone or not name.startswith("elsa")]
    with scratch("elsa-verify-") as folder:
        output = folder / "outputs.npz"
        script = str(Path(template.__file__).resolve())
        command = [python, "-c", _PRELUDE, ",".join(blocked), script, format, str(bundle.resolve()),
                   str(output), "library" if library else "bodies"]  # fmt: skip
        code, errors = _run(command, folder)
        if code == template.MISSING_RUNTIME:
            return FreshRun({}, missing="onnxruntime" if format == "onnx" else "torch")
        if code != 0:
            return FreshRun({}, failure=_failure(code, errors))
        return FreshRun(_outputs(output))


def _run(command: list[str], directory: Path) -> tuple[int, str]:
    """Run to the end; killed where this process is interrupted or the time is up."""
    # The working directory comes first in the path of `-c`: it must hold no module.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    with running(command, cwd=directory, env=environment, stdout=subprocess.DEVNULL,
                 stderr=subprocess.PIPE) as process:  # fmt: skip
        try:
            _, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return 1, f"failed: no answer in {SECONDS} s"
    return process.returncode, errors


def _failure(code: int, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("failed: ")]
    if said:
        return said[-1].removeprefix("failed: ")[:400]
    last = lines[-1][:300] if lines else "it said nothing"
    return f"the process ended with {'signal' if code < 0 else 'exit code'} {abs(code)}: {last}"


def _outputs(path: Path) -> dict[int, list[np.ndarray[Any, Any]]]:
    results: dict[int, list[np.ndarray[Any, Any]]] = {}
    with np.load(path, allow_pickle=False) as stored:
        names = sorted(stored.files, key=lambda name: [int(n) for n in name.split(".")[1:]])
        for name in names:
            results.setdefault(int(name.split(".")[1]), []).append(stored[name])
    return results
