"""`graphed` on a real GPU: replays agree with eager calls, and follow what changes."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from processes import at_once
from torch import Tensor, nn

import elsa_core as elsa

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def mlp(width: int = 256) -> nn.Module:
    with torch.inference_mode(False):
        layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)]
        return nn.Sequential(*layers).cuda().eval()


def vit(name: str = "vit_tiny_patch16_224", **given: Any) -> nn.Module:
    with torch.inference_mode(False):
        return timm.create_model(name, **{"depth": 3, **given}).cuda().eval()


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 256)), device="cuda")


def images(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype)


def agree(held: Any, model: nn.Module, *args: Any, tolerance: float = 1e-5) -> Tensor:
    expected, found = model(*args), held(*args)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(held(*args), found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_patched_model(name: str, dtype: torch.dtype) -> None:
    """By the rule of the project: no further from float64 than twice the eager model."""
    depth = {"depth": 3} if "vit" in name else {"depth": None}
    with torch.inference_mode(False):
        model = timm.create_model(name, **{k: v for k, v in depth.items() if v}).cuda().eval()
    exact = [(x, model.double()(x.double())) for x in (images(1), images(3))]
    model.to(dtype)
    eager = [(model(x.to(dtype)).double() - y).norm() for x, y in exact]
    elsa.patch(model)
    held = elsa.graphed(model)
    for _ in range(3):
        for (x, y), theirs in zip(exact, eager, strict=True):
            ours = (held(x.to(dtype)).double() - y).norm()
            assert ours <= 2 * theirs + torch.finfo(dtype).eps * y.norm()
    assert held.captures == 2


def test_writes_are_followed_and_replaced_tensors_captured_anew() -> None:
    model = mlp()
    held = elsa.graphed(model)
    x = rows()
    first = agree(held, model, x)
    entry = next(iter(held._graphs.entries.values()))
    model[0].weight.data.mul_(1.5)
    second = agree(held, model, x)
    assert not torch.equal(first, second)
    assert next(iter(held._graphs.entries.values())) is entry
    model[0].weight.data = torch.randn_like(model[0].weight)
    torch.cuda.empty_cache()
    third = agree(held, model, x)
    assert not torch.equal(second, third)
    with torch.inference_mode(False):
        model[3].weight = nn.Parameter(torch.randn(256, 256, device="cuda"))
    agree(held, model, x)
    with torch.inference_mode(False):
        model.half()
    agree(held, model, x.half(), tolerance=2e-2)
    assert next(iter(held._graphs.entries.values())) is not entry


def test_autocast() -> None:
    model = mlp()
    held = elsa.graphed(model)
    x = rows()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            agree(held, model, x, tolerance=2e-2)
    model[0].weight.data.mul_(-1)
    with torch.autocast("cuda", dtype=torch.float16):
        agree(held, model, x, tolerance=2e-2)
    agree(held, model, x)
    assert held.captures == 3


def test_shapes_are_evicted_and_memory_comes_back() -> None:
    model = mlp(1024)
    torch.cuda.synchronize()
    model(rows(8, 1024))
    before = torch.cuda.memory_allocated()
    held = elsa.graphed(model, shapes=2)
    for _ in range(3):
        for count in (1, 2, 2, 1):
            agree(held, model, rows(count, 1024))
    for count in (3, 4, 5):
        agree(held, model, rows(count, 1024))
        assert held.captures == 2
    agree(held, model, rows(1, 1024))
    held.clear()
    torch.cuda.empty_cache()
    # cuBLAS keeps its workspace of a stream
    assert torch.cuda.memory_allocated() - before < 64 * 2**20
    agree(held, model, rows(1, 1024))


def test_workspaces_that_others_free() -> None:
    """As torch.compile's own graphs do: a replay must not work in memory that is another's."""
    model = mlp(512)
    held = elsa.graphed(model)
    x = rows(4, 512)
    expected = agree(held, model, x)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**22,), 7.0, device="cuda") for _ in range(16)]
    for _ in range(3):
        assert torch.equal(held(x), expected)
    torch.cuda.synchronize()
    assert all(bool((other == 7.0).all()) for other in others)


def test_streams_and_threads() -> None:
    model = mlp()
    held = elsa.graphed(model, shapes=3)

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.inference_mode(), torch.cuda.stream(stream):
            for i in range(40):
                x = torch.randn(1 + (seed + i) % 3, 256, device="cuda", generator=generator)
                assert torch.allclose(held(x), model(x), rtol=1e-5, atol=1e-5)

    at_once(work, range(4))
    assert held.captures == 3


def test_another_thread_may_allocate_during_a_capture() -> None:
    model = vit()
    held = elsa.graphed(model)
    stop, wrong = threading.Event(), list[Exception]()

    def allocate() -> None:
        try:
            held_on: list[Tensor] = []
            while not stop.is_set():
                size = 2**22 + 4096 * len(held_on)
                held_on = [*held_on[-64:], torch.ones(size, device="cuda")]
                held_on[-1].sum().item()
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for batch in (1, 2, 3):
            agree(held, model, images(batch))
    finally:
        stop.set()
        thread.join()
    assert not wrong, wrong
    assert held.captures == 3


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


class Uploads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(256.0).to(x.device, non_blocking=True)


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, True)


@pytest.mark.parametrize("kind", [Looks, Uploads, Drops])
def test_what_no_graph_holds(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(mlp(), kind()).eval()
    held = elsa.graphed(model)
    for x in (rows(), -rows(), rows()):
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        if kind is Drops:
            held(x)  # the first call may draw more
            torch.manual_seed(1)
        assert torch.equal(held(x), expected)
    assert held.captures == 0
    assert sum("graphed" in line for line in caplog.messages) == 1
    torch.rand(4, device="cuda")  # random numbers are as they were
    agree(elsa.graphed(model[0]), model[0], rows())
