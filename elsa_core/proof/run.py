"""Running a check: the original, float64 and each path of the patched model, case by case."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.inputs.cases import chunks
from elsa_core.measuring.timing import synchronize
from elsa_core.messages import first_line
from elsa_core.patching import original
from elsa_core.proof import gradients, paths
from elsa_core.proof.compare import TURBO_EPS, map_floating
from elsa_core.proof.judge import MODEL_SAMPLES, Judgement, settle
from elsa_core.proof.report import GradientCheck, GradientRecord, ModelCheck, model_check
from elsa_core.proof.samples import jittered, nearby
from elsa_core.proof.sides import Fault, Given, PatchedError, Sides, finding, of_model, own
from elsa_core.proof.site_run import Asked, Progress, SiteRun

TIMED_RUNS = 5
TIMED_SECONDS = 3.0

MODEL = "model"

Judgements = dict[str, Judgement]


@dataclass
class CheckRun:
    """One check in progress: the model's cases, and the progress made.

    Attributes:
        model: patched; its sites by path in `sites`.
        oracle: the original in float64.
        asked: what to do.
        dtype, device: of the model.
        fault: a deliberate error.
        progress: called with (what, steps done, steps in all).
        left_out: paths that the original cannot take, with the reason.
    """

    model: nn.Module
    sites: Mapping[str, nn.Module]
    oracle: nn.Module
    asked: Asked
    dtype: torch.dtype
    device: torch.device
    fault: Fault | None
    progress: Progress | None
    left_out: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        self.site_run = SiteRun(
            self.sites, self.oracle, self.asked, self.dtype, self.fault, self.tick
        )
        self.sides = of_model(self.model, self.oracle, self.sites, self.fault)
        self.by_path: dict[str, Sides] = {
            path: self.sides if path == paths.EAGER else self._through(path)
            for path in self.asked.paths
        }
        self.gradients = GradientRecord()

    def tick(self, what: str, steps: int) -> None:
        """Say that so many steps more are done."""
        self.done += steps
        if self.progress is not None:
            self.progress(what, self.done, self.steps)

    def cases(self, cases: Mapping[str, tuple[Any, ...]]) -> tuple[ModelCheck, ...]:
        """Every case; hard cases for a site, and gradients, come from the first."""
        each = len(self.sites) + 1
        self.steps = len(cases) * each + 1 + int(self.asked.grad)
        results: list[ModelCheck] = []
        for index, (name, case) in enumerate(cases.items()):
            results += self._case(name, case)
            self.tick(name, (index + 1) * each - self.done)
        if self.asked.grad:
            name, case = next(iter(cases.items()))
            self._gradients(name, self._prepared(next(chunks(case, self.asked.batch_size))))
            self.tick("gradients", 1)
        return tuple(one for one in results if one.path not in self.left_out)

    def gradient_checks(self) -> tuple[GradientCheck, ...]:
        """The verdict on the gradients of the sites and of the model; empty if not asked for."""
        if not self.asked.grad:
            return ()
        return (*self.site_run.gradient_checks(), self.gradients.result(MODEL))

    def timings(self, case: tuple[Any, ...]) -> tuple[tuple[float, float], int]:
        """Median seconds of (original, patched) forwards of the first batch, run in turns."""
        batch = self._prepared(next(chunks(case, self.asked.batch_size)))
        seconds: tuple[list[float], list[float]] = ([], [])
        start = time.perf_counter()
        while len(seconds[0]) < TIMED_RUNS:
            classes: list[AbstractContextManager[Any]] = [original(self.model), nullcontext()]
            for index, swapped in enumerate(classes):
                with swapped:
                    seconds[index].append(_seconds(self.model, own(batch), self.device))
            if time.perf_counter() - start > TIMED_SECONDS:
                break
        medians = (statistics.median(seconds[0]), statistics.median(seconds[1]))
        self.tick("timing", 1)
        return medians, len(seconds[0])

    def _prepared(self, batch: tuple[Any, ...]) -> Given:
        moved = tuple(x.to(self.device) if isinstance(x, Tensor) else x for x in batch)
        return tuple(map_floating(moved, self.dtype)), {}

    def _case(self, name: str, case: tuple[Any, ...]) -> list[ModelCheck]:
        """One case by every path, each over as many samples as it takes."""
        judged = {path: self._judgement() for path in self.by_path}
        inputs = 0
        for index, raw in enumerate(chunks(case, self.asked.batch_size)):
            watch = self.site_run.watch(name) if index == 0 else nullcontext()
            self._batch(name, self._prepared(raw), judged, watch, top1=True)
            inputs += next(len(x) for x in raw if isinstance(x, Tensor) and x.ndim)
        first = self._prepared(next(chunks(case, self.asked.batch_size)))
        for seed in range(max((each.too_few for each in judged.values()), default=0)):
            self._batch(name, (nearby(first[0], seed), {}), judged)
        doubtful = {path: each for path, each in judged.items() if each.in_doubt and not each.error}
        settle(
            doubtful.values(),
            MODEL_SAMPLES,
            lambda seed: self._batch(name, jittered(first, seed), doubtful),
        )
        return [model_check(name, path, inputs, each) for path, each in judged.items()]

    def _batch(
        self,
        name: str,
        batch: Given,
        judged: Judgements,
        watch: AbstractContextManager[None] | None = None,
        *,
        top1: bool = False,
    ) -> None:
        """One batch through the original (under `watch`), float64, and the patched model by each
        path of `judged`; a path that raises is out of it."""
        with watch or nullcontext():
            try:
                one = self.sides.original(batch)
            except (ElsaError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, TypeError, ValueError, AssertionError, IndexError) as error:
                raise ModelError(
                    f"inputs[{name!r}]: the original model does not run on them "
                    f"({first_line(error)})"
                ) from error
        for each in judged.values():  # the sites were judged as the original ran through them
            each.grant(self.site_run.granted())
        alive = [path for path, each in judged.items() if not each.error]
        exact = self.sides.exact(batch) if alive else None
        for path in alive:
            try:
                two = self.by_path[path].patched(batch)
            except PatchedError as error:
                judged[path].error = str(error)
                self._require(path, batch, error)
            else:
                judged[path].add(exact, one, two, top1=top1)

    def _through(self, path: str) -> Sides:
        """The model whose patched runs go by a graph or the compiler."""
        run: list[Callable[[Given], Any]] = []

        def run_patched(given: Given) -> Any:
            if not run:  # made with the first batch: what it raises is a finding too
                run.append(paths.runner(path, self.model, self.fault))
            return run[0](given)

        return replace(self.sides, run_patched=run_patched, fault=nullcontext)

    def _require(self, path: str, batch: Given, error: PatchedError) -> None:
        """Where the original cannot take this path either, that is no finding about elsa.

        Raises:
            UnavailableError: this machine has no compiler for the path.
            ModelError: the path was asked for by name.
        """
        if path == paths.EAGER:
            return
        if paths.lacks_compiler(error.__cause__):
            raise UnavailableError(f"path {path}: {first_line(error.__cause__ or error)}")
        try:
            with original(self.model):
                run = paths.runner(path, self.model, None)
            finding(lambda: run(batch))
        except PatchedError as other:
            reason = str(other).removeprefix("the patched code raises ")
            if self.asked.by_name:
                raise ModelError(
                    f"path {path}: the original model does not run by it either ({reason})"
                ) from error
            self.left_out[path] = f"the original does not run by it either: {reason}"
            self.by_path.pop(path)

    def _judgement(self) -> Judgement:
        eps = TURBO_EPS if self.site_run.turbo else None
        return Judgement(self.asked.factor, eps)

    def _gradients(self, name: str, batch: Given) -> None:
        judgement = self._judgement()
        gradients.judge(judgement, self.sides, batch, self.dtype, MODEL_SAMPLES)
        self.gradients.add(name, judgement)


def _seconds(model: nn.Module, given: Given, device: torch.device) -> float:
    args, kwargs = given
    synchronize(device)
    start = time.perf_counter()
    try:
        model(*args, **kwargs)
    except Exception:  # what it raises is in the report already, as the case that failed
        return float("nan")
    synchronize(device)
    return time.perf_counter() - start
