"""Timing of several contenders side by side: rounds interleaved, so that drift meets all alike."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from elsa_core.base.messages import first_line
from elsa_core.graphs import capture
from elsa_core.measuring.memory_limit import kernel_bytes

SETTLE_SECONDS: Final = 0.02
"""Pause between two contenders. Worker threads of OpenMP and ONNX Runtime spin after their work and
take the processor from the next contender: 3 ms after ONNX Runtime's attention over 49 tokens,
PyTorch's own took 113 us, 20 ms after it 65 us, as it does alone."""
_WARM_UPS: Final = 10
_BATCH_SECONDS: Final = 0.02
# The driver renews its counter of energy every 20 to 100 ms: over a second, some percent at most.
_ENERGY_SECONDS: Final = 1.0
_HOST_SECONDS: Final = 0.3  # of a batch of calls that are only enqueued
_FLUSH_BYTES: Final = 256 * 2**20  # larger than any GPU's last-level cache

Sample = TypeVar("Sample")


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: unique within a case.
        call: computes the output once, with inputs that it holds.
        context: entered around calls, outside what is timed (it selects a backend of PyTorch).
        precision: elsa's precision, None for a peer.
        read: brings what `call` returns to an output [batch, heads, queries, head_dim].
        pools: it keeps memory between calls, so that a call's own workspace cannot be seen.
        notes: what a reader of the result should know (which backend and schedule served it).
    """

    name: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    precision: str | None = None
    read: Callable[[object], Tensor] | None = None
    pools: bool = False
    notes: dict[str, str] = field(default_factory=dict)

    def output(self) -> Tensor:
        """One call, as a tensor [batch, heads, queries, head_dim]."""
        with self.context(), torch.inference_mode():
            returned = self.call()
        if self.read is not None:
            return self.read(returned)
        assert isinstance(returned, Tensor)
        return returned


@contextlib.contextmanager
def float32_products(precision: str = "highest") -> Iterator[None]:
    """PyTorch's float32 products in full precision; "high" allows TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def interleaved(
    contenders: Sequence[Contender],
    rounds: int,
    sample: Callable[[Contender], Sample],
    enough: Callable[[dict[str, list[Sample]]], bool] | None = None,
    seed: int = 0,
) -> dict[str, list[Sample]]:
    """One sample of each contender in each round, so that drift meets all alike.

    Each round has an order of its own: what a call leaves in the caches matters to the next, and in
    a fixed order the second of two equal models measured 2 to 5% faster than the first. Ends after
    `rounds`, or as soon as `enough` says so of the samples so far. Garbage is collected before.
    """
    samples: dict[str, list[Sample]] = {c.name: [] for c in contenders}
    order, shuffled = list(contenders), random.Random(seed)  # noqa: S311
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffled.shuffle(order)
            for contender in order:
                with contender.context(), torch.inference_mode():
                    samples[contender.name].append(sample(contender))
            if enough is not None and enough(samples):
                break
    finally:
        if was_enabled:
            gc.enable()
    return samples


def warmed_up(contender: Contender, budget_seconds: float = 5.0) -> float:
    """Call until the time of a call is stable; seconds of the fastest call after the first.

    Stable: two calls in a row that are not more than 5% faster than the fastest before them. There
    are at most `_WARM_UPS` calls, and none begins after the budget, but always two.
    """
    end, best, quiet = time.perf_counter() + budget_seconds, math.inf, 0
    with contender.context(), torch.inference_mode():
        contender.call()
        for i in range(_WARM_UPS):
            taken = timed(contender.call, 1)
            quiet = 0 if taken < 0.95 * best else quiet + 1
            best = min(best, taken)
            if (i and quiet == 2) or time.perf_counter() > end:
                break
    return best


def time_all(
    contenders: Sequence[Contender], device: torch.device, rounds: int, budget_seconds: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds a call, one sample for each contender and round: by `time_cuda` on a GPU.

    Elsewhere a sample is the mean over as many calls as fill 20 ms, or this contender's share of a
    small budget. Where all rounds would take longer than `budget_seconds`, there are fewer, but
    never under 3.
    """
    if device.type == "cuda":
        return time_cuda(contenders, rounds=rounds, budget_seconds=budget_seconds)
    calls, cost = {}, 0.0
    batch_seconds = min(_BATCH_SECONDS, budget_seconds / (rounds * len(contenders)))
    for contender in contenders:
        single = warmed_up(contender, 0.1 * budget_seconds / len(contenders))
        calls[contender.name] = max(1, min(2000, round(batch_seconds / max(single, 1e-7))))
        cost += single * (calls[contender.name] + 1) + SETTLE_SECONDS
    rounds = max(3, min(rounds, int(budget_seconds / cost)))

    def sample(contender: Contender) -> float:
        time.sleep(SETTLE_SECONDS)
        contender.call()
        return timed(contender.call, calls[contender.name])

    return interleaved(contenders, rounds, sample), {}


def time_cuda(
    contenders: Sequence[Contender], *, rounds: int, budget_seconds: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of GPU time a call under CUDA graph; the median of some replays in each round.

    The last-level cache is overwritten before each replay, as `triton.testing.do_bench` does.

    Returns:
        (samples by contender, why a contender was timed without a graph, where it could not be
        captured).
    """
    replays: dict[str, Callable[[], object]] = {}
    notes: dict[str, str] = {}
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    cost = 0.0
    for contender in contenders:
        with contender.context(), torch.inference_mode():
            try:
                replays[contender.name] = capture.captured(contender.call)
            except Exception as error:  # what a call itself raises comes again below
                torch.cuda.synchronize()
                notes[contender.name] = f"timed without a graph: {first_line(error)}"
                replays[contender.name] = contender.call
            cost += _gpu_seconds(replays[contender.name], flush, 2) + 1e-4
    rounds = max(3, min(rounds, int(budget_seconds / cost)))
    inner = max(1, min(10, int(budget_seconds / (cost * rounds))))

    samples = interleaved(
        contenders, rounds, lambda each: _gpu_seconds(replays[each.name], flush, inner)
    )
    replays.clear()
    torch.cuda.synchronize()
    return samples, notes


def host_seconds(contender: Contender, gpu_seconds: float) -> float:
    """Host time of one eager call that only has to be enqueued (CUDA).

    So few calls go into a batch that the launch queue never fills; a call that the GPU works on for
    long is timed once.
    """
    calls = max(1, min(100, int(_HOST_SECONDS / max(gpu_seconds, 1e-6))))
    with contender.context(), torch.inference_mode():
        batches = []
        for _ in range(5 if calls > 1 else 1):
            torch.cuda.synchronize()
            batches.append(timed(contender.call, calls))
        torch.cuda.synchronize()
    return statistics.median(batches)


def workspace(contender: Contender, device: torch.device, output_bytes: int = 0) -> int | None:
    """Bytes that a call takes at its peak beyond its output.

    CUDA: of PyTorch's allocator. CPU: growth of the process's resident memory, every allocator
    counted, accurate to some hundred KiB; None where the system has no resettable peak (Linux has
    one).
    """
    cuda = device.type == "cuda"
    before: int | None
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        gc.collect()  # and freed memory goes back, so that a call cannot hide behind it (glibc)
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
        before = kernel_bytes("/proc/self/status", "VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
    with contender.context(), torch.inference_mode():
        kept = contender.call()
    synchronize(device)
    own = torch.cuda.max_memory_allocated() if cuda else kernel_bytes("/proc/self/status", "VmHWM")
    del kept
    return None if before is None or own is None else max(0, own - before - output_bytes)


def timed(call: Callable[[], object], calls: int) -> float:
    """Mean seconds of some calls in a row, as the host sees them."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _gpu_seconds(call: Callable[[], object], flush: Tensor, calls: int) -> float:
    """Median GPU time of a call between two events, each behind a write that fills the cache."""
    pairs = []
    for _ in range(calls):
        flush.zero_()
        start = mark(flush.device)
        call()
        pairs.append((start, mark(flush.device)))
    torch.cuda.synchronize()
    return statistics.median(between(*pair) for pair in pairs)


def mark(device: torch.device) -> Any:
    """Now: by the host's clock, or as an event on the current stream of a GPU, which is a node of
    the graph that is captured there."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Seconds between two marks; the GPU has come to its end."""
    return end - begin if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has been given to do; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def energy_of(device: torch.device, call: Callable[[], object]) -> float | None:
    """Joules of one call on a GPU, all that it draws included; None where the driver does not tell.

    The mean over a second of calls, each awaited, by NVML, the driver's own library.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return energy_by(library, f"GPU-{uuid}", call, torch.cuda.synchronize)
    except (OSError, AttributeError):
        return None


def energy_by(
    library: Any, uuid: str, call: Callable[[], object], synchronize: Callable[[], object],
    seconds: float = _ENERGY_SECONDS,
) -> float | None:  # fmt: skip
    """The same by a library, of the GPU with this UUID, which CUDA_VISIBLE_DEVICES does not
    renumber. Raises OSError."""
    handle, milli = ctypes.c_void_p(), ctypes.c_ulonglong()

    def ask(name: str, *given: Any) -> None:
        code = getattr(library, name)(*given)
        if code != 0:
            raise OSError(f"NVML error {code}")

    ask("nvmlInit_v2")
    ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
    synchronize()
    start, calls = time.perf_counter(), 0
    ask("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(milli))
    begin = milli.value
    while calls == 0 or time.perf_counter() - start < seconds:
        call()
        synchronize()
        calls += 1
    ask("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(milli))
    used = milli.value - begin
    return used / 1e3 / calls if used > 0 else None
