"""`graphed` in training on a real GPU: random loops, mutations of live models, memory, DDP."""

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import elsa_core as elsa

from . import scripts
from .test_graphed import said
from .test_training import CHANGES, Net, stepped

pytestmark = pytest.mark.gpu
State = tuple[list[Tensor], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    torch.manual_seed(0)
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before


def errors(found: State, exact: State) -> dict[str, tuple[float, float]]:
    """(error, norm) of the losses and of the state as one vector each, floats alone."""

    def vector(state: State, names: list[str]) -> dict[str, Tensor]:
        kept = [state[1][name].double().flatten() for name in names]
        return {
            "losses": torch.stack([x.double().cpu() for x in state[0]]),
            "state": torch.cat(kept),
        }

    names = [n for n, x in exact[1].items() if x.is_floating_point() and n in found[1]]
    one, two = vector(found, names), vector(exact, names)
    return {n: (float((one[n] - two[n]).norm()), float(two[n].norm())) for n in one}


def judged(script: scripts.Script, model: nn.Module, patch: bool) -> int:
    """By the rule of `check`: no further from float64 than twice the eager loop; captures."""
    exact = scripts.run(script, copy.deepcopy(model).double(), lambda m: m, "cuda", exact=True)
    eager = scripts.run(script, copy.deepcopy(model), lambda m: m, "cuda")
    held: list[Any] = []

    def wrapped(module: nn.Module) -> Any:
        if patch:
            elsa.patch(module)
        held.append(elsa.graphed(module))
        return held[0]

    found = errors(scripts.run(script, model, wrapped, "cuda"), exact)
    theirs = errors(eager, exact)
    eps = torch.finfo(script.autocast or torch.float32).eps
    print(script, {name: (found[name][0], theirs[name][0], found[name][1]) for name in found})
    for name, (error, norm) in found.items():
        assert error <= 2 * theirs[name][0] + eps * norm, (name, error, theirs[name])
    return int(held[0].captures)


@pytest.mark.parametrize("seed", range(6))
def test_a_random_script(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    script = scripts.Script.of(seed, cuda=True, drop=False)
    assert judged(script, scripts.convolutions(0.0).cuda(), patch=False) >= 1
    assert not said(caplog)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_random_script_of_a_patched_model(
    name: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    script = scripts.Script.of(100 + seed, cuda=True, drop=False)
    size = {"depth": 3, "patch_size": 8} if "vit" in name else {"depths": (2, 2), "window_size": 4}
    model = timm.create_model(name, img_size=scripts.SIZE, num_classes=scripts.CLASSES, **size)
    assert judged(script, model.cuda(), patch=True) >= 1
    assert not said(caplog)


@pytest.mark.parametrize("seed", range(200, 203))
def test_a_random_script_with_dropout(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """The same kernels draw the same masks: an eager loop's results to rounding."""
    script = scripts.Script.of(seed, cuda=True)
    script = scripts.Script(**{**vars(script), "drop": 0.3})
    model = scripts.convolutions(0.3).cuda()
    eager = scripts.run(script, copy.deepcopy(model), lambda m: m, "cuda")
    found = scripts.run(script, model, elsa.graphed, "cuda")
    eps = torch.finfo(script.autocast or torch.float32).eps
    for name, (error, norm) in errors(found, eager).items():
        print(name, error / norm)
        assert error <= 16 * eps * norm, (name, error, norm)
    assert not said(caplog)


def agree(held: Any, model: nn.Module, *shape: int) -> None:
    x = torch.randn(*(shape or (3, 8)), device="cuda")
    torch.testing.assert_close(stepped(held, x), stepped(model, x))
    held.zero_grad()
    model.zero_grad()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_live_model(name: str) -> None:
    model = Net().cuda()
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    agree(held, twin)
    for each in (held.model, twin):
        torch.manual_seed(1)
        with torch.device("cuda"):
            CHANGES[name](each)
    for shape in ((3, 8), (2, 8), (3, 8)):
        agree(held, twin, *shape)
    torch.cuda.empty_cache()
    agree(held, twin)


def test_a_capture_while_an_earlier_loss_is_alive(caplog: pytest.LogCaptureFixture) -> None:
    """Its autograd nodes remember the default stream, which no capture may wait for."""
    model = Net().cuda()
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    eager = model(torch.randn(3, 8, device="cuda")).sum()
    for count in (2, 3, 4, 3):
        loss = held(torch.randn(count, 8, device="cuda")).sum()
        loss.backward()
        held.zero_grad()
    agree(held, twin, 5, 8)
    eager.backward()
    assert held.captures == 4 and not said(caplog)


def test_accumulation_and_gradients_that_somebody_keeps(caplog: pytest.LogCaptureFixture) -> None:
    model = Net().cuda()
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    agree(held, twin)
    for _ in range(3):
        x = torch.randn(3, 8, device="cuda")
        torch.testing.assert_close(stepped(held, x), stepped(twin, x))
    held.zero_grad(), twin.zero_grad()
    assert not said(caplog)
    xs = torch.randn(2, 3, 8, device="cuda")
    found, expected = ([torch.autograd.grad(each(x).sum(), list(each.parameters())) for x in xs]
                       for each in (held, twin))  # fmt: skip
    torch.testing.assert_close(found, expected)
    assert len(said(caplog)) == 1 and "still held" in said(caplog)[0]


def test_dropout_of_a_patched_model() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=2, proj_drop_rate=0.2, attn_drop_rate=0.2, drop_path_rate=0.2,
        num_classes=0,
    ).cuda()  # fmt: skip
    elsa.patch(model)
    held = elsa.graphed(model.train())
    x = torch.randn(4, 3, 224, 224, device="cuda")
    outs = []
    for _ in range(3):
        out = held(x)
        out.square().sum().backward()
        outs.append(out.detach())
    assert held.captures == 1
    spread = [float((outs[i] - outs[j]).norm() / outs[i].norm()) for i, j in ((0, 1), (1, 2))]
    assert min(spread) > 0.05, spread
    torch.manual_seed(5)
    first = held(x).detach()
    torch.manual_seed(5)
    assert torch.equal(held(x).detach(), first)


def test_what_a_capture_refuses_leaves_cuda_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if float(out.sum().detach()) > 0 else -out

    class LooksBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (2.0 if float(grad.sum()) > 0 else 3.0)

    class Back(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return LooksBack.apply(super().forward(x))

    for kind in (Looks, Back):
        model = kind(8, 8).cuda()
        held, twin = elsa.graphed(model), copy.deepcopy(model)
        for _ in range(2):
            agree(held, twin)
        assert held.captures == 0
    torch.rand(4, device="cuda")
    model = Net().cuda()
    agree(elsa.graphed(model), copy.deepcopy(model))
    assert len(said(caplog)) == 2


def test_memory_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    first = elsa.graphed(model)  # makes what is made once in a process
    stepped(first, x)
    first.clear()
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    held = elsa.graphed(model)
    for _ in range(3):
        held(x).square().sum().backward()
        held.zero_grad()
    held.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # cuBLAS keeps its workspace of each stream and thread
    assert torch.cuda.memory_reserved() - before < 160 * 2**20


def test_streams(caplog: pytest.LogCaptureFixture) -> None:
    model = Net().cuda()
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    for i in range(4):
        with torch.cuda.stream(torch.cuda.Stream() if i % 2 else torch.cuda.default_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            agree(held, twin)
        torch.cuda.synchronize()
    assert held.captures == 1


def test_a_grad_moves_on_the_stream_of_its_backward() -> None:
    """A forward on another stream copied it before the backward had written it."""
    model = Net().cuda()
    held, twin = elsa.graphed(model), copy.deepcopy(model)
    agree(held, twin)
    x, y = torch.randn(3, 8, device="cuda"), torch.randn(3, 8, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        loss = held(x).square().sum()
        torch.cuda._sleep(400_000_000)
        loss.backward()
    held(y)
    with torch.cuda.stream(side):
        found = [p.grad.clone() for p in model.parameters()]
    torch.cuda.synchronize()
    twin(x).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in twin.parameters()])


def test_within_distributed_data_parallel(caplog: pytest.LogCaptureFixture) -> None:
    distributed: Any = torch.distributed
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    distributed.init_process_group("nccl", rank=0, world_size=1)
    try:
        parallel: Callable[..., Any] = nn.parallel.DistributedDataParallel
        for view in (False, True):
            model = Net().cuda()
            twin = copy.deepcopy(model)
            held = elsa.graphed(model)
            wrapped = parallel(held, device_ids=[0], gradient_as_bucket_view=view)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
            for _ in range(5):
                x = torch.randn(3, 8, device="cuda")
                for each, optimizer in zip((wrapped, twin), optimizers, strict=True):
                    optimizer.zero_grad(set_to_none=not view)
                    each(x).square().sum().backward()
                    optimizer.step()
                torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
            assert held.captures == 1
        assert not said(caplog)
    finally:
        distributed.destroy_process_group()
