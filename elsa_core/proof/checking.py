"""Proof that a patched model still computes what it did: relative to float64, site by site."""

from __future__ import annotations

import copy
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, SupportsIndex

import torch
from torch import nn

from elsa_core import dispatch
from elsa_core.base.inputs import ModelInput, as_cases, chunks
from elsa_core.base.messages import Progress, shown
from elsa_core.base.operands import require_number
from elsa_core.base.processes import environment_kept
from elsa_core.errors import ArgumentError, ModelError, NothingPatchedError
from elsa_core.measuring.timing import synchronize
from elsa_core.patching import is_layer, original, patched_sites
from elsa_core.proof import paths as run_paths
from elsa_core.proof.compare import MODEL_SAMPLES
from elsa_core.proof.report import NOTHING_TESTED, CheckReport, GradientCheck, gradient_check
from elsa_core.proof.run import CheckRun
from elsa_core.proof.sides import Given, faulty, judge_gradients, own
from elsa_core.proof.site_run import Asked

FAULT_SWITCH = "ELSA_FAULT_INJECTION"
_WHOLE = "model"  # what the whole model's gradients have where a site's have its path
_RUNS = 5  # timed forwards of original and patched
_SECONDS = 3.0  # after which no further round of them begins


@environment_kept()
def check(
    model: nn.Module,
    inputs: ModelInput | Mapping[str, ModelInput],
    *,
    factor: float = 2.0,
    stress: bool = True,
    batch_size: int = 8,
    paths: Sequence[str] | None = None,
    grad: bool = False,
    sparsity_bound: float = 0.0,
    progress: Progress | bool | None = None,
) -> CheckReport:
    """Judges a patched model against the original one, with float64 as the oracle.

    The error of the patched model may not exceed `factor` times the original's own error plus a
    rounding band of two ulp (`elsa_core.proof.compare`). That holds for the model's output and for
    each site's. A site is run alone, on what reached it in the original. Top-1 must agree with the
    oracle's wherever the original's own rounding cannot flip it. Values that are not finite fail.

    ELSA_FAULT_INJECTION=site_path:amount multiplies the output of that patched site by 1 + amount,
    to show that the check sees it. The report says that it was on.

    Args:
        model: Patched by `elsa_core.patch`; any floating dtype but float64. Comes back as it was.
            Of a compiled model the eager one is judged.
        inputs: A tensor [B, C, H, W], a tuple of the model's arguments, or named ones of either.
            Floating tensors are cast to the model's dtype and device first.
        factor: How many times the original's own error is allowed; at least 1.
        stress: Also hard cases for each site, made from the first case that reaches it, and one
            with random weights for those that are all zero (made without `stress` too, where a
            site's output is zero and would show nothing).
        batch_size: Rows for one forward. Sites are judged on the first batch of each case.
        paths: How the whole patched model runs: "eager", "graph" (a CUDA graph), "compile"
            (`torch.compile`), "compile+graph", or several of them. The original and the sites run
            eagerly. Default: "eager", and on CUDA "graph" and "compile" too. One that the original
            or this machine cannot run is left out, and the report gives the reason.
        grad: Also the gradients of the first case, by the same rule: of every parameter that wants
            one and of each input, for the model, eagerly and by path "graph", and for each site.
        sparsity_bound: The relative error that is allowed in addition, at least 0, for a model and
            its sites that were patched with a number as `sparsity`.
        progress: Called with (what, steps done, steps in all). Default: a line on stderr where that
            is a terminal; False: nothing.

    Raises:
        TypeError: An argument of a wrong type.
        NothingPatchedError: No site of the model is patched.
        ArgumentError: `factor`, `batch_size`, `paths`, an input or the fault switch is wrong.
        ModelError: The original model does not run on the inputs, not by a path that was asked
            for, or not in float64.
        UnavailableError: A path needs a GPU or a compiler that is not there.
    """
    require_number("factor", factor)
    require_number("sparsity_bound", sparsity_bound)
    if not isinstance(batch_size, SupportsIndex):
        raise TypeError(f"batch_size must be a whole number, not {type(batch_size).__name__}")
    if not (math.isfinite(factor) and factor >= 1.0):
        raise ArgumentError(f"factor={factor}: expected a finite number of at least 1")
    if not (math.isfinite(sparsity_bound) and sparsity_bound >= 0.0):
        raise ArgumentError(
            f"sparsity_bound={sparsity_bound}: expected a finite number, not below 0"
        )
    if batch_size < 1:
        raise ArgumentError(f"batch_size={batch_size}: expected at least 1")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: judged without it
    sites = patched_sites(model)
    if not sites:
        raise NothingPatchedError("check: no site of this model is patched; call patch first")
    if grad and any(isinstance(vars(s).get("elsa_sparsity"), float) for s in sites.values()):
        raise ArgumentError("a number as sparsity has no gradients: check it without grad (--grad)")
    cases = as_cases(inputs)
    fault = None
    if text := os.environ.get(FAULT_SWITCH, ""):
        path, _, number = text.rpartition(":")
        try:
            fault = path, float(number)
        except ValueError:
            fault = path, math.nan
        if path not in sites or math.isnan(fault[1]):
            raise ArgumentError(
                f"{FAULT_SWITCH}={text}: expected the path of a patched site, a colon and a number"
            )
    dtype, device = _home(model)
    asked = Asked(
        factor, batch_size, stress, grad, run_paths.chosen(paths, device), paths is not None,
        sparsity_bound, fault is not None, dtype, device,
    )  # fmt: skip
    with shown(progress) as told, _undisturbed(model, device):
        with original(model):
            try:  # the original in float64, which holds its weights exactly
                oracle = copy.deepcopy(model).double()
            except (RuntimeError, TypeError, AssertionError) as error:  # the last: fully_shard
                raise ModelError(
                    f"check: this model cannot be copied for a float64 oracle ({error})"
                ) from error
        steps = len(cases) * (len(sites) + 1) + int(grad) + 1  # the last: the timing
        with nullcontext() if fault is None else faulty(sites[fault[0]], fault[1]):
            return _report(CheckRun(model, sites, oracle, asked, told, steps), cases, fault)


def _report(
    run: CheckRun, cases: Mapping[str, tuple[Any, ...]], fault: tuple[str, float] | None
) -> CheckReport:
    asked, sites, by_name = run.asked, run.site_run, {}
    name, case = next(iter(cases.items()))
    batch = run.prepared(next(chunks(case, asked.batch_size)))
    dispatch.compile_kernels(lambda: run.model(*batch[0], **batch[1]), run.progress)
    checks = run.cases(cases)
    slopes: list[GradientCheck] = []
    if asked.grad:
        slopes += [
            gradient_check(path, judged)
            for path, judged in sites.gradients.items()
            if sites.records[path].calls or any(each.comparisons for _, each in judged)
        ]
        by_name[_WHOLE] = run.sides
        if run_paths.GRAPH in run.by_path and run.trains(run_paths.GRAPH, batch):
            by_name[f"{_WHOLE} by {run_paths.GRAPH}"] = run.by_path[run_paths.GRAPH]
        for title, sides_of in by_name.items():
            one = judge_gradients(run.new_judgement(), sides_of, batch, asked.dtype, MODEL_SAMPLES)
            slopes.append(gradient_check(title, [(name, one)]))
        run.tick("gradients", 1)
    before, after = _seconds(run.model, batch, asked.device)
    run.tick("timing", 1)
    results = tuple(record.result(path) for path, record in sites.records.items())
    # A buffer may hold -inf on purpose (a causal mask), a NaN never.
    bad = []
    for name, weight in run.model.named_parameters():
        if weight.is_floating_point() and not bool(weight.detach().isfinite().all()):
            bad.append(name)
    for name, buffer in run.model.named_buffers():
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            bad.append(name)
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    failures = [f"weights: NaN or infinite values in {', '.join(bad[:3])}{more}"] if bad else []
    failures += [f"{site.path}: {site.reason}" for site in results if not site.ok]
    for verdict in checks:
        by = "" if verdict.path == run_paths.EAGER else f" by {verdict.path}"
        failures += [] if verdict.ok else [f"model on {verdict.case!r}{by}: {verdict.reason}"]
    failures += [f"{one.path}: gradients: {one.reason}" for one in slopes if not one.ok]
    # a site has to have run elsa's operator, unless all are layers, or PyTorch's own attention was
    # asked for, which is none, or a registered backend served
    attends = not all(
        is_layer(site) or vars(site).get("elsa_backend") == "sdpa" for site in run.sites.values()
    )
    attends &= not any(record.backends for record in sites.records.values())
    if not failures and attends and not any(site.operator_calls for site in results):
        failures.append(NOTHING_TESTED)
    return CheckReport(
        sites=results, cases=checks, ok=not failures, dtype=str(asked.dtype).removeprefix("torch."),
        device=str(asked.device), factor=asked.factor, stress=asked.stress,
        seconds_original=statistics.median(before), seconds_patched=statistics.median(after),
        timed_runs=len(before), failures=tuple(failures), paths=tuple(run.by_path),
        fault_injection=None if fault is None else f"{fault[0]}:{fault[1]:g}",
        left_out=run.left_out, gradients=tuple(slopes),
    )  # fmt: skip


def _home(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    counts: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype, parameter.device] += parameter.numel()
    if not counts:
        raise ModelError("check: the model has no floating weights; nothing can be compared")
    dtype, device = counts.most_common(1)[0][0]
    if device.type == "meta":
        raise ModelError("check: the weights are on the meta device; load the model for real")
    if dtype == torch.float64:
        raise ArgumentError(
            "check: a float64 model has no oracle better than itself; check it in float32"
        )
    return dtype, device


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode, eager, no gradient, no autocast; every mode and random state comes back."""
    modes = [(module, module.training) for module in model.modules()]
    index = device.index if device.index is not None else 0
    rng = torch.random.fork_rng(devices=[index] if device.type == "cuda" else [])
    eager = torch.autocast(device_type=device.type, enabled=False)
    # A compiler leaves out hooks, so that what is compiled, whole or in part, runs eagerly. A
    # process that has not imported the compiler, which takes seconds, has compiled nothing.
    stance: AbstractContextManager[object] = nullcontext()
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), rng, eager, stance:
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _seconds(
    model: nn.Module, given: Given, device: torch.device
) -> tuple[list[float], list[float]]:
    """Of forwards of (original, patched), run in turns; NaN for one that raises."""
    seconds: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    while len(seconds[0]) < _RUNS:
        classes: list[AbstractContextManager[object]] = [original(model), nullcontext()]
        for taken, swapped in zip(seconds, classes, strict=True):
            with swapped:
                args, kwargs = own(given)
                synchronize(device)
                begun = time.perf_counter()
                try:
                    model(*args, **kwargs)
                    synchronize(device)
                    taken.append(time.perf_counter() - begun)
                except Exception:  # it is in the report already, as the case that failed
                    taken.append(math.nan)
        if time.perf_counter() - start > _SECONDS:
            break
    return seconds
