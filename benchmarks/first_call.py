"""The time of the first call of a fresh process on a GPU, with a kernel pack and without.

    python -m elsa_core.bench.first_call [--pack DIR] [--shape 8,12,197,64] [--dtype fp32] > a.json

Each measurement is a process of its own in which CUDA is up and the packages are imported; these
times stand apart. `empty`: Triton's cache on disk was empty, so that Triton (up to 3.6 for each
kind of launch, later once) compiles its launcher as well, with the C compiler; `kept`: it holds
what the process before left there. Needs a GPU; not part of `elsa bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPEATS = 3


def measured(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Milliseconds of the steps of this process; call it once, before anything is imported."""
    times: dict[str, Any] = {}
    last = time.perf_counter()

    def step(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[name] = (now - last) * 1e3
        last = now

    import torch

    step("import_torch_ms")
    torch.zeros(1, device="cuda").add_(1).item()
    step("cuda_ms")
    import triton

    import elsa_core as elsa
    from elsa_core.backends.triton.pack import lookup
    from elsa_core.precision import DTYPES

    step("import_elsa_ms")
    q, k, v = (torch.randn(shape, device="cuda", dtype=DTYPES[dtype]) for _ in range(3))
    torch.cuda.synchronize()
    step("inputs_ms")
    for name in ("first_call_ms", "second_call_ms"):
        elsa.attention(q, k, v, backend="triton")
        torch.cuda.synchronize()
        step(name)
    return {
        **times, **{name: lookup.COUNTS[name] for name in ("hits", "misses")},
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "schedule": elsa.explain(q, k, v, backend="triton").schedule,
    }  # fmt: skip


def compared(shape: str, dtype: str, pack: str) -> dict[str, Any]:
    """The medians of fresh processes by variant.

    Raises:
        RuntimeError: a process fails; the last line that it wrote says why.
    """
    found: dict[str, Any] = {"shape": shape, "dtype": dtype, "repeats": REPEATS}
    for name, asked in (("pack", pack), ("jit", "0")):
        runs: dict[str, list[dict[str, Any]]] = {"empty": [], "kept": []}
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "kept"):
                    runs[state].append(_fresh(shape, dtype, asked, cache))
        for state, documents in runs.items():
            found[f"{name}_{state}"] = _median(documents)
    return found


def _fresh(shape: str, dtype: str, pack: str, cache: str) -> dict[str, Any]:
    environ = {**os.environ, "ELSA_PACK": pack, "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", __spec__.name, "--here", "--shape", shape, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _median(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose first call took the median time, and the least and the longest of them."""
    ordered = sorted(documents, key=lambda document: float(document["first_call_ms"]))
    ends = [ordered[0]["first_call_ms"], ordered[-1]["first_call_ms"]]
    return {**ordered[len(ordered) // 2], "first_call_range_ms": ends}


def main() -> None:
    """Write the document to stdout."""
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.first_call")
    parser.add_argument("--pack", default="1", help="folder of packs [those of the user's cache]")
    parser.add_argument("--shape", default="8,12,197,64", help="B,H,N,D")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        document = measured(tuple(map(int, given.shape.split(","))), given.dtype)
    else:
        pack = given.pack if given.pack == "1" else str(Path(given.pack).resolve())
        try:
            document = compared(given.shape, given.dtype, pack)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
