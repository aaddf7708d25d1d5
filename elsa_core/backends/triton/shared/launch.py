"""A kernel's launch without Triton's bookkeeping, so that a warm call costs the host little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from elsa_core.backends.triton.pack import lookup
from elsa_core.backends.triton.shared.device import INTERPRETED, direct_launch_known

Recorder = Callable[["Launch", tuple[Tensor, ...]], None]
_recorders: list[Recorder] = []


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Hand every first call of a launch, with its tensors, to `recorder` instead of the GPU."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()


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
        self.tail = tail
        # Triton 3.10 stops fusing multiply and add by default
        self.options = {"enable_fp_fusion": True, **options}
        self.loaded = False  # whether the kernel is compiled and on the device
        self.compiled: Any = None
        self.launcher: Any = None
        self.runtime: Any = None
        self.head: tuple[Any, ...] = ()
        self.values: tuple[Any, ...] = ()
        self.stream: Callable[[int], int] = int
        self.device = 0

    def __call__(self, *pointers: Tensor) -> None:
        if self.compiled is not None:
            # addresses: for a tensor the launcher would ask the driver whose memory it is
            addresses = [p.data_ptr() for p in pointers]
            stream = self.stream(self.device)
            if _hooked(self.runtime):  # Triton's own launch calls the hooks
                self.compiled[self.grid](*addresses, *self.values, stream=stream)
            else:
                self.launcher(*self.grid, stream, *self.head, *addresses, *self.values)
            return
        if _recorders:
            _recorders[-1](self, pointers)
            return
        if lookup.wanted() and not INTERPRETED and direct_launch_known():
            found = lookup.find(self.kernel, pointers, self.tail, self.options)
            if found is not None:
                self._bind(found, pointers)
                self.loaded = True
                _made(self, *pointers)
                return
        compiled = self.kernel[self.grid](*pointers, **self.tail, **self.options)
        self.loaded = True
        if not INTERPRETED and hasattr(compiled, "__getitem__") and direct_launch_known():
            self._bind(compiled, pointers)

    def hooked(self) -> bool:
        """Whether Triton's launch hooks are called for this launch."""
        return self.runtime is not None and _hooked(self.runtime)

    def _bind(self, compiled: Any, pointers: tuple[Tensor, ...]) -> None:
        """Keep what a warm call needs of Triton's own launch, without its bookkeeping."""
        from triton import knobs
        from triton.runtime import driver

        # positional, in the kernel's own order: pointers come first
        names = [p.name for p in self.kernel.params]
        self.values = tuple(self.tail[name] for name in names[len(pointers) :])
        self.stream = driver.active.get_current_stream
        self.device = pointers[0].get_device()
        self.launcher, self.runtime = compiled.run, knobs.runtime
        # the function, its metadata, and no data, entry hook and exit hook of this launch
        self.head = (compiled.function, compiled.packed_metadata, None, None, None)
        self.compiled = compiled


_made = Launch.__call__  # before `listen` replaces it


def listen(to: Callable[[Launch, tuple[Tensor, ...]], None]) -> None:
    """Call `to` after every launch of this process from now on, not of those that `recording` has.

    Without a call of this function a launch checks nothing.
    """
    plain = Launch.__call__

    def call(self: Launch, *pointers: Tensor) -> None:
        plain(self, *pointers)
        if self.compiled is not None or not _recorders:
            to(self, pointers)

    Launch.__call__ = call
