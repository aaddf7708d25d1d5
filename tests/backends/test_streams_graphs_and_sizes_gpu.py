"""On a GPU launches share nothing across streams and graphs, wait for nothing, follow lengths that
change in a recorded graph, and reach elements beyond 32 bits."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa

pytestmark = pytest.mark.gpu
F32, F16 = torch.float32, torch.float16


def make(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)


def step(call: Callable[..., Tensor], tensors: list[Tensor], trains: bool) -> list[Tensor]:
    """The output, and where it trains the gradients of the first three."""
    if not trains:
        with torch.no_grad():
            return [call(*tensors)]
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out = call(*leaves, *tensors[3:])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def attention(dtype: torch.dtype) -> Any:
    from elsa_core.backends.triton import attention_forward
    from elsa_core.backends.triton.attention.backward import attention_backward

    def call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        out, lse = attention_forward(q, k, v, None, False, 0.125, "strict")
        terms = (torch.zeros_like(lse), q, k, v, None, out, lse, False, 0.125, "strict")
        return [out, lse, *attention_backward(grad, *terms, (True, True, True, False))[:3]]

    return call, lambda seed: [make(2, 4, 197 + 60 * seed * (i == 0 or i == 3), 64, dtype=dtype,
                                    seed=4 * seed + i) for i in range(4)]  # fmt: skip


def packed(dtype: torch.dtype, decode: bool = False, entmax: bool = False) -> Any:
    keys = [1 + 577 * i for i in range(33)] if decode else [256, 1, 0, 1000, 63, 577]
    queries = [1] * 33 if decode else keys
    function = elsa.entmax_varlen_attention if entmax else elsa.varlen_attention
    bounds = ends(queries), ends(keys)  # from the host: not within a capture

    def call(*tensors: Tensor) -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return function(q, k, v, *bounds, max(queries), max(keys), backend="triton")  # type: ignore[return-value]

        return step(attend, list(tensors), entmax)

    def given(seed: int) -> list[Tensor]:
        sizes = (sum(queries), sum(keys), sum(keys))
        return [make(n, 4, 64, dtype=dtype, seed=3 * seed + i) for i, n in enumerate(sizes)]

    return call, given


def windows() -> Any:
    def call(qkv: Tensor, bias: Tensor) -> list[Tensor]:
        return [elsa.window_attention(qkv, bias, num_heads=3, window_size=(7, 7),
                                      shift_size=(3, 3), backend="triton")]  # fmt: skip

    return call, lambda seed: [make(2, 28, 28, 288, seed=seed), make(3, 49, 49, seed=9)]


def layer() -> Any:
    def call(x: Tensor, w: Tensor) -> list[Tensor]:
        return [elsa.linear(x, w, backend="triton")]

    return call, lambda seed: [make(1576, 768, seed=seed), make(2304, 768, seed=9)]


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: attention(F32), "attention, half": lambda: attention(F16),
    "packed": lambda: packed(F32), "decode": lambda: packed(F32, decode=True),
    "decode, half": lambda: packed(F16, decode=True),
    "packed entmax": lambda: packed(F32, entmax=True), "windows": windows, "linear": layer,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_random_delays_change_no_bit(name: str) -> None:
    """Two streams at once, each held up for a random time ahead of its inputs and of its calls: a
    launch that waits for the wrong one, or memory that two calls share, would show."""
    call, given = CALLS[name]()
    draw, sides = random.Random(0), [torch.cuda.Stream(), torch.cuda.Stream()]
    cases = [given(seed) for seed in range(2)]
    expected = [[t.clone() for t in call(*case)] for case in cases]
    torch.cuda.synchronize()
    for _ in range(30):
        found: list[list[Any]] = [[], []]
        for lane in (0, 1, 0, 1):
            with torch.cuda.stream(sides[lane]):
                torch.cuda._sleep(draw.randrange(400_000))
                late = [t.clone() for t in cases[lane]]
                torch.full((1 << 20,), math.nan, device="cuda")
                torch.cuda._sleep(draw.randrange(100_000))
                found[lane].append(call(*late))
                late[0].zero_()  # behind the call, which has read it
        torch.cuda.synchronize()
        for lane, calls in enumerate(found):
            for each in calls:
                assert all(map(torch.equal, each, expected[lane]))


@pytest.mark.parametrize("name", [name for name in CALLS if "entmax" not in name])
def test_graphs_and_eager_calls_at_once(name: str) -> None:
    """Launches that may run at once share no memory; a graph follows what its inputs hold."""
    call, given = CALLS[name]()
    cases = [given(seed % 2) for seed in range(4)]
    expected = [[t.clone() for t in call(*case)] for case in cases]
    graphs, outs = [], []
    for case in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(call(*case))
        graphs.append(graph)
    lanes = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, lane in zip(graphs, lanes, strict=True):
            with torch.cuda.stream(lane):
                graph.replay()
        eager = []
        for case, lane in zip(cases, reversed(lanes), strict=True):
            with torch.cuda.stream(lane):
                eager.append(call(*case))
        torch.cuda.synchronize()
        for found in (outs, eager):
            for mine, right in zip(found, expected, strict=True):
                assert all(map(torch.equal, mine, right))


PACKED = {
    "varlen": (elsa.varlen_attention, {}),
    "entmax": (elsa.entmax_varlen_attention, {"alpha": 1.5}),
}


@pytest.mark.parametrize("name", PACKED)
def test_nothing_waits_for_the_device(name: str) -> None:
    """Where the longest lengths are given; of entmax, gradients included, also where not."""
    function, terms = PACKED[name]
    given = [make(1897, 4, 64, seed=i) for i in range(3)]
    starts = ends([256, 1, 0, 1000, 63, 577])
    trains = name == "entmax"

    def call(*tensors: Tensor) -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = function(q, k, v, starts, max_seqlen_q=1000, max_seqlen_k=1000,
                                   backend="triton", **terms)  # fmt: skip
            return out

        return step(attend, list(tensors), trains)

    call(*given)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", PACKED)
def test_new_lengths_in_a_recorded_graph(name: str) -> None:
    """They are data: a graph that was recorded with others serves these."""
    function, terms = PACKED[name]
    q, k, v = (make(1897, 4, 64, dtype=F16, seed=i) for i in range(3))
    static = ends([256, 1, 0, 1000, 63, 577])

    def attend(starts: Tensor) -> list[Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            out: Tensor = function(*tensors, starts, max_seqlen_q=1000, is_causal=True,
                                   backend="triton", **terms)  # fmt: skip
            return out

        return step(call, [q, k, v], name == "entmax")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(static)
    others = ends([1000, 0, 600, 200, 1, 96])
    static.copy_(others)
    graph.replay()
    assert all(map(torch.equal, found, attend(others)))


def test_a_captured_step_drops_anew_in_each_replay() -> None:
    x = make(2, 4, 197, 64, dtype=F16).requires_grad_()
    for _ in range(2):
        elsa.attention(x, x, x, dropout_p=0.2, backend="eager").sum().backward()
    torch.cuda.synchronize()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = elsa.attention(x, x, x, dropout_p=0.2, backend="eager")
        out.sum().backward()
    outs = []
    for _ in range(2):
        graph.replay()
        outs.append((out.detach().clone(), x.grad.clone()))
    assert not torch.equal(outs[0][0], outs[1][0]) and not torch.equal(outs[0][1], outs[1][1])


def test_no_size_recompiles() -> None:
    from elsa_core.backends.triton.attention.forward import forward
    from elsa_core.backends.triton.window.forward_kernels import window_tile

    def count() -> int:
        kernels = (forward, window_tile)
        return sum(len(c[0]) for each in kernels for c in each.device_caches.values())

    def call(n: int) -> None:
        q = make(1, 4, n, 64, dtype=F16)
        elsa.attention(q, q, q, backend="triton")
        qkv = make(1, 7 * (n - 595), 56, 288, dtype=F16)
        elsa.window_attention(qkv, num_heads=3, window_size=(7, 7), backend="triton")

    with torch.no_grad():
        call(600)
        call(608)
        before = count()
        for n in range(601, 620):
            call(n)
    assert count() - before <= 2


def test_attention_of_more_than_2_to_31_elements() -> None:
    n = (1 << 25) + 77
    k = torch.randn(1, 1, n, 64, device="cuda", dtype=F16)
    q = torch.randn(1, 1, 3, 64, device="cuda", dtype=F16)
    for rows in (3, 1):
        out, lse = elsa.attention(q[:, :, :rows], k, k, backend="triton", return_lse=True)
        logs, parts = [], []
        for part in k.split(1 << 22, 2):
            scores = q[:, :, :rows].double() @ part.double().mT / 8
            logs.append(scores.logsumexp(-1))
            parts.append(scores.softmax(-1) @ part.double())
        right = (torch.stack(logs).softmax(0)[..., None] * torch.stack(parts)).sum(0)
        assert (lse - torch.stack(logs).logsumexp(0)).abs().max() < 1e-4
        assert (out.double() - right).abs().max() < 5e-4


def test_windows_of_more_than_2_to_31_elements() -> None:
    """The batch, and one image, hold more elements than 32 bits count."""
    for batch, side in ((60, 1024), (1, 4992)):
        qkv = torch.randn((batch, side, side, 96), device="cuda", dtype=F16)
        assert qkv.numel() > 1 << 31
        with torch.no_grad():
            out, last = (
                elsa.window_attention(t, num_heads=1, window_size=(8, 8), backend="triton")
                for t in (qkv, qkv[-1:, -16:, -16:].contiguous())
            )
        torch.testing.assert_close(out[-1:, -16:, -16:], last, rtol=1e-3, atol=1e-4)
        del out, qkv


def test_rows_of_linear_beyond_32_bits() -> None:
    x, w = make(64, 96).repeat(500_000, 1), make(96, 96)  # 3.07e9 numbers
    with torch.no_grad():
        out = elsa.linear(x, w, backend="triton")
    assert torch.equal(out[-64:], out[:64])


def test_states_of_parts_of_the_keys_merge_without_a_loss() -> None:
    """Merged by an lse in float64, parts are as exact as all keys at once."""
    from elsa_core.distributed import shards

    q, k, v = (make(1, 2, n, 64, seed=n) for n in (300, 262144, 262144))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    rows = shards.Rows(q, None, 0, is_causal=False, scale=1 / 8, precision="strict", backend="auto")
    cuts = [(i, min(i + 100_003, 262144)) for i in range(0, 262144, 100_003)]
    total = None
    for i, j in cuts:
        total = shards.state(rows, shards.Run(i, j, k[:, :, i:j], v[:, :, i:j]), total)
    assert total is not None and total.m.dtype == torch.float64
    out, _ = shards.finished(total, rows, 64)
    whole = elsa.attention(q, k, v, backend="triton")
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (out, whole)]
    assert errors[0] <= 1.1 * errors[1] + 2 * torch.finfo(F32).eps, errors
