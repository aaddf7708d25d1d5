"""Where the time goes: the sites of a prepared model, timed beside one another or in its graphs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from elsa_core.profiling.runs.runs import Prepared, ProfileReport, Progress
from elsa_core.profiling.runs.variants import GRAPH, first_tensor
from elsa_core.profiling.sites import SiteClock, inside, order_of, outermost, profiles, served
from elsa_core.profiling.timeline import Cut, Marked, timelines
from elsa_core.proof import check

_PAIR: Final = ("eager", "patched")
# The watched models take part in the rounds under names that no baseline has.
_WATCHED: Final = ("eager, watched", "patched, watched")
_SHARE: Final = 0.25  # of the budget, for the sites
_SHARE_ASKED: Final = 0.5  # where they were asked for
_LEAST_ROUNDS: Final = FEWEST_ROUNDS + 2  # that fit into the sites' budget
_CHECK_CALLS: Final = 12  # forwards that take as long as a check of errors, roughly
_ASK: Final = "sites=True (--sites)"  # as Python and the command line have it
_DISTURBED: Final = 0.1  # by which telling the sites apart may slow a run before it is said
_CORRECTED: Final = 0.1  # by which the sites' rounds may differ from the run's before it is said


@dataclass(frozen=True)
class Asked:
    """What is wanted of the sites: to be timed (None: on a CPU only if the budget suffices), and
    their errors against float64; `end`: when the budget is over, by `time.perf_counter`.
    """

    sites: bool | None
    errors: bool
    settings: Settings
    end: float

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.end - time.perf_counter()


def located(
    ready: Prepared, found: ProfileReport, samples: Samples, asked: Asked, tell: Progress
) -> ProfileReport:
    """A report with its sites, timed and their errors checked."""
    always = asked.sites is True or (asked.sites is None and ready.first.device.type == "cuda")
    both = sum(found.run(name).seconds for name in _PAIR)
    least = 2 * _LEAST_ROUNDS * both
    if asked.sites is False:
        return found
    if not always and asked.left < least:
        return replace(found, notes=(f"no time was left for the sites: {_ASK} times them",))
    share = _SHARE_ASKED if asked.sites else _SHARE
    budget = max(share * asked.settings.budget_seconds, least)
    how = replace(
        asked.settings, budget_seconds=budget if always else min(budget, asked.left), decide=True
    )
    tell("sites", 0, 0)
    places, within = _sites_of(ready.plain, ready.report, ready.first)
    # last: from the profiler's first use on, launches of this process are slower
    timed, notes = _by_graphs(ready, places, found, samples, how, partial(tell, "sites"))
    if timed is None:
        timed, more = _by_hooks(ready, places, found, how, partial(tell, "sites"))
        notes += more
    judged: dict[str, tuple[float, float]] = {}
    more = ()
    if asked.errors and not always and asked.left < _CHECK_CALLS * both:
        more = (f"no time was left for the errors of the sites: {_ASK} checks them",)
    elif asked.errors:
        tell("errors", 0, 0)
        judged, more = _errors(ready.patched, ready.arguments)
    # a hook on a projection would send some attention back to its original forward
    asked_of = [site.path for site in places if site.patched]
    routes = served(ready.patched, ready.arguments, asked_of)
    rows = profiles(places, timed.before, timed.after, routes, judged, how.seed, within)
    held = [path for row in rows for path in row.within]
    if held:
        holders = sum(bool(row.within) for row in rows)
        notes += (
            f"{len(held)} linear layers inside {holders} attention sites ({held[0]}, ...) are "
            "timed as part of these: attention's rows are with their projections",
        )
    disturbed = tuple(
        f"{timed.what} slowed {name} by {each.value - 1:.0%}; its sites are scaled to its own time"
        for name, each in timed.covers.items()
        if each.rounds >= FEWEST_ROUNDS and each.low > 1 + _DISTURBED
    )
    return replace(
        found, sites=rows, cover={name: each.value for name, each in timed.covers.items()},
        warnings=found.warnings + disturbed, notes=(*notes, *more),
    )  # fmt: skip


@dataclass(frozen=True)
class _Timed:
    """Samples with the time of each site, in pairs, how far they add up to the run's own, and what
    may have slowed it."""

    before: Sequence[Sample]
    after: Sequence[Sample]
    covers: Mapping[str, Ratio]
    what: str


def _by_graphs(
    ready: Prepared,
    places: Sequence[AttentionSite],
    found: ProfileReport,
    samples: Samples,
    how: Settings,
    progress: Callable[[int, int], None],
) -> tuple[_Timed | None, tuple[str, ...]]:
    """Replays of the original and the patched model's graphs, cut at the sites; and what to note.

    The host, which binds small models, does not enter there. None where there are no such graphs,
    or the profiler cannot say.
    """
    names = tuple(name + GRAPH for name in _PAIR)
    if not {c.name for c in ready.built.contenders}.issuperset(names):
        return None, ()
    paths = [site.path for site in places]
    try:
        marked = [
            Marked(shared_copy(model), ready.arguments, paths)
            for model in (ready.plain, ready.patched)
        ]
        lines = timelines(marked, how.budget_seconds, progress)
    except Exception as error:
        # profilers fail in many ways, and rows by hooks are better than no report
        return None, (f"sites were timed eagerly: {first_line(error)}",)
    busy = [found.run(name).device_seconds or 0.0 for name in names]
    before, after = (
        _of_graph(samples[name], line, seconds)
        for name, line, seconds in zip(names, lines, busy, strict=True)
    )
    covers = {
        name: ratio([each.whole for each in line], [seconds] * len(line), how.seed)
        for name, line, seconds in zip(names, lines, busy, strict=True)
    }
    note = "sites were timed in CUDA graphs; the rest of the model includes launching the graph"
    return _Timed(before, after, covers, "the profiler"), (note,)


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


def _by_hooks(
    ready: Prepared,
    places: Sequence[AttentionSite],
    found: ProfileReport,
    how: Settings,
    progress: Callable[[int, int], None],
) -> tuple[_Timed, tuple[str, ...]]:
    """Rounds with further copies whose sites are watched; and what to note of them.

    The sites have rounds of their own, and a machine that others use too is slower in some rounds
    than in others. Sites keep their share of the call, and take it of the time that is reported.
    """
    contenders = [each for each in ready.built.contenders if each.name in _PAIR]
    clocks = {}
    for name, source in zip(_WATCHED, (ready.plain, ready.patched), strict=True):
        copied = shared_copy(source)
        clocks[name] = SiteClock(copied, [site.path for site in places], ready.first.device)
        contenders.append(Contender(name, partial(copied, *ready.arguments)))
    samples = rounds.take_samples(contenders, ready.first.device, how, clocks, progress)
    seconds = {name: [sample.seconds for sample in own] for name, own in samples.items()}
    pairs = list(zip(_PAIR, _WATCHED, strict=True))
    covers = {name: ratio(seconds[watched], seconds[name]) for name, watched in pairs}
    order = order_of(*(samples[watched] for watched in _WATCHED))
    means = middle_means(order, [seconds[watched] for watched in _WATCHED])
    by = [mean / found.run(name).seconds for name, mean in zip(_PAIR, means, strict=True)]
    before, after = (
        [_divided(each, factor) for each in samples[watched]]
        for watched, factor in zip(_WATCHED, by, strict=True)
    )
    timed = _Timed(before, after, covers, "timing its sites")
    if all(abs(each - 1) <= _CORRECTED for each in by):
        return timed, ()
    said = " and ".join(f"{each:.2f}x ({name})" for name, each in zip(_PAIR, by, strict=True))
    return timed, (
        f"sites were timed in rounds of their own, in which a call took {said} of its time in the "
        "other rounds; they are scaled to that time",
    )


def _divided(sample: Sample, by: float) -> Sample:
    return Sample(
        sample.seconds / by,
        None if sample.host is None else sample.host / by,
        None if sample.device is None else sample.device / by,
        {path: seconds / by for path, seconds in sample.sites.items()},
    )


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
    chosen = []
    for site in outermost(everything, parts):
        other = known.get(site.path, site)
        chosen.append(replace(site, patched=other.patched, reason=other.reason))
    return tuple(chosen), inside(everything, parts)


def _timed(model: nn.Module, sites: Sequence[AttentionSite]) -> dict[str, str]:
    """Of each block that is timed in its attention alone, the path of that."""
    paths = {module: path for path, module in model.named_modules()}
    found = {site.path: attention_within(model.get_submodule(site.path)) for site in sites}
    return {path: paths[inner] for path, inner in found.items() if inner is not None}


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
