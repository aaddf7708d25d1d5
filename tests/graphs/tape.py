"""A graph backend on a CPU: it records operators and repeats them on the memory that they had.

As a CUDA graph does, a replay runs no Python of the model, reads and writes the addresses of the
capture, whatever its tensors have become since, and leaves its results where they were.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elsa_core.graphs import capture


def _aliased(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _aliased((args, kwargs or {}))
        result = func(*args, **kwargs)
        self.steps.append((func, args, kwargs, pytree.tree_leaves(_aliased(result))))
        return result

    def replay(self) -> None:
        for func, args, kwargs, kept in self.steps:
            for old, new in zip(kept, pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _RandomNumbers:
    def get_offset(self) -> bytes:
        state: bytes = torch.get_rng_state().numpy().tobytes()
        return state

    def set_offset(self, state: bytes) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class Tape:
    """Stands in for `elsa_core.graphs.capture.Cuda`.

    Attributes:
        captures, replays: how many there were.
        recording: whether a capture is at work.
        stream: the current one, a name.
        moves: the streams that gradients were moved on.
        error: what a capture raises, if set.
    """

    device_type = "cpu"

    def __init__(self) -> None:
        self.captures = self.replays = self.waits = self.pools = 0
        self.error: Exception | None = None
        self.capturing = self.recording = False
        self.stream, self.moves = "first", []

    def is_capturing(self) -> bool:
        return self.capturing

    def order(self, device: torch.device) -> Any:
        return self.stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        self.moves.append(stream)
        yield
        self.stream = before

    def wait(self, device: torch.device) -> None:
        self.waits += 1

    def random_numbers(self, device: torch.device) -> Any:
        return _RandomNumbers()

    def pool(self, device: torch.device) -> Any:
        self.pools += 1
        return object()

    def captured(
        self, parts: Sequence[Callable[[], object]], pool: Any, device: torch.device
    ) -> list[Callable[[], object]]:
        for call in parts:
            call()
        if self.error is not None:
            raise self.error
        recorders = [_Recorder() for _ in parts]
        self.recording = True
        try:
            for recorder, call in zip(recorders, parts, strict=True):
                with recorder:
                    call()
        finally:
            self.recording = False
        self.captures += 1
        return [self._replayer(recorder) for recorder in recorders]

    def _replayer(self, recorder: _Recorder) -> Callable[[], object]:
        def replay() -> None:
            self.replays += 1
            recorder.replay()

        return replay


@contextmanager
def taped() -> Iterator[Tape]:
    """In the place of the machine's graphs, which a CPU does not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "BACKEND", tape := Tape())
        yield tape
