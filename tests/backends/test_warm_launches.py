"""Warm launches: the arguments that Triton's own launch would pass on, without its bookkeeping."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.compiler.compiler import CompiledKernel

from elsa_core.backends.triton.shared.launch import Launch

STREAM = 77


class Kernel(CompiledKernel):
    """Triton's own class; there is nothing to unload."""

    def __del__(self) -> None:
        pass


def launched() -> tuple[Launch, CompiledKernel, list[tuple[Any, ...]]]:
    """A launch bound to a kernel of Triton's own class, whose launcher keeps its arguments."""
    seen: list[tuple[Any, ...]] = []
    compiled = Kernel.__new__(Kernel)
    compiled.module, compiled.function, compiled.packed_metadata = 1, 4711, (4, 1, 0)
    compiled.name, compiled._module_pid, compiled.src = "kernel", -1, None
    compiled._run = lambda *arguments: seen.append(arguments)
    names = ("Q", "Out", "n", "BLOCK")
    kernel = SimpleNamespace(params=[SimpleNamespace(name=n) for n in names], arg_names=names)
    launch = Launch(kernel, (3, 2), {"n": 5, "BLOCK": 64}, {"num_warps": 4})
    launch._keep(compiled, (torch.zeros(1), torch.zeros(1)))
    launch._bind()
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


class Jit:
    """A kernel as Triton's JIT shows it: called with everything, it returns what it compiled."""

    def __init__(self, compiled: CompiledKernel):
        names = ("Q", "Out", "n", "BLOCK")
        self.params = [SimpleNamespace(name=name) for name in names]
        self.arg_names = names
        self.compiled = compiled
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*pointers: torch.Tensor, **given: Any) -> CompiledKernel:
            self.calls.append((grid, given))
            return self.compiled

        return call


@pytest.mark.parametrize(
    ("version", "direct"),
    [("3.4.0", True), ("3.6.0", True), ("3.9.1", True), ("3.3.1", False), ("3.10.0", False),
     ("4.0.0", False)],
)  # fmt: skip
def test_an_unknown_triton_is_launched_by_its_own_jit(version, direct, monkeypatch) -> None:
    """Only the versions whose compiled kernels are known take the short way."""
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setenv("ELSA_PACK", "0")
    _, compiled, seen = launched()
    kernel = Jit(compiled)
    launch = Launch(kernel, (3, 2), {"n": 5, "BLOCK": 64}, {"num_warps": 4})
    for _ in range(3):
        launch(torch.zeros(1), torch.zeros(1))
    assert (len(kernel.calls), len(seen)) == ((1, 2) if direct else (3, 0))
    assert kernel.calls[0] == (
        (3, 2, 1), {"n": 5, "BLOCK": 64, "num_warps": 4, "enable_fp_fusion": True}
    )  # fmt: skip
