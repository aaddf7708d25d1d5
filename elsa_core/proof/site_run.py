"""Running the sites of a model: each is judged alone, on what reaches it in the original."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError
from elsa_core.measuring.memory_limit import is_out_of_memory
from elsa_core.patching import entry, is_layer
from elsa_core.proof.capture import OperatorCapture
from elsa_core.proof.compare import SITE_SAMPLES, TURBO_EPS, Judgement, floating_outputs, settle
from elsa_core.proof.report import LEGIBLE, SiteRecord
from elsa_core.proof.samples import zeros_filled
from elsa_core.proof.sides import Given, PatchedError, Sides, judge_gradients, of_site, own, watched
from elsa_core.proof.site_cases import FILLED, Seen, SiteCase, site_cases


@dataclass(frozen=True)
class Asked:
    """What a check is to do: the arguments of `check`, and the model's dtype and device.

    `by_name`: the paths were asked for; one that the original cannot take is an error then.
    `bound` is granted to sites patched to leave out weights by a number whose calls reach a sparse
    operator, and to a model with such sites. `faulty`: with a deliberate error.
    """

    factor: float
    batch_size: int
    stress: bool
    grad: bool
    paths: tuple[str, ...]
    by_name: bool
    bound: float
    faulty: bool
    dtype: torch.dtype
    device: torch.device


class SiteRun:
    """The sites, what is known of each, and how they are watched; `tick` is called with a path, and
    1, when a site has been judged."""

    def __init__(
        self, sites: Mapping[str, nn.Module], oracle: nn.Module, asked: Asked,
        tick: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self.sites, self.oracle, self.asked, self.tick = sites, oracle, asked, tick
        self.records = {path: SiteRecord(is_layer(site)) for path, site in sites.items()}
        self.gradients: dict[str, list[tuple[str, Judgement]]] = {path: [] for path in sites}
        self.entries = {path: entry(site) for path, site in sites.items()}
        self.patched = {path: type(site) for path, site in sites.items()}
        self.turbo = {
            path
            for path, site in sites.items()
            if vars(site).get("elsa_precision") == "turbo" and asked.dtype == torch.float32
        }
        self.granted = 0.0  # the error that the sparsity of sites grants to the model
        self._kinds: set[Any] = set()
        self._busy = False

    @contextmanager
    def watch(self, case: str) -> Iterator[None]:
        """Judges every site at the moment the original runs through it."""
        calls: Counter[str] = Counter()

        def judge(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._busy:  # a run of the site alone, below, comes through the same hook
                return
            self._busy = True
            try:
                calls[path] += 1
                label = case if calls[path] == 1 else f"{case}, call {calls[path]}"
                self._visit(path, label, module, (args, kwargs), output)
            finally:
                self._busy = False
            if calls[path] == 1:
                self.tick(path, 1)

        with ExitStack() as hooks:
            for path, site in self.sites.items():
                hook: Any = partial(judge, path)
                hook.elsa_observer = True  # a site may hold another one
                hooks.enter_context(watched(site, self.entries[path], hook))
            yield

    def _visit(self, path: str, label: str, module: nn.Module, given: Given, output: Any) -> None:
        """Judges a site on what reached it, and the first time on hard cases made of that."""
        record, entry, patched = self.records[path], self.entries[path], self.patched[path]
        is_first = record.calls == 0
        sides = of_site(path, module, patched, self.oracle.get_submodule(path), entry)
        seen = self._judge(label, sides, given, output, grad=is_first)
        hidden = record.clearest >= LEGIBLE  # no output of the original tells anything
        cases: Iterable[SiteCase] = ()
        if self.asked.stress and is_first:
            kind = (type(module), *(tuple(weight.shape) for weight in module.parameters()))
            cases = site_cases(module, given, entry, seen, is_first=kind not in self._kinds)
            self._kinds.add(kind)
        elif hidden:
            cases = (SiteCase(FILLED, given, twin) for twin in zeros_filled(module))
        for case in cases:
            other = sides
            if case.twin is not None:
                exact = copy.deepcopy(case.twin).double()
                other = of_site(path, case.twin, patched, exact, entry)
            self._extra(f"{label}, {case.name}", other, case)
            if case.name == FILLED and hidden and record.clearest < LEGIBLE:
                record.notes.append(f"its output is zero with these weights: see {label}, {FILLED}")

    def _extra(self, label: str, sides: Sides, case: SiteCase) -> None:
        """Judges a site on arguments, or with weights, that are not the model's own."""
        record = self.records[sides.what]
        try:
            output = sides.original(case.given)
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError) as error:
            if case.may_refuse and not is_out_of_memory(error):
                return
            raise
        if not all(bool(x.isfinite().all()) for x in floating_outputs(output).values()):
            record.notes.append(f"{label}: left out, the original overflows")
            return
        try:
            self._judge(label, sides, case.given, output, grad=True)
        except ElsaError as error:
            if not case.may_refuse:
                raise
            record.errors.append(f"{label}: elsa refuses it: {first_line(error)}")

    def _judge(self, label: str, sides: Sides, given: Given, output: Any, *, grad: bool) -> Seen:
        """Judges one call of a site, and with `grad` its gradients where they were asked for;
        returns what the operator saw of it."""
        path = sides.what
        record, eps = self.records[path], TURBO_EPS if path in self.turbo else None
        judgement = Judgement(self.asked.factor, eps)
        # of a site that leaves out weights by a number
        inexact = isinstance(vars(self.sites[path]).get("elsa_sparsity"), float)
        bound = self.asked.bound if inexact else 0.0
        try:
            with OperatorCapture(self.asked.factor, bound) as capture:
                left = own(given)
                # before the call: a site may add to a list
                pairs = list(zip(*map(pytree.tree_leaves, (left, given)), strict=True))
                found = sides.patched(left)
                dense = (
                    (a, b)
                    for a, b in pairs
                    if isinstance(a, torch.Tensor) and a.layout == torch.strided
                    and not (a.is_nested or a.is_meta)
                )  # fmt: skip
                if not all(torch.equal(a, b) for a, b in dense):
                    # It writes to its arguments, as the original did before it came here: all
                    # three get what that left.
                    output = sides.original(given)
                if any(call.tiles for call in capture.calls):
                    # a layer was patched so too, and is exact
                    judgement.bound, self.granted = bound, max(self.granted, bound)
                judgement.add(sides.exact(given), output, found)
        except PatchedError as error:
            record.errors.append(f"{label}: {error}")
            seen = Seen()
        else:
            calls = capture.calls
            settle(
                [judgement], SITE_SAMPLES, given,
                lambda other, _: judgement.add(
                    sides.exact(other), sides.original(other), sides.patched(other)
                ),
            )  # fmt: skip
            record.add(label, judgement.comparisons, calls)
            record.backends |= capture.backends
            padded = [call.padded for call in calls]
            seen = Seen(
                largest_logit=max((call.largest_logit for call in calls), default=0.0),
                keys=max((call.keys for call in calls if call.padded is None), default=0),
                whole_windows=False in padded and True not in padded,
            )
        if grad and self.asked.grad:
            slopes = Judgement(self.asked.factor, eps)
            judge_gradients(slopes, sides, given, self.asked.dtype, SITE_SAMPLES)
            self.gradients[path].append((label, slopes))
        return seen
