"""Eager forwards of whole models, patched and not: `python -m elsa_core.bench.eager` prints JSON.

Most people run a model in eager mode, and at batch 1 the host's time is the time. Each model stands
beside its original in the same run, who begins drawn anew in each round, in inference mode; wall
time of a forward, from the first launch to the end of the last kernel. `--least 0.1` measures as if
eager calls went to elsa's kernels from a tenth of the sizes in `routing/measured.json` on.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import torch

import elsa_core as elsa
from elsa_core.backends import cuda
from elsa_core.measuring import environment
from elsa_core.measuring.timing import Contender, interleaved, synchronize
from elsa_core.precision import DTYPES
from elsa_core.routing import measured


class Case(NamedTuple):
    """A model at its own size."""

    model: str
    batch: int
    dtype: str


CASES = tuple(
    Case(*case)
    for case in (
        ("vit_tiny_patch16_224", 1, "fp32"),
        ("vit_tiny_patch16_224", 1, "fp16"),
        ("vit_tiny_patch16_224", 8, "fp16"),
        ("vit_base_patch16_224", 1, "fp32"),
        ("vit_base_patch16_224", 1, "fp16"),
        ("vit_base_patch16_224", 8, "fp16"),
        ("swin_tiny_patch4_window7_224", 1, "fp32"),
        ("swin_tiny_patch4_window7_224", 1, "fp16"),
        ("mvitv2_tiny", 1, "fp32"),
        ("mvitv2_tiny", 1, "fp16"),
        ("hiera_base_224", 1, "fp32"),
        ("hiera_base_224", 1, "fp16"),
        ("vit_small_patch16_dinov3", 1, "fp32"),
        ("vit_small_patch16_dinov3", 1, "fp16"),
        ("eva02_tiny_patch14_224", 1, "fp32"),
        ("eva02_tiny_patch14_224", 1, "fp16"),
    )
)


def measure(case: Case, device: torch.device, rounds: int, calls: int) -> dict[str, Any]:
    """Medians of `rounds` samples of `calls` forwards each, in microseconds of one forward."""
    dtype = DTYPES[case.dtype]
    original = elsa.load(case.model, device=device, dtype=dtype).eval()
    patched = copy.deepcopy(original)
    elsa.patch(patched)
    size = getattr(original, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    images = torch.randn((case.batch, *size), device=device, dtype=dtype)

    def sample(contender: Contender) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            contender.call()
        synchronize(device)
        return (time.perf_counter() - started) / calls * 1e6

    contenders = [
        Contender(name, partial(model, images))
        for name, model in (("original", original), ("patched", patched))
    ]
    interleaved(contenders, 3, sample)
    found = interleaved(contenders, rounds, sample, shuffle=random.Random(0))  # noqa: S311
    medians = {name: round(statistics.median(times), 1) for name, times in found.items()}
    speed = round(medians["original"] / medians["patched"], 3)
    return {**case._asdict(), "us": medians, "speed": speed}


def _scale_least(share: float) -> None:
    """Of this process, the sizes from which eager calls on a GPU go to elsa's kernels."""
    for sizes in measured._table()["eager"].values():
        sizes |= {dtype: int(share * least) for dtype, least in sizes.items()}
    measured.eager_least.cache_clear()


def main(arguments: list[str]) -> None:
    """Print the document."""
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.eager")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--match", default="", help="only cases whose name, model-batch-dtype, holds this"
    )
    parser.add_argument("--least", type=float, default=1.0, metavar="SHARE")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=5)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    _scale_least(given.least)
    results = []
    for case in CASES:
        if given.match in "-".join(map(str, case)):
            results.append(measure(case, device, given.rounds, given.calls))
            sys.stderr.write(f"{case}: {results[-1]['us']} {results[-1]['speed']}\n")
    document = {
        "schema_version": 1, "least": given.least, "environment": environment.describe(device),
        "cuda_library": cuda.status()._asdict(), "results": results,
    }  # fmt: skip
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
