"""The program of a fresh process: runs one artefact of a bundle on the reference inputs.

It is handed to `python -c` as text and imports nothing of this package: load.py is all it runs.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

MISSING_RUNTIME = 77
PROVIDER = "CUDAExecutionProvider"  # the name of the ImportError of an ONNX Runtime without it


def _replay(
    code: dict[str, Any], format: str, folder: str, output: str, further: str, **how: Any
) -> None:
    """Write outputs for reference.npz at each of its batch sizes, "BATCH.INDEX", and the first ones
    for the inputs of `further`."""
    bundle = Path(folder)
    model = code["load"](format, bundle, **how)
    facts, results = code["manifest"](bundle), {}
    sizes, names = facts["reference"]["batch_sizes"], range(len(facts["inputs"]))
    with np.load(bundle / "reference.npz", allow_pickle=False) as stored:
        arrays = [stored[f"input.{index}"] for index in names]
    for size in sizes:
        for index, array in enumerate(model(*(each[:size] for each in arrays))):
            results[f"{size}.{index}"] = array
    if further:
        with np.load(further, allow_pickle=False) as stored:
            arrays = [stored[f"input.{index}"] for index in names]
        parts, rows, most = [], len(arrays[0]), max(sizes)
        for start in range(0, rows, most):
            count = min(most, rows - start)
            # a GPU's plans are for these sizes alone: what fills one up is left out
            size = min(size for size in sizes if size >= count)
            chosen = np.arange(start, start + size) % rows
            parts.append(model(*(each[chosen] for each in arrays))[0][:count])
        results["further"] = np.concatenate(parts)
    np.savez(output, **results)


def main(blocked: list[str], script: str, runtime: str, **how: Any) -> int:
    """Run an artefact and return the exit code.

    Standard error ends with the missing module or provider, or with "failed: " and a line.
    """

    def refuse(name: str, *_: Any) -> None:
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked: the bundle must run without it")

    finder: Any = SimpleNamespace(find_spec=refuse)
    sys.meta_path.insert(0, finder)
    code = runpy.run_path(script, run_name="load")
    try:
        __import__(runtime)
    except ImportError as error:
        sys.stderr.write(str(error).splitlines()[0])
        return MISSING_RUNTIME
    try:
        _replay(code, runtime=runtime, **how)
    except BaseException as error:
        if isinstance(error, ImportError) and error.name == PROVIDER:
            sys.stderr.write(f"\n{PROVIDER}")
            return MISSING_RUNTIME
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        sys.stderr.write(f"\nfailed: {type(error).__name__}: {(lines or [''])[0]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
