"""A graph's timeline, cut at marker kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elsa_core.profiling import timeline, variants
from elsa_core.profiling.timeline import Kernel, Marked, cut, timelines

ORDER = [("a", True), ("a", False), ("b", True), ("b", False)]


def kernels(*spans: tuple[str, float, float]) -> list[Kernel]:
    return [Kernel(*span) for span in spans]


def test_markers_and_the_gaps_behind_them_are_cut_out() -> None:
    seen = kernels(
        ("gemm", 0, 2), ("spin_kernel(long)", 3, 4),  # 2 and the gap of 1 before the marker
        ("qkv", 6, 8), ("attention", 9, 12), ("spin_kernel(long)", 13, 14),
        ("norm", 20, 21), ("spin_kernel(long)", 22, 23), ("proj", 24, 25),
        ("spin_kernel(long)", 25, 26), ("head", 30, 33),
    )  # fmt: skip
    found = cut(seen, ORDER)
    assert found.sites == {"a": 7.0, "b": 1.0}
    assert found.whole == 3.0 + 7.0 + 2.0 + 1.0 + 3.0


def test_overlapping_kernels_count_once() -> None:
    seen = kernels(
        ("spin_kernel", 0, 1), ("split", 1, 6), ("fold", 4, 9), ("spin_kernel", 9, 10),
        ("spin_kernel", 10, 11), ("spin_kernel", 11, 12),
    )  # fmt: skip
    assert cut(seen, ORDER) == timeline.Cut(8.0, {"a": 8.0, "b": 0.0})


def test_a_site_that_runs_twice_is_summed() -> None:
    seen = kernels(
        ("spin_kernel", 0, 1), ("x", 1, 2), ("spin_kernel", 2, 3),
        ("spin_kernel", 3, 4), ("x", 4, 6), ("spin_kernel", 6, 7),
    )  # fmt: skip
    assert cut(seen, [("a", True), ("a", False)] * 2).sites == {"a": 3.0}


def test_a_lost_marker_is_not_guessed() -> None:
    with pytest.raises(RuntimeError, match="every marker"):
        cut(kernels(("spin_kernel", 0, 1), ("x", 1, 2)), ORDER)


class FakeGpu:
    """Records what a capture launches; the profiler then sees every replay of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        self.launched: list[str] = []
        self.replayed: list[list[str]] = []
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
        return [[Kernel(name, i, i + 0.5) for i, name in enumerate(names)]] * 2


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
    plain, _ = gpu.graphed(lambda: model(torch.zeros(1)))
    marked = Marked(variants.shared_copy(nn.Sequential(*model)), (torch.zeros(1),), ["1"])
    assert marked.order == [("1", True), ("1", False)]
    (found,) = timelines([marked], [plain])
    assert len(found.cuts) == len(found.unmarked) == 2 * timeline.SESSIONS
    assert set(found.unmarked) == {5.5}
    for each in found.cuts:
        assert each.sites == {"1": 3.0}
        assert each.whole == 5.5
