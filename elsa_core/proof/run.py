"""Running a check: the original, float64 and each path of the patched model, case by case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from elsa_core.base.inputs import chunks
from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.patching import original
from elsa_core.proof import paths
from elsa_core.proof.compare import TURBO_EPS, map_floating
from elsa_core.proof.dependence import depends, filled
from elsa_core.proof.judge import MODEL_SAMPLES, Judgement, settle
from elsa_core.proof.report import ModelCheck, model_check
from elsa_core.proof.samples import jittered, nearby
from elsa_core.proof.sides import Fault, Given, PatchedError, Sides, finding, of_model, own
from elsa_core.proof.site_cases import FILLED
from elsa_core.proof.site_run import Asked, Progress, SiteRun

Judgements = dict[str, Judgement]
# After so many eager calls on a GPU the launches of a layout are replayed, as in what a user runs.
_CALLS: Final = 3
_SEED: Final = 1 << 16  # of a sample that no other step takes


@dataclass
class CheckRun:
    """One check in progress: the model's cases, and the progress made.

    `oracle` is the original in float64, `steps` counts one for each case, and for each site in it,
    and what follows. `left_out`: paths that the original or this machine cannot take, with the
    reason. `whole` is the model whose outputs are judged: a copy with other weights where those of
    zero hide the sites. `shown`: whether its output depends on them at all.
    """

    model: nn.Module
    sites: Mapping[str, nn.Module]
    oracle: nn.Module
    asked: Asked
    dtype: torch.dtype
    device: torch.device
    fault: Fault | None
    progress: Progress | None
    steps: int
    left_out: dict[str, str] = field(default_factory=dict)
    done: int = 0
    has_replayed: bool = False

    def __post_init__(self) -> None:
        self.site_run = SiteRun(
            self.sites, self.oracle, self.asked, self.dtype, self.fault, self.tick
        )
        self.shown, self.label = True, ""
        self._judge(self.model, self.oracle, self.sites)

    def _judge(self, model: nn.Module, oracle: nn.Module, sites: Mapping[str, nn.Module]) -> None:
        """Make `model` the one whose outputs are judged."""
        self.whole = model
        self.sides = of_model(model, oracle, sites, self.fault)
        self.by_path: dict[str, Sides] = {
            path: self.sides if path == paths.EAGER else self._through(path)
            for path in self.asked.paths
        }

    def tick(self, what: str, steps: int) -> None:
        self.done += steps
        if self.progress is not None:
            self.progress(what, self.done, self.steps)

    def cases(self, cases: Mapping[str, tuple[Any, ...]]) -> tuple[ModelCheck, ...]:
        """Every case by every path; a site's hard cases come from the first that reaches it."""
        each = len(self.sites) + 1
        self._require_shown(next(iter(cases.values())))
        results: list[ModelCheck] = []
        for index, (name, case) in enumerate(cases.items()):
            results += self._case(name, case)
            self.tick(name, (index + 1) * each - self.done)
        return tuple(one for one in results if one.path not in self.left_out)

    def _require_shown(self, case: tuple[Any, ...]) -> None:
        """Judge a copy without weights of zero where they hide what the sites give."""
        given = self._prepared(next(chunks(case, 1)))
        if depends(self.model, self.sites, given):
            return
        twins = filled(self.model, self.oracle)
        if twins is not None:
            sites = {path: twins[0].get_submodule(path) for path in self.sites}
            if depends(twins[0], sites, given):
                self.label = f", {FILLED}"
                self._judge(*twins, sites)
                return
        self.shown = False

    def first_batch(self, case: tuple[Any, ...]) -> Given:
        """In the model's dtype and on its device."""
        return self._prepared(next(chunks(case, self.asked.batch_size)))

    def judgement(self) -> Judgement:
        eps = TURBO_EPS if self.site_run.turbo else None
        return Judgement(self.asked.factor, eps)

    def _prepared(self, batch: tuple[Any, ...]) -> Given:
        moved = tuple(x.to(self.device) if isinstance(x, Tensor) else x for x in batch)
        return tuple(map_floating(moved, self.dtype)), {}

    def _case(self, name: str, case: tuple[Any, ...]) -> list[ModelCheck]:
        judged = {path: self.judgement() for path in self.by_path}
        inputs = 0
        for index, raw in enumerate(chunks(case, self.asked.batch_size)):
            watch = self.site_run.watch(name) if index == 0 else nullcontext()
            self._batch(name, self._prepared(raw), judged, watch, top1=True)
            inputs += next(len(x) for x in raw if isinstance(x, Tensor) and x.ndim)
        first = self.first_batch(case)
        if self.device.type == "cuda" and paths.EAGER in judged and not self.has_replayed:
            self._replayed(name, first, judged[paths.EAGER])
        for seed in range(max((each.too_few for each in judged.values()), default=0)):
            self._batch(name, (nearby(first[0], seed), {}), judged)
        doubtful = {path: each for path, each in judged.items() if each.in_doubt and not each.error}
        settle(doubtful.values(), MODEL_SAMPLES,
               lambda seed: self._batch(name, jittered(first, seed), doubtful))  # fmt: skip
        label = name + self.label
        return [
            model_check(label, path, inputs, each, shown=self.shown)
            for path, each in judged.items()
        ]

    def _replayed(self, name: str, first: Given, eager: Judgement) -> None:
        """The eager path in the calls that follow some of their kind."""
        self.has_replayed = True
        if eager.error:
            return
        try:
            for _ in range(_CALLS):
                self.sides.patched(first)
        except PatchedError as error:
            eager.error = str(error)
            return
        self._batch(name, (nearby(first[0], _SEED), {}), {paths.EAGER: eager})

    def _batch(
        self, name: str, batch: Given, judged: Judgements,
        watch: AbstractContextManager[None] | None = None, *, top1: bool = False,
    ) -> None:  # fmt: skip
        """One batch through the original (under `watch`), float64, and the patched model by each
        path of `judged`; a path that raises is out of it."""
        with watch or nullcontext():
            try:
                if watch is not None and self.whole is not self.model:
                    with original(self.model):
                        self.model(*own(batch)[0])
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
                run.append(paths.runner(path, self.whole, self.fault))
            return run[0](given)

        return replace(self.sides, run_patched=run_patched, fault=nullcontext)

    def _require(self, path: str, batch: Given, error: PatchedError) -> None:
        """Where the original cannot take this path either, or this machine has no compiler for it,
        that is no finding about elsa: it is left out with the reason. An error where it was asked
        for by name."""
        if path == paths.EAGER:
            return
        if paths.lacks_compiler(error.__cause__):
            reason = first_line(error.__cause__ or error)
            if self.asked.by_name:
                raise UnavailableError(f"path {path}: {reason}")
            self._leave_out(path, f"this machine lacks its compiler: {reason}")
            return
        refused = self._refusal(path, batch)
        if refused is not None and self.asked.by_name:
            raise ModelError(
                f"path {path}: the original model does not run by it either ({refused})"
            ) from error
        if refused is not None:
            self._leave_out(path, f"the original does not run by it either: {refused}")

    def _refusal(self, path: str, batch: Given) -> str | None:
        """Why the original does not run by a path; None if it does."""
        with original(self.whole):
            run = paths.runner(path, self.whole, None)
        try:
            finding(lambda: run(batch))
        except PatchedError as error:
            return str(error).removeprefix("the patched code raises ")
        return None

    def trains(self, path: str, batch: Given) -> bool:
        """Whether the original's backward runs by a path; else the report says why not, or
        ModelError where the path was asked for by name."""
        with torch.enable_grad():
            reason = self._refusal(path, own(batch))
        if reason is not None and self.asked.by_name:
            raise ModelError(f"gradients by path {path}: {reason}")
        if reason is not None:
            self.left_out[f"{path} (gradients)"] = reason
        return reason is None

    def _leave_out(self, path: str, reason: str) -> None:
        self.left_out[path] = reason
        self.by_path.pop(path)
