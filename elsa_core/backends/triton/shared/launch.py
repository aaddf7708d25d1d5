"""A kernel's launch without Triton's bookkeeping, so that a warm call costs the host little."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.pack import lookup
from elsa_core.backends.triton.shared.device import DIRECT_LAUNCH, INTERPRETED, triton_version

# Whether it took the launch: False of a thread that it does not record.
Recorder = Callable[["Launch", tuple[Tensor, ...]], bool | None]
RECORDERS: list[Recorder] = []
"""Where not empty, first calls of launches are handed to the last of these."""


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Hand every first call of a launch, with its tensors, to `recorder` instead of the GPU."""
    RECORDERS.append(recorder)
    try:
        yield
    finally:
        RECORDERS.pop()


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def _loading() -> Iterator[None]:
    """Let this thread load kernels while a CUDA graph is captured, as PyTorch allocates memory
    then: the driver would refuse it, or end the capture.
    """
    if INTERPRETED or torch.version.hip or not torch.cuda.is_initialized():
        yield
        return
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _hooked(runtime: Any) -> bool:
    """Whether a launch hook is set (`knobs.runtime`)."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Launch:
    """One kernel with everything but its pointers bound.

    The first call goes through Triton's JIT, which compiles or finds the kernel, or takes it from a
    kernel pack that has it (`pack.lookup`); later ones go straight to the compiled
    kernel. That is right because a plan fixes all that Triton specialises on: dtypes, constants and
    the 16-byte alignment of pointers; integers are never specialised and have fixed types. How a
    compiled kernel takes its arguments is outside Triton's public interface: with a version that is
    not among `device.DIRECT_LAUNCH` every call goes through the JIT.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], tail: dict[str, Any], options: dict[str, Any]
    ):
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        # arguments and constants that the kernel has, of what its call knows
        self.tail = {name: tail[name] for name in kernel.arg_names if name in tail}
        # Triton 3.10 stops fusing multiply and add by default
        self.options = {"enable_fp_fusion": True, **options}
        self.compiled: Any = None
        self.launcher: Any = None
        self.runtime: Any = None
        self.head: tuple[Any, ...] = ()
        self.values = tuple(self.tail.values())  # passed behind the pointers, in the kernel's order
        self.stream: Callable[[int], int] = int
        self.device = 0

    def __call__(self, *pointers: Tensor) -> bool | None:
        """Launch the kernel; False where a recorder took the launch instead."""
        if self.compiled is not None:
            if self.launcher is None:
                with _loading():
                    self._bind()
            # addresses: for a tensor the launcher would ask the driver whose memory it is
            addresses = [p.data_ptr() for p in pointers]
            stream = self.stream(self.device)
            if _hooked(self.runtime):  # Triton's own launch calls the hooks
                self.compiled[self.grid](*addresses, *self.values, stream=stream)
            else:
                self.launcher(*self.grid, stream, *self.head, *addresses, *self.values)
            return None
        for recorder in RECORDERS[-1:]:  # looked up once: another thread may end it
            if recorder(self, pointers) is not False:
                return False
        first, last = DIRECT_LAUNCH
        direct = not INTERPRETED and first <= triton_version() <= last
        if direct and lookup.wanted():
            found = lookup.find(self.kernel, pointers, self.tail, self.options)
            if found is not None and self._launched(found, pointers):
                return None
        with _loading():
            compiled = self.kernel[self.grid](*pointers, **self.tail, **self.options)
        if direct and hasattr(compiled, "__getitem__"):
            self._keep(compiled, pointers)
            self._bind()
        return None

    def _launched(self, found: Any, pointers: tuple[Tensor, ...]) -> bool:
        """Make the first launch of a pack's kernel: past Triton's launcher, which takes long to
        begin and is compiled where no process has before, if something does.
        """
        from triton import knobs

        runtime = knobs.runtime
        names = "kernel_load_start_hook", "kernel_load_end_hook"
        loads = (getattr(runtime, name, None) for name in names)
        watched = _hooked(runtime) or any(getattr(hook, "calls", hook) for hook in loads)
        quick = not watched and any(
            launch(found, self.grid, self.values, pointers) for launch in _FIRST
        )
        if not quick:
            with _loading():
                if not lookup.load(found):
                    return False
        self._keep(found, pointers)
        if not quick:
            _made(self, *pointers)
        return True

    def hooked(self) -> bool:
        """Whether Triton's launch hooks are called for this launch."""
        return self.runtime is not None and _hooked(self.runtime)

    def _keep(self, compiled: Any, pointers: tuple[Tensor, ...]) -> None:
        """Keep a kernel for further calls."""
        from triton import knobs

        self.device = pointers[0].get_device()
        self.runtime, self.compiled = knobs.runtime, compiled

    def _bind(self) -> None:
        """Keep what a warm call needs of Triton's own launch, without its bookkeeping."""
        from triton.runtime import driver

        compiled = self.compiled
        self.stream = driver.active.get_current_stream
        run = lookup.run_of(compiled)
        # before `launcher`, which other threads take for all of it; the function, its metadata, and
        # no data, entry hook and exit hook of this launch
        self.head = (compiled.function, compiled.packed_metadata, None, None, None)
        self.launcher = run


_made = Launch.__call__  # before `attach` replaces it
# Of a kernel from a pack, blocks, values and pointers: whether it made the launch.
First = Callable[[Any, tuple[int, ...], tuple[Any, ...], tuple[Tensor, ...]], bool]
_FIRST: list[First] = []


def attach(first: First, heard: Recorder) -> None:
    """From now on ask `first` for the first launch of each kernel that comes from a pack, and call
    `heard` after every launch but those that `recording` has.

    Without a call of this function a launch checks nothing.
    """
    _FIRST.append(first)
    plain = Launch.__call__

    def call(self: Launch, *pointers: Tensor) -> bool | None:
        made = plain(self, *pointers)
        if made is not False:
            heard(self, pointers)
        return made

    Launch.__call__ = call
