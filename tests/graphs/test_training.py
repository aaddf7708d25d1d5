"""`graphed` in training over a tape: bit by bit what an eager loop computes."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.errors import ArgumentError

from . import scripts
from .tape import Tape
from .test_graphed import Does, said


@pytest.fixture(autouse=True)
def trains(tape: Tape) -> Any:
    with torch.inference_mode(False):
        torch.manual_seed(0)
        yield


def equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(8))
def test_a_random_script(tape: Tape, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    script = scripts.Script.of(seed, steps=7, cuda=False)
    model = scripts.convolutions(script.drop)
    expected = scripts.run(script, copy.deepcopy(model), lambda m: m, "cpu")
    found = scripts.run(script, model, elsa.graphed, "cpu")
    equal(found, expected)
    assert tape.replays and not said(caplog)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_patched_model(tape: Tape, name: str, caplog: pytest.LogCaptureFixture) -> None:
    size = {"depth": 2, "patch_size": 8} if "vit" in name else {"depths": (1, 1), "window_size": 4}
    script = scripts.Script.of(3, steps=4, cuda=False, drop=False)
    model = timm.create_model(
        name, img_size=scripts.SIZE, num_classes=scripts.CLASSES, drop_path_rate=0.2, **size
    )
    elsa.patch(model)
    expected = scripts.run(script, copy.deepcopy(model), lambda m: m, "cpu")
    torch.testing.assert_close(scripts.run(script, model, elsa.graphed, "cpu"), expected)
    assert tape.replays and not said(caplog)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu() * self.gain)


def pair() -> tuple[Any, nn.Module]:
    model = Net()
    return elsa.graphed(model), copy.deepcopy(model)


def stepped(held: Any, x: Tensor) -> list[Tensor | None]:
    """The loss and every gradient of one step, and what the gradients of the parameters are then.

    Copies: a gradient that is held ends graphs.
    """
    out = held(x)
    loss = out.square().sum()
    loss.backward()
    grads = [None if p.grad is None else p.grad.clone() for p in held.parameters()]
    return [loss.detach(), *grads]


def agree(held: Any, model: nn.Module, *shape: int) -> None:
    x = torch.randn(*(shape or (3, 8)))
    equal(stepped(held, x), stepped(model, x))
    held.zero_grad()
    model.zero_grad()


CHANGES: dict[str, Callable[[Any], object]] = {
    "data": lambda net: setattr(net.first.weight, "data", torch.ones(8, 8)),
    "in place": lambda net: net.first.weight.data.mul_(2),
    "module": lambda net: setattr(net, "second", nn.Linear(8, 4, bias=False)),
    "attribute": lambda net: setattr(net, "gain", 3.0),
    "frozen": lambda net: net.first.weight.requires_grad_(False),
    "eval": lambda net: net.eval(),
    "part in eval": lambda net: net.first.eval(),
    "dtype": lambda net: net.double().float(),
    "hook": lambda net: net.first.register_forward_hook(lambda _, __, out: out * 2),
    "backward hook": lambda net: net.second.register_full_backward_hook(
        lambda _, g, __: (g[0] * 2,)
    ),
    "loaded": lambda net: net.load_state_dict(
        {name: torch.ones_like(value) for name, value in net.state_dict().items()}, assign=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_live_model(tape: Tape, name: str) -> None:
    held, twin = pair()
    agree(held, twin)
    for each in (held.model, twin):
        torch.manual_seed(1)
        CHANGES[name](each)
    agree(held, twin)
    agree(held, twin, 2, 8)
    agree(held, twin)


def test_a_backward_hook_is_called(tape: Tape) -> None:
    held, twin = pair()
    seen: list[int] = []
    held.model.second.register_full_backward_hook(lambda *_: seen.append(1))
    for calls in (1, 2, 3):
        agree(held, twin)
        assert len(seen) == calls
    assert not tape.captures


class Sets(Net):
    """Its forward makes a setting of the process."""

    def forward(self, x: Tensor) -> Tensor:
        torch.backends.cudnn.benchmark = True
        return super().forward(x)


@pytest.fixture
def sets() -> Iterator[tuple[Any, nn.Module]]:
    """A pair of them."""
    model, before = Sets(), torch.backends.cudnn.benchmark
    yield elsa.graphed(model), copy.deepcopy(model)
    torch.backends.cudnn.benchmark = before


def test_a_setting_that_the_first_call_makes(tape: Tape, sets: tuple[Any, nn.Module]) -> None:
    """As PyTorch's first attention on a Hopper GPU sets the order of its kernels."""
    held, twin = sets
    for _ in range(3):
        agree(held, twin)
    assert tape.captures == held.captures == 1


def test_a_graph_that_takes_the_place_of_the_only_one(tape: Tape, sets: Any) -> None:
    """Its pool is the same: gradients that lie in it were overwritten by the next backward."""
    held, twin = sets
    for step in range(5):
        if step < 3:
            torch.backends.cudnn.benchmark = False
        x = torch.randn(3, 8)
        for each in (held, twin):
            if step == 3:
                each.zero_grad()
            each(x).square().sum().backward()
        equal([p.grad for p in held.parameters()], [p.grad for p in twin.parameters()])


def test_accumulation_moves_a_gradient_out_of_the_graph(tape: Tape) -> None:
    """A `grad` that lies in the graph's memory would be overwritten and then added to itself."""
    held, twin = pair()
    for _ in range(3):
        x = torch.randn(3, 8)
        equal(stepped(held, x), stepped(twin, x))
    for each in (held, twin):
        each.zero_grad(set_to_none=False)
    x = torch.randn(3, 8)
    equal(stepped(held, x), stepped(twin, x))
    assert tape.captures == 1


def test_gradients_that_somebody_keeps(tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    held, twin = pair()
    agree(held, twin)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    params = list(held.parameters())
    kept = torch.autograd.grad(held(x).sum(), params)
    replays = tape.replays
    other = torch.autograd.grad(held(y).sum(), params)
    equal(kept, torch.autograd.grad(twin(x).sum(), list(twin.parameters())))
    equal(other, torch.autograd.grad(twin(y).sum(), list(twin.parameters())))
    assert tape.replays == replays
    (line,) = said(caplog)
    assert "still held" in line
    del kept, other
    agree(held, twin)
    assert tape.replays == replays + 2


def test_a_grad_is_not_in_the_pool_when_a_graph_is_replayed(tape: Tape) -> None:
    """A forward's temporaries, and those of another shape's graphs, lie where gradients lay."""
    held, twin = pair()
    for count in (3, 2, 3):
        x = torch.randn(count, 8)
        equal(stepped(held, x), stepped(twin, x))
        grads = [p.grad for p in held.parameters()]
        held(torch.randn(2, 8)), held(torch.randn(3, 8))
        memory = {at for entry in held._steps.entries.values() for at in entry.memory._addresses}
        assert memory.isdisjoint(p.grad.data_ptr() for p in held.parameters())
        assert all(p.grad is grad for p, grad in zip(held.parameters(), grads, strict=True))
    loss = held(torch.randn(3, 8)).sum()
    kept = held.model.first.weight.grad  # its own memory by now
    held.zero_grad()
    loss.backward()
    assert kept is not None


def test_a_view_of_a_grad_follows_it(tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    """A grad moved out of the graph and left its views there: writes to them were lost."""
    held, twin = pair()
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    for each in (held, twin):
        each(x).sum().backward()
        view = getattr(each, "model", each).first.weight.grad.view(-1)
        each(y).square().sum().backward()
        view.mul_(0.5)
        del view
    equal([p.grad for p in held.parameters()], [p.grad for p in twin.parameters()])
    (line,) = said(caplog)
    assert "still held" in line
    held(x)  # the view has gone
    assert tape.replays == 3 and len(said(caplog)) == 1


def test_a_grad_moves_on_the_stream_of_its_backward(tape: Tape) -> None:
    held, _ = pair()
    tape.stream = "second"
    held(torch.randn(3, 8)).sum().backward()
    tape.stream = "third"
    held(torch.randn(3, 8))
    assert tape.moves == ["second"] and tape.stream == "third"


def test_another_threads_forward_during_a_backward(tape: Tape) -> None:
    """It replayed the graph over what the backward was about to read."""
    held, twin = pair()
    agree(held, twin)
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    loss, order, found = held(x).square().sum(), tape.order, []

    def interrupted(device: torch.device) -> Any:
        tape.order = order  # type: ignore[method-assign]
        thread = threading.Thread(target=lambda: found.append(held(y)))
        thread.start()
        thread.join()
        return order(device)

    tape.order = interrupted  # type: ignore[method-assign]
    loss.backward()
    twin(x).square().sum().backward()
    equal([p.grad for p in held.parameters()], [p.grad for p in twin.parameters()])
    equal(found, [twin(y)])


def test_two_forwards_before_a_backward(tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    held, twin = pair()
    agree(held, twin)
    x, y = torch.randn(3, 8), torch.randn(2, 8)
    for each in (held, twin):
        loss = each(x).sum() + each(y).square().sum()
        loss.backward()
    equal([p.grad for p in held.parameters()], [p.grad for p in twin.parameters()])
    (line,) = said(caplog)
    assert "another forward comes before the backward" in line
    held.zero_grad(), twin.zero_grad()
    agree(held, twin)
    held(x)  # its backward never comes, and its output is gone
    agree(held, twin)
    assert tape.captures == 1


def test_a_second_backward(tape: Tape) -> None:
    held, _ = pair()
    loss = held(torch.randn(3, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        x = torch.randn(3, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(held(x).square().sum(), x, create_graph=True)
        grad.sum().backward()


def test_a_parameter_that_changes_before_the_backward(tape: Tape) -> None:
    """PyTorch refuses it too, where the parameter is saved for the backward."""
    for name, fits in (("second.weight", False), ("second.bias", True)):
        for held in pair():
            loss = held(torch.randn(3, 8)).sum()
            with torch.no_grad():
                getattr(held, "model", held).get_parameter(name).mul_(2)
            if fits:
                loss.backward()
            else:
                with pytest.raises(RuntimeError, match="modified"):
                    loss.backward()


@pytest.mark.parametrize("name", ["first.weight", "count"])
def test_a_tensor_that_moves_before_the_backward(tape: Tape, name: str) -> None:
    """The backward would read memory that may be somebody else's by then."""
    held, twin = pair()
    for net in (held.model, twin):
        net.register_buffer("count", torch.ones(8))
    agree(held, twin)
    loss = held(torch.randn(3, 8)).sum()
    tensor = dict(chain(held.model.named_parameters(), held.model.named_buffers()))[name]
    tensor.data = tensor.data.clone()
    with pytest.raises(RuntimeError, match="other memory"):
        loss.backward()
    agree(held, twin)  # though the loss is alive
    assert tape.captures == 2 and loss.isfinite()


def test_an_attribute_that_wants_a_gradient_later(tape: Tape) -> None:
    held, twin = pair()
    for net in (held.model, twin):
        net.gain = torch.ones(8)
    agree(held, twin)
    for net in (held.model, twin):
        net.gain.requires_grad_()
    agree(held, twin)
    equal(held.model.gain.grad, twin.gain.grad)


def test_clear_frees_the_gradients(tape: Tape) -> None:
    held, _ = pair()
    held(torch.randn(3, 8)).sum().backward()
    (entry,) = held._steps.entries.values()
    memory = weakref.ref(entry.memory)
    del entry
    held.clear()
    gc.collect()
    assert memory() is None and all(p.grad is not None for p in held.parameters())


def test_a_buffer_whose_elements_share_memory(tape: Tape) -> None:
    held, twin = pair()
    for net in (held.model, twin):
        del net.gain
        net.register_buffer("gain", torch.ones(1).expand(8))
        net.register_buffer("nothing", torch.ones(0))
    agree(held, twin)
    assert tape.captures == 1


def test_a_result_that_the_loss_is_not_made_of(tape: Tape) -> None:
    """Its parameters had gradients of zeros, which an optimizer decays weights with."""

    class Heads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            return {"loss": self.second(hidden), "more": self.other(hidden)}

    model, called = Heads(), []
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    for names in (("loss",), ("loss", "more"), ("more",)):
        x = torch.randn(3, 8)
        for each in (held, twin):
            out = each(x)
            sum((out[name].square().sum() for name in names), torch.zeros(())).backward()
        equal([p.grad for p in held.parameters()], [p.grad for p in twin.parameters()])
        absent = sum(p.grad is None for p in held.parameters())
        assert absent == (0 if len(names) > 1 else 2)
        held.zero_grad(), twin.zero_grad()
    model.other.weight.register_hook(called.append)
    held(torch.randn(3, 8))["loss"].sum().backward()
    equal(called, [torch.zeros(2, 8)])
    assert tape.captures == 1 and tape.replays == 8


def test_an_argument_given_twice_has_one_gradient(tape: Tape) -> None:
    held, grads = elsa.graphed(Does(lambda x, y: x * 2 + y * 3)), []
    for call in (held, held.model):
        x = torch.ones(2, requires_grad=True)
        call(x, x).sum().backward()
        grads.append(x.grad)
    equal(grads[0], grads[1])


def test_first_call_leaves_statistics_and_random_numbers_as_one_call(tape: Tape) -> None:
    model = scripts.convolutions(0.5).train()
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    x = torch.randn(2, 3, 32, 32)
    for each in (held, twin):
        torch.manual_seed(3)
        each(x)
    equal(held.state_dict(), twin.state_dict())
    torch.manual_seed(4)
    first, second = held(x).detach(), held(x).detach()
    assert not torch.equal(first, second)


class Global(nn.Module):
    outside = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * Global.outside


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weights = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weights[0], self.first.bias)


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = getattr(self, "seen", 0) + 1
        return super().forward(x)


class Checkpointed(nn.Linear):
    reentrant = False

    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Hosted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        import random

        return super().forward(x) * (0.0 if random.random() < 0.0 else 1.0)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "wants a gradient and is no parameter": lambda: nn.Sequential(nn.Linear(8, 8), Global()),
    "is no parameter": Listed,
    "changes what the model holds": lambda: Counting(8, 8),
    "checkpointing": lambda: Checkpointed(8, 8),
    "reentrant": lambda: nn.Sequential(nn.Linear(8, 8), Reentrant(8, 8)),
    "writes to a tensor": lambda: Clamped(8, 8),
    "none of its results has a gradient": lambda: Detached(8, 8),
    "random numbers on the host": lambda: Hosted(8, 8),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_graph_may_hold(tape: Tape, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    model = REFUSED[reason]()
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(3, 8, requires_grad=True)
        if isinstance(model, Detached):
            equal(held(x), twin(x))
            continue
        agree(held, twin)
    assert tape.replays == held.captures == 0
    (line,) = said(caplog)
    assert reason in line


def test_settings_of_autograd(tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    held, twin = pair()
    with torch.autograd.detect_anomaly(check_nan=False):
        agree(held, twin)
    with torch.autograd.graph.save_on_cpu():
        agree(held, twin)
    assert held.captures == 0 and len(said(caplog)) == 2
    agree(held, twin)
    assert held.captures == 1


def test_parallel_wrappers_are_refused() -> None:
    class DistributedDataParallel(nn.Module):
        pass

    class FSDPModule(nn.Linear):
        pass

    with pytest.raises(ArgumentError, match="graphed model into DistributedDataParallel"):
        elsa.graphed(DistributedDataParallel())
    with pytest.raises(ArgumentError, match="FSDP"):
        elsa.graphed(nn.Sequential(FSDPModule(2, 2)))


def test_training_and_inference_take_turns(tape: Tape) -> None:
    model = scripts.convolutions(0.0)
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    x = torch.randn(2, 3, 32, 32)
    for _ in range(4):
        held.train(), twin.train()
        equal(stepped(held, x), stepped(twin, x))
        held.eval(), twin.eval()
        with torch.inference_mode():
            equal(held(x), twin(x))
    assert tape.captures == 2
    memory = [p.grad.data_ptr() for p in held.parameters() if p.grad is not None]
    held.clear()
    gc.collect()
    assert memory and held.captures == 0
    equal([p.grad for p in held.parameters()], [p.grad for p in twin.parameters()])
