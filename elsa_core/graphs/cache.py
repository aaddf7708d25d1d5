"""The graphs of one model, one for each kind of call."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn

from elsa_core.graphs import capture
from elsa_core.graphs.checks import Given, RefusedError, saved_tensor_hooks, why_not
from elsa_core.graphs.entries import GradientMemory, Inference, Training

_LOG = logging.getLogger("elsa")
_FEW_REPLAYS: Final = 4
_MOST_LOST: Final = 4
_MOST_KNOWN: Final = 1024
# Graphs of one device share cuBLAS's workspaces, and a process captures one graph at a time.
_LOCK = threading.RLock()
_PENDING: Final = (
    "another forward comes before the backward of the last one, and both need the same memory "
    "(where no gradient is wanted, call it under torch.no_grad() or torch.inference_mode())"
)
_KEPT: Final = (
    "gradients that an earlier backward gave are still held, outside of the parameters' grad: "
    "clone what is to be kept"
)


class Graphs:
    """The graphs of one model, `shapes` at most, the one used last at the end; copies and pickles
    are empty. They share a pool of memory, which is right as long as one is replayed at a time:
    from a training forward until its backward no other call is a graph's. `warned`: reasons that a
    warning gave already."""

    def __init__(
        self, shapes: int, copy_outputs: bool, kind: type[Inference] | type[Training],
        warned: dict[str, None] | None = None,
    ) -> None:  # fmt: skip
        self._most, self._copy_outputs, self._kind = shapes, copy_outputs, kind
        self.entries: OrderedDict[Hashable, Inference | Training] = OrderedDict()
        self._refused: dict[Hashable, str] = {}
        self._lost: Counter[Hashable] = Counter()  # graphs dropped after few replays
        self._in_a_row = 0  # such graphs, of any calls
        self.warned: dict[str, None] = {} if warned is None else warned  # reasons, in order
        self._device: torch.device | None = None  # of all entries
        self._pool: Any = None
        self._ticket: Any = None  # of the last forward of any entry
        self._gradients: list[GradientMemory] = []  # of the pool, of dropped entries too

    def __reduce__(self) -> Any:
        return Graphs, (self._most, self._copy_outputs, self._kind)

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be at its end
            if self.entries and not capture.BACKEND.is_capturing():
                self._drop(*self.entries)

    def clear(self) -> None:
        """Drop everything."""
        with _LOCK:
            self._drop(*self.entries)
            self._refused.clear()
            self._lost.clear()
            self._in_a_row = 0

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's result: of a replay, or of its own call."""
        try:
            return self.answer(model, args, kwargs)
        except RefusedError as refusal:
            reason = str(refusal)
        if reason not in self.warned and len(self.warned) < _MOST_KNOWN:
            self.warned[reason] = None
            _LOG.warning("graphed: such calls run without a CUDA graph: %s", reason)
        return model(*args, **kwargs)

    def answer(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a replay; raises RefusedError: no graph is to hold the call."""
        given = Given.of(args, kwargs)
        device = given.device()
        if torch._C._len_torch_function_stack():
            raise RefusedError("a TorchFunctionMode is active (a default device is one)")
        if torch.nn.modules.module._has_any_global_hook():
            raise RefusedError("hooks of all modules are set, and a replay calls none")
        if self._kind.backward and torch.is_anomaly_enabled():
            raise RefusedError("autograd looks for anomalies")
        if self._kind.backward and saved_tensor_hooks() is not None:
            raise RefusedError("hooks for saved tensors are set, and no graph calls them")
        key = (id(model), model.training, given.key(device))  # a graph keeps its model alive
        with _LOCK:
            if key in self._refused:
                raise RefusedError(self._refused[key])
            if self._gradients or self._ticket is not None:
                self._check_pool()
            entry, same, result = self.entries.get(key), False, None
            training = self._kind.backward
            if (
                entry is not None
                and entry.given.tree == given.tree
                and entry.guards.alive()
                and (not training or entry.guards.hold())
            ):
                result = entry.run(given, self._copy_outputs)
                same = training or entry.guards.hold()  # asked while the GPU is at work
            if entry is not None and same:
                self.entries.move_to_end(key)
            else:
                if entry is not None:
                    self._drop(key, replaced=True)
                    guards = {k: e.guards for k, e in self.entries.items()}
                    stale = [k for k, g in guards.items() if not (g.alive() and g.hold())]
                    self._drop(*stale)  # they would keep what the model no longer has
                    entry = result = None  # its memory is free before the next one's is taken
                entry = self._captured(key, model, given, device)
                # PyTorch's first attention on a GPU sets the order of its kernels, which is in it
                key = (id(model), model.training, given.key(device))
                if key in self.entries:  # no `_drop`: the pool stays, and the gradients in it
                    capture.BACKEND.wait(device)
                self.entries[key] = entry
                self.entries.move_to_end(key)
                result = entry.run(given, self._copy_outputs)
            if isinstance(entry, Training):
                self._ticket = entry.ticket
            return result

    def _check_pool(self) -> None:
        """Let no replay write over what is still wanted: RefusedError where a forward waits for its
        backward, or somebody holds gradients."""
        ticket = None if self._ticket is None else self._ticket()
        if ticket is not None and not ticket.done:
            raise RefusedError(_PENDING)
        free = [each.free() for each in self._gradients]
        if not all(free):
            raise RefusedError(_KEPT)
        live = {id(each.memory) for each in self.entries.values() if isinstance(each, Training)}
        if len(live) < len(self._gradients):
            self._gradients = [each for each in self._gradients if id(each) in live]

    def _captured(
        self, key: Hashable, model: nn.Module, given: Given, device: torch.device
    ) -> Inference | Training:
        reason = why_not(model, device, backward=self._kind.backward)
        if reason:
            raise RefusedError(reason)
        if len(self._lost) >= _MOST_KNOWN:
            self._lost.clear()
        if self._in_a_row >= _MOST_LOST * self._most and key not in self._lost:
            self._lost[key] = 0  # when it comes again there will be a graph
            raise RefusedError(
                "its sizes or numbers are new, as in many calls before, whose graphs were dropped "
                "after few replays"
            )
        try:
            if self._lost[key] >= _MOST_LOST:
                raise RefusedError(
                    f"its graphs were dropped after few replays: more than shapes={self._most} "
                    "take turns, or the model changes between calls"
                )
            if device != self._device:
                self._drop(*self.entries)
            while len(self.entries) >= self._most:
                self._drop(next(iter(self.entries)), replaced=True)
            if not self.entries:
                self._pool, self._device = capture.BACKEND.pool(device), device
            capture.BACKEND.order(device)
            entry = self._kind(model, given, device, self._pool)
        except RefusedError as refusal:
            if len(self._refused) >= _MOST_KNOWN:
                self._refused.clear()
            self._refused[key] = str(refusal)
            raise
        if isinstance(entry, Training):
            self._gradients.append(entry.memory)
        return entry

    def _drop(self, *keys: Hashable, replaced: bool = False) -> None:
        """Drop graphs. Where one is `replaced` again and again, capturing is not worth its time."""
        if keys and self._device is not None:
            capture.BACKEND.wait(self._device)
        for key in keys:
            if replaced:
                few = self.entries[key].replays < _FEW_REPLAYS
                self._lost[key] = self._lost[key] + 1 if few else 0
                self._in_a_row = self._in_a_row + 1 if few else 0
            del self.entries[key]
        if not self.entries:
            self._gradients = []  # the next pool is another
