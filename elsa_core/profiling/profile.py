"""`profile`: a patched model against the ways one would otherwise run it, in one go."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.bench.results import digits
from elsa_core.bench.timing import Contender
from elsa_core.errors import ArgumentError, ElsaError
from elsa_core.patching.patch import PatchReport, patch, patched_sites
from elsa_core.patching.sites import AttentionSite, find_sites, inspect
from elsa_core.profiling import energy, measure, trust, variants
from elsa_core.profiling.measure import Ratio, Samples, Settings, ratio, spread
from elsa_core.profiling.report import ProfileReport, Run
from elsa_core.profiling.sites import SiteClock, SiteProfile, outermost, profiles, served
from elsa_core.profiling.timeline import Cut, Marked, timelines
from elsa_core.proof.cases import ModelInput, as_cases, chunks
from elsa_core.proof.check import check

Progress = Callable[[str, int, int], None]

# The watched models take part in the rounds under names that no baseline has.
_KEPT_SAMPLES = 100
_COVERED = 0.05  # by which the rows' sum may differ from the whole
_DISTURBED = 0.1  # by which the profiler may slow a graph whose sites it tells apart
_WATCHED = ("eager, watched", "patched, watched")


def profile(
    model: nn.Module,
    inputs: ModelInput,
    *,
    baselines: Sequence[str] | None = None,
    precision: str = "strict",
    backend: str = "auto",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rounds: int = 20,
    budget_seconds: float = 60.0,
    seed: int = 0,
    sites: bool = True,
    errors: bool = True,
    progress: Progress | None = None,
) -> ProfileReport:
    """Measure what patching a model gains against the ways one would otherwise run it.

    All of them take turns in the same rounds, in inference mode, on copies of the model's modules
    over the same weights; the model itself is not changed.

    Args:
        model: any module with attention sites that can be patched. One that is patched already
            keeps its patches, and `precision`, `backend`, `include` and `exclude` do not matter.
        inputs: a tensor [B, C, H, W], or a tuple of the model's arguments, on its device.
        baselines: names of `elsa_core.profiling.variants.BASELINES`, or "all"; default: "eager" and
            "sdpa", on CUDA also "compile" and CUDA graphs. "eager" always takes part.
        precision, backend, include, exclude: as for `elsa_core.patch`.
        rounds: samples of each at least; more until the intervals are within 1%.
        budget_seconds: limit of the rounds, under which there are fewer, but never under 3.
        seed: of the bootstrap.
        sites: also time every attention site, before and after.
        errors: with `sites`, also check each site's error on one image against float64.
        progress: called with (what, steps done, steps in all; 0 unknown).

    Returns:
        The report.

    Raises:
        ArgumentError: an argument is wrong, or the model cannot be copied.
        NothingPatchedError: no site of the model can be patched.
        UnavailableError: a baseline or backend that this machine lacks.
    """
    if rounds < 1 or not budget_seconds > 0:
        raise ArgumentError("profile: rounds and budget_seconds must be positive")
    tell = progress or (lambda what, done, total: None)
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    arguments = next(iter(as_cases(inputs).values()))
    first = next(value for value in arguments if isinstance(value, Tensor))
    names = variants.chosen(baselines, first.device)
    settings = Settings(rounds, budget_seconds, seed)
    with _current(first.device):
        tell("patching", 0, 0)
        plain, patched, report = _both(model, precision, backend, include, exclude)
        found = _sites_of(plain, report, first) if sites else None
        built = variants.build(plain, patched, arguments, (*names, *variants.ours(names)), tell)
        graphs = _graphs(built)
        watched, clocks = _watched(
            plain, patched, arguments, None if graphs else found, first.device
        )
        watch = trust.Watch(first.device)
        samples = measure.take_samples(
            (*built.contenders, *watched), first.device, settings, clocks,
            lambda done, total: tell("rounds", done, total),
        )  # fmt: skip
        spreads = {c.name: spread(_seconds(samples, c.name)).relative for c in built.contenders}
        warnings = watch.warnings(spreads)
        tell("memory", 0, 0)
        runs = _runs(built, samples, first.device, first.shape[0], seed)
        tell("sites", 0, 0)
        lines: dict[str, tuple[Cut, ...]] = {}
        notes: tuple[str, ...] = ()
        of_sites = samples
        if found is not None and graphs:
            # last: from the profiler's first use on, launches of this process are slower
            lines, notes = _timelines(
                plain, patched, arguments, found, graphs, budget_seconds / 4,
                lambda done, total: tell("sites", done, total),
            )  # fmt: skip
            if not lines:
                watched, clocks = _watched(plain, patched, arguments, found, first.device)
                pair = (c for c in built.contenders if c.name in ("eager", "patched"))
                fewer = replace(settings, budget_seconds=budget_seconds / 4)
                of_sites = measure.take_samples((*pair, *watched), first.device, fewer, clocks)
        busy = {run.name: run.device_seconds or 0.0 for run in runs}
        located = _located(patched, arguments, found, lines, of_sites, busy, errors, seed)
    best, own = _fastest(runs, patched=False), _fastest(runs, patched=True)
    return ProfileReport(
        device=str(first.device),
        dtype=str(first.dtype if first.is_floating_point() else "").removeprefix("torch."),
        batch=first.shape[0],
        image_size=(first.shape[-2], first.shape[-1]) if first.dim() == 4 else None,
        precision=report.precision,
        backend=report.backend,
        rounds=len(samples["eager"]),
        weight_bytes=_weight_bytes(model),
        runs=runs,
        left_out=built.left_out,
        best_baseline=best,
        best_patched=own,
        gain=_related(samples, best, own, seed),
        sites=located.rows,
        cover=located.cover,
        patched=len(report.patched),
        kept=len(report.kept),
        warnings=warnings + located.warnings,
        notes=notes + located.notes,
        patch=report,
    )


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """PyTorch's memory counters, events and graphs speak of the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _fastest(runs: Sequence[Run], *, patched: bool) -> str:
    fit = (run for run in runs if run.patched is patched and run.name != variants.CONTROL)
    return min(fit, key=lambda run: run.seconds).name


def _watched(
    plain: nn.Module,
    patched: nn.Module,
    arguments: tuple[Any, ...],
    found: Sequence[AttentionSite] | None,
    device: torch.device,
) -> tuple[list[Contender], dict[str, SiteClock]]:
    """Further copies whose sites are timed in the rounds; none where no sites are asked for."""
    contenders: list[Contender] = []
    clocks: dict[str, SiteClock] = {}
    if found is not None:
        for name, source in zip(_WATCHED, (plain, patched), strict=True):
            copied = variants.shared_copy(source)
            clocks[name] = SiteClock(copied, [site.path for site in found], device)
            contenders.append(Contender(name, _caller(copied, arguments)))
    return contenders, clocks


@dataclass(frozen=True)
class _Located:
    """What is known of the sites; see `ProfileReport`."""

    rows: tuple[SiteProfile, ...] = ()
    cover: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _located(
    patched: nn.Module,
    arguments: tuple[Any, ...],
    found: Sequence[AttentionSite] | None,
    lines: Mapping[str, Sequence[Cut]],
    samples: Samples,
    busy: Mapping[str, float],
    errors: bool,
    seed: int,
) -> _Located:
    if found is None:
        return _Located()
    judged, notes = _errors(patched, arguments) if errors else ({}, [])
    routes = served(patched, arguments, list(patched_sites(patched)))
    if lines:
        before, after = (_of_graph(samples[name], line, busy[name]) for name, line in lines.items())
        covers = {name: _profiled(line, busy[name], seed) for name, line in lines.items()}
        warnings = _disturbed(covers)
    else:
        before, after = (samples[name] for name in _WATCHED)
        covers = _cover(samples)
        warnings = _uncovered(covers)
    rows = profiles(found, before, after, routes, judged, seed)
    cover = {name: each.value for name, each in covers.items()}
    return _Located(rows, cover, warnings, tuple(notes))


def _uncovered(covers: Mapping[str, Ratio]) -> tuple[str, ...]:
    return tuple(
        f"the sites of {name} add up to {each.value:.0%} of its time"
        for name, each in covers.items()
        if each.rounds >= measure.FEWEST_ROUNDS
        and not (each.low < 1 + _COVERED and each.high > 1 - _COVERED)
    )


def _disturbed(covers: Mapping[str, Ratio]) -> tuple[str, ...]:
    return tuple(
        f"the profiler slowed {name} by {each.value - 1:.0%}; its sites are scaled to its own time"
        for name, each in covers.items()
        if each.rounds >= measure.FEWEST_ROUNDS and each.low > 1 + _DISTURBED
    )


def _cover(samples: Samples) -> dict[str, Ratio]:
    """By run, the time of the watched forwards, whose parts the sites are, over the others'."""
    names = {watched.partition(",")[0]: watched for watched in _WATCHED}
    return {
        name: ratio(_seconds(samples, watched), _seconds(samples, name))
        for name, watched in names.items()
    }


def _graphs(built: variants.Built) -> tuple[str, ...]:
    """The runs of the original and of the patched model as CUDA graphs, or none of them."""
    names = ("eager" + variants.GRAPH, "patched" + variants.GRAPH)
    return names if {c.name for c in built.contenders}.issuperset(names) else ()


def _timelines(
    plain: nn.Module,
    patched: nn.Module,
    arguments: tuple[Any, ...],
    found: Sequence[AttentionSite],
    graphs: Sequence[str],
    budget_seconds: float,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, tuple[Cut, ...]], tuple[str, ...]]:
    """By graph run, its replays cut at the sites, the original's first; and what to note of it.

    The host, which binds small models, does not enter there. None where the profiler cannot say.
    """
    paths = [site.path for site in found]
    try:
        marked = [
            Marked(variants.shared_copy(model), arguments, paths) for model in (plain, patched)
        ]
        lines = timelines(marked, budget_seconds, progress)
    except Exception as error:
        # profilers fail in many ways, and rows by hooks are better than no report
        return {}, (f"sites were timed eagerly: {variants.first_line(error)}",)
    note = "sites were timed in CUDA graphs; the rest of the model includes launching the graph"
    return dict(zip(graphs, lines, strict=True)), (note,)


def _of_graph(
    samples: Sequence[measure.Sample], cuts: Sequence[Cut], busy_seconds: float
) -> list[measure.Sample]:
    """The cuts as samples of the graph's run: what a caller waits, and the sites' part of it.

    Each session's cut stands beside the median wait of its share of the rounds, the same rounds
    for every run. The profiler lengthens kernels, short ones most (a graph of 140 kernels by 4 to
    15% on an H200): sites keep their share of the replay, and take it of an undisturbed one,
    `busy_seconds` (0: not known).
    """
    count = min(len(cuts), len(samples))
    found = []
    for i, each in enumerate(cuts[:count]):
        share = samples[i * len(samples) // count : (i + 1) * len(samples) // count]
        wait = statistics.median(sample.seconds for sample in share)
        scale = busy_seconds / each.whole if busy_seconds else 1.0
        own = {path: seconds * scale for path, seconds in each.sites.items()}
        found.append(measure.Sample(wait, sites=own))
    return found


def _profiled(cuts: Sequence[Cut], busy_seconds: float, seed: int) -> Ratio:
    """Seconds of marked replays, without their markers and as profiled, over an undisturbed one."""
    whole = [each.whole for each in cuts]
    return ratio(whole, [busy_seconds] * len(whole), seed)


def _both(
    model: nn.Module,
    precision: str,
    backend: str,
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
) -> tuple[nn.Module, nn.Module, PatchReport]:
    """Copies over the same weights: unpatched and patched."""
    plain = variants.unpatched_copy(model)
    already = patched_sites(model)
    if not already:
        patched = variants.shared_copy(plain)
        report = patch(
            patched, precision=precision, backend=backend, include=include, exclude=exclude
        )
        return plain, patched, report
    patched = variants.shared_copy(model).eval()
    one = vars(next(iter(already.values())))
    everything = find_sites(patched)
    report = PatchReport(
        tuple(site for site in everything if site.patched),
        tuple(site for site in everything if not site.patched),
        str(one["elsa_precision"]),
        str(one["elsa_backend"]),
    )
    return plain, patched, report


def _sites_of(plain: nn.Module, report: PatchReport, first: Tensor) -> tuple[AttentionSite, ...]:
    """The sites whose times add up, with tokens where they can be found out, and whether elsa
    serves them."""
    everything: tuple[AttentionSite, ...] = find_sites(plain)
    if first.dim() == 4:
        with contextlib.suppress(ElsaError):  # only the tokens are missing then
            everything = inspect(plain, tuple(first.shape[1:])).sites
    known = {site.path: site for site in (*report.patched, *report.kept)}
    return tuple(_marked(site, known) for site in outermost(everything))


def _marked(site: AttentionSite, known: Mapping[str, AttentionSite]) -> AttentionSite:
    other = known.get(site.path, site)
    return replace(site, patched=other.patched, reason=other.reason)


def _runs(
    built: variants.Built, samples: Samples, device: torch.device, batch: int, seed: int
) -> tuple[Run, ...]:
    counter = energy.meter(device)
    names = [contender.name for contender in built.contenders]
    baselines = [name for name in names if not name.startswith("patched")]
    fastest = min(
        (name for name in baselines if name != variants.CONTROL),
        key=lambda name: spread(_seconds(samples, name)).seconds,
    )
    runs = []
    for contender in built.contenders:
        name = contender.name
        is_ours = name not in baselines
        middle = spread(_seconds(samples, name))
        memory = built.graph_bytes.get(name)
        host = busy = joules = None
        if device.type == "cuda":
            host = spread([s.host or 0.0 for s in samples[name]]).seconds
            busy = measure.busy_seconds(contender, is_graph=name.endswith(variants.GRAPH))
            if counter is not None:
                joules = _joules(counter, contender)
        runs.append(
            Run(
                name=name,
                patched=is_ours,
                seconds=middle.seconds,
                seconds_p10=middle.p10,
                seconds_p90=middle.p90,
                spread=middle.relative,
                samples=_thinned(_seconds(samples, name)),
                images_per_second=digits(batch / middle.seconds),
                memory_bytes=measure.memory_bytes(contender, device) if memory is None else memory,
                host_seconds=host,
                device_seconds=busy,
                bound=measure.bound_by(middle.seconds, host, busy),
                joules=joules,
                ratio=None if name == "eager" else _related(samples, "eager", name, seed),
                ratio_to_best=_related(samples, fastest, name, seed) if is_ours else None,
            )
        )
    return tuple(runs)


def _thinned(seconds: Sequence[float]) -> tuple[float, ...]:
    """At most `_KEPT_SAMPLES` of the samples, evenly spread over the rounds."""
    step = -(-len(seconds) // _KEPT_SAMPLES)
    return tuple(digits(each) for each in seconds[::step])


def _joules(counter: energy.Meter, contender: Contender) -> float | None:
    with contender.context(), torch.inference_mode():
        return energy.per_call(counter, contender.call, torch.cuda.synchronize)


def _related(samples: Samples, reference: str, name: str, seed: int) -> Ratio:
    return ratio(_seconds(samples, reference), _seconds(samples, name), seed)


def _seconds(samples: Samples, name: str) -> list[float]:
    return [sample.seconds for sample in samples[name]]


def _errors(
    patched: nn.Module, arguments: tuple[Any, ...]
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """(patched, original) error of each patched site on one image, and what went wrong."""
    try:
        outcome = check(patched, next(chunks(arguments, 1)), stress=False, batch_size=1)
    except (ElsaError, RuntimeError, MemoryError) as error:
        return {}, [f"errors were not checked: {variants.first_line(error)}"]
    found = {site.path: (site.patched_error, site.original_error) for site in outcome.sites}
    return found, [f"the check failed: {line}" for line in outcome.failures]


def _weight_bytes(model: nn.Module) -> int:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _caller(module: nn.Module, arguments: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: module(*arguments)
