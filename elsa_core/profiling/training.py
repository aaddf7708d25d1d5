"""`elsa profile --train`: a patched model's training step against what one would run otherwise."""

from __future__ import annotations

from typing import Any

from torch import nn

from elsa_core.base.inputs import ModelInput
from elsa_core.base.processes import environment_kept
from elsa_core.errors import ArgumentError
from elsa_core.measuring.rounds import Settings
from elsa_core.profiling.runs.runs import ProfileReport
from elsa_core.profiling.runs.training import measure_training


@environment_kept()
def profile_training(
    model: nn.Module,
    inputs: ModelInput,
    *,
    rounds: int = 20,
    budget_seconds: float = 60.0,
    seed: int = 0,
    **asked: Any,
) -> ProfileReport:
    """Measure what patching a model gains in training: forward, backward and AdamW.

    All ways take turns in the same rounds on copies of the model, which itself is not changed; see
    `elsa_core.profiling.runs.training.measure_training`.

    Args:
        model: in float32, with attention sites that can be patched.
        inputs: a tensor [B, C, H, W], or a tuple of the model's arguments, on its device.
        rounds: samples of each at least; more until the intervals decide.
        budget_seconds: of warming up and rounds; under it there are fewer, but never under 3.
        seed: of the labels and of the bootstrap.
        asked: `dtype`, "fp32", or "fp16" or "bf16" for autocast (fp16 with a scaled loss);
            `baselines`, of "eager", "control", "sdpa", "compile", "eager+graph", "sdpa+graph" or
            "all" (default: "eager" on a CPU, with "eager+graph" and "compile" on CUDA; these two
            are also measured patched); `precision`, `backend`, `include`, `exclude` and `scope` as
            for `elsa_core.patch`; `progress`, called with (what, steps done, steps in all).

    Returns:
        The report: no sites, and runs whose `parts` are seconds of forward, backward and optimizer.

    Raises:
        ArgumentError: an argument is wrong, no parameter wants a gradient, or the model cannot be
            copied.
        NothingPatchedError: no site of the model can be patched.
        UnavailableError: a backend that this machine lacks.
    """
    if rounds < 1 or not budget_seconds > 0:
        raise ArgumentError("profile: rounds and budget_seconds must be positive")
    return measure_training(
        model, inputs, Settings(rounds, budget_seconds, seed, decide=True), **asked
    )
