"""What moves between host and device: slices in through two buffers, results out through two.

On a GPU copies run on streams of their own. A slice is copied while the slice before it is worked
on; a buffer is overwritten once the work on it is over. Memory that is not pinned is copied by the
host into pinned memory first. On a CPU nothing moves: slices are views.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Copies of a slice that one block may take, from pinned memory: each costs the host microseconds.
_MOST_COPIES = 1024


@dataclass(frozen=True)
class Report:
    """What the last pass of a streamed attention, forward or backward, moved, and how it hid it.

    Attributes:
        blocks: of keys and values that were folded, over all blocks of queries.
        copied_bytes: from host to device; written_bytes: from device to host. 0 on a CPU.
        staged_bytes: of the copied ones, those that the host first moved into pinned memory.
        seconds: from the first copy or fold to the end of the last.
        copy_seconds, fold_seconds: sums of the device's time from host to device and in folds.
        hidden: share of copy_seconds in which a fold was at work; None where nothing was copied.
    """

    blocks: int
    copied_bytes: int
    written_bytes: int
    staged_bytes: int
    seconds: float
    copy_seconds: float
    fold_seconds: float
    hidden: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass
class Timeline:
    """When copies and folds of a pass began and ended; read by `Report` afterwards."""

    cuda: bool
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    folds: list[tuple[Any, Any]] = field(default_factory=list)
    copied_bytes: int = 0
    written_bytes: int = 0
    staged_bytes: int = 0

    def mark(self) -> Any:
        """Now, on the device's current stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


LAST: list[Timeline] = []  # of the last pass, or none


def report() -> Report | None:
    """How the last streamed pass of this process went; waits for it. None before the first.

    A backward is a pass of its own.
    """
    if not LAST:
        return None
    told = LAST[0]
    marks = [mark for pair in (*told.copies, *told.folds) for mark in pair]
    place = {id(mark): mark for mark in marks}
    if told.cuda:
        for mark in marks:
            mark.synchronize()
        place = {id(mark): marks[0].elapsed_time(mark) / 1e3 for mark in marks}
    copies, folds = (
        [(place[id(a)], place[id(b)]) for a, b in pairs] for pairs in (told.copies, told.folds)
    )
    copying, folding = (sum(stop - start for start, stop in p) for p in (copies, folds))
    # within a list intervals do not overlap
    both = ((max(a, c), min(b, d)) for a, b in copies for c, d in folds)
    common = sum(max(0.0, stop - start) for start, stop in both)
    return Report(
        len(folds), told.copied_bytes, told.written_bytes, told.staged_bytes,
        max(place.values()) - min(place.values()) if place else 0.0, copying, folding,
        common / copying if copying else None,
    )  # fmt: skip


@dataclass
class _Slot:
    """One of two places for slices."""

    memory: dict[Any, Tensor] = field(default_factory=dict)  # by tensor, pinned or on the device
    copied: Any = None  # the event after which the slices are there
    freed: Any = None  # the event after which the work on them is over


def _reserve(memory: dict[Any, Tensor], key: Any, like: Tensor, **options: Any) -> bool:
    """Have flat memory for a tensor under a key; whether it is new."""
    held = memory.get(key)
    if held is not None and held.numel() >= like.numel() and held.dtype == like.dtype:
        return False
    memory.pop(key, None)
    memory[key] = torch.empty(like.numel(), dtype=like.dtype, **options)
    return True


class Loader:
    """Brings slices of host tensors to a device, the next ones under the work on those before.

    `folds`: whether the work on a slice is a fold of the timeline.
    """

    def __init__(self, device: torch.device, timeline: Timeline, *, folds: bool = True) -> None:
        self.timeline = timeline
        self._device, self._folds = device, folds
        self._slots = (_Slot(), _Slot())
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._count = 0

    def blocks(
        self, tensors: Sequence[Tensor], dims: Sequence[int], bounds: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Slices [start, stop) of every tensor along its own dim, on the device.

        They hold until the next ones are asked for. Tensors that are on the device are not moved.
        """
        if not bounds:
            return
        operands = list(zip(tensors, dims, strict=True))
        longest, new = max(stop - start for start, stop in bounds), False
        for i, (tensor, dim) in enumerate(operands):
            part = tensor.narrow(dim, 0, longest)
            for slot in self._slots if part.device != self._device else ():
                new |= _reserve(slot.memory, (i, False), part, device=self._device)
                if not _layout(part).direct:
                    pinned = self._device.type == "cuda"
                    new |= _reserve(slot.memory, (i, True), part, device="cpu", pin_memory=pinned)
        if new and self._stream is not None:
            # memory of the device that is new here may still be read by earlier work
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        slices = (
            [tensor.narrow(dim, start, stop - start) for tensor, dim in operands]
            for start, stop in bounds
        )
        slot, coming = self._load(next(slices))
        try:
            for _ in bounds:
                if self._stream is not None and slot.copied is not None:
                    torch.cuda.current_stream(self._device).wait_event(slot.copied)
                begun = self.timeline.mark() if self._folds else None
                yield coming
                if self._folds:
                    self.timeline.folds.append((begun, self.timeline.mark()))
                if self._stream is not None:
                    slot.freed = torch.cuda.current_stream(self._device).record_event()
                following = next(slices, None)
                if following is not None:  # after the work was launched, so that it runs meanwhile
                    slot, coming = self._load(following)
        finally:
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _load(self, slices: Sequence[Tensor]) -> tuple[_Slot, tuple[Tensor, ...]]:
        slot = self._slots[self._count % 2]
        self._count += 1
        found, moved = list(slices), []
        for i, part in enumerate(slices):
            if part.device == self._device:
                continue
            source = part
            if not _layout(part).direct:
                if self._stream is not None and slot.copied is not None:
                    slot.copied.synchronize()  # the last copy out of this pinned memory
                source = in_order_of(part, slot.memory[i, True])
                source.copy_(part)
                self.timeline.staged_bytes += part.nbytes
            found[i] = in_order_of(part, slot.memory[i, False])
            moved.append((found[i], source))
        if moved:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                if self._stream is not None and slot.freed is not None:
                    self._stream.wait_event(slot.freed)
                begun = self.timeline.mark()
                for target, source in moved:
                    self.timeline.copied_bytes += source.nbytes
                    for to, one in runs(target, source):
                        to.copy_(one, non_blocking=True)
                slot.copied = self.timeline.mark()
                self.timeline.copies.append((begun, slot.copied))
        return slot, tuple(found)


class Writer:
    """Takes results to host memory, while the device works on: two on their way at most."""

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self._device, self._timeline = device, timeline
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory: list[dict[Any, Tensor]] = [{}, {}]
        self._pending: deque[list[tuple[Any, Tensor, Tensor, Tensor, bool]]] = deque()
        self._count = 0

    def write(self, pairs: Sequence[tuple[Tensor, Tensor]], *, add: bool = False) -> None:
        """Put results into host tensors of their shapes and dtypes, or add them to these.

        The targets may be read after `finish`.
        """
        if self._stream is None:
            for found, target in pairs:
                (target.add_ if add else target.copy_)(found)
            return
        memory = self._memory[self._count % 2]
        self._count += 1
        self.finish(1)
        self._pending.append([])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for i, (found, target) in enumerate(pairs):
                _reserve(memory, i, found, pin_memory=True)
                staged = in_order_of(found, memory[i])
                for to, source in runs(staged, found):
                    to.copy_(source, non_blocking=True)
                self._timeline.written_bytes += found.nbytes
                # `found` is kept: its memory must not be used again before it was read
                event = self._stream.record_event()
                self._pending[-1].append((event, found, staged, target, add))

    def finish(self, most: int = 0) -> None:
        """Wait until everything is written, or no more than the last `most` writes are pending."""
        while len(self._pending) > most:
            for event, _, staged, target, add in self._pending.popleft():
                event.synchronize()
                (target.add_ if add else target.copy_)(staged)


class _Layout(NamedTuple):
    """How a tensor lies in memory.

    order: its dims, outermost first, where broadcast ones are. leading: the sizes of those below
    which memory is contiguous. direct: whether it can be copied as it is, run by run.
    """

    order: list[int]
    leading: torch.Size
    direct: bool


def _layout(tensor: Tensor) -> _Layout:
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: -(strides[d] or 2**62))
    ordered = part = tensor.permute(order)
    depth = 0
    while not part.is_contiguous() and part.dim() > 1:
        depth, part = depth + 1, part[0]
    leading = ordered.shape[:depth]
    few = part.is_contiguous() and leading.numel() <= _MOST_COPIES
    return _Layout(order, leading, few and tensor.is_pinned())


def in_order_of(like: Tensor, memory: Tensor) -> Tensor:
    """Flat memory as a dense tensor of the shape of `like`, its dims in the same order."""
    order = _layout(like).order
    dense = memory[: like.numel()].view([like.shape[d] for d in order])
    return dense.permute([order.index(d) for d in range(like.dim())])


def runs(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Contiguous parts of `source` and where they go: those alone are copied without a wait.

    `target` is dense, in the order of `source`.
    """
    order, leading, _ = _layout(source)
    target, source = target.permute(order), source.permute(order)
    for place in product(*map(range, leading)):
        yield target[place], source[place]
