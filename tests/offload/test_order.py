"""The streams of a GPU, without one: no copy overtakes the work on what it overwrites.

Streams, events and the host are actors with vector clocks. An access of memory must come after all
earlier accesses of it that it conflicts with, by what the code waits for, not by what was called
first.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from elsa_core.distributed import shards
from elsa_core.distributed.shards import Saved, Wanted
from elsa_core.offload import passes, streaming

from .cases import CASES, Case

Clock = dict[int, int]


class Actor:
    """A stream, or the host: what it has done, and what it knows of others."""

    def __init__(self, *_: Any) -> None:
        self.clock: Clock = defaultdict(int)

    def learn(self, clock: Clock) -> None:
        for actor, count in clock.items():
            self.clock[actor] = max(self.clock[actor], count)

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)

    def wait_stream(self, stream: Actor) -> None:
        self.learn(stream.clock)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}
        self.at = 0.0

    def record(self, stream: Actor | None = None) -> None:
        self.clock, self.at = dict((stream or machine.current).clock), time.perf_counter()

    def synchronize(self) -> None:
        machine.host.learn(self.clock)

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Machine:
    """The actors, and who touched which memory."""

    def __init__(self) -> None:
        self.host, self.current = Actor(), Actor()
        self.computing = False  # copies between tensors of the device
        self.reads: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.writes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.kept: list[Tensor] = []  # so that no address is used twice

    @contextmanager
    def on(self, stream: Actor) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    def access(self, actor: Actor, tensor: Tensor, *, write: bool) -> None:
        self.kept.append(tensor)
        place = tensor.untyped_storage().data_ptr()
        if actor is not self.host:
            actor.learn(self.host.clock)  # nothing starts before it is launched
        actor.clock[id(actor)] += 1
        conflicts = self.writes[place] + (self.reads[place] if write else [])
        for other, count in conflicts:
            assert actor.clock[other] >= count, "memory is used before earlier work on it is over"
        (self.writes if write else self.reads)[place].append((id(actor), actor.clock[id(actor)]))


machine = Machine()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    global machine  # noqa: PLW0603
    machine = Machine()
    copy, empty = Tensor.copy_, torch.empty

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        of_device = non_blocking or machine.computing
        actor = machine.current if of_device else machine.host
        machine.access(actor, source, write=False)
        machine.access(actor, target, write=True)
        return copy(target, source)

    def made(*sizes: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        memory = empty(*sizes, **options)
        if device == torch.device("cuda", 0):  # from the pool of the stream that computes
            machine.access(machine.current, memory, write=True)
        return memory

    def computed(function: Any) -> Any:
        def run(rows: Any, given: Any, *others: Any) -> Any:
            block = given[0] if isinstance(given, list) else given
            for tensor in (rows.query, rows.attn_mask, block.key, block.value):
                if tensor is not None:
                    machine.access(machine.current, tensor, write=False)
            machine.computing = True
            results = function(rows, given, *others)
            machine.computing = False
            for tensor in results or ():
                machine.access(machine.current, tensor, write=True)
            return results

        return run

    def finished(*given: Any) -> Any:
        results = finish(*given)
        for tensor in results:
            machine.access(machine.current, tensor, write=True)
        return results

    finish = shards.finished
    monkeypatch.setattr(shards, "finished", finished)
    monkeypatch.setattr(shards, "state", computed(shards.state))
    monkeypatch.setattr(shards, "gradients", computed(shards.gradients))
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(torch, "empty", made)
    for name, fake in {
        "Stream": Actor, "Event": Event, "device": lambda device: nullcontext(),
        "stream": machine.on,
        "current_stream": lambda device=None: machine.current,
        "mem_get_info": lambda device: (1 << 34, 1 << 34),
        "get_per_process_memory_fraction": lambda device: 1.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake, raising=False)
    return torch.device("cuda", 0)


def call_of(case: Case, device: torch.device) -> tuple[passes.Call, Tensor]:
    query, key, value, mask, grad = case.tensors()
    call = passes.Call(
        query, key, value, mask, case.is_causal, 0.25, "strict", "auto", device, case.block,
        case.query_block,
    )  # fmt: skip
    return call, grad


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("name", ["plain", "causal", "hidden", "one block", "one key a block"])
def test_nothing_is_used_too_early(
    name: str, pinned: bool, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: pinned)
    call, grad = call_of(CASES[name], gpu)
    out, lse = passes.forward(call)
    report = streaming.report()
    wanted = Wanted(True, True, True, False)
    grads = passes.backward(call, Saved(grad, out, lse), wanted)
    written = streaming.report()
    monkeypatch.undo()
    assert report is not None and report.copied_bytes > 0
    assert (report.staged_bytes == 0) == pinned or CASES[name].mask != "none"
    assert written is not None and written.written_bytes > 0
    plain = call._replace(device=torch.device("cpu"))
    direct = passes.forward(plain)
    assert torch.equal(out, direct[0]) and torch.equal(lse, direct[1])
    others = passes.backward(plain, Saved(grad, out, lse), wanted)
    for found, expected in zip(grads[:3], others[:3], strict=True):
        assert found is not None and expected is not None and torch.equal(found, expected)


def test_a_copy_does_not_wait_for_the_work_before_it(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a block is free to run under the fold of the one before, for every block."""
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    held = torch.randn(1, 1, 60, 4)
    loader = streaming.Loader(gpu, streaming.Timeline(cuda=True))
    folds: list[int] = []
    bounds = [(start, start + 10) for start in range(0, 60, 10)]
    copying, computing = loader._stream, machine.current
    assert isinstance(copying, Actor)
    for (part,) in loader.blocks([held], [2], bounds):
        # the copy of this block knew of no fold but those two or more before this one
        begun = folds[0] - 1 if folds else computing.clock[id(computing)]
        assert copying.clock[id(computing)] <= (folds[-2] if len(folds) > 1 else begun)
        machine.access(computing, part, write=False)
        folds.append(computing.clock[id(computing)])
    assert len(folds) == 6
