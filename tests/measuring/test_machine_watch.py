"""Why a measurement may not be believed; energy and memory limits, with fakes for a GPU."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from elsa_core.measuring import busy, environment, memory_limit, timing

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_a_free_machine_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(100.0, 1000.0), (105.0, 1100.0)])
    monkeypatch.setattr(busy, "processor_times", lambda: next(ticks))
    assert busy.watch(CPU)({"eager": 0.02, "patched": 0.1}) == ()


def test_load_heat_and_spread_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, heat = iter([(100.0, 1000.0), (150.0, 1100.0)]), iter([3, 5])
    monkeypatch.setattr(busy, "processor_times", lambda: next(ticks))
    monkeypatch.setattr(busy, "throttle_count", lambda: next(heat))
    found = busy.watch(CPU)({"eager": 0.11, "patched": 0.3, "sdpa": 0.01})
    assert found == (
        "other programs used 50% of the processors meanwhile",
        "the processor was throttled for heat 2 times meanwhile",
        "times of patched spread over 30% of their median, and of 1 more",
    )


def test_heat_is_read_from_every_core(tmp_path: Path) -> None:
    for core, count in ((0, "2\n"), (1, "3\n"), (2, "broken")):
        folder = tmp_path / f"cpu{core}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(count)
    assert busy.throttle_count(str(tmp_path)) == 5
    assert busy.throttle_count(str(tmp_path / "none")) == 0


def test_a_gpu_that_others_use_or_that_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(query: str, device: torch.device) -> list[str]:
        assert device == CUDA
        if "compute-apps" in query:
            return ["123456"]
        return ["Not Active, Active, Not Active, Active"] if "throttle" in query else ["0"]

    monkeypatch.setattr(environment, "nvidia_smi", smi)
    monkeypatch.setattr(busy, "processor_times", lambda: (0.0, 0.0))
    assert busy.watch(CUDA)({}) == (
        "1 other process(es) use the GPU: 123456",
        "the GPU's clocks were held down by heat (driver), its power limit",
    )
    monkeypatch.setattr(environment, "nvidia_smi", lambda *_: [])
    assert busy.watch(CUDA)({}) == ()


class FakeNvml:
    """NVML whose counter grows by 2 joules at each reading."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.milli, self.uuid = refuses, 0, b""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        self.uuid = uuid
        return 2 if self.refuses == "handle" else 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, out: Any) -> int:  # noqa: N802
        self.milli += 2000
        ctypes.cast(out, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.milli
        return 3 if self.refuses == "energy" else 0


def test_energy_of_a_call() -> None:
    library = FakeNvml()
    order: list[str] = []
    used = timing.energy_by(
        library, "GPU-1", lambda: order.append("call"), lambda: order.append("wait"), seconds=0.0
    )
    assert library.uuid == b"GPU-1"
    assert used == 2.0 and order == ["wait", "call", "wait"]


@pytest.mark.parametrize(("refuses", "code"), [("handle", 2), ("energy", 3)])
def test_a_gpu_without_a_counter(refuses: str, code: int) -> None:
    with pytest.raises(OSError, match=f"NVML error {code}"):
        timing.energy_by(FakeNvml(refuses), "GPU-1", lambda: None, lambda: None)


def test_beyond_the_limit_memory_is_an_error() -> None:
    """Without the limit the system would hand out the memory, and kill the process later."""
    with memory_limit.limited(CPU, available=64 * 2**20), pytest.raises(RuntimeError) as caught:
        torch.empty(2**28)
    assert memory_limit.is_out_of_memory(caught.value)
    assert torch.empty(2**28).numel() == 2**28  # and afterwards it is as before
    with memory_limit.limited(CUDA, available=0):
        torch.empty(2**20)


def test_what_counts_as_out_of_memory() -> None:
    assert memory_limit.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert memory_limit.is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty((2**40, 2**40))  # more bytes than a number of 64 bits has
    assert memory_limit.is_out_of_memory(caught.value)
    assert not memory_limit.is_out_of_memory(RuntimeError("sizes do not match"))
    assert not memory_limit.is_out_of_memory(ValueError("out of memory"))
