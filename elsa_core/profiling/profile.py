"""`profile`: a patched model against the ways one would otherwise run it, in one go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import SupportsIndex

from torch import nn

from elsa_core.base.inputs import ModelInput, as_cases
from elsa_core.base.messages import shown
from elsa_core.base.processes import environment_kept
from elsa_core.errors import ArgumentError
from elsa_core.measuring.rounds import Settings
from elsa_core.patching import plain_model
from elsa_core.profiling.locate import located
from elsa_core.profiling.runs.runs import ProfileReport, Progress, prepare, timed
from elsa_core.profiling.runs.variants import first_tensor, on_device

__all__ = ["ProfileReport", "profile"]


@environment_kept()
def profile(
    model: nn.Module,
    inputs: ModelInput,
    *,
    baselines: Sequence[str] | None = None,
    precision: str = "strict",
    backend: str = "auto",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    scope: str = "auto",
    rounds: int = 20,
    budget_seconds: float = 60.0,
    seed: int = 0,
    sites: bool | None = None,
    errors: bool = True,
    progress: Progress | bool | None = None,
) -> ProfileReport:
    """Measure what patching a model gains against the ways one would otherwise run it.

    All of them take turns in the same rounds, in inference mode, on copies of the model's modules
    over the same weights; the model itself is not changed. The rounds end as soon as the interval
    decides; what is left of the budget goes to the sites.

    Args:
        model: any module with attention sites that can be patched. One that is patched already
            keeps its patches; `precision`, `backend`, `include`, `exclude` and `scope` do not
            matter then.
        inputs: a tensor [B, C, H, W], or a tuple of the model's arguments, on its device.
        baselines: names of `runs.variants.BASELINES`, or "all"; default: "eager"
            on a CPU; on CUDA also "sdpa", "compile" and CUDA graphs. "eager" always takes part.
        precision, backend, include, exclude, scope: as for `elsa_core.patch`.
        rounds: samples of each at least; more until the intervals decide.
        budget_seconds: of warming up, rounds and sites; under it there are fewer rounds, but never
            under 3.
        seed: of the bootstrap.
        sites: also time every attention site, before and after, whatever is left of the budget;
            None: on a CPU only if the budget suffices.
        errors: also measure the error of every run's output against float64, and with sites that
            of each site, both on the inputs that are timed.
        progress: called with (what, steps done, steps in all; 0 unknown). Default: a line on stderr
            where that is a terminal; False: nothing.

    Returns:
        The report.

    Raises:
        TypeError: `model` is no `nn.Module`, `inputs` is no tensor or tuple, or a number is none.
        ArgumentError: an argument is wrong, or the model cannot be copied.
        NothingPatchedError: no site of the model can be patched.
        UnavailableError: a baseline or backend that this machine lacks.
    """
    if not isinstance(rounds, int) or not isinstance(budget_seconds, int | float):
        raise TypeError("profile: rounds must be a whole number and budget_seconds a number")
    if not isinstance(seed, SupportsIndex):
        raise TypeError(f"seed must be a whole number, not {type(seed).__name__}")
    if rounds < 1 or not budget_seconds > 0:
        raise ArgumentError("profile: rounds and budget_seconds must be positive")
    model = plain_model(model)
    arguments = next(iter(as_cases(inputs).values()))
    settings = Settings(rounds, budget_seconds, seed, decide=True)
    device, start = first_tensor(arguments).device, time.perf_counter()
    with shown(progress) as told, on_device(device):
        tell = told or (lambda what, done, total: None)
        ready = prepare(
            model, arguments, baselines, tell, precision=precision, backend=backend,
            include=include, exclude=exclude, scope=scope,
        )  # fmt: skip
        if device.type == "cuda":  # compiling and capturing are not what the budget is for
            start = time.perf_counter()
        end = start + budget_seconds
        # the verdict comes before the sites
        budget = max(end - time.perf_counter(), budget_seconds / 2)
        found, _ = timed(ready, replace(settings, budget_seconds=budget), tell, errors=errors)
        return located(ready, found, settings, tell, sites=sites, errors=errors, end=end)
