"""A CUDA graph's own timeline, cut at the attention sites.

A small model on a GPU is bound by launches: what hooks measure there is the host. As a CUDA graph
the host is out of the way, and PyTorch's profiler says when each kernel of a replay began and
ended. Which of them belong to a site is known from marker kernels, which a second capture of the
same model runs around each site and which are cut out again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import nn

from elsa_core.profiling.boundaries import around
from elsa_core.profiling.runs import variants

SESSIONS: Final = 12  # of the profiler, for each graph
LEAST_SESSIONS: Final = 3
_REPLAYS: Final = 6  # in a session; the first one finds the profiler's buffers cold
_MARKER: Final = "spin_kernel"  # what torch.cuda._sleep launches


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill of a replay: its name, and when it began and ended, in seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Cut:
    """One replay: its seconds without markers, and of these the seconds in each site."""

    whole: float
    sites: dict[str, float]


class Marked:
    """A model, with a kernel that does nothing around each site, as a CUDA graph."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], paths: Sequence[str]) -> None:
        self.order: list[tuple[str, bool]] = []
        self.paths = tuple(paths)
        for path in paths:
            enter, leave = (partial(self._mark, path, entering) for entering in (True, False))
            around(model.get_submodule(path), enter, leave)
        self.replay, _ = variants.graphed(lambda: model(*inputs))

    def _mark(self, path: str, entering: bool) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.order.append((path, entering))
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


def timelines(
    marked: Sequence[Marked], budget_seconds: float, progress: Callable[[int, int], None]
) -> list[tuple[Cut, ...]]:
    """Replay all of them in turns and cut what the profiler saw.

    Returns:
        For each model the middle replay of each session: replays of one session have its conditions
        in common and are no rounds of their own.
    """
    cuts: list[list[Cut]] = [[] for _ in marked]
    start, sessions, done = time.perf_counter(), SESSIONS, 0
    for tried in range(1, 2 * SESSIONS + 1):
        progress(done, sessions)
        seen = [_seen(each.replay) for each in marked]
        if all(seen):
            done += 1
            for each, replays, kept in zip(marked, seen, cuts, strict=True):
                found = [cut(kernels, each.order, each.paths) for kernels in replays]
                kept.append(sorted(found, key=lambda one: one.whole)[len(found) // 2])
        each_took = (time.perf_counter() - start) / tried
        sessions = max(LEAST_SESSIONS, min(SESSIONS, int(budget_seconds / each_took)))
        if done >= sessions:
            break
    if done < LEAST_SESSIONS:
        raise RuntimeError("the profiler did not see every kernel")
    return [tuple(kept) for kept in cuts]


def cut(kernels: Sequence[Kernel], order: Sequence[tuple[str, bool]], paths: Sequence[str]) -> Cut:
    """The seconds of one replay and of its sites, markers and the gaps behind them left out.

    A kernel's time runs until the next one begins: what lies between two kernels belongs to the
    first, and where two overlap nothing counts twice. `order`: of each marker, in turn, its site's
    path and whether the site begins there.
    """
    if sum(_MARKER in kernel.name for kernel in kernels) != len(order):
        raise RuntimeError("the profiler did not see every marker")
    marks = iter(order)
    inside: str | None = None
    whole, sites = 0.0, dict.fromkeys(paths, 0.0)
    for i, kernel in enumerate(kernels):
        if _MARKER in kernel.name:
            path, entering = next(marks)
            inside = path if entering else None
            continue
        until = kernels[i + 1].begin if i + 1 < len(kernels) else kernel.end
        whole += until - kernel.begin
        if inside is not None:
            sites[inside] += until - kernel.begin
    return Cut(whole, sites)


def _seen(replay: Callable[[], object]) -> list[list[Kernel]]:
    """The kernels of the replays of one session, each replay's by their beginning."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_REPLAYS):
            replay()
            torch.cuda.synchronize()
    return whole_replays(
        [
            Kernel(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in found.events() or ()
            if event.device_type == DeviceType.CUDA
        ],
        _REPLAYS,
    )


def whole_replays(kernels: Sequence[Kernel], count: int) -> list[list[Kernel]]:
    """Split `count` replays at the pauses between them; those that were seen whole but the first.

    The profiler loses events now and then, mostly at the beginning. What most replays consist of
    is taken for whole; none where there is no majority.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.begin)
    if len(ordered) < count:
        return []
    ends = list(accumulate((kernel.end for kernel in ordered), max))
    places = sorted(range(1, len(ordered)), key=lambda i: ordered[i].begin - ends[i - 1])
    edges = [0, *sorted(places[len(places) - count + 1 :]), len(ordered)]
    parts = [ordered[begin:end] for begin, end in pairwise(edges)]
    names = [tuple(kernel.name for kernel in part) for part in parts]
    usual, often = Counter(names).most_common(1)[0]
    if 2 * often <= count:
        return []
    return [part for part, own in zip(parts[1:], names[1:], strict=True) if own == usual]
