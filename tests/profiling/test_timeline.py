"""A graph's timeline, cut at marker kernels."""

from __future__ import annotations

import random

import pytest

from elsa_core.measuring.rounds import Sample
from elsa_core.patching.sites import AttentionSite
from elsa_core.profiling import locate, timeline
from elsa_core.profiling.sites import profiles
from elsa_core.profiling.timeline import Kernel, cut

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
