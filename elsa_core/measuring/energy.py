"""Energy of a GPU by NVML, the driver's own library; nothing needs to be installed for it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Final

import torch

# The driver renews its counter every 20 to 100 ms; over a second that is at most some percent.
_SECONDS: Final = 1.0


def per_call(device: torch.device, call: Callable[[], object]) -> float | None:
    """Joules of one call on a GPU, all that it draws included; None where the driver does not tell.

    The mean over a second of calls, each awaited.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return measured(library, f"GPU-{uuid}", call, torch.cuda.synchronize)
    except (OSError, AttributeError):
        return None


def measured(
    library: Any, uuid: str, call: Callable[[], object], synchronize: Callable[[], object],
    seconds: float = _SECONDS,
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
