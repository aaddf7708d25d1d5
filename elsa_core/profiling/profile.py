"""`profile`: a patched model against the ways one would otherwise run it, and where the time goes:
its sites, timed beside one another or in CUDA graphs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from elsa_core.base.inputs import ModelInput, as_cases
from elsa_core.base.messages import first_line, shown
from elsa_core.base.processes import environment_kept
from elsa_core.errors import ElsaError
from elsa_core.measuring.intervals import FEWEST_ROUNDS, Ratio, middle_means, ratio
from elsa_core.measuring.rounds import Clock, Sample, Settings, take_samples
from elsa_core.measuring.timing import Contender
from elsa_core.patching import (
    AttentionSite,
    PatchReport,
    find_sites,
    inspect,
    plain_model,
    shared_copy,
)
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import Prepared, ProfileReport, Progress, prepare, timed
from elsa_core.profiling.runs.variants import first_tensor, inputs_kept, on_device
from elsa_core.profiling.sites import outermost, profiles, served, site_clock
from elsa_core.proof import check

__all__ = ["ProfileReport", "profile"]

_PAIR = ("eager", "patched")
# The watched models take part in the rounds under names that no baseline has.
_WATCHED: Final = ("eager, watched", "patched, watched")
_SHARE: Final = 0.25  # of the budget, for the sites
_SHARE_ASKED: Final = 0.5  # where they were asked for
_LEAST_ROUNDS: Final = FEWEST_ROUNDS + 2  # that fit into the sites' budget
_CHECK_CALLS: Final = 12  # forwards that take as long as a check of errors, roughly
_ASK: Final = "sites=True (--sites)"  # as Python and the command line have it
_DISTURBED: Final = 0.1  # by which telling the sites apart may slow a run before it is said
_CORRECTED: Final = 0.1  # by which the sites' rounds may differ from the run's before it is said
Sites = Mapping[AttentionSite, tuple[str, ...]]


@environment_kept()
def profile(
    model: nn.Module,
    inputs: ModelInput,
    *,
    baselines: Sequence[str] | None = None,
    precision: str = "strict",
    backend: str = "auto",
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    scope: str = "auto",
    rounds: int = 20,
    budget_seconds: float = 60.0,
    seed: int = 0,
    sites: bool | None = None,
    errors: bool = True,
    progress: Progress | bool | None = None,
) -> ProfileReport:
    """Measure what patching a model gains against the ways one would otherwise run it.

    All of them take turns in the same rounds, in inference mode, on copies of the model's modules
    over the same weights; the model itself is not changed. The rounds end as soon as the interval
    decides; what is left of the budget goes to the sites.

    Args:
        model: any module with attention sites that can be patched. One that is patched already
            keeps its patches; `precision`, `backend`, `include`, `exclude` and `scope` do not
            matter then.
        inputs: a tensor [B, C, H, W], or a tuple of the model's arguments, on its device.
        baselines: names of `runs.variants.BASELINES`, or "all"; default: "eager"
            on a CPU; on CUDA also "sdpa", "compile" and CUDA graphs. "eager" always takes part.
        precision, backend, include, exclude, scope: as for `elsa_core.patch`.
        rounds: samples of each at least; more until the intervals decide.
        budget_seconds: of warming up, rounds and sites; under it there are fewer rounds, but never
            under 3.
        seed: of the bootstrap.
        sites: also time every attention site, before and after, whatever is left of the budget;
            None: on a CPU only if the budget suffices.
        errors: also measure the error of every run's output against float64, and with sites that
            of each site, both on the inputs that are timed.
        progress: called with (what, steps done, steps in all; 0 unknown). Default: a line on stderr
            where that is a terminal; False: nothing.

    Returns:
        The report.

    Raises:
        TypeError: `model` is no `nn.Module`, `inputs` is no tensor or tuple, or a number is none.
        ArgumentError: an argument is wrong, or the model cannot be copied.
        NothingPatchedError: no site of the model can be patched.
        UnavailableError: a baseline or backend that this machine lacks.
    """
    settings = Settings(rounds, budget_seconds, seed, decide=True)
    model = plain_model(model)
    arguments = next(iter(as_cases(inputs).values()))
    device, start = first_tensor(arguments).device, time.perf_counter()
    with shown(progress) as told, on_device(device), inputs_kept(arguments):
        tell = told or (lambda what, done, total: None)
        ready = prepare(
            model, arguments, baselines, tell, precision=precision, backend=backend,
            include=include, exclude=exclude, scope=scope,
        )  # fmt: skip
        if device.type == "cuda":  # compiling and capturing are not what the budget is for
            start = time.perf_counter()
        end = start + budget_seconds
        # the verdict comes before the sites
        budget = max(end - time.perf_counter(), budget_seconds / 2)
        found, _ = timed(ready, replace(settings, budget_seconds=budget), tell, errors=errors)
        return _located(ready, found, settings, tell, sites=sites, errors=errors, end=end)


def _located(
    ready: Prepared, found: ProfileReport, settings: Settings, tell: Progress, *,
    sites: bool | None, errors: bool, end: float,
) -> ProfileReport:  # fmt: skip
    """The report `found` of `ready` with its sites, timed and their errors checked as `profile` was
    asked to. end: of the budget, by `time.perf_counter`."""
    always = sites is True or (sites is None and ready.first.device.type == "cuda")
    both = sum(found.run(name).seconds for name in _PAIR)
    least = 2 * _LEAST_ROUNDS * both
    left = end - time.perf_counter()
    if sites is False:
        return found
    if not always and left < least:
        return replace(found, notes=(f"no time was left for the sites: {_ASK} times them",))
    budget = max((_SHARE_ASKED if sites else _SHARE) * settings.budget_seconds, least)
    how = replace(settings, budget_seconds=budget if always else min(budget, left), decide=True)
    tell("sites", 0, 0)
    places = _sites_of(ready.plain, ready.report, ready.first)
    (before, after), covers, notes = _timed_sites(ready, places, found, how, tell)
    judged: dict[str, tuple[float, float]] = {}
    if errors and not always and end - time.perf_counter() < _CHECK_CALLS * both:
        notes.append(f"no time was left for the errors of the sites: {_ASK} checks them")
    elif errors:
        tell("errors", 0, 0)
        judged, more = _errors(ready.patched, ready.arguments)
        notes += more
    # a hook on a projection would send some attention back to its original forward
    routes = served(ready.patched, ready.arguments, [site.path for site in places if site.patched])
    rows = profiles(places, before, after, routes, judged, how.seed)
    held = [path for row in rows for path in row.within]
    if held:
        holders = sum(bool(row.within) for row in rows)
        notes.append(
            f"{len(held)} linear layers inside {holders} attention sites ({held[0]}, ...) are "
            "timed as part of these: attention's rows are with their projections"
        )
    disturbed = tuple(
        f"timing its sites slowed {name} by {each.value - 1:.0%}; its sites are scaled to its own "
        "time"
        for name, each in covers.items()
        if each.rounds >= FEWEST_ROUNDS and each.low > 1 + _DISTURBED
    )
    return replace(
        found, sites=rows, cover={name: each.value for name, each in covers.items()},
        warnings=found.warnings + disturbed, notes=tuple(notes),
    )  # fmt: skip


def _timed_sites(
    ready: Prepared, places: Sites, found: ProfileReport, how: Settings, tell: Progress
) -> tuple[list[list[Sample]], dict[str, Ratio], list[str]]:
    """Samples with the time of each site, before and after; how far telling them apart slowed each
    run; and what to note. In rounds with further copies whose sites are watched.

    Where both models were also run as CUDA graphs, so are the copies: the host, which binds small
    models, does not enter then. The sites have rounds of their own, and a machine that others use
    too is slower in some rounds than in others, and events between kernels take time. Sites keep
    their share of the call, and take it of the time that is reported; in graphs of the GPU's.
    """
    built = {each.name: each for each in ready.built.contenders}
    notes: list[str] = []
    pair, graphs = _PAIR, (_PAIR[0] + variants.GRAPH, _PAIR[1] + variants.GRAPH)
    watched = None
    if built.keys() >= {*graphs}:
        try:
            watched, pair = _watched(ready, places, graphed=True), graphs
            notes = ["sites were timed in CUDA graphs; the rest of the model includes launching "
                     "the graph"]  # fmt: skip
        except Exception as error:  # rows of eager calls are better than no report
            notes = [f"sites were timed eagerly: {first_line(error)}"]
    contenders, clocks = watched or _watched(ready, places, graphed=False)
    for name in pair:
        replay = ready.built.replays.get(name, built[name].call)
        contenders.append(replace(built[name], call=replay))
    progress = partial(tell, "sites")
    samples = take_samples(contenders, ready.first.device, how, clocks, progress)
    seconds = {name: [sample.span for sample in own] for name, own in samples.items()}
    watched_seconds = [seconds[name] for name in _WATCHED]
    order = [before * after for before, after in zip(*watched_seconds, strict=True)]
    means = middle_means(order, watched_seconds)
    scaled, by = [], []
    for name, own, mean in zip(pair, _WATCHED, means, strict=True):
        run = found.run(name)
        busy = run.seconds if pair == _PAIR else run.device_seconds or run.seconds
        by.append(mean / run.seconds)
        scaled.append([
            replace(
                each, span=each.span * run.seconds / mean,
                sites={path: taken * busy / mean for path, taken in each.sites.items()},
            )
            for each in samples[own]
        ])  # fmt: skip
    if pair == _PAIR and any(abs(each - 1) > _CORRECTED for each in by):
        said = " and ".join(f"{each:.2f}x ({name})" for name, each in zip(pair, by, strict=True))
        notes.append(
            f"sites were timed in rounds of their own, in which a call took {said} of its time in "
            "the other rounds; they are scaled to that time"
        )
    covers = {
        name: ratio(seconds[own], seconds[name], how.seed)
        for name, own in zip(pair, _WATCHED, strict=True)
    }
    return scaled, covers, notes


def _watched(
    ready: Prepared, places: Sites, *, graphed: bool
) -> tuple[list[Contender], dict[str, Clock]]:
    contenders, clocks = [], {}
    for name, source in zip(_WATCHED, (ready.plain, ready.patched), strict=True):
        copied = shared_copy(source)
        paths = [site.path for site in places]
        clocks[name] = site_clock(copied, paths, ready.first.device)
        call: Any = partial(copied, *ready.arguments)
        contenders.append(Contender(name, variants.graphed(call)[0] if graphed else call))
    return contenders, clocks


def _sites_of(plain: nn.Module, report: PatchReport, first: Tensor) -> Sites:
    """The sites whose times add up, with tokens where they can be found out and whether elsa serves
    them, each with the paths of those that are timed as part of it."""
    sites: tuple[AttentionSite, ...] = find_sites(plain, report.scope)
    if first.dim() == 4:
        with contextlib.suppress(ElsaError):  # only the tokens are missing then
            sites = inspect(plain, tuple(first.shape[1:]), scope=report.scope).sites
    known = {site.path: site for site in (*report.patched, *report.kept)}
    by_path = {site.path: site for site in sites}
    found = {}
    for path, within in outermost(plain, sites).items():
        other = known.get(path, by_path[path])
        found[replace(by_path[path], patched=other.patched, reason=other.reason)] = within
    return found


def _errors(
    patched: nn.Module, arguments: tuple[Any, ...]
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """(patched, original) error of each patched site on these inputs, and what went wrong."""
    rows = len(first_tensor(arguments))
    try:
        outcome = check(
            patched, arguments, stress=False, batch_size=rows, paths=("eager",), progress=False
        )
    except (ElsaError, RuntimeError, MemoryError) as error:
        return {}, [f"errors were not checked: {first_line(error)}"]
    found = {site.path: (site.patched_error, site.original_error) for site in outcome.sites}
    return found, [f"the check failed: {line}" for line in outcome.failures]
