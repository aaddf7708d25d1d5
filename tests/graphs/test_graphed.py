"""`graphed` over a tape: replays run no Python, and nothing that they would miss is missed."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from processes import at_once
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core.errors import ArgumentError

from .tape import Tape


class Net(nn.Module):
    """A little of everything that a forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.randn(8))
        self.scale, self.cache, self.steps = 0.5, {"table": torch.randn(8)}, [torch.randn(8)]
        self.forwards = 0

    def forward(self, x: Tensor, gain: float = 1.0, other: Tensor | None = None) -> Any:
        self.__dict__["seen"] = tuple(x.shape)
        hidden = self.norm(self.first(x).relu() * self.scale) + self.cache["table"] + self.steps[0]
        out = self.second(hidden) * gain + self.shift
        return out if other is None else {"sum": out + other, "product": (out * other, gain)}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        return Net().eval()


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 8)))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "elsa"]


def agree(held: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    expected, found = model(*args, **kwargs), held(*args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_call_is_captured_once_and_replayed_for_other_values(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net)
    assert not held.training  # as the model is
    kept = []
    for _ in range(4):
        x = inputs()
        agree(held, net, x)
        kept.append((held(x), net(x)))
    assert tape.captures == held.captures == 1
    assert tape.replays == 8
    assert all(torch.equal(mine, theirs) for mine, theirs in kept)  # copies, not the graph's memory


def test_results_without_a_copy_are_the_graphs_memory(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net, copy_outputs=False)
    first = held(inputs())
    x = inputs()
    assert held(x) is first
    assert torch.equal(first, net(x))


def test_arguments_of_other_layouts_and_values_are_other_graphs(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net)
    views = (inputs(3, 16)[:, ::2], inputs(1, 8).expand(3, 8), inputs(8, 3).t(), inputs())
    for count, view in enumerate(views, start=1):
        agree(held, net, view)
        assert tape.captures == count
    held.clear()
    tape.captures = 0
    x, other = inputs(), inputs()
    agree(held, net, x, 2.0, other=other)
    agree(held, net, inputs(), 2.0, other=inputs())
    assert tape.captures == 1
    agree(held, net, x, 3.0, other=other)  # another number is another graph
    agree(held, net, x, gain=3.0, other=other)
    assert tape.captures == 3
    agree(held, net, x, 0.0)
    assert torch.equal(held(x, -0.0).signbit(), net(x, -0.0).signbit())
    assert tape.captures == 5


def test_an_argument_given_twice_is_not_two(tape: Tape) -> None:
    model = Does(lambda a, b: a + b if a is b else a - b).eval()
    held = elsa.graphed(model)
    x, y = inputs(), inputs()
    for given in ((x, x), (x, y), (y, y), (y, x)):
        agree(held, model, *given)
    assert tape.captures == 2


CHANGES: dict[str, Callable[[Net], object]] = {
    "data": lambda net: setattr(net.first.weight, "data", torch.randn(8, 8)),
    "parameter": lambda net: setattr(net.first, "weight", nn.Parameter(torch.randn(8, 8))),
    "transposed": lambda net: setattr(net.first.weight, "data", net.first.weight.data.t()),
    "buffer": lambda net: setattr(net, "shift", torch.randn(8)),
    "no bias": lambda net: setattr(net.first, "bias", None),
    "attribute": lambda net: setattr(net, "scale", 0.25),
    "cached": lambda net: net.cache.update(table=torch.randn(8)),
    "listed": lambda net: net.steps.__setitem__(0, torch.randn(8)),
    "module": lambda net: setattr(net, "second", nn.Linear(8, 8).eval()),
    "class": lambda net: setattr(net.first, "__class__", Doubled),
    "forward": lambda net: setattr(net.norm, "forward", lambda x: x),
    "assigned": lambda net: net.load_state_dict(Net().state_dict(), assign=True),
    "attribute of a part": lambda net: setattr(net.norm, "eps", 0.5),
    "parametrised": lambda net: net.second.register_parameter("bias", nn.Parameter(torch.randn(8))),
}


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_a_replay_would_miss_is_captured_anew(
    tape: Tape, net: Net, name: str
) -> None:
    held = elsa.graphed(net)
    x = inputs()
    agree(held, net, x)
    before = net(x)
    with torch.inference_mode(False):
        CHANGES[name](net)
    agree(held, net, x)
    assert not torch.equal(before, net(x))
    assert tape.captures == 2
    agree(held, net, inputs())
    assert tape.captures == 2


def test_writes_to_the_weights_are_followed_without_a_capture(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net)
    x = inputs()
    agree(held, net, x)
    net.first.weight.data.mul_(2)
    agree(held, net, x)
    net.load_state_dict(Net().state_dict())
    agree(held, net, x)
    net.steps[0].zero_()
    agree(held, net, x)
    assert tape.captures == 1


def test_a_hook_is_called(tape: Tape, net: Net, caplog: pytest.LogCaptureFixture) -> None:
    held = elsa.graphed(net)
    x = inputs()
    agree(held, net, x)
    seen: list[Tensor] = []
    handle = net.norm.register_forward_hook(lambda _, __, out: seen.append(out))
    agree(held, net, x)
    held(x)
    assert len(seen) == 3 and tape.captures == 1
    handle.remove()
    agree(held, net, x)
    assert tape.captures == 2
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        agree(held, net, inputs(2, 8))
    assert tape.captures == 2
    assert sum("hooks" in line for line in caplog.messages) == 2


@pytest.mark.parametrize("scope", ["attention", "model"])
def test_patch_and_unpatch_after_a_capture(tape: Tape, scope: str) -> None:
    with torch.inference_mode(False):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    held = elsa.graphed(model)
    x = inputs(2, 3, 32, 32)
    for change in (
        lambda: None,
        lambda: elsa.patch(model, scope=scope),
        lambda: elsa.patch(model, scope=scope, precision="ieee"),
        lambda: elsa.unpatch(model),
        lambda: None,
    ):
        change()
        # a tape holds PyTorch's linear layers, as every recorder on a CPU
        torch.testing.assert_close(held(x), model(x))
    assert tape.captures == 4


def test_shapes_dtypes_and_settings_have_graphs_of_their_own(tape: Tape) -> None:
    with torch.inference_mode(False):
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    held = elsa.graphed(net)
    for count, x in enumerate((inputs(1, 8), inputs(2, 8), inputs(2, 1, 8)), start=1):
        agree(held, net, x)
        assert tape.captures == count
    x = inputs(2, 8)
    full = held(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(held, net, x)
        assert not torch.equal(held(x), full)
    assert tape.captures == 4
    with torch.autocast("cpu", dtype=torch.float16):
        agree(held, net, x)
    torch.use_deterministic_algorithms(True)
    agree(held, net, x)
    torch.use_deterministic_algorithms(False)
    assert tape.captures == 6
    with torch.inference_mode(False), torch.no_grad():
        found = held(x.clone())
        assert not found.is_inference()
    assert tape.captures == held.captures == 7
    agree(held, net, x)
    assert tape.captures == 7


def test_autocast_does_not_read_casts_that_end_with_its_context(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net)
    x = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)  # autocast keeps the casts of the weights from here on
        held(x)
    net.first.weight.data.mul_(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(held, net, x)
    assert tape.captures == 1


def test_the_shapes_used_last_are_kept(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net, shapes=2)
    a, b, c = inputs(1, 8), inputs(2, 8), inputs(3, 8)
    for x in (a, b, a, c):  # b goes
        agree(held, net, x)
    assert (tape.captures, held.captures) == (3, 2)
    agree(held, net, a)
    assert tape.captures == 3
    agree(held, net, b)
    assert (tape.captures, held.captures) == (4, 2)
    held.clear()
    assert held.captures == 0
    agree(held, net, b)
    assert tape.captures == 5 and tape.pools == 2


def test_shapes_that_take_turns_are_not_captured_for_ever(
    tape: Tape, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    held = elsa.graphed(net, shapes=1)
    for _ in range(12):
        agree(held, net, inputs(1, 8))
        agree(held, net, inputs(2, 8))
    assert tape.captures <= 10
    assert len([line for line in caplog.messages if "take turns" in line]) == 1
    assert "shapes=1" in caplog.messages[-1]


def test_sizes_that_never_come_again_are_not_captured_for_ever(
    tape: Tape, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was captured at its only call, which takes as long as five."""
    held = elsa.graphed(net, shapes=2)
    for count in range(1, 41):
        agree(held, net, inputs(count, 8))
    assert tape.captures == 10 and held.captures == 2
    (line,) = said(caplog)
    assert "sizes or numbers are new" in line
    for _ in range(6):  # but for one that comes again
        agree(held, net, inputs(50, 8))
    assert tape.captures == 11
    for count in (51, 51, 52, 52):  # and one graph that was of use lets new ones be made at once
        held(inputs(count, 8))
    held.clear()
    held(inputs(99, 8))
    assert held.captures == 1


def test_gradients_that_are_wanted_have_graphs_of_their_own(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net)
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.randn(3, 8)
        assert held(x).requires_grad
        assert tape.captures == 1
        net.requires_grad_(False)
        agree(held, net, x)
        assert tape.captures == 2
        x.requires_grad_()
        assert held(x).requires_grad
        assert tape.captures == 3
        net.train()
        with torch.no_grad():
            assert not held(x).requires_grad
        assert tape.captures == 3


class Does(nn.Module):
    """Its forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


GLOBAL = torch.randn(8)


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.ones(8)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.holder.tensor


class Generated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(8, generator=self.generator)


REFUSED = {
    "random numbers": lambda: Does(lambda x: x + nn.functional.dropout(x, 0.5, True)),
    "writes to a tensor": Counting, "a tensor that is no": lambda: Does(lambda x: x + GLOBAL),
    "no attribute of its modules": Hidden, "returns a Holder": lambda: Does(lambda x: Holder()),
    "generator": Generated, "writes to": lambda: Does(lambda x: x.mul_(2)),  # its argument
    "a tensor on another device": lambda: Does(lambda x: (x * 2, torch.empty(2, device="meta"))),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_graph_may_hold_is_the_models_own_call(
    tape: Tape, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode(False):
        model = REFUSED[reason]().eval()
    held = elsa.graphed(model)
    x = inputs()
    results = [held(x) for _ in range(3)]
    assert tape.replays == held.captures == 0
    assert len(caplog.messages) == 1 and reason in caplog.messages[0], caplog.messages
    if reason == "random numbers":
        assert not torch.equal(results[0], results[1])
    if reason == "writes to":
        assert all(result is x for result in results)
    if reason == "writes to a tensor":  # the runs before them are undone
        assert [float(r[0, 0] / x[0, 0]) for r in results] == pytest.approx([1, 2, 3])


class Making(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made = x * 2
        made.add_(1)  # before it makes anything else
        return made * torch.tensor(3.0)


def test_what_a_call_makes_it_may_write_and_read(tape: Tape) -> None:
    model = Making().eval()
    held = elsa.graphed(model)
    for _ in range(3):
        agree(held, model, inputs())
    assert tape.captures == held.captures == 1


def test_a_capture_that_fails(tape: Tape, net: Net, caplog: pytest.LogCaptureFixture) -> None:
    tape.error = RuntimeError("operation not permitted when stream is capturing\nmore")
    held = elsa.graphed(net)
    x = inputs()
    for _ in range(3):
        agree(held, net, x)
    assert tape.captures == held.captures == 0
    (line,) = caplog.messages
    assert line.endswith("a graph cannot hold it: operation not permitted when stream is capturing")
    tape.error = None
    agree(held, net, x)
    assert tape.captures == 0  # for ever after
    agree(held, net, inputs(1, 8))
    assert tape.captures == 1  # for this kind of call
    held.clear()
    agree(held, net, x)
    assert tape.captures == 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((torch.zeros(3, 8, device="meta"),), "on meta"),
        ((), "no argument is a tensor"),
        ((torch.zeros(3, 8), object()), "an argument is a object"),
        ((torch.zeros(3, 8), 1.0, torch.zeros(3, 8, device="meta")), "on cpu, meta"),
        ((torch.zeros(3, 8).to_sparse(),), "of its own kind"),
    ],
)
def test_other_arguments(
    tape: Tape, given: tuple[Any, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    held = elsa.graphed(Does(lambda *args: len(args)).eval())
    assert held(*given) == held(*given) == len(given)
    assert len(caplog.messages) == 1 and reason in caplog.messages[0]
    assert tape.captures == 0


def test_a_model_elsewhere(tape: Tape, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Identity()
    model.register_buffer("shift", torch.zeros(1, device="meta"))
    held = elsa.graphed(model.eval())
    agree(held, model, inputs())
    assert "shift is on meta and the input on cpu" in caplog.messages[0]
    model.shift = torch.zeros(1)
    agree(held, model, inputs())
    assert tape.captures == 1


def test_without_a_gpu_a_call_is_the_models_own(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    held = elsa.graphed(net)
    with torch.inference_mode():
        agree(held, net, inputs())
        agree(held, net, inputs(1, 8))
    (line,) = caplog.messages
    assert "cpu: CUDA graphs need an NVIDIA GPU" in line


def test_nobody_else_is_disturbed(tape: Tape, net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """Within another capture, a compiler, a mode: the model itself, without a word."""
    held = elsa.graphed(net)
    x = inputs()
    tape.capturing = True
    agree(held, net, x)
    tape.capturing = False
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        held(x)
    assert counter.get_total_flops() > 0
    compiled = torch.compile(held, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))
    assert tape.captures == 0 and not said(caplog)
    with torch.device("meta"):
        held(x)
    assert tape.captures == 0 and "TorchFunctionMode" in said(caplog)[0]


def test_what_is_refused(tape: Tape, net: Net) -> None:
    """And the model's own errors are its own."""
    held = elsa.graphed(net)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            held(inputs(3, 7))
    agree(held, net, inputs())
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not str"):
        elsa.graphed("vit")  # type: ignore[arg-type]
    for shapes in (0, -1, True, 2.5):
        with pytest.raises(ArgumentError, match="shapes must be a positive integer"):
            elsa.graphed(net, shapes=shapes)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="graphed model already"):
        elsa.graphed(nn.Sequential(elsa.graphed(net)))
    for other in (torch.compile(net), torch.jit.script(nn.Linear(2, 2))):
        with pytest.raises(ArgumentError, match="eager models"):
            elsa.graphed(other)


def test_it_is_a_module_like_the_model(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net)
    x = inputs()
    agree(held, net, x)
    assert list(held.state_dict()) == list(net.state_dict())
    fresh = Net().state_dict()
    held.load_state_dict(fresh)
    assert torch.equal(net.first.weight, fresh["first.weight"])
    outer = nn.ModuleDict({"inner": held})
    named = outer.state_dict()
    assert set(named) == {f"inner.{name}" for name in net.state_dict()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    outer.load_state_dict(zeros)
    assert not net.first.weight.any()
    assert {id(p) for p in held.parameters()} == {id(p) for p in net.parameters()}
    with torch.inference_mode(False):
        held.double()
    agree(held, net, x.double())
    assert tape.captures == 2


def test_copies_and_pickles_hold_no_graphs(tape: Tape) -> None:
    with torch.inference_mode(False):
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
        held = elsa.graphed(net, shapes=3, copy_outputs=False)
    x = inputs()
    agree(held, net, x)
    with torch.inference_mode(False):
        others = copy.deepcopy(held), pickle.loads(pickle.dumps(held))
    for other in others:
        assert other.captures == 0 and held.captures == 1
        other.model[0].weight.data.mul_(2)
        agree(other, other.model, x)
        assert other(x) is other(x)
    agree(held, net, x)


def test_memory_goes_with_the_model(tape: Tape, net: Net) -> None:
    held = elsa.graphed(net)
    held(inputs())
    (entry,) = held._graphs.entries.values()
    known, waits = weakref.ref(entry), tape.waits
    del entry, held
    gc.collect()
    assert known() is None and tape.waits == waits + 1  # dropped once no replay reads it
    held = elsa.graphed(net)
    old = weakref.ref(net.first.weight)
    held(inputs()), held(inputs(1, 8))
    with torch.inference_mode(False):
        net.first.weight = nn.Parameter(torch.randn(8, 8))
    held(inputs())
    gc.collect()
    assert old() is None  # no graph of another shape keeps the weight that was replaced


def test_a_graph_goes_before_the_one_in_its_place_is_captured(tape: Tape) -> None:
    """Both had memory at once: the call still held the old one."""
    old: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            alive.extend(ref() is not None for ref in old)
            return super().forward(x)

    with torch.inference_mode(False):
        model = Asking(8, 8).eval()
    held = elsa.graphed(model)
    x = torch.randn(2, 8)
    held(x)
    (entry,) = held._graphs.entries.values()
    old.append(weakref.ref(entry))
    del entry
    with torch.inference_mode(False):
        model.weight = nn.Parameter(torch.randn(8, 8))
    held(x)
    assert tape.captures == 2 and alive and not any(alive)


def test_threads(tape: Tape) -> None:
    with torch.inference_mode(False):
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).eval()
    held = elsa.graphed(net, shapes=2)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for i in range(30):
                x = torch.randn(1 + (seed + i) % 2, 8, generator=generator)
                assert torch.equal(held(x), net(x))

    at_once(work, range(4))
    assert tape.captures == 2
