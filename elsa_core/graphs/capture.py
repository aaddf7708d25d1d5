"""The one place that captures CUDA graphs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import torch

_WARM_UPS: Final = 3  # calls after which compiled code is tuned and libraries are ready


@lru_cache(maxsize=64)
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream of each GPU for all captures: cuBLAS makes a workspace for every new one."""
    return torch.cuda.Stream(device)


def captured(
    call: Callable[[], object], ready: Callable[[], object] | None = None
) -> Callable[[], object]:
    """The replay of a CUDA graph of one call on the current device, which runs once before that, on
    a stream of its own; `ready` is called right before the capture. RuntimeError: a graph cannot
    hold it."""
    own = _capture_stream(torch.cuda.current_device())
    (replay,) = captured_in_turn([call], torch.cuda.graph_pool_handle(), own, ready)
    return replay


def captured_in_turn(
    parts: Sequence[Callable[[], object]], pool: Any, stream: torch.cuda.Stream,
    ready: Callable[[], object] | None = None, error_mode: str = "global",
) -> list[Callable[[], object]]:  # fmt: skip
    """`captured` of calls that always follow one another, as a forward and its backward do: a graph
    of each, in one pool of graphs that are never replayed at the same time. `stream`: captured on;
    cuBLAS makes its workspace for one that has none yet in the graph's pool. `error_mode`: as
    `torch.cuda.graph` has it; "thread_local" leaves other threads alone."""
    own = _capture_stream(torch.cuda.current_device())
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        for call in parts:
            call()  # what is made once for each stream must not be made during the capture
    torch.cuda.current_stream().wait_stream(own)
    if ready is not None:
        ready()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before, offset = torch.cuda.current_stream(), generator.get_offset()
    graphs = [torch.cuda.CUDAGraph() for _ in parts]
    try:
        for graph, call in zip(graphs, parts, strict=True):
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode):
                call()
    except BaseException:
        torch.cuda.set_stream(before)  # older PyTorch leaves the capture's own
        # A failed capture leaves the GPU's random numbers as if it went on, and the next draw
        # anywhere raises "Offset increment outside graph capture": a state of their own again.
        fresh = torch.Generator(generator.device)
        fresh.manual_seed(generator.initial_seed())
        fresh.set_offset(offset)
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(fresh)
        raise
    return [graph.replay for graph in graphs]


def replayed(
    call: Callable[[], object], ready: Callable[[], object] | None = None
) -> Callable[[], Any]:
    """`captured` of a call that is warmed up first; returns its output, always in the same
    memory."""
    output: deque[Any] = deque(maxlen=1)
    for _ in range(_WARM_UPS):
        call()
    replay = captured(lambda: output.append(call()), ready)

    def run() -> Any:
        replay()
        return output[0]

    return run


class Cuda:
    """What `elsa_core.graphs.model` needs of CUDA; tests put another in its place."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.cuda.Stream] = {}

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def order(self, device: torch.device) -> torch.cuda.Stream:
        """Let what follows on the current stream, which is returned, begin after the last call,
        whatever its stream."""
        now = torch.cuda.current_stream(device)
        last = self._last.get(device)
        if last is not None and last != now:
            now.wait_stream(last)
        self._last[device] = now
        return now

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """On another stream, which the current one then waits for."""
        now = torch.cuda.current_stream(stream.device)
        with torch.cuda.stream(stream):
            yield
        now.wait_stream(stream)

    def wait(self, device: torch.device) -> None:
        """Wait until the last call has ended, so that its graph may be dropped."""
        last = self._last.get(device)
        if last is not None:
            last.synchronize()

    def random_numbers(self, device: torch.device) -> torch.Generator:
        """The device's generator: `get_offset` stays as it is where no number is drawn."""
        return torch.cuda.default_generators[device.index]

    def pool(self, device: torch.device) -> Any:
        """A new pool for graphs that are replayed one after the other, and a stream to capture on:
        a new one, so that cuBLAS has its workspace in the pool."""
        return torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def captured(
        self, parts: Sequence[Callable[[], object]], pool: Any, device: torch.device
    ) -> list[Callable[[], object]]:
        """`captured_in_turn`, with a pool of `pool`."""
        handle, stream = pool
        with torch.cuda.device(device):
            try:
                return captured_in_turn(parts, handle, stream, error_mode="thread_local")
            except RuntimeError:
                torch.cuda.synchronize()
                raise


BACKEND: Any = Cuda()
"""Who captures; tests on a CPU put another in its place."""
