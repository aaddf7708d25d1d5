"""A graph's timeline, cut at marker kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from elsa_core.measuring.rounds import Sample
from elsa_core.measuring.timing import Contender
from elsa_core.patching.report import PatchReport
from elsa_core.patching.sites import AttentionSite
from elsa_core.profiling import locate, timeline
from elsa_core.profiling.runs import variants
from elsa_core.profiling.runs.runs import Prepared
from elsa_core.profiling.sites import profiles
from elsa_core.profiling.timeline import Kernel, Marked, cut, timelines

SITE = AttentionSite(
    path="0", module_class="Attention", kind="global", num_heads=1, head_dim=8, query_tokens=4,
    key_tokens=4, extra=(), flops=None, flops_share=None, patchable=True, reason="",
    adapter=None, patched=True,
)  # fmt: skip

ORDER = [("a", True), ("a", False), ("b", True), ("b", False)]
PATHS = ("a", "b")


def kernels(*spans: tuple[str, float, float]) -> list[Kernel]:
    return [Kernel(*span) for span in spans]


def test_markers_and_the_gaps_behind_them_are_cut_out() -> None:
    seen = kernels(
        ("gemm", 0, 2), ("spin_kernel(long)", 3, 4),  # 2 and the gap of 1 before the marker
        ("qkv", 6, 8), ("attention", 9, 12), ("spin_kernel(long)", 13, 14),
        ("norm", 20, 21), ("spin_kernel(long)", 22, 23), ("proj", 24, 25),
        ("spin_kernel(long)", 25, 26), ("head", 30, 33),
    )  # fmt: skip
    found = cut(seen, ORDER, PATHS)
    assert found.sites == {"a": 7.0, "b": 1.0}
    assert found.whole == 3.0 + 7.0 + 2.0 + 1.0 + 3.0


def test_overlapping_kernels_count_once() -> None:
    seen = kernels(
        ("spin_kernel", 0, 1), ("split", 1, 6), ("fold", 4, 9), ("spin_kernel", 9, 10),
        ("spin_kernel", 10, 11), ("spin_kernel", 11, 12),
    )  # fmt: skip
    assert cut(seen, ORDER, PATHS) == timeline.Cut(8.0, {"a": 8.0, "b": 0.0})


def test_a_site_that_runs_twice_is_summed() -> None:
    seen = kernels(
        ("spin_kernel", 0, 1), ("x", 1, 2), ("spin_kernel", 2, 3),
        ("spin_kernel", 3, 4), ("x", 4, 6), ("spin_kernel", 6, 7),
    )  # fmt: skip
    found = cut(seen, [("a", True), ("a", False)] * 2, PATHS)
    assert found.sites == {"a": 3.0, "b": 0.0}  # b never ran


def test_a_lost_marker_is_not_guessed() -> None:
    with pytest.raises(RuntimeError, match="every marker"):
        cut(kernels(("spin_kernel", 0, 1), ("x", 1, 2)), ORDER, PATHS)


class FakeGpu:
    """Records what a capture launches; the profiler then sees every replay of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        self.launched: list[str] = []
        self.replayed: list[list[str]] = []
        self.sessions, self.blind = 0, set[int]()  # so far, and those of which nothing is seen
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: self.launched.append("spin_kernel"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(variants, "graphed", self.graphed)
        monkeypatch.setattr(timeline, "_seen", self.seen)

    def __deepcopy__(self, memo: Any) -> FakeGpu:
        return self

    def graphed(self, call: Any) -> tuple[Any, int]:
        call()  # warm-up
        self.launched, self.capturing = [], True
        call()
        self.capturing = False
        names = list(self.launched)
        return (lambda: self.replayed.append(names)), 0

    def seen(self, replay: Any) -> list[list[Kernel]]:
        replay()
        names = self.replayed[-1]
        self.sessions += 1
        if self.sessions in self.blind:
            return []
        slow = [[Kernel(name, 2 * i, 2 * i + 1) for i, name in enumerate(names)]]
        return [[Kernel(name, i, i + 0.5) for i, name in enumerate(names)]] * 3 + slow


class Launching(nn.Module):
    """Stands for a module of some kernels."""

    def __init__(self, gpu: FakeGpu, count: int) -> None:
        super().__init__()
        self.gpu, self.count = gpu, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gpu.launched += ["kernel"] * self.count
        return x


def test_timelines_of_marked_models(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    model = nn.Sequential(Launching(gpu, 2), Launching(gpu, 3), Launching(gpu, 1))
    marked = Marked(variants.shared_copy(nn.Sequential(*model)), (torch.zeros(1),), ["1"])
    assert marked.order == [("1", True), ("1", False)]
    told: list[tuple[int, int]] = []
    (found,) = timelines([marked], 60.0, lambda *each: told.append(each))
    assert len(found) == timeline.SESSIONS
    assert told == [(done, timeline.SESSIONS) for done in range(timeline.SESSIONS)]
    for each in found:
        assert each.sites == {"1": 3.0}
        assert each.whole == 5.5
    (few,) = timelines([marked], 0.0, lambda *_: None)
    assert len(few) == timeline.LEAST_SESSIONS
    gpu.sessions, gpu.blind = 0, {1, 4, 10}  # these are seen again
    (found,) = timelines([marked], 60.0, lambda *_: None)
    assert len(found) == timeline.SESSIONS
    gpu.sessions, gpu.blind = 0, set(range(3, 100))
    with pytest.raises(RuntimeError, match="every kernel"):
        timelines([marked], 60.0, lambda *_: None)


def session(*replays: str, pause: float = 30.0) -> list[Kernel]:
    """Kernels named by one letter each, 2 long and 1 apart, a pause after each replay."""
    found, now = [], 0.0
    for names in replays:
        for name in names:
            found.append(Kernel(name, now, now + 2))
            now += 3
        now += pause
    return found


def test_a_session_is_split_at_its_pauses() -> None:
    kernels = session("abc", "abc", "abc", "abc")
    found = timeline.whole_replays(list(reversed(kernels)), 4)
    assert found == [kernels[3:6], kernels[6:9], kernels[9:]]


def test_replays_of_which_events_were_lost_are_left_out() -> None:
    kernels = session("bc", "abc", "abc", "ac", "abc")
    assert timeline.whole_replays(kernels, 5) == [kernels[2:5], kernels[5:8], kernels[10:]]
    # as many lost as make the count a multiple: five kernels of each in 20 instead of 25
    kernels = session("", "abcde", "abcde", "abcde", "abcde")
    found = timeline.whole_replays(kernels, 5)
    assert found and all([kernel.name for kernel in one] == list("abcde") for one in found)
    assert timeline.whole_replays(session("abc", "ab", "ac", "bc"), 4) == []
    assert timeline.whole_replays(session("a"), 4) == []


def test_rows_of_a_graph_keep_the_scatter_of_its_waits() -> None:
    """Sites as they were, and waits that scatter by 5%: the rest shows no difference."""
    noise = random.Random(0)
    line = (timeline.Cut(1.0, {"0": 0.1}),) * 12
    runs = [[Sample(noise.gauss(1.2, 0.06)) for _ in range(40)] for _ in range(2)]
    before, after = (locate._of_graph(samples, line, 0.0) for samples in runs)
    assert len(before) == len(after) == 12
    assert all(sample.sites == {"0": 0.1} for sample in before)
    row, rest = profiles([SITE], before, after, {}, {}, seed=0)
    assert row.seconds_before == pytest.approx(0.1)
    assert row.share == pytest.approx(0.1 / 1.2, rel=0.05)
    assert rest.ratio.verdict == "no difference"
    assert rest.ratio.high - rest.ratio.low > 0.01


def test_equal_sites_are_seldom_told_apart() -> None:
    """Two equal models, whose sessions drift by 1% and whose replays scatter by 1% more."""
    noise, told = random.Random(1), 0
    waits = [Sample(1.2)] * 40
    for _ in range(60):
        lines = []
        for _ in range(2):
            wholes = [noise.gauss(1.0, 0.014) for _ in range(timeline.SESSIONS)]
            cuts = [timeline.Cut(w, {"0": 0.1 * w * noise.gauss(1.0, 0.004)}) for w in wholes]
            lines.append(cuts)
        before, after = (locate._of_graph(waits, line, 1.0) for line in lines)
        told += profiles([SITE], before, after, {}, {}, seed=0)[0].ratio.verdict != "no difference"
    assert told <= 9  # 5% are 3


def test_what_the_profiler_adds_is_told_and_taken_out() -> None:
    line = (timeline.Cut(1.2, {"0": 0.12}),) * 6
    cover = locate._profiled(line, 1.0, 0)
    assert cover.value == pytest.approx(1.2)
    (warning,) = locate._disturbed({"eager+graph": cover}, "the profiler")
    assert warning.startswith("the profiler slowed eager+graph by 20%")
    covered = {"eager+graph": locate._profiled(line, 1.15, 0)}
    assert locate._disturbed(covered, "the profiler") == ()
    waits = [Sample(1.5)] * 12
    own = locate._of_graph(waits, line, 1.0)
    assert [each.sites["0"] for each in own] == pytest.approx([0.1] * 6)
    assert locate._of_graph(waits, line, 0.0)[0].sites["0"] == 0.12


def test_what_no_graph_can_show_is_watched_by_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Contender("eager+graph", lambda: None)
    built = variants.Built((call, Contender("patched+graph", lambda: None)), {}, {}, {}, {})
    monkeypatch.setattr(
        variants, "graphed", lambda _: (_ for _ in ()).throw(RuntimeError("no capture\nhere"))
    )
    model, image = nn.Sequential(nn.Identity()), torch.zeros(1)
    ready = Prepared(model, model, (image,), image, PatchReport((), (), "strict", "auto"), built)
    graphs = locate._graphs(built)
    assert graphs == ("eager+graph", "patched+graph")
    lines, notes = locate._timelines(ready, (SITE,), graphs, 1.0, lambda *_: None)
    assert lines == {}
    assert notes == ("sites were timed eagerly: no capture",)
    assert locate._graphs(variants.Built((call,), {}, {}, {}, {})) == ()
