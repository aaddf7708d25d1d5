"""Eager forwards of whole models, patched and not: `python -m benchmarks.eager`.

Most people run a model in eager mode, and at batch 1 the host's time is the time. Each model stands
beside its original in inference mode, in turns drawn anew in each round; wall time of a forward,
from the first launch to the end of the last kernel.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from functools import partial
from typing import NamedTuple

import torch

import elsa_core as elsa
from benchmarks.harness import Row, in_turns, main, row
from elsa_core.measuring.timing import Contender
from elsa_core.precision import DTYPES

CALLS = 5
BATCHES = (("vit_tiny_patch16_224", 8), ("vit_base_patch16_224", 8))
FAMILIES = (
    "vit_tiny_patch16_224", "vit_base_patch16_224", "deit3_small_patch16_224",
    "vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3", "eva02_tiny_patch14_224",
    "beit_base_patch16_224", "vit_relpos_small_patch16_224", "hiera_base_224", "mvitv2_tiny",
    "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_ns_224",
    "maxvit_tiny_tf_224", "davit_tiny", "twins_svt_small", "nest_tiny", "gcvit_tiny",
    "tiny_vit_11m_224", "pvt_v2_b1", "levit_256", "efficientvit_m5", "efficientformer_l1",
    "convit_tiny", "crossvit_9_240", "cait_xxs24_224", "xcit_tiny_12_p16_224", "volo_d1_224",
)  # fmt: skip
MODELS = (*((name, 1) for name in FAMILIES), *BATCHES)


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

    ways = (("original", original), ("patched", patched))
    contenders = [Contender(way, partial(model, images)) for way, model in ways]
    found = in_turns(contenders, given, calls=calls)
    rows = [row(name, way, seconds) for way, seconds in found.items()]
    rows[1]["ratio"] = rows[0]["median"] / rows[1]["median"]
    return rows


if __name__ == "__main__":
    main(__doc__, cases, measure)
