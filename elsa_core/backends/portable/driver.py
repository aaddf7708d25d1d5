"""Loading and launching compiled code through the CUDA driver, which is opened at run time."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elsa_core.errors import UnavailableError

# Of cuda.h.
_MAX_DYNAMIC_SHARED = 8
_PREFER_SHARED = 1
# Above it a kernel must ask for its shared memory.
PLAIN_SHARED = 48 << 10
LARGEST_GRID = (1 << 31) - 1


class Driver:
    """One driver library. Methods raise UnavailableError with the function and the error's name."""

    def __init__(self, library: ctypes.CDLL):
        self._calls = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._ask("cuInit", 0)

    def function(self, device: int, code: bytes, symbol: bytes, shared_bytes: int) -> int:
        """The handle of a kernel on a device; the code stays loaded."""
        with self._current(device):
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._ask("cuModuleLoadData", ctypes.byref(module), code)
            try:
                self._ask("cuModuleGetFunction", ctypes.byref(function), module, symbol)
                if shared_bytes > PLAIN_SHARED:
                    self._ask("cuFuncSetCacheConfig", function, _PREFER_SHARED)
                    self._ask("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
            except UnavailableError:
                self._calls.cuModuleUnload(module)
                raise
        return int(function.value or 0)

    def launch(
        self, device: int, function: int, grid: int, threads: int, shared_bytes: int, stream: int,
        arguments: ctypes.Structure,
    ) -> None:  # fmt: skip
        """Launch a kernel that takes one structure by value."""
        params = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with self._current(device):
            self._ask(
                "cuLaunchKernel", ctypes.c_void_p(function), grid, 1, 1, threads, 1, 1,
                shared_bytes, ctypes.c_void_p(stream), params, None,
            )  # fmt: skip

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Make the primary context of a device, which is PyTorch's, the current one."""
        self._ask("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                handle, context = ctypes.c_int(), ctypes.c_void_p()
                self._ask("cuDeviceGet", ctypes.byref(handle), device)
                self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                self._contexts[device] = context
            return self._contexts[device]

    def _ask(self, function: str, *arguments: object) -> None:
        try:
            result = getattr(self._calls, function)(*arguments)
        except AttributeError:
            raise UnavailableError(f"the CUDA driver has no {function}: it is too old") from None
        if result:
            name = ctypes.c_char_p()
            self._calls.cuGetErrorName(result, ctypes.byref(name))
            raise UnavailableError(f"{function} failed: {(name.value or b'unknown').decode()}")


@functools.cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        UnavailableError: there is none, or it does not start.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise UnavailableError(f"no CUDA driver: {error}") from None
