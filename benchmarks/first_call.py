"""The first call of a fresh process on a GPU, with a kernel pack and without.

    python -m benchmarks.first_call [--pack DIR] [--shape 8,12,197,64] [--dtype fp32]

Each sample is a process of its own in which CUDA is up and the packages are imported; these times
stand apart. `cache empty`: Triton's cache on disk was empty, so that Triton compiles its launcher
as well, with the C compiler; `cache kept`: it holds what the process before left there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, main, options, row


def steps(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Seconds of the steps of this process; call it once."""
    times: dict[str, Any] = {}
    last = time.perf_counter()

    def step(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[name], last = now - last, now

    torch.zeros(1, device="cuda").add_(1).item()
    step("cuda")
    import triton  # noqa: F401

    import elsa_core as elsa
    from elsa_core.backends.triton.pack import lookup
    from elsa_core.precision import DTYPES

    step("import_elsa")
    q, k, v = (torch.randn(shape, device="cuda", dtype=DTYPES[dtype]) for _ in range(3))
    torch.cuda.synchronize()
    step("inputs")
    for name in ("first_call", "second_call"):
        elsa.attention(q, k, v, backend="triton")
        torch.cuda.synchronize()
        step(name)
    return {**times, **{name: lookup.COUNTS[name] for name in ("hits", "misses")}}


def fresh(pack: str, cache: str, given: Namespace) -> dict[str, Any]:
    """The steps of a new process."""
    environ = {**os.environ, "ELSA_PACK": pack, "TRITON_CACHE_DIR": cache}
    words = ["--here", "--shape", given.shape, "--dtype", given.dtype]
    done = subprocess.run([sys.executable, "-m", "benchmarks.first_call", *words],
                          capture_output=True, text=True, check=False, env=environ)  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cases(given: Namespace) -> dict[str, None]:
    """The one call."""
    return {f"{given.shape.replace(',', 'x')}-{given.dtype}": None}


def measure(name: str, case: None, given: Namespace) -> list[Row]:
    """Packs and Triton's compiler in turns, each with an empty cache and with the one it leaves."""
    packs = {"pack": given.pack if given.pack == "1" else str(Path(given.pack).resolve()),
             "jit": "0"}  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(given.rounds):
        for kind, pack in packs.items():
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "kept"):
                    found = fresh(pack, cache, given)
                    runs.setdefault(f"{kind}, cache {state}", []).append(found)
    rows = []
    for way, found_steps in runs.items():
        ordered = sorted(found_steps, key=lambda each: float(each["first_call"]))
        middle = dict(ordered[len(ordered) // 2])
        middle.pop("first_call")
        rows.append(row(name, way, [each["first_call"] for each in found_steps], **middle))
    return rows


if __name__ == "__main__":
    parser = options(__doc__, rounds=3)
    parser.add_argument("--pack", default="1", help="folder of packs [those of the user's cache]")
    parser.add_argument("--shape", default="8,12,197,64", help="B,H,N,D")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--here", action="store_true", help="measure in this process; print JSON")
    given = parser.parse_args()
    if given.here:
        found = steps(tuple(map(int, given.shape.split(","))), given.dtype)
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        main(__doc__, cases, measure, parser)
