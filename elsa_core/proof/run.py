"""Running a check: the original, float64 and each path of the patched model, case by case."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from elsa_core.base.inputs import chunks
from elsa_core.base.messages import Progress, first_line
from elsa_core.errors import ElsaError, ModelError, UnavailableError
from elsa_core.measuring.memory_limit import is_out_of_memory
from elsa_core.patching import entry, is_layer, original
from elsa_core.proof import paths
from elsa_core.proof.compare import (
    MIN_VALUES,
    MODEL_SAMPLES,
    TURBO_EPS,
    Judgement,
    floating_outputs,
    map_floating,
    settle,
)  # fmt: skip
from elsa_core.proof.report import ModelCheck, model_check
from elsa_core.proof.samples import moved, nearby, zeros_filled
from elsa_core.proof.sides import Given, PatchedError, of_model, own, watched
from elsa_core.proof.site_cases import FILLED
from elsa_core.proof.site_run import Asked, SiteRun

# After so many eager calls on a GPU the launches of a layout are replayed, as in what a user runs.
_CALLS: Final = 3
_SEED: Final = 1 << 16  # of a sample that no other step takes


def depends(model: nn.Module, sites: Mapping[str, nn.Module], given: Given) -> bool:
    """Whether the original's output changes with what the attention sites give (without any, the
    patched layers); True where it does not run. The model is patched, in eval mode.

    Many models start with a head or a last gain of zeros: their output is the same whatever the
    sites give, and its error of zero proves nothing.
    """
    attention = [site for site in sites.values() if not is_layer(site)]
    try:
        with original(model), ExitStack() as hooks:
            before = floating_outputs(model(*own(given)[0], **given[1]))
            for site in attention or sites.values():
                # noise as large as what it gives, or of one where that is zero or not a number
                hooks.enter_context(watched(site, entry(site), lambda _, __, ___, output: moved(
                    output, 0, lambda leaf, noise: (
                        leaf + noise * (leaf.float().square().mean().sqrt().nan_to_num() or 1.0)
                    ),
                )))  # fmt: skip
            after = floating_outputs(model(*own(given)[0], **given[1]))
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        return True  # the check itself says why
    return any(not torch.equal(value, after[name]) for name, value in before.items())


class CheckRun:
    """One check in progress: the model's cases, and the progress made.

    `oracle` is the original in float64; `progress` is told of `steps`: one for each case, and for
    each site in it, and what follows. `left_out`: paths that the original or this machine cannot
    take, with the reason. `sides` is the model whose outputs are judged: a copy with other weights
    where those of zero hide the sites. `shown`: whether its output depends on them at all.
    """

    def __init__(
        self, model: nn.Module, sites: Mapping[str, nn.Module], oracle: nn.Module, asked: Asked,
        progress: Progress | None, steps: int,
    ) -> None:  # fmt: skip
        self.model, self.sites, self.oracle, self.asked = model, sites, oracle, asked
        self.progress, self.steps, self.done = progress, steps, 0
        self.left_out: dict[str, str] = {}
        self.shown, self.label, self.has_replayed = True, "", False
        self.site_run = SiteRun(sites, oracle, asked, self.tick)
        self.new_judgement = partial(
            Judgement, asked.factor, TURBO_EPS if self.site_run.turbo else None
        )
        self._use(model, oracle)

    def _use(self, model: nn.Module, oracle: nn.Module) -> None:
        """Make `model` the one whose outputs are judged."""
        self.sides = of_model(model, oracle)
        self.by_path = dict.fromkeys(self.asked.paths, self.sides)
        for path in self.asked.paths:
            if path != paths.EAGER:
                # made with the first batch: what it raises is a finding too
                runner = cache(partial(paths.runner, path, model, faulty=self.asked.faulty))
                run = partial(lambda runner, given: runner()(given), runner)
                self.by_path[path] = replace(self.sides, run_patched=run)

    def tick(self, what: str, steps: int) -> None:
        self.done += steps
        if self.progress is not None:
            self.progress(what, self.done, self.steps)

    def prepared(self, batch: tuple[Any, ...]) -> Given:
        """A batch in the model's dtype and on its device."""
        device = self.asked.device
        here = tuple(x.to(device) if isinstance(x, Tensor) else x for x in batch)
        return tuple(map_floating(here, self.asked.dtype)), {}

    def cases(self, cases: Mapping[str, tuple[Any, ...]]) -> tuple[ModelCheck, ...]:
        """Every case by every path; a site's hard cases come from the first that reaches it."""
        given = self.prepared(next(chunks(next(iter(cases.values())), 1)))
        if not depends(self.model, self.sites, given):
            self.shown = False
            twins = zeros_filled(self.model, self.oracle)
            sites = {path: twins[0].get_submodule(path) for path in self.sites if twins}
            if twins and depends(twins[0], sites, given):
                self.shown, self.label = True, f", {FILLED}"
                self._use(*twins)
        results: list[ModelCheck] = []
        for index, (name, case) in enumerate(cases.items(), 1):
            results += self._case(name, case)
            self.tick(name, index * (len(self.sites) + 1) - self.done)
        return tuple(one for one in results if one.path not in self.left_out)

    def _case(self, name: str, case: tuple[Any, ...]) -> list[ModelCheck]:
        judged = {path: self.new_judgement() for path in self.by_path}
        inputs, batches = 0, [*chunks(case, self.asked.batch_size)]
        for index, raw in enumerate(batches):
            watch = self.site_run.watch(name) if index == 0 else None
            self._batch(name, self.prepared(raw), judged, watch, top1=True)
            inputs += next(len(x) for x in raw if isinstance(x, Tensor) and x.ndim)
        first = self.prepared(batches[0])
        eager = judged.get(paths.EAGER)
        if self.asked.device.type == "cuda" and eager is not None and not self.has_replayed:
            self.has_replayed = True  # the eager path in the calls that follow some of their kind
            try:
                for _ in range(0 if eager.error else _CALLS):
                    self.sides.patched(first)
            except PatchedError as error:
                eager.error = str(error)
            if not eager.error:
                self._batch(name, (nearby(first[0], _SEED), {}), {paths.EAGER: eager})
        # an output of few values needs further samples
        values = (
            max((one.values for one in each.comparisons.values()), default=MIN_VALUES)
            for each in judged.values()
        )
        fewest = max(1, min(values, default=MIN_VALUES))
        for seed in range(math.ceil(MIN_VALUES / fewest) - 1):
            self._batch(name, (nearby(first[0], seed), {}), judged)
        doubtful = {path: each for path, each in judged.items() if each.in_doubt and not each.error}
        settle(doubtful.values(), MODEL_SAMPLES, first,
               lambda given, _: self._batch(name, given, doubtful))  # fmt: skip
        label = name + self.label
        return [model_check(label, path, inputs, each, shown=self.shown)
                for path, each in judged.items()]  # fmt: skip

    def _batch(
        self, name: str, batch: Given, judged: Mapping[str, Judgement],
        watch: AbstractContextManager[None] | None = None, *, top1: bool = False,
    ) -> None:  # fmt: skip
        """One batch through the original (under `watch`), float64, and the patched model by each
        path of `judged`; a path that raises is out of it."""
        with watch or nullcontext():
            try:
                if watch is not None and self.sides.weights is not self.model:
                    with original(self.model):
                        self.model(*own(batch)[0])
                one = self.sides.original(batch)
            except (RuntimeError, TypeError, ValueError, AssertionError, IndexError) as error:
                if isinstance(error, ElsaError) or is_out_of_memory(error):
                    raise
                raise ModelError(
                    f"inputs[{name!r}]: the original model does not run on them "
                    f"({first_line(error)})"
                ) from error
        for each in judged.values():  # the sites were judged as the original ran through them
            each.bound = self.site_run.granted
        alive = [path for path, each in judged.items() if not each.error]
        exact = self.sides.exact(batch) if alive else None
        for path in alive:
            if path != paths.EAGER:  # its first batch may take minutes to compile
                self.tick(f"{name}, {path}", 0)
            try:
                two = self.by_path[path].patched(batch)
            except PatchedError as error:
                judged[path].error = str(error)
                if path != paths.EAGER:
                    self._require(path, batch, error)
            else:
                judged[path].add(exact, one, two, top1=top1)

    def _require(self, path: str, batch: Given, error: PatchedError) -> None:
        """Where the original cannot take this path either, or this machine has no compiler for it,
        that is no finding about elsa: it is left out with the reason. An error where it was asked
        for by name."""
        failure: ElsaError
        if paths.lacks_compiler(error.__cause__):
            reason = first_line(error.__cause__ or error)
            failure = UnavailableError(f"path {path}: {reason}")
            said = f"this machine lacks its compiler: {reason}"
        elif (refused := self._refusal(path, batch)) is not None:
            failure = ModelError(
                f"path {path}: the original model does not run by it either ({refused})"
            )
            said = f"the original does not run by it either: {refused}"
        else:
            return
        if self.asked.by_name:
            raise failure from error
        self.left_out[path] = said
        self.by_path.pop(path)

    def _refusal(self, path: str, batch: Given) -> str | None:
        """Why the original does not run by a path; None if it does."""
        with original(self.sides.weights):
            run = paths.runner(path, self.sides.weights, faulty=self.asked.faulty)
        try:
            replace(self.sides, run_patched=run).patched(batch)
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
