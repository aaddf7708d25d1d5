"""`elsa bench training`: training steps of whole models, patched against the original.

The models and sizes of the ELSA paper's training table and a table of steps at larger batches. Each
case is one `runs.training.measure_training`: forward, backward and AdamW. Documents
have the form of `elsa bench models`, with the parts of a step beside each time, and the errors are
those of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError
from elsa_core.measuring.memory_limit import limited
from elsa_core.measuring.rounds import Settings
from elsa_core.patching import patch, shared_copy
from elsa_core.profiling.bench import models
from elsa_core.profiling.bench.model_cases import Document, ModelCase, empty, result
from elsa_core.profiling.bench.models import Tables
from elsa_core.profiling.runs import training, variants
from elsa_core.profiling.runs.runs import Progress

COMMAND: Final = "bench training"

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


def _steps(device_type: str) -> Iterable[ModelCase]:
    for label, side, batch, dtype in _STEPS[device_type]:
        yield ModelCase("steps", label, _MODELS[label], side, batch, dtype,
                        quick=(label, side) in _QUICK)  # fmt: skip


def _paper(device_type: str) -> Iterable[ModelCase]:
    for label, dtype, sides in _PAPER:
        for side in sides:
            if device_type == "cuda":
                yield ModelCase("paper", label, _MODELS[label], side, 8, dtype)
            elif dtype == "fp32":
                yield ModelCase("paper", label, _MODELS[label], side, 1, dtype)


TABLES: Final[Tables] = {
    device_type: {"steps": tuple(_steps(device_type)), "paper": tuple(_paper(device_type))}
    for device_type in ("cpu", "cuda")
}
"""Cases by device type and table. dtype "fp16" (with a scaled loss) and "bf16" are autocast."""


def select(device_type: str, **chosen: Any) -> tuple[ModelCase, ...]:
    """The cases of a device; arguments and errors as of `models.select`."""
    return models.select(device_type, **chosen, among=TABLES)


def settings(
    device: torch.device, *, baselines: Sequence[str] | None = None, **chosen: Any
) -> Document:
    """How to measure, as plain data; see `elsa_core.profiling.bench.models.settings`.

    Raises:
        ArgumentError: as `elsa_core.profiling.runs.training.chosen`.
    """
    return models.settings(device, baselines=training.chosen(baselines, device), **chosen)


def started(chosen: Document, described: Document) -> Document:
    """An empty document, as `elsa_core.profiling.bench.models.started`."""
    return models.started(chosen, described, COMMAND)


def run(
    cases: Sequence[ModelCase],
    document: Document,
    *,
    device: torch.device,
    keep: Callable[[Document], None] = lambda document: None,
    limit_seconds: float | None = None,
    progress: Progress | None = None,
) -> Document:
    """Measure the cases that the document does not hold yet, as `models.run`."""
    return models.run(
        cases, document, device=device, keep=keep, limit_seconds=limit_seconds, progress=progress,
        measured=measure,
    )  # fmt: skip


def measure(case: ModelCase, device: torch.device, settings: Document, tell: Progress) -> Document:
    """One case as plain data; see `elsa_core.profiling.bench.model_cases.result`."""
    variants.forget_compiled()
    try:
        with limited(device):
            tell("building", 0, 0)
            model = models.build(replace(case, dtype="fp32"), device, settings["seed"])
            generator = torch.Generator().manual_seed(settings["seed"])
            shape = (case.batch, 3, case.image_size, case.image_size)
            images = torch.randn(shape, generator=generator).to(device)
            how = Settings(settings["rounds"], settings["budget_seconds"], settings["seed"])
            found = training.measure_training(
                model, images, how, dtype=case.dtype, baselines=settings["baselines"],
                precision=case.precision, backend=settings["backend"], progress=tell,
            )  # fmt: skip
            tell("checking", 0, 0)
            errors, failures = _checked(model, images, case, settings["backend"])
            return result(case, found, failures) | {"errors": errors}
    except (ElsaError, RuntimeError, MemoryError) as error:
        return empty(case, first_line(error))


def _checked(
    model: nn.Module, images: torch.Tensor, case: ModelCase, backend: str
) -> tuple[tuple[float, float] | None, list[str]]:
    """Relative errors of all gradients, elsa's and the original's, of the batch that was timed."""
    patched = shared_copy(model)
    patch(patched, precision=case.precision, backend=backend)
    try:  # of the calls that were timed: a smaller batch may be computed in another way
        found = training.gradient_comparison(model, patched, images, case.dtype)
    except (ElsaError, RuntimeError, MemoryError):
        return None, []
    reason = found.reason()
    errors = (found.patched_error, found.original_error)
    return errors, [f"gradients: {reason}"] if reason else []
