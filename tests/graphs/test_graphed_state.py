"""`graphed` over a tape: forwards with a state, and settings that decide which kernels run."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core import dispatch
from elsa_core.backends.support import Backend
from elsa_core.backends.triton.shared.device import Described, describing
from elsa_core.graphs import checks

from .tape import Tape
from .test_graphed import agree, inputs, said


class Difference(nn.Module):
    """Of its input and the one of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.prev = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.prev
        self.prev = x
        return y


class Featured(nn.Module):
    """Gives what the call before kept of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.feat = torch.zeros(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.feat
        self.feat = x[:1]
        return y


class Intermediate(Featured):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.feat
        self.feat = y * 0.5
        return y


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.past: Any = []

    def forward(self, x: Tensor) -> Tensor:
        self.past.append(x)
        return x - self.past[-2] if len(self.past) > 1 else x


class Bounded(Appending):
    """Of a fixed length after the first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.past = deque(maxlen=2)


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even = True

    def forward(self, x: Tensor) -> Tensor:
        self.even = not self.even
        return x * 2 if self.even else x


STATES = (Difference, Featured, Intermediate, Appending, Bounded, Alternating)


@pytest.mark.parametrize("kind", STATES)
def test_state_that_a_forward_writes_for_its_next_call(
    tape: Tape, kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Seen once by all warm-ups, it looked like a constant: `x - self.prev` was 0 for ever."""
    model, twin = kind().eval(), kind().eval()
    held = elsa.graphed(model)
    held(torch.zeros(1, 8)), twin(torch.zeros(1, 8))
    if isinstance(twin, Alternating):
        twin.even = bool(model.even)  # the runs of the first call are calls too
    for value in (1.0, 2.0, 4.0):
        agree(held, twin, torch.full((1, 8), value))
    assert tape.captures == tape.replays == held.captures == 0
    (line,) = said(caplog)
    keeps = kind in (Difference, Bounded)  # the same tensor in each run of the first call
    assert ("keeps an argument" if keeps else "changes what the model holds") in line


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.rand(8) * self.calls


def test_a_call_that_no_graph_holds_changes_buffers_and_random_numbers_once(tape: Tape) -> None:
    with torch.inference_mode(False), torch.no_grad():
        model, twin = Counting().eval(), Counting().eval()
        held, found = elsa.graphed(model), []
        for each in (held, twin):
            torch.manual_seed(0)
            found.append([each(torch.ones(8)) for _ in range(2)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert held.captures == 0


def test_a_result_with_a_gradient_of_an_attribute(
    tape: Tape, caplog: pytest.LogCaptureFixture
) -> None:
    """No parameter wants one, so the call was inference, and its result had the capture's node."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.ones(8, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.gain).exp()

    with torch.inference_mode(False):
        model = Scaled().eval()
        held = elsa.graphed(model)
        for value in (1.0, 2.0):
            x = torch.full((8,), value)
            found, expected = (torch.autograd.grad(f(x).sum(), model.gain) for f in (held, model))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (line,) = said(caplog)
    assert "wants a gradient and is no parameter" in line


def test_state_that_only_the_capture_writes(tape: Tape) -> None:
    """An attribute would lie in the graph's memory, which every replay overwrites."""
    runs: list[int] = []

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feat: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            runs.append(1)
            if len(runs) == 5:
                self.feat = y
            return y

    model = Late().eval()
    held = elsa.graphed(model)
    held(torch.ones(1, 8))
    kept = model.feat
    assert kept is not None and len(runs) == 6  # five runs and the model's own
    held(torch.full((1, 8), 3.0))
    assert held.captures == tape.replays == 0
    assert torch.equal(kept, torch.full((1, 8), 2.0))


def test_hooks_of_all_modules_after_a_capture(tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode(False):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    held = elsa.graphed(model)
    x = inputs()
    agree(held, model, x)
    seen: list[Tensor] = []
    register: Callable[..., Any] = torch.nn.modules.module.register_module_forward_hook
    with register(lambda module, _, out: out + 1 if isinstance(module, nn.GELU) else None):
        agree(held, model, x)
    before: Callable[..., Any] = torch.nn.modules.module.register_module_forward_pre_hook
    with before(lambda _, given: seen.append(given[0])):
        held(x)
    assert len(seen) >= 3
    agree(held, model, x)
    assert tape.captures == held.captures == 1  # the graph is right again
    (line,) = said(caplog)
    assert "hooks of all modules" in line


class Listed(nn.Module):
    def __init__(self, lists: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(8))
        self.steps = [[float(i)] for i in range(lists)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.steps[-1][0]


def test_more_lists_than_are_compared(tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    """Those beyond the bound were not compared, and a change of one was not seen."""
    for lists, held_ones in ((checks.MOST_NESTED - 1, 1), (checks.MOST_NESTED, 0)):
        model = Listed(lists).eval()  # and the list that holds them; dicts of modules do not count
        held = elsa.graphed(model)
        x = inputs()
        agree(held, model, x)
        model.steps[-1][0] = 7.0
        agree(held, model, x)
        assert (held.captures, len(said(caplog))) == (held_ones, 1 - held_ones)
    assert "dicts and lists" in said(caplog)[0]


@contextmanager
def registered() -> Iterator[None]:
    dispatch.register(Backend("of_a_test", "cpu", {}))
    try:
        yield
    finally:
        dispatch.unregister("of_a_test")


SWITCHES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "describing": lambda: describing(Described("H200", (9, 0), 132)),
    "registered": registered,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_this_package_switches(tape: Tape, name: str) -> None:
    """Within a switch a graph from outside it served, with the kernels that were chosen there."""
    with torch.inference_mode(False):
        model = nn.Linear(8, 8).eval()
    held = elsa.graphed(model)
    x = inputs()
    agree(held, model, x)
    before = dispatch.switched()
    with SWITCHES[name]():
        agree(held, model, x)
        assert tape.captures == 2
        with describing(Described("H100", (9, 0), 132)):
            agree(held, model, x)
        assert tape.captures == 3
    assert (dispatch.switched() == before) == (name != "registered")
    agree(held, model, x)
    again = 4 if name == "registered" else 3  # a registration is never taken for an older one
    assert tape.captures == again
    if name != "registered":
        with SWITCHES[name]():
            agree(held, model, x)
    assert tape.captures == again


def _rnn_precision() -> Any:
    before = torch._C._get_fp32_precision_getter("cuda", "rnn")
    torch._C._set_fp32_precision_setter("cuda", "rnn", "ieee" if before != "ieee" else "tf32")
    return lambda: torch._C._set_fp32_precision_setter("cuda", "rnn", before)


def _backend_order() -> Any:
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(before[::-1])
    return lambda: torch._C._set_sdp_priority_order(before)


@pytest.mark.parametrize("change", [_rnn_precision, _backend_order])
def test_settings_of_pytorch_that_choose_kernels(tape: Tape, change: Callable[[], Any]) -> None:
    held, x = elsa.graphed(nn.ReLU().eval()), inputs()
    held(x)
    try:
        undo = change()
    except (AttributeError, RuntimeError):
        pytest.skip("this PyTorch has no such setting")
    try:
        held(x)
    finally:
        undo()
    held(x)
    assert tape.captures == 2
