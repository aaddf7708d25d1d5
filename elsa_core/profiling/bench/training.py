"""`elsa bench training`: training steps of whole models, patched against the original.

The models and sizes of the ELSA paper's training table and a table of steps at larger batches:
forward, backward and AdamW. Documents have the form of `elsa bench models`, with the parts of a
step beside each time, and the errors are those of the gradients.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Final

import torch

from elsa_core.errors import ElsaError
from elsa_core.measuring.documents import Document
from elsa_core.patching import patch, shared_copy
from elsa_core.profiling.bench import models
from elsa_core.profiling.bench.runner import ModelCase, Runner, result
from elsa_core.profiling.runs import training
from elsa_core.profiling.runs.runs import Progress

_MODELS: Final = {
    "ViT-T": "timm:vit_tiny_patch16_224",
    "ViT-B": "timm:vit_base_patch16_224",
    "Swin-T": "timm:swin_tiny_patch4_window7_224",
    "SwinV2-T": "timm:swinv2_tiny_window8_256",
}
_STEPS: Final = {
    "cuda": (
        # label, side, batch, dtype
        ("ViT-T", 224, 8, "fp32"),
        ("ViT-B", 224, 16, "fp32"),
        ("ViT-B", 512, 4, "fp32"),
        ("ViT-B", 1024, 2, "fp32"),
        ("ViT-B", 224, 64, "bf16"),
        ("ViT-B", 512, 16, "bf16"),
        ("Swin-T", 224, 32, "fp32"),
        ("Swin-T", 224, 32, "bf16"),
        ("SwinV2-T", 256, 16, "bf16"),
    ),
    "cpu": (("ViT-T", 224, 4, "fp32"), ("Swin-T", 224, 4, "fp32")),
}
# The paper's repository: forward and backward; it does not say the batch, and 8 is the paper's.
_PAPER: Final = (
    ("ViT-T", "fp16", (224, 384, 512)),
    ("ViT-T", "fp32", (224, 512, 768)),
    ("Swin-T", "fp16", (224, 384, 512)),
    ("Swin-T", "fp32", (224, 384, 512)),
)
_QUICK: Final = (("ViT-T", 224), ("Swin-T", 224))


TABLES: Final = {
    device_type: {
        "steps": tuple(
            ModelCase("steps", label, _MODELS[label], side, batch, dtype,
                      quick=(label, side) in _QUICK)
            for label, side, batch, dtype in _STEPS[device_type]
        ),
        "paper": tuple(
            ModelCase("paper", label, _MODELS[label], side, batch, dtype)
            for label, dtype, sides in _PAPER
            for side in sides
            if dtype == "fp32" or device_type == "cuda"
        ),
    }
    for device_type, batch in (("cpu", 1), ("cuda", 8))
}  # fmt: skip
"""Cases by device type and table. dtype "fp16" (with a scaled loss) and "bf16" are autocast."""


def measure(case: ModelCase, device: torch.device, settings: Document, tell: Progress) -> Document:
    """One case as plain data."""
    tell("building", 0, 0)
    model, given = models.build(replace(case, dtype="fp32"), device, settings["seed"])
    how = ("rounds", "budget_seconds", "seed", "baselines", "backend")
    found = training.profile_training(
        model, given, dtype=case.dtype, precision=case.precision, decide=False, progress=tell,
        **{key: settings[key] for key in how},
    )  # fmt: skip
    tell("checking", 0, 0)
    patched, errors, reason = shared_copy(model), None, ""
    patch(patched, precision=case.precision, backend=settings["backend"])
    # of all gradients of the batch that was timed: a smaller one may be computed in another way
    with contextlib.suppress(ElsaError, RuntimeError, MemoryError):
        judged = training.gradient_comparison(model, patched, given, case.dtype)
        errors, reason = (judged.patched_error, judged.original_error), judged.reason()
    failures = [f"gradients: {reason}"] if reason else []
    return result(case, found, failures) | {"errors": errors}


RUNNER: Final = Runner("bench training", TABLES, measure, baselines=training.chosen)
