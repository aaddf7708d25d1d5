"""One model in several ways in the same rounds: time, throughput, memory, energy of each."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from elsa_core import dispatch
from elsa_core.base.inputs import chunks
from elsa_core.base.messages import first_line, side
from elsa_core.base.summary import Summarised, Summary
from elsa_core.errors import ElsaError
from elsa_core.measuring import rounds
from elsa_core.measuring.busy import watch
from elsa_core.measuring.documents import Plain
from elsa_core.measuring.intervals import Ratio, digits, paired_times, percentile, ratio
from elsa_core.measuring.rounds import Samples, Settings
from elsa_core.measuring.timing import Contender, energy_of, workspace
from elsa_core.patching import (
    PatchReport,
    find_sites,
    patch,
    patched_scope,
    patched_sites,
    shared_copy,
    unpatch,
)
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.variants import first_tensor, inputs_kept
from elsa_core.profiling.words import duration, ratio_text, shares, three, verdict_text
from elsa_core.proof import TURBO_EPS, Comparison, floating_outputs, map_floating

if TYPE_CHECKING:
    from elsa_core.profiling.sites import SiteProfile

Progress = Callable[[str, int, int], None]

_KEPT_SAMPLES: Final = 100
_FACTOR: Final = 2.0  # times the error of "eager", which a run may have
_SLOW: Final = 0.05  # of the budget, that a call takes whose memory is not measured


@dataclass(frozen=True)
class Run(Plain):
    """One way to run the model. Times are seconds a call; None is "not measured".

    Attributes:
        name: a baseline, or "patched" and what goes with it.
        patched: whether it runs on elsa.
        seconds: "eager"'s is the median of the rounds; another run's is that over the median of the
            rounds' ratios (`elsa_core.measuring.intervals.paired_times`). Ratios are quotients of
            these.
        seconds_p10, seconds_p90: percentiles over the rounds.
        spread: distance of these percentiles over the median.
        samples: the rounds, thinned evenly to at most 100.
        images_per_second: batch over `seconds`.
        memory_bytes: growth at the peak of a call, output included, weights not: PyTorch's
            allocator on CUDA (for a CUDA graph its own pool), else the resident set. None where
            one more call would take 5% of the budget.
        host_seconds: until the call returns (CUDA).
        device_seconds: of the GPU, for a call that follows another, without the host: of its CUDA
            graph (CUDA).
        bound: "host" where launching takes longer than computing, "device", or "".
        joules: energy of a call (CUDA with NVML).
        error: relative Euclidean error of this very call's output against float64.
        first_seconds: to the first result, compiling and capturing included.
        ratio: "eager"'s time over this one's; None for "eager".
        ratio_to_best: the fastest baseline's time over this one's (patched only).
        parts: of a training step: seconds of forward, backward and optimizer, means over the middle
            half of the rounds: the host's on a CPU, the GPU's on CUDA, idle time included.
    """

    name: str
    patched: bool
    seconds: float
    seconds_p10: float
    seconds_p90: float
    spread: float
    samples: tuple[float, ...]
    images_per_second: float
    memory_bytes: int | None
    host_seconds: float | None
    device_seconds: float | None
    bound: str
    joules: float | None
    error: float | None
    first_seconds: float | None
    ratio: Ratio | None
    ratio_to_best: Ratio | None
    parts: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a call that is no training step has no parts."""
        found = super().to_dict()
        if self.parts is None:
            del found["parts"]
        return found


@dataclass(frozen=True, repr=False)
class ProfileReport(Summarised, Plain):
    """What patching gained for one model, one input size, one dtype and one precision.

    Attributes:
        device, dtype: of the model, as text.
        batch: images of a call.
        image_size: height and width; None where the first input is no image.
        precision, backend: what the patched sites ask for.
        rounds: samples of each run.
        weight_bytes: of parameters and buffers, the same for all runs.
        runs: baselines first, then the patched ones.
        left_out: {name: why it did not run or is no run of its own}.
        best_baseline, best_patched: the fastest of each kind ("control" is no baseline).
        gain: the fastest baseline's time over the fastest patched run's.
        patched, kept: numbers of sites.
        warnings: reasons to doubt the figures.
        wrong: the runs whose error is more than twice "eager"'s and a rounding band.
        patch: what was patched.
        sites: slowest first, the last one being the rest of the model; empty if not asked for.
        cover: for the two runs whose sites were timed ("eager" and "patched", or both as CUDA
            graphs), the time in which their sites were told apart over the run's own. Graphs: the
            profiled replay over an undisturbed one.
        notes: what else a reader should know.
    """

    device: str
    dtype: str
    batch: int
    image_size: tuple[int, int] | None
    precision: str
    backend: str
    rounds: int
    weight_bytes: int
    runs: tuple[Run, ...]
    left_out: dict[str, str]
    best_baseline: str
    best_patched: str
    gain: Ratio
    patched: int
    kept: int
    warnings: tuple[str, ...]
    wrong: tuple[str, ...]
    patch: PatchReport
    sites: tuple[SiteProfile, ...] = ()
    cover: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def run(self, name: str) -> Run:
        """The run of this name."""
        return {run.name: run for run in self.runs}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what was patched stands in the sites."""
        found = super().to_dict()
        del found["patch"]
        return found

    def summary(self) -> Summary:
        """The verdict, a row for each run, and a row for each site, slowest first."""
        found = self.to_dict()
        size = f"{side(found['image_size'])} px, " if found["image_size"] else ""
        what = f"{size}batch {found['batch']}, {found['dtype']} on {found['device']}"
        runs = [
            (run["name"], duration(run["seconds"]), three(run["images_per_second"]),
             ratio_text(run["ratio"]))
            for run in found["runs"]
        ]  # fmt: skip
        sites = [
            (site["path"] or "the model", duration(site["seconds_before"]),
             duration(site["seconds_after"]), share, ratio_text(site["ratio"]))
            for site, share in zip(found["sites"], shares(found["sites"]), strict=True)
        ]  # fmt: skip
        columns = ("site", ">before", ">after", ">share before", "times as fast")
        return Summary(
            f"{verdict_text(found)} · {what}",
            ("run", ">time of a call", ">images/s", "times as fast as eager"),
            runs,
            [*found["warnings"], *found["notes"]],
            Summary("where the time goes", columns, sites) if sites else None,
        )


@dataclass(frozen=True)
class Prepared:
    """A model ready to be run in several ways: copies over the same weights, unpatched and patched,
    the arguments of a call and the first tensor of them, what was patched, and the contenders.

    `trains`: a call is a training step.
    """

    plain: nn.Module
    patched: nn.Module
    arguments: tuple[Any, ...]
    first: Tensor
    report: PatchReport
    built: variants.Built
    trains: bool = False


def prepare(
    model: nn.Module,
    arguments: tuple[Any, ...],
    baselines: Sequence[str] | None,
    tell: Progress,
    *,
    step: variants.Calling | None = None,
    **patching: Any,
) -> Prepared:
    """Copy, patch and build; a model that is patched already keeps its patches.

    `step` makes the training step of a copy; None: calls are inference. `patching`: precision,
    backend, include, exclude and scope, as for `elsa_core.patch`.
    """
    first = first_tensor(arguments)
    names = variants.chosen(baselines, first.device, trains=step is not None)
    tell("patching", 0, 0)
    plain = shared_copy(model)
    unpatch(plain)
    plain.eval()
    already = patched_sites(model)
    if already:
        patched, one = shared_copy(model).eval(), vars(next(iter(already.values())))
        scope = patched_scope(patched)
        sites = find_sites(patched, scope)
        report = PatchReport(
            tuple(site for site in sites if site.patched),
            tuple(site for site in sites if not site.patched),
            str(one["elsa_precision"]), str(one["elsa_backend"]), scope=scope,
        )  # fmt: skip
    else:
        patched = shared_copy(plain)
        report = patch(patched, **patching)
    with inputs_kept(arguments):
        dispatch.compile_kernels(lambda: patched(*arguments), tell)
        every = (*names, *variants.ours(names))
        built = variants.build(plain, patched, arguments, every, tell, step)
    return Prepared(plain, patched, arguments, first, report, built, step is not None)


def timed(
    ready: Prepared, settings: Settings, tell: Progress,
    clocks: Mapping[str, rounds.Clock] | None = None, *, errors: bool = True, costs: bool = True,
) -> tuple[ProfileReport, Samples]:  # fmt: skip
    """The runs of what was prepared, their errors, and the samples that they were made of.

    Without `costs` memory, energy and the GPU's share of a call stay unknown, which saves time.
    """
    first, built, report = ready.first, ready.built, ready.report
    doubts = watch(first.device)
    tell("rounds", 0, 0)
    with inputs_kept(ready.arguments):
        samples = rounds.take_samples(
            built.contenders, first.device, settings, clocks,
            progress=lambda done, total: tell("rounds", done, total),
            first=built.first_seconds if first.device.type == "cpu" else {},
        )  # fmt: skip
    tell("errors", 0, 0)
    known = RunErrors({}, {})
    if errors and not ready.trains:
        known = run_errors(ready.plain, built.contenders, ready.arguments, report.precision)
    seconds = {name: [sample.seconds for sample in own] for name, own in samples.items()}
    spreads = {}  # distance of the 10th and 90th percentile over the median
    for name, own in seconds.items():
        width = percentile(own, 0.9) - percentile(own, 0.1)
        spreads[name] = digits(width / statistics.median(own))
    warnings = doubts(spreads)
    tell("memory", 0, 0)
    runs = _runs(ready, samples, known.errors, spreads, settings, costs=costs)
    fit = sorted((r for r in runs if r.name != variants.CONTROL), key=lambda run: run.seconds)
    best, fastest = (next(run for run in fit if run.patched is each) for each in (False, True))
    assert fastest.ratio_to_best is not None
    weights = [*ready.plain.parameters(), *ready.plain.buffers()]
    # token ids have none
    dtype = next((t.dtype for t in (first, *weights) if t.is_floating_point()), first.dtype)
    found = ProfileReport(
        device=str(first.device),
        dtype=str(dtype).removeprefix("torch."),
        batch=first.shape[0],
        image_size=(first.shape[-2], first.shape[-1]) if first.dim() == 4 else None,
        precision=report.precision,
        backend=report.backend,
        rounds=len(samples["eager"]),
        weight_bytes=sum(each.numel() * each.element_size() for each in weights),
        runs=runs,
        left_out=built.left_out,
        best_baseline=best.name,
        best_patched=fastest.name,
        gain=fastest.ratio_to_best,
        patched=len(report.patched),
        kept=len(report.kept),
        warnings=(*warnings, *known.warnings),
        wrong=tuple(known.wrong),
        patch=report,
    )
    return found, samples


def _runs(
    ready: Prepared, samples: Samples, errors: Mapping[str, float], spreads: Mapping[str, float],
    settings: Settings, *, costs: bool,
) -> tuple[Run, ...]:  # fmt: skip
    built, first = ready.built, ready.first
    seconds = {name: [sample.seconds for sample in own] for name, own in samples.items()}
    times = paired_times(seconds, "eager")
    baselines = [name for name in times if not name.startswith("patched")]
    best = min((n for n in baselines if n != variants.CONTROL), key=lambda name: times[name])

    runs = []
    for each in built.contenders:
        name = each.name
        taken, time = seconds[name], times[name]
        over = {  # a ratio is the quotient of the two times
            other: ratio(seconds[other], taken, settings.seed, (times[other], time))
            for other in {"eager", best}
        }
        host = None
        if first.device.type == "cuda":
            host = digits(statistics.median(sample.host or 0.0 for sample in samples[name]))
        # the rounds have used the budget up: one more call must be a small part of it
        slow = time > _SLOW * settings.budget_seconds
        memory, busy, joules = _costs(ready, each, slow=slow, wanted=costs)
        runs.append(
            Run(
                name=name,
                patched=name not in baselines,
                seconds=digits(time),
                seconds_p10=digits(percentile(taken, 0.1)),
                seconds_p90=digits(percentile(taken, 0.9)),
                spread=spreads[name],
                samples=tuple(map(digits, taken[:: -(-len(taken) // _KEPT_SAMPLES)])),
                images_per_second=digits(first.shape[0] / time),
                memory_bytes=memory,
                host_seconds=host,
                device_seconds=busy,
                bound=rounds.bound_by(time, host, busy),
                joules=joules,
                error=errors.get(name),
                first_seconds=digits(built.first_seconds[name]),
                ratio=None if name == "eager" else over["eager"],
                ratio_to_best=None if name in baselines else over[best],
            )
        )
    return tuple(runs)


def _costs(
    ready: Prepared, contender: Contender, *, slow: bool, wanted: bool
) -> tuple[int | None, float | None, float | None]:
    name, device = contender.name, ready.first.device
    memory = ready.built.graph_bytes.get(name)
    if not wanted:
        return memory, None, None
    if memory is None and not slow:
        memory = workspace(contender, device)
    if device.type != "cuda" or ready.trains:
        return memory, None, None
    replay = replace(contender, call=ready.built.replays.get(name, contender.call))
    busy = rounds.busy_seconds(replay, is_graph=name.endswith(variants.GRAPH))
    with contender.context(), torch.inference_mode():
        return memory, busy, energy_of(device, contender.call)


class RunErrors(NamedTuple):
    """Relative Euclidean errors against float64 of the worst output of each run, why those of
    `wrong` are too large, and reasons to doubt the runs.
    """

    errors: dict[str, float]
    wrong: dict[str, str]
    warnings: tuple[str, ...] = ()


def run_errors(
    plain: nn.Module,
    contenders: Sequence[Contender],
    arguments: tuple[Any, ...],
    precision: str = "strict",
) -> RunErrors:
    """The error of every run that is timed: of that very call, its batch and its inputs.

    The oracle is the original in float64 on the same inputs: since attention in float64 takes
    memory, of one row at a time where every output has the batch's rows. The rule is that of
    `check`: twice the error of "eager", and a rounding band.
    """
    try:
        with torch.inference_mode():
            outputs = {}
            for contender in contenders:
                with contender.context(), inputs_kept(arguments):
                    outputs[contender.name] = floating_outputs(contender.call())
        reference = outputs["eager"]
        if not reference:
            raise ValueError("the model's output has no floating tensor")
        oracle, first = copy.deepcopy(plain).double(), first_tensor(arguments)
        by_row = all(out.ndim and len(out) == len(first) for out in reference.values())
        with torch.inference_mode(), torch.autocast(first.device.type, enabled=False):
            parts = [
                floating_outputs(oracle(*map_floating(rows, torch.float64)))
                for rows in chunks(arguments, 1 if by_row else len(first))
            ]
            exact = {place: torch.cat([part[place] for part in parts]) for place in reference}
        errors, wrong = {}, {}
        turbo = precision == "turbo" and all(x.dtype == torch.float32 for x in reference.values())
        for name, found in outputs.items():
            eps = TURBO_EPS if turbo and name.startswith("patched") else None
            comparisons = {place: Comparison(_FACTOR, eps) for place in reference}
            for place, each in comparisons.items():
                each.add(exact[place], reference[place], found[place])
            worst = max(comparisons.values(), key=lambda each: each.excess)
            errors[name] = worst.patched_error
            if worst.patched_error > worst.allowed and name != "eager":
                wrong[name] = worst.reason()
    except (ElsaError, RuntimeError, TypeError, ValueError, MemoryError, KeyError) as error:
        return RunErrors({}, {}, (f"the errors of the runs are not known: {first_line(error)}",))
    return RunErrors(errors, wrong, tuple(f"{name}: {why}" for name, why in wrong.items()))
