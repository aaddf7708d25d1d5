"""Running the sites of a model: each is judged alone, on what reaches it in the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError
from elsa_core.patching import entry, is_layer
from elsa_core.proof import gradients
from elsa_core.proof.capture import OperatorCapture
from elsa_core.proof.compare import TURBO_EPS, floating_outputs
from elsa_core.proof.judge import SITE_SAMPLES, Judgement, settle
from elsa_core.proof.report import GradientCheck, GradientRecord, SiteCheck, SiteRecord
from elsa_core.proof.samples import jittered
from elsa_core.proof.sides import Fault, Given, Hook, PatchedError, Sides, of_site, watched
from elsa_core.proof.site_cases import (
    FILLED,
    Seen,
    SiteCase,
    kind_of,
    site_cases,
    zeros_filled,
)

Progress = Callable[[str, int, int], None]


def is_inexact(site: nn.Module) -> bool:
    """Whether a patched site leaves out weights by a number."""
    return isinstance(vars(site).get("elsa_sparsity"), float)


@dataclass(frozen=True)
class Asked:
    """What a check is to do: the arguments of `check`.

    `by_name`: the paths were asked for; one that the original cannot take is an error then.
    `bound` is granted to sites patched to leave out weights by a number whose calls reach a sparse
    operator, and to a model with such sites.
    """

    factor: float
    batch_size: int
    stress: bool
    grad: bool
    paths: tuple[str, ...]
    by_name: bool
    bound: float = 0.0


@dataclass
class SiteRun:
    """The sites, what is known of each, and how they are watched; `tick` is called with a path, and
    1, when a site has been judged."""

    sites: Mapping[str, nn.Module]
    oracle: nn.Module
    asked: Asked
    dtype: torch.dtype
    fault: Fault | None
    tick: Callable[[str, int], None]
    busy: bool = False

    def __post_init__(self) -> None:
        self.records = {path: SiteRecord(is_layer(site)) for path, site in self.sites.items()}
        self.gradients = {path: GradientRecord() for path in self.sites} if self.asked.grad else {}
        self.classes = {path: type(site) for path, site in self.sites.items()}
        self.entries = {path: entry(site) for path, site in self.sites.items()}
        self.kinds: set[Any] = set()
        self.turbo = {
            path
            for path, site in self.sites.items()
            if vars(site).get("elsa_precision") == "turbo" and self.dtype == torch.float32
        }

    def granted(self) -> float:
        """The error that the sparsity of the sites judged so far grants to the model."""
        sparse = (self.sites[path] for path, record in self.records.items() if record.tiles)
        return self.asked.bound if any(is_inexact(site) for site in sparse) else 0.0

    def checks(self) -> tuple[SiteCheck, ...]:
        return tuple(record.result(path) for path, record in self.records.items())

    def gradient_checks(self) -> tuple[GradientCheck, ...]:
        return tuple(
            record.result(path)
            for path, record in self.gradients.items()
            if self.records[path].calls or record.count
        )

    @contextmanager
    def watch(self, case: str) -> Iterator[None]:
        """Judges every site at the moment the original runs through it."""
        with ExitStack() as hooks:
            for path, site in self.sites.items():
                hooks.enter_context(watched(site, self.entries[path], self._hook(path, case)))
            yield

    def _hook(self, path: str, case: str) -> Hook:
        seen = 0

        def judge(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            nonlocal seen
            if self.busy:  # a run of the site alone, below, comes through the same hook
                return
            self.busy = True
            try:
                seen += 1
                label = case if seen == 1 else f"{case}, call {seen}"
                self._visit(path, label, module, (args, kwargs), output)
            finally:
                self.busy = False
            if seen == 1:
                self.tick(path, 1)

        judge.elsa_observer = True  # type: ignore[attr-defined]  # a site may hold another one
        return judge

    def _visit(self, path: str, label: str, module: nn.Module, given: Given, output: Any) -> None:
        """Judges a site on what reached it, and the first time on hard cases made of that."""
        record = self.records[path]
        is_first = record.calls == 0
        sides = self._sides(path, module, self.oracle.get_submodule(path))
        seen = self._judge(path, label, sides, given, output)
        if is_first:
            self._judge_gradients(path, label, sides, given)
        hidden = not record.shown
        for each in self._cases(path, module, given, seen, is_first=is_first):
            self._extra(path, f"{label}, {each.name}", module, each)
            if each.name == FILLED and hidden and record.shown:
                record.notes.append(f"its output is zero with these weights: see {label}, {FILLED}")

    def _cases(
        self, path: str, module: nn.Module, given: Given, seen: Seen, *, is_first: bool
    ) -> Iterator[SiteCase]:
        entry = self.entries[path]
        if self.asked.stress and is_first:
            kind = kind_of(module)
            yield from site_cases(module, given, entry, seen, is_first=kind not in self.kinds)
            self.kinds.add(kind)
        elif not self.records[path].shown:
            twin = zeros_filled(module, entry)
            if twin is not None:
                yield SiteCase(FILLED, given, twin)

    def _extra(self, path: str, label: str, module: nn.Module, case: SiteCase) -> None:
        """Judges a site on arguments, or with weights, that are not the model's own."""
        oracle = self.oracle.get_submodule(path)
        if case.twin is not None:
            module, oracle = case.twin, copy.deepcopy(case.twin).double()
        sides = self._sides(path, module, oracle)
        try:
            output = sides.original(case.given)
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError) as error:
            if case.may_refuse and not isinstance(error, torch.OutOfMemoryError):
                return
            raise
        if not all(bool(x.isfinite().all()) for x in floating_outputs(output).values()):
            self.records[path].notes.append(f"{label}: left out, the original overflows")
            return
        try:
            self._judge(path, label, sides, case.given, output)
            self._judge_gradients(path, label, sides, case.given)
        except ElsaError as error:
            if not case.may_refuse:
                raise
            self.records[path].errors.append(f"{label}: elsa refuses it: {first_line(error)}")

    def _judge(self, path: str, label: str, sides: Sides, given: Given, output: Any) -> Seen:
        """Judges one call of a site; returns what the operator saw of it."""
        record, judgement = self.records[path], self._judgement(path)
        bound = self.asked.bound if is_inexact(self.sites[path]) else 0.0
        with OperatorCapture(self.asked.factor, bound) as capture:
            try:
                judgement.add(sides.exact(given), output, sides.patched(given))
            except PatchedError as error:
                record.errors.append(f"{label}: {error}")
                return Seen()

        if any(call.tiles for call in capture.calls):  # a layer was patched so too, and is exact
            judgement.grant(bound)

        def again(seed: int) -> None:
            other = jittered(given, seed)
            judgement.add(sides.exact(other), sides.original(other), sides.patched(other))

        settle([judgement], SITE_SAMPLES, again)
        record.add(label, judgement.comparisons, capture.calls)
        record.backends |= capture.backends
        padded = [call.padded for call in capture.calls]
        return Seen(
            largest_logit=max((call.largest_logit for call in capture.calls), default=0.0),
            keys=max((call.keys for call in capture.calls if call.padded is None), default=0),
            whole_windows=False in padded and True not in padded,
        )

    def _judge_gradients(self, path: str, label: str, sides: Sides, given: Given) -> None:
        if self.asked.grad:
            judgement = self._judgement(path)
            gradients.judge(judgement, sides, given, self.dtype, SITE_SAMPLES)
            self.gradients[path].add(label, judgement)

    def _judgement(self, path: str) -> Judgement:
        return Judgement(self.asked.factor, TURBO_EPS if path in self.turbo else None)

    def _sides(self, path: str, module: nn.Module, oracle: nn.Module) -> Sides:
        entry, patched = self.entries[path], self.classes[path]
        return of_site(path, module, patched, oracle, entry, self.fault)
