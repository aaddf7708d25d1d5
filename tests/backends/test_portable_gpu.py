"""The portable kernels on a real GPU, by twice the error of PyTorch's own operator."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core import reference
from elsa_core.precision import theorem1_bound

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BAND = 2.5e-7


@pytest.fixture(autouse=True)
def nan_filled() -> Iterator[None]:
    """Fill what the allocator hands out with NaN: an element that is never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def portable(*arguments: object, **named: object) -> tuple[Tensor, Tensor]:
    found = elsa.attention(*arguments, backend="portable", return_lse=True, **named)  # type: ignore[arg-type]
    assert isinstance(found, tuple)
    return found


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False,
    scale: float | None = None,
) -> None:  # fmt: skip
    out, lse = portable(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
    again = portable(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    exact, exact_lse = reference.attention(q, k, v, mask, causal, scale)
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1).contiguous() for t in (k, v))
    full = None if mask is None else mask.expand(*q.shape[:3], k.shape[2]).contiguous()
    peer = F.scaled_dot_product_attention(q.contiguous(), k, v, full, is_causal=causal, scale=scale)
    empty = exact_lse.isneginf()
    theirs = relative(peer.masked_fill(empty[..., None], 0.0), exact)
    assert relative(out, exact) <= 2 * theirs + BAND
    assert not out[empty].any() and torch.equal(lse.isneginf(), empty)
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    factor = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    spread = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * factor
    worst = (lse.double() - exact_lse)[~empty].abs().max()
    assert worst <= torch.finfo(torch.float32).eps * (4 + 4 * spread)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_long_rows(tokens: int, dim: int) -> None:
    """Where the maximum stays from tile to tile: no more than twice PyTorch's error."""
    q, k, v = (make(1, 1, tokens, dim, seed=seed) for seed in range(3))
    exact = reference.attention(q, k, v)[0]
    theirs = relative(F.scaled_dot_product_attention(q, k, v), exact)
    assert relative(portable(q, k, v)[0], exact) <= 2 * theirs
    k = k[:, :, :1].expand_as(k).contiguous()
    v = torch.zeros_like(v)
    v[:, :, : tokens // 2] = 1.0
    assert (portable(q, k, v)[0].double() - 0.5).abs().max() <= theorem1_bound(tokens, 64)


def test_gradients_and_operator() -> None:
    q, k, v = (make(2, 3, 65, 40, seed=seed).requires_grad_() for seed in range(3))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    slope = make(2, 3, 65, 40, seed=5)
    out = elsa.attention(q, k, v, is_causal=True, backend="portable")
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out, (q, k, v), slope)
    peer = torch.autograd.grad(
        F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), slope
    )
    wanted = torch.autograd.grad(
        F.scaled_dot_product_attention(*exact, is_causal=True), exact, slope.double()
    )
    for grad, theirs, true in zip(grads, peer, wanted, strict=True):
        assert relative(grad, true) <= 2 * relative(theirs, true) + 4 * BAND
    torch.library.opcheck(
        torch.ops.elsa.attention_portable.default, (q, k, v, None, True, 0.2, "ieee"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


def test_streams_graphs_threads_and_devices() -> None:
    q = make(2, 3, 197, 64)
    expected = portable(q, q, q)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = portable(q, q, q)[0]
    torch.cuda.synchronize()
    assert torch.equal(on_stream, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = portable(q, q, q)[0]
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(portable(q, q, q)[0]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)
    for device in range(1, torch.cuda.device_count()):
        there = q.to(f"cuda:{device}")
        assert torch.equal(portable(there, there, there)[0].to(q.device), expected)


def test_auto_and_explain() -> None:
    q = make(1, 2, 65, 64)
    route = elsa.explain(q, q, q, precision="ieee", backend="portable")
    assert route.backend == "portable" and "no tensor core" in route.schedule
    assert elsa.explain(q, q, q, precision="ieee").backend != "portable"


def test_measures() -> None:
    """Prints what `python -m benchmarks.portable` says of a shape."""
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.portable", "--match", "8x12x197x64"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["contender"]: row for row in csv.DictReader(done.stdout.splitlines())}
    assert float(rows["portable"]["error"]) < 1e-6
    print({name: row["share_of_cublas"] for name, row in rows.items()})
