"""Where the time goes: the sites of a prepared model, timed beside one another or in its graphs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor, nn

from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError
from elsa_core.measuring import rounds
from elsa_core.measuring.intervals import FEWEST_ROUNDS, Ratio, middle_means, ratio
from elsa_core.measuring.rounds import Sample, Samples, Settings
from elsa_core.measuring.timing import Contender
from elsa_core.patching import (
    AttentionSite,
    PatchReport,
    attention_within,
    find_sites,
    inspect,
    shared_copy,
)
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import ModelRuns, Prepared, Progress
from elsa_core.profiling.runs.variants import first_tensor
from elsa_core.profiling.sites import (
    SiteClock,
    SiteProfile,
    inside,
    order_of,
    outermost,
    profiles,
    served,
)
from elsa_core.profiling.timeline import Cut, Marked, timelines
from elsa_core.proof import check

# The watched models take part in the rounds under names that no baseline has.
_WATCHED: Final = ("eager, watched", "patched, watched")
_PAIR: Final = ("eager", "patched")
_SHARE: Final = 0.25  # of the budget, for the sites
_SHARE_ASKED: Final = 0.5  # where they were asked for
_LEAST_ROUNDS: Final = FEWEST_ROUNDS + 2  # that fit into the sites' budget
_CHECK_CALLS: Final = 12  # forwards that take as long as a check of errors, roughly
_ASK: Final = "sites=True (--sites)"  # as Python and the command line have it
_DISTURBED: Final = 0.1  # by which telling the sites apart may slow a run before it is said
_CORRECTED: Final = 0.1  # by which the sites' rounds may differ from the run's before it is said


@dataclass(frozen=True)
class Located:
    """What is known of the sites; see `ProfileReport`."""

    rows: tuple[SiteProfile, ...] = ()
    cover: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """What is wanted of the sites.

    Attributes:
        sites: whether to time them; None: on a CPU only if the budget suffices.
        errors: with sites, also check each one's error on the same inputs against float64.
        settings: rounds, budget and seed of the whole profile.
        end: when the budget is over, by `time.perf_counter`.
    """

    sites: bool | None
    errors: bool
    settings: Settings
    end: float

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.end - time.perf_counter()


def locate(
    ready: Prepared, found: ModelRuns, samples: Samples, asked: Asked, tell: Progress
) -> Located:
    """Time the sites of a model whose runs have been measured, and check their errors.

    Args:
        ready, found, samples: the model, its runs, and the samples these were made of.
        asked: what is wanted.
        tell: progress.
    """
    device = ready.first.device
    always = asked.sites is True or (asked.sites is None and device.type == "cuda")
    both = sum(found.run(name).seconds for name in _PAIR)
    least = 2 * _LEAST_ROUNDS * both
    if asked.sites is False:
        return Located()
    if not always and asked.left < least:
        note = f"no time was left for the sites: {_ASK} times them"
        return Located(notes=(note,))
    share = _SHARE_ASKED if asked.sites else _SHARE
    budget = max(share * asked.settings.budget_seconds, least)
    how = replace(
        asked.settings, budget_seconds=budget if always else min(budget, asked.left), decide=True
    )
    tell("sites", 0, 0)
    places, within = _sites_of(ready.plain, ready.report, ready.first)
    graphs = _graphs(ready.built)
    lines: dict[str, tuple[Cut, ...]] = {}
    notes: tuple[str, ...] = ()
    if graphs:
        # last: from the profiler's first use on, launches of this process are slower
        lines, notes = _timelines(
            ready, places, graphs, how.budget_seconds,
            lambda done, total: tell("sites", done, total),
        )  # fmt: skip
    if lines:
        timed = _from_graphs(samples, lines, found, how.seed)
    else:
        timed = _from_hooks(ready, places, found, how, tell)
    more: tuple[str, ...] = ()
    judged: dict[str, tuple[float, float]] = {}
    if asked.errors and not always and asked.left < _CHECK_CALLS * both:
        more = (f"no time was left for the errors of the sites: {_ASK} checks them",)
    elif asked.errors:
        tell("errors", 0, 0)
        judged, more = _errors(ready.patched, ready.arguments)
    # a hook on a projection would send some attention back to its original forward
    asked_of = [site.path for site in places if site.patched]
    routes = served(ready.patched, ready.arguments, asked_of)
    rows = profiles(places, timed.before, timed.after, routes, judged, how.seed, within)
    cover = {name: each.value for name, each in timed.covers.items()}
    return Located(rows, cover, timed.warnings, (*notes, *timed.notes, *_held(rows), *more))


def _held(rows: Sequence[SiteProfile]) -> tuple[str, ...]:
    """What to note of sites that have no row of their own."""
    held = [path for row in rows for path in row.within]
    if not held:
        return ()
    holders = sum(bool(row.within) for row in rows)
    return (
        f"{len(held)} linear layers inside {holders} attention sites ({held[0]}, ...) are timed as "
        "part of these: attention's rows are with their projections",
    )


@dataclass(frozen=True)
class _Timed:
    """Samples with the time of each site, in pairs, and how far they add up to the run's own."""

    before: Sequence[Sample]
    after: Sequence[Sample]
    covers: Mapping[str, Ratio]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _from_graphs(
    samples: Samples, lines: Mapping[str, Sequence[Cut]], found: ModelRuns, seed: int
) -> _Timed:
    busy = {name: found.run(name).device_seconds or 0.0 for name in lines}
    before, after = (_of_graph(samples[name], line, busy[name]) for name, line in lines.items())
    covers = {name: _profiled(line, busy[name], seed) for name, line in lines.items()}
    return _Timed(before, after, covers, _disturbed(covers, "the profiler"))


def _from_hooks(
    ready: Prepared,
    places: Sequence[AttentionSite],
    found: ModelRuns,
    how: Settings,
    tell: Progress,
) -> _Timed:
    watched, clocks = _watched(ready, places)
    pair = (each for each in ready.built.contenders if each.name in _PAIR)
    samples = rounds.take_samples(
        (*pair, *watched), ready.first.device, how, clocks,
        lambda done, total: tell("sites", done, total),
    )  # fmt: skip
    covers = _cover(samples)
    own = [found.run(name).seconds for name in _PAIR]
    pairs, corrections = _scaled([samples[name] for name in _WATCHED], own)
    notes = _corrected(dict(zip(_PAIR, corrections, strict=True)))
    return _Timed(pairs[0], pairs[1], covers, _disturbed(covers, "timing its sites"), notes)


def _scaled(
    watched: Sequence[Sequence[Sample]], seconds: Sequence[float]
) -> tuple[list[list[Sample]], list[float]]:
    """Samples whose rows add up to the runs' own times, and how far they were from them.

    The sites have rounds of their own, and a machine that others use too is slower in some rounds
    than in others. Sites keep their share of the call, and take it of the time that is reported.

    Args:
        watched: samples with the time of each site, of both runs in pairs.
        seconds: what a call of each run takes, as reported.
    """
    means = middle_means(order_of(*watched), [[each.seconds for each in own] for own in watched])
    corrections = [mean / own for mean, own in zip(means, seconds, strict=True)]
    pairs = zip(watched, corrections, strict=True)
    return [[_divided(each, by) for each in own] for own, by in pairs], corrections


def _divided(sample: Sample, by: float) -> Sample:
    return Sample(
        sample.seconds / by,
        None if sample.host is None else sample.host / by,
        None if sample.device is None else sample.device / by,
        {path: seconds / by for path, seconds in sample.sites.items()},
    )


def _watched(
    ready: Prepared, places: Sequence[AttentionSite]
) -> tuple[list[Contender], dict[str, SiteClock]]:
    """Further copies whose sites are timed in the rounds."""
    contenders: list[Contender] = []
    clocks: dict[str, SiteClock] = {}
    for name, source in zip(_WATCHED, (ready.plain, ready.patched), strict=True):
        copied = shared_copy(source)
        clocks[name] = SiteClock(copied, [site.path for site in places], ready.first.device)
        contenders.append(Contender(name, _caller(copied, ready.arguments)))
    return contenders, clocks


def _disturbed(covers: Mapping[str, Ratio], what: str) -> tuple[str, ...]:
    return tuple(
        f"{what} slowed {name} by {each.value - 1:.0%}; its sites are scaled to its own time"
        for name, each in covers.items()
        if each.rounds >= FEWEST_ROUNDS and each.low > 1 + _DISTURBED
    )


def _corrected(corrections: Mapping[str, float]) -> tuple[str, ...]:
    """What to note of sites whose rounds were slower or faster than those of the runs."""
    if all(abs(each - 1) <= _CORRECTED for each in corrections.values()):
        return ()
    said = " and ".join(f"{each:.2f}x ({name})" for name, each in corrections.items())
    return (
        f"sites were timed in rounds of their own, in which a call took {said} of its time in the "
        "other rounds; they are scaled to that time",
    )


def _cover(samples: Samples) -> dict[str, Ratio]:
    """By run, the time of the watched forwards, whose parts the sites are, over the others'."""
    seconds = {name: [sample.seconds for sample in own] for name, own in samples.items()}
    return {
        name: ratio(seconds[watched], seconds[name])
        for name, watched in zip(_PAIR, _WATCHED, strict=True)
    }


def _graphs(built: variants.Built) -> tuple[str, ...]:
    """The runs of the original and of the patched model as CUDA graphs, or none of them."""
    names = ("eager" + variants.GRAPH, "patched" + variants.GRAPH)
    return names if {c.name for c in built.contenders}.issuperset(names) else ()


def _timelines(
    ready: Prepared,
    places: Sequence[AttentionSite],
    graphs: Sequence[str],
    budget_seconds: float,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, tuple[Cut, ...]], tuple[str, ...]]:
    """By graph run, its replays cut at the sites, the original's first; and what to note of it.

    The host, which binds small models, does not enter there. None where the profiler cannot say.
    """
    paths = [site.path for site in places]
    try:
        marked = [
            Marked(shared_copy(model), ready.arguments, paths)
            for model in (ready.plain, ready.patched)
        ]
        lines = timelines(marked, budget_seconds, progress)
    except Exception as error:
        # profilers fail in many ways, and rows by hooks are better than no report
        return {}, (f"sites were timed eagerly: {first_line(error)}",)
    note = "sites were timed in CUDA graphs; the rest of the model includes launching the graph"
    return dict(zip(graphs, lines, strict=True)), (note,)


def _of_graph(samples: Sequence[Sample], cuts: Sequence[Cut], busy_seconds: float) -> list[Sample]:
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
        found.append(Sample(wait, sites=own))
    return found


def _profiled(cuts: Sequence[Cut], busy_seconds: float, seed: int) -> Ratio:
    """Seconds of marked replays, without their markers and as profiled, over an undisturbed one."""
    whole = [each.whole for each in cuts]
    return ratio(whole, [busy_seconds] * len(whole), seed)


def _sites_of(
    plain: nn.Module, report: PatchReport, first: Tensor
) -> tuple[tuple[AttentionSite, ...], dict[str, tuple[str, ...]]]:
    """The sites whose times add up, with tokens where they can be found out, and whether elsa
    serves them; and by site the paths of those that are timed as part of it."""
    everything: tuple[AttentionSite, ...] = find_sites(plain, report.scope)
    if first.dim() == 4:
        with contextlib.suppress(ElsaError):  # only the tokens are missing then
            everything = inspect(plain, tuple(first.shape[1:]), scope=report.scope).sites
    known = {site.path: site for site in (*report.patched, *report.kept)}
    parts = _timed(plain, everything)
    chosen = tuple(_marked(site, known) for site in outermost(everything, parts))
    return chosen, inside(everything, parts)


def _timed(model: nn.Module, sites: Sequence[AttentionSite]) -> dict[str, str]:
    """Of each block that is timed in its attention alone, the path of that."""
    paths = {module: path for path, module in model.named_modules()}
    found = {site.path: attention_within(model.get_submodule(site.path)) for site in sites}
    return {path: paths[inner] for path, inner in found.items() if inner is not None}


def _marked(site: AttentionSite, known: Mapping[str, AttentionSite]) -> AttentionSite:
    other = known.get(site.path, site)
    return replace(site, patched=other.patched, reason=other.reason)


def _errors(
    patched: nn.Module, arguments: tuple[Any, ...]
) -> tuple[dict[str, tuple[float, float]], tuple[str, ...]]:
    """(patched, original) error of each patched site on these inputs, and what went wrong."""
    rows = len(first_tensor(arguments))
    try:
        outcome = check(
            patched, arguments, stress=False, batch_size=rows, paths=("eager",), progress=False
        )
    except (ElsaError, RuntimeError, MemoryError) as error:
        return {}, (f"errors were not checked: {first_line(error)}",)
    found = {site.path: (site.patched_error, site.original_error) for site in outcome.sites}
    return found, tuple(f"the check failed: {line}" for line in outcome.failures)


def _caller(module: nn.Module, arguments: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: module(*arguments)
