"""Streamed attention on a GPU: exact, the same bits, hidden copies, and memory that stays small."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import elsa_core as elsa
from elsa_core.errors import ArgumentError

from .cases import CASES, Case, Place, Terms, assert_exact, differentiated

pytestmark = pytest.mark.gpu
LONGER = {
    name: replace(
        case, head_dim=64, value_dim=64, queries=case.queries * 9, keys=case.keys * 9, block=128,
        query_block=101,
    )
    for name, case in CASES.items()
} | {"odd widths": Case(queries=301, keys=403, head_dim=40, value_dim=24, block=96)}  # fmt: skip


def placed(*, query: str, mask: str = "cpu", pinned: bool = True) -> Place:
    def place(name: str, tensor: Tensor) -> Tensor:
        if name in ("query", "mask"):
            tensor = tensor.to({"query": query, "mask": mask}[name])
        if pinned and tensor.device.type == "cpu" and tensor.numel():
            held = torch.empty_like(tensor, pin_memory=True)
            return held.copy_(tensor)
        return tensor

    return place


def streamed(case: Case, place: Place, **options: Any) -> Terms:
    blocks = {"block": case.block, "query_block": None, "device": "cuda"} | options

    def call(*tensors: Any) -> Any:
        return elsa.offload.attention(*tensors, **case.arguments(), **blocks, return_lse=True)

    return differentiated(call, case, case.dtype, place)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("name", LONGER)
def test_keys_and_values_on_the_host(name: str, pinned: bool) -> None:
    case = LONGER[name]
    place = placed(query="cuda", mask="cuda" if pinned else "cpu", pinned=pinned)
    found = streamed(case, place)
    assert found["out"].is_cuda and found["query"].is_cuda and not found["key"].is_cuda
    assert_exact(found, case, "cuda")
    again = streamed(case, place)
    assert all(torch.equal(found[term], again[term]) for term in found)


@pytest.mark.parametrize("name", LONGER)
def test_everything_on_the_host(name: str) -> None:
    case = LONGER[name]
    found = streamed(case, placed(query="cpu", pinned=False), query_block=case.query_block)
    assert not any(t.is_cuda for t in found.values())
    assert_exact(found, case, "cuda")
    again = streamed(case, placed(query="cpu"), query_block=case.query_block)
    assert all(torch.equal(found[term], again[term]) for term in found)


def long(queries: int, keys: int, heads: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    shape = (1, heads, keys, 64)
    key, value = (torch.empty(shape, pin_memory=True).normal_() for _ in range(2))
    return torch.randn(1, heads, queries, 64, device="cuda"), key, value


def test_copies_are_hidden() -> None:
    query, key, value = long(32768, 32768)
    for _ in range(2):  # the first call compiles
        elsa.attention(query, key, value, offload="host", offload_block=4096)
        report = elsa.offload.report()
    assert report is not None and report.blocks == 8 and report.staged_bytes == 0
    assert report.copied_bytes == key.nbytes + value.nbytes
    assert report.hidden is not None and report.hidden > 0.5
    leaves = [t.requires_grad_() for t in (query, key, value)]
    for _ in range(2):
        out = elsa.attention(*leaves, offload="host", offload_block=4096)
        assert isinstance(out, Tensor)
        out.sum().backward()
        report = elsa.offload.report()
    assert report is not None and report.hidden is not None and report.hidden > 0.5
    assert report.written_bytes == key.nbytes + value.nbytes


def test_memory_stays_small() -> None:
    """Keys and values of 2 GiB: the device holds four blocks of them, and what queries need."""
    query, key, value = long(512, 1 << 19)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = elsa.attention(query, key, value, offload="host", offload_block=1 << 15)
    block = (1 << 15) * 8 * 64 * 4 * 2
    grown = torch.cuda.max_memory_allocated() - before
    assert isinstance(out, Tensor) and grown <= 6 * block + 64 * query.nbytes
    assert grown < (key.nbytes + value.nbytes) // 4
    resident = elsa.attention(query, key.cuda(), value.cuda())
    assert torch.allclose(out, resident, atol=1e-5)


def test_keys_and_values_that_exceed_the_device() -> None:
    """With the process limited to a part of the device, the resident call fails, this one runs."""
    torch.cuda.empty_cache()
    query, key, value = long(256, 1 << 20)  # 4 GiB
    total = torch.cuda.get_device_properties(0).total_memory
    used = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (used + (3 << 30)) / total))
    try:
        with pytest.raises(torch.OutOfMemoryError):
            elsa.attention(query, key.cuda(), value.cuda())
        torch.cuda.empty_cache()
        out = elsa.attention(query, key, value, offload="host", offload_block=1 << 15)
        leaves = [t.requires_grad_() for t in (query, key, value)]
        trained = elsa.attention(*leaves, offload="host", offload_block=1 << 15)
        trained.sum().backward()  # type: ignore[union-attr]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(out, Tensor) and torch.equal(out, trained.detach())  # type: ignore[union-attr]
    rows = query.detach()[:, :, :4].double()
    scores = rows @ key.detach().cuda().double().mT / 8
    exact = scores.softmax(-1) @ value.detach().cuda().double()
    assert float((out[:, :, :4] - exact).norm() / exact.norm()) < 2e-6


def test_blocks_by_the_free_memory() -> None:
    query, key, value = long(4096, 100_003, heads=2)
    out = elsa.attention(query, key, value, offload="host")
    resident = elsa.attention(query, key.cuda(), value.cuda())
    assert torch.allclose(out, resident, atol=1e-5)  # type: ignore[arg-type]
    away = elsa.attention(query.cpu(), key, value, offload="host")
    assert isinstance(away, Tensor) and not away.is_cuda
    assert torch.allclose(away, resident.cpu(), atol=1e-5)  # type: ignore[union-attr]


def test_capture_is_refused() -> None:
    query, key, value = long(256, 512, heads=1)
    with pytest.raises(ArgumentError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        elsa.attention(query, key, value, offload="host")


@pytest.mark.parametrize("half", [False, True])
def test_a_model_keeps_what_its_backward_needs_on_the_host(half: bool) -> None:
    """The same gradients, from less memory than half of what is saved takes."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=512, patch_size=16, embed_dim=192, depth=8, num_heads=3, num_classes=10
    ).cuda()
    images = torch.randn(4, 3, 512, 512, device="cuda")

    def step(**options: Any) -> tuple[int, list[Tensor]]:
        elsa.patch(model, **options)
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.float16, enabled=half):
            loss = model(images).float().square().mean()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, [p.grad.clone() for p in model.parameters()]

    step()  # what is kept for later calls is there then
    resident, expected = step()
    left, found = step(offload="host")
    assert left < 0.3 * resident
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3 if half else 1e-5, atol=1e-4 if half else 1e-6)


def test_attention_of_a_model_in_host_memory_runs_on_the_gpu() -> None:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(img_size=64, patch_size=4, embed_dim=64, depth=2, num_heads=2).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
        elsa.patch(model, offload="host")
        found = model(images)
    report = elsa.offload.report()
    assert report is not None and report.copied_bytes > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
