"""One check in progress: runs original, patched and float64 side by side, site by site."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.errors import ElsaError, ModelError
from elsa_core.messages import first_line
from elsa_core.patching import adapters
from elsa_core.patching.layers import is_layer
from elsa_core.patching.patch import original
from elsa_core.proof.capture import OperatorCapture
from elsa_core.proof.cases import chunks, hard_cases, jittered, nearby, zeros_filled
from elsa_core.proof.compare import (
    TURBO_EPS,
    Comparison,
    Top1,
    floating_outputs,
    is_classification,
    map_floating,
)
from elsa_core.proof.entry import Hook, call, watched
from elsa_core.proof.report import ModelCheck, SiteCheck, SiteRecord, model_check

# Two errors of n normal values, equally good, differ by more than 2x once in 10^4 draws at n = 32
# and once in 30 at n = 8: an output with fewer values is judged on nearby inputs as well.
MIN_VALUES = 32

# Samples of a case, where the first alone condemns the patched model. Two equally good errors that
# one dot product dominates differ by more than 2x once in 3 with one sample, once in 40 with 10 and
# once in 10^4 with 32.
SITE_SAMPLES = 32
MODEL_SAMPLES = 10

FILLED = "zero weights filled"

TIMED_RUNS = 5
TIMED_SECONDS = 3.0

Progress = Callable[[str, int, int], None]
Comparisons = dict[str, Comparison]


@dataclass(frozen=True)
class Fault:
    """A deliberate error: the output of one patched site times 1 + amount."""

    path: str
    amount: float

    @contextmanager
    def on(self, site: nn.Module) -> Iterator[None]:
        def disturb(_module: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any) -> Any:
            gain = 1.0 + self.amount
            if isinstance(output, Tensor):
                return output * gain
            return tuple(x * gain if isinstance(x, Tensor) else x for x in output)

        with watched(site, adapters.entry(site), disturb):
            yield


@dataclass
class CheckRun:
    """The models, what is known of each site, and the progress made."""

    model: nn.Module
    sites: Mapping[str, nn.Module]
    oracle: nn.Module
    dtype: torch.dtype
    device: torch.device
    factor: float
    batch_size: int
    fault: Fault | None
    progress: Progress | None
    steps: int = 0
    done: int = 0
    busy: bool = False

    def __post_init__(self) -> None:
        self.records = {path: SiteRecord(is_layer(site)) for path, site in self.sites.items()}
        self.classes = {path: type(site) for path, site in self.sites.items()}
        self.entries = {path: adapters.entry(site) for path, site in self.sites.items()}
        self.turbo = {
            path
            for path, site in self.sites.items()
            if vars(site).get("elsa_precision") == "turbo" and self.dtype == torch.float32
        }

    def tick(self, what: str, steps: int) -> None:
        self.done += steps
        if self.progress is not None:
            self.progress(what, self.done, self.steps)

    def cases(self, cases: Mapping[str, tuple[Any, ...]], stress: bool) -> tuple[ModelCheck, ...]:
        """Every case; hard cases for a site come from the first that reaches it."""
        each = len(self.sites) + 1
        self.steps = len(cases) * each + 1
        results = []
        for index, (name, case) in enumerate(cases.items()):
            results.append(self._case(name, case, stress))
            self.tick(name, (index + 1) * each - self.done)
        return tuple(results)

    def site_checks(self) -> tuple[SiteCheck, ...]:
        return tuple(self.records[path].result(path) for path in self.sites)

    def timings(self, case: tuple[Any, ...]) -> tuple[tuple[float, float], int]:
        """Median seconds of (original, patched) forwards of the first batch, run in turns."""
        batch = self._prepared(next(chunks(case, self.batch_size)))
        seconds: tuple[list[float], list[float]] = ([], [])
        start = time.perf_counter()
        while len(seconds[0]) < TIMED_RUNS:
            classes: list[AbstractContextManager[Any]] = [original(self.model), nullcontext()]
            for index, swapped in enumerate(classes):
                with swapped:
                    seconds[index].append(self._seconds(batch))
            if time.perf_counter() - start > TIMED_SECONDS:
                break
        medians = (statistics.median(seconds[0]), statistics.median(seconds[1]))
        return medians, len(seconds[0])

    def _seconds(self, batch: tuple[Any, ...]) -> float:
        batch = _own(batch)
        self._synchronize()
        start = time.perf_counter()
        try:
            self.model(*batch)
        except Exception:  # what it raises is in the report already, as the case that failed
            return math.nan
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _prepared(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        moved = tuple(x.to(self.device) if isinstance(x, Tensor) else x for x in batch)
        return tuple(map_floating(moved, self.dtype))

    def _case(self, name: str, case: tuple[Any, ...], stress: bool) -> ModelCheck:
        comparisons: Comparisons = {}
        top1, inputs = Top1(), 0
        try:
            for index, raw in enumerate(chunks(case, self.batch_size)):
                watch = self._watch(name, stress) if index == 0 else nullcontext()
                self._batch(name, self._prepared(raw), comparisons, top1, watch)
                inputs += next(len(x) for x in raw if isinstance(x, Tensor) and x.ndim)
            values = max((c.values for c in comparisons.values()), default=MIN_VALUES)
            first = self._prepared(next(chunks(case, self.batch_size)))
            for seed in range(math.ceil(MIN_VALUES / max(values, 1)) - 1):
                self._batch(name, nearby(first, seed), comparisons, None, nullcontext())
            if any(comparison.in_doubt for comparison in comparisons.values()):
                for seed in range(1, MODEL_SAMPLES):
                    self._batch(name, jittered(first, seed), comparisons, None, nullcontext())
                _count_samples(comparisons, MODEL_SAMPLES)
        except _PatchedError as error:
            return model_check(name, inputs, comparisons, top1, str(error))
        return model_check(name, inputs, comparisons, top1, "")

    def _batch(
        self,
        name: str,
        batch: tuple[Any, ...],
        comparisons: Comparisons,
        top1: Top1 | None,
        watch: AbstractContextManager[None],
    ) -> None:
        """One batch through original (under `watch`), patched and float64."""
        with original(self.model), watch:
            try:
                one = self.model(*_own(batch))
            except (ElsaError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, TypeError, ValueError, AssertionError, IndexError) as error:
                raise ModelError(
                    f"inputs[{name!r}]: the original model does not run on them "
                    f"({first_line(error)})"
                ) from error
        with self._fault_on(self.model, ""):
            two = _run_patched(self.model, _own(batch), {})
        exact = self._exact(self.oracle, "the model", _own(batch), {})
        self._compare(comparisons, exact, one, two, TURBO_EPS if self.turbo else None)
        if top1 is not None and is_classification(one) and _same_shape(one, two):
            top1.add(exact, one, two)

    @contextmanager
    def _watch(self, case: str, stress: bool) -> Iterator[None]:
        """Judges every site at the moment the original runs through it."""
        with ExitStack() as hooks:
            for path, site in self.sites.items():
                hook = self._site_hook(path, case, stress)
                hooks.enter_context(watched(site, self.entries[path], hook))
            yield

    def _site_hook(self, path: str, case: str, stress: bool) -> Hook:
        seen = 0

        def judge(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            nonlocal seen
            if self.busy:  # a run of the site alone, below, comes through the same hook
                return
            self.busy = True
            try:
                seen += 1
                label = case if seen == 1 else f"{case}, call {seen}"
                hard = stress and self.records[path].calls == 0
                self._site(path, label, module, (args, kwargs), output, hard)
            finally:
                self.busy = False
            if seen == 1:
                self.tick(path, 1)

        judge.elsa_observer = True  # type: ignore[attr-defined]  # a site may hold another one
        return judge

    def _site(
        self,
        path: str,
        label: str,
        module: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,
        stress: bool,
    ) -> None:
        oracle, record = self.oracle.get_submodule(path), self.records[path]
        largest = self._site_once(path, label, module, oracle, given, output)
        if stress or not record.shown:
            self._site_filled(path, label, module, given)
        if stress:
            for name, args, kwargs in hard_cases(module, *given, largest, self.entries[path]):
                self._site_case(path, f"{label}, {name}", module, oracle, (args, kwargs))

    def _site_filled(
        self,
        path: str,
        label: str,
        module: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        """Judges a copy of the site without zero weights, which hide what it computes."""
        record = self.records[path]
        hidden = not record.shown
        twin = zeros_filled(module, self.entries[path])
        if twin is not None:
            oracle = copy.deepcopy(twin).double()
            self._site_case(path, f"{label}, {FILLED}", twin, oracle, given)
        if hidden and record.shown:
            record.notes.append(f"its output is zero with these weights: see {label}, {FILLED}")

    def _site_case(
        self,
        path: str,
        label: str,
        module: nn.Module,
        oracle: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        """Judges a site on arguments, or with weights, that are not the model's own."""
        output = call(module, self.entries[path], *given)
        if all(bool(x.isfinite().all()) for x in floating_outputs(output).values()):
            self._site_once(path, label, module, oracle, given, output)
        else:
            self.records[path].notes.append(f"{label}: left out, the original overflows")

    def _site_once(
        self,
        path: str,
        label: str,
        module: nn.Module,
        oracle: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,
    ) -> float:
        """Judges one call of a site; returns the largest logit that reached the operator."""
        entry, record, comparisons = self.entries[path], self.records[path], dict[str, Comparison]()
        with OperatorCapture(self.factor) as capture:
            try:
                self._compare_site(comparisons, path, module, oracle, given, output)
            except _PatchedError as error:
                record.errors.append(f"{label}: {error}")
                return 0.0
        if any(comparison.in_doubt for comparison in comparisons.values()):
            for seed in range(1, SITE_SAMPLES):
                other = jittered(given, seed)
                one = call(module, entry, *other)
                self._compare_site(comparisons, path, module, oracle, other, one)
            _count_samples(comparisons, SITE_SAMPLES)
        record.add(label, comparisons)
        record.operator_calls += len(capture.calls)
        record.drifts += [call.drift for call in capture.calls]
        record.errors += [f"{label}: {call.reason()}" for call in capture.calls if call.reason()]
        largest = max((call.largest_logit for call in capture.calls), default=0.0)
        record.largest_logit = max(record.largest_logit, largest)
        return largest

    def _compare_site(
        self,
        into: Comparisons,
        path: str,
        module: nn.Module,
        oracle: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,
    ) -> None:
        """One call of a site, patched and in float64, beside what the original gave."""
        entry, original_class = self.entries[path], type(module)
        with self._fault_on(module, path):
            module.__class__ = self.classes[path]
            try:
                two = _run_patched(module, *given, entry)
            finally:
                module.__class__ = original_class
        exact = self._exact(oracle, path, *given, entry)
        self._compare(into, exact, output, two, TURBO_EPS if path in self.turbo else None)

    @contextmanager
    def _fault_on(self, module: nn.Module, path: str) -> Iterator[None]:
        """The deliberate error, where it concerns the module at `path` or something inside it."""
        if self.fault is None or (path and path != self.fault.path):
            yield
            return
        with self.fault.on(module if path else self.sites[self.fault.path]):
            yield

    def _exact(
        self,
        oracle: nn.Module,
        what: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entry: str = "forward",
    ) -> Any:
        try:
            wide = [map_floating(given, torch.float64) for given in (args, kwargs)]
            return call(oracle, entry, *wide)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{what} does not run in float64, which the oracle needs ({first_line(error)})"
            ) from error

    def _compare(
        self, into: Comparisons, exact: Any, one: Any, two: Any, eps: float | None
    ) -> None:
        exacts, ones, twos = (floating_outputs(output) for output in (exact, one, two))
        if not ones:
            raise ModelError("check: the original returns no floating tensor to compare")
        for name, expected in ones.items():
            comparison = into.setdefault(name, Comparison(self.factor, eps))
            if name not in twos:
                comparison.mismatch = f"{name} is missing from the patched output"
            else:
                comparison.add(exacts[name], expected, twos[name])


def _own(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies for one run: a model may write to its inputs (`x.sub_(mean)`)."""
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in batch)


def _count_samples(comparisons: Comparisons, count: int) -> None:
    for comparison in comparisons.values():
        comparison.samples = count


class _PatchedError(Exception):
    """The patched code raised where the original did not."""


def _run_patched(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entry: str = "forward"
) -> Any:
    """Runs patched code; what it raises is a finding, except where elsa says what is missing."""
    try:
        return call(module, entry, args, kwargs)
    except (ElsaError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _PatchedError(
            f"the patched code raises {type(error).__name__}: {first_line(error)}"
        ) from error


def _same_shape(one: Any, two: Any) -> bool:
    return isinstance(two, Tensor) and one.shape == two.shape
