"""Eager forwards of whole models, patched and not: `python -m benchmarks.eager`.

Most people run a model in eager mode, and at batch 1 the host's time is the time. Each model stands
beside its original in inference mode, in turns drawn anew in each round; wall time of a forward,
from the first launch to the end of the last kernel.
"""

from __future__ import annotations

import copy
import random
import time
from argparse import Namespace
from functools import partial
from typing import NamedTuple

import torch

import elsa_core as elsa
from benchmarks.harness import Row, main, row
from elsa_core.measuring.timing import Contender, interleaved, synchronize
from elsa_core.precision import DTYPES

CALLS = 5
MODELS = (
    ("vit_tiny_patch16_224", 1), ("vit_tiny_patch16_224", 8), ("vit_base_patch16_224", 1),
    ("vit_base_patch16_224", 8), ("swin_tiny_patch4_window7_224", 1), ("mvitv2_tiny", 1),
    ("hiera_base_224", 1), ("vit_small_patch16_dinov3", 1), ("eva02_tiny_patch14_224", 1),
)  # fmt: skip


class Case(NamedTuple):
    """A model at its own size."""

    model: str
    batch: int
    dtype: str


def cases(given: Namespace) -> dict[str, Case]:
    """Each model in single and half precision."""
    found = (Case(*model, dtype) for model in MODELS for dtype in ("fp32", "fp16"))
    return {"-".join(map(str, case)): case for case in found}


def measure(name: str, case: Case, given: Namespace) -> list[Row]:
    """Seconds of a forward; `ratio`: the original's over the patched model's."""
    dtype, calls = DTYPES[case.dtype], 1 if given.quick else CALLS
    original = elsa.load(case.model, device=given.device, dtype=dtype).eval()
    patched = copy.deepcopy(original)
    elsa.patch(patched)
    size = getattr(original, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    images = torch.randn((case.batch, *size), device=given.device, dtype=dtype)

    def sample(contender: Contender) -> float:
        synchronize(given.device)
        started = time.perf_counter()
        for _ in range(calls):
            contender.call()
        synchronize(given.device)
        return (time.perf_counter() - started) / calls

    ways = (("original", original), ("patched", patched))
    contenders = [Contender(way, partial(model, images)) for way, model in ways]
    with torch.inference_mode():
        interleaved(contenders, 3, sample)
        found = interleaved(contenders, given.rounds, sample, shuffle=random.Random(0))
    rows = [row(name, way, seconds) for way, seconds in found.items()]
    rows[1]["ratio"] = rows[0]["median"] / rows[1]["median"]
    return rows


if __name__ == "__main__":
    main(__doc__, cases, measure)
