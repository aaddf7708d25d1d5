"""Warm launches: the arguments that Triton's own launch would pass on, without its bookkeeping."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.compiler.compiler import CompiledKernel

from elsa_core.backends.triton.shared.launch import Launch

STREAM = 77


def launched() -> tuple[Launch, CompiledKernel, list[tuple[Any, ...]]]:
    """A launch bound to a kernel of Triton's own class, whose launcher keeps its arguments."""
    seen: list[tuple[Any, ...]] = []
    compiled = CompiledKernel.__new__(CompiledKernel)
    compiled.module, compiled.function, compiled.packed_metadata = 1, 4711, (4, 1, 0)
    compiled.name, compiled._module_pid, compiled.src = "kernel", -1, None
    compiled._run = lambda *arguments: seen.append(arguments)
    names = ("Q", "Out", "n", "BLOCK")
    kernel = SimpleNamespace(params=[SimpleNamespace(name=name) for name in names])
    launch = Launch(kernel, (3, 2), {"n": 5, "BLOCK": 64}, {"num_warps": 4})
    launch._bind(compiled, (torch.zeros(1), torch.zeros(1)))
    launch.stream = lambda device: STREAM
    return launch, compiled, seen


@pytest.fixture(autouse=True)
def a_driver(monkeypatch):
    from triton.runtime import driver

    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(type(driver), "active", active, raising=False)


def test_arguments_are_those_of_triton() -> None:
    launch, compiled, seen = launched()
    q, out = torch.zeros(2), torch.zeros(3)
    launch(q, out)
    compiled[launch.grid](q.data_ptr(), out.data_ptr(), 5, 64, stream=STREAM)
    ours, theirs = seen
    assert ours == (3, 2, 1, STREAM, 4711, (4, 1, 0), None, None, None, q.data_ptr(),
                    out.data_ptr(), 5, 64)  # fmt: skip
    assert len(ours) == len(theirs) and ours[:6] == theirs[:6] and ours[9:] == theirs[9:]
    # theirs[6] describes the launch to these two, to which nobody listens
    assert all(not getattr(hook, "calls", hook) for hook in theirs[7:9])


def test_a_hook_hears_of_every_launch(monkeypatch) -> None:
    launch, _, seen = launched()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", print)
    launch(torch.zeros(2), torch.zeros(3))
    (arguments,) = seen
    assert arguments[7] is print and arguments[3] == STREAM
