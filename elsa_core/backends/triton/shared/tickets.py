"""Counters that programs of one launch share: zeros before it, and set back to zeros by it.

Nothing clears them between calls, so two launches that may run at once must not have the same ones.
Launches of one stream follow one another; a CUDA graph may be replayed on any stream, so every
launch that is recorded keeps counters of its own.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# counters that are allocated at once, 256 KiB, and those left below which calls that are not
# recorded allocate again: so that recorded ones, which cannot, find some
SLAB, FEW_LEFT = 1 << 16, 1 << 14
_LOCK = threading.Lock()
_slabs: dict[torch.device, Tensor] = {}  # what is left of each device's
_kept: list[Tensor] = []  # recorded launches know addresses in them
_of_streams: dict[tuple[torch.device, int], Tensor] = {}


def tickets(count: int, device: torch.device) -> Tensor:
    """`count` int32 zeros for one launch on the current stream of `device`.

    While a graph is recorded and no slab is left, zeros that the graph itself clears.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    recording = torch.cuda.is_current_stream_capturing()
    with _LOCK:
        if recording:
            return _cut(count, device, recording)
        if device not in _slabs or _slabs[device].numel() < FEW_LEFT:
            _renew(count, device)
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        found = _of_streams.get(key)
        if found is None or found.numel() < count:
            found = _of_streams[key] = _cut(count, device, recording)
        return found[:count]


def _renew(count: int, device: torch.device) -> None:
    """A new slab of at least `count`, which all streams see as zeros."""
    _slabs[device] = torch.zeros(max(SLAB, count), dtype=torch.int32, device=device)
    _kept.append(_slabs[device])
    torch.cuda.current_stream(device).synchronize()


def _cut(count: int, device: torch.device, recording: bool) -> Tensor:
    """Counters that no other call has."""
    left = _slabs.get(device)
    if left is None or left.numel() < count:
        if recording:
            return torch.zeros(count, dtype=torch.int32, device=device)
        _renew(count, device)
        left = _slabs[device]
    # whole cache lines: neighbours do not share one
    _slabs[device] = left[-(-count // 32) * 32 :]
    return left[:count]
