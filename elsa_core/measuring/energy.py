"""Energy of a GPU by NVML, the driver's own library; nothing needs to be installed for it."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from typing import Any, Final

import torch

# The driver renews its counter every 20 to 100 ms; over a second that is at most some percent.
_SECONDS: Final = 1.0


class Meter:
    """The total energy that a GPU has used since the driver was loaded."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def joules(self) -> float:
        """The counter."""
        milli = ctypes.c_ulonglong()
        _checked(
            self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(milli))
        )
        return milli.value / 1e3


def meter(device: torch.device) -> Meter | None:
    """The meter of a GPU, None where there is none or the driver does not tell."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    with contextlib.suppress(OSError, AttributeError):
        found = open_meter(ctypes.CDLL("libnvidia-ml.so.1"), f"GPU-{uuid}")
        found.joules()
        return found
    return None


def open_meter(library: Any, uuid: str) -> Meter:
    """The meter of the GPU with this UUID (which CUDA_VISIBLE_DEVICES does not renumber)."""
    _checked(library.nvmlInit_v2())
    handle = ctypes.c_void_p()
    _checked(library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)))
    return Meter(library, handle)


def per_call(
    counter: Meter,
    call: Callable[[], object],
    synchronize: Callable[[], object],
    seconds: float = _SECONDS,
) -> float | None:
    """Joules of one call, all that the GPU draws included; the mean over `seconds` of calls."""
    try:
        synchronize()
        start, begin, calls = time.perf_counter(), counter.joules(), 0
        while calls == 0 or time.perf_counter() - start < seconds:
            call()
            synchronize()
            calls += 1
        used = counter.joules() - begin
    except OSError:
        return None
    return used / calls if used > 0 else None


def _checked(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML error {code}")
