"""Attention and a model over two GPUs and NCCL, against float64 and one GPU."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

import elsa_core as elsa

from . import gpu_ranks
from .cases import Case
from .test_attention import by_float64, error, joined
from .test_models import assert_as_exact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
NAMES = [(name, method) for name, case in gpu_ranks.CASES.items()
         for method in gpu_ranks.methods(case)]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("gpus")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    mp.spawn(gpu_ranks.everything, (port, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def on_one_gpu(case: Case) -> dict[str, Tensor | None]:
    query, key, value, mask, grad = case.whole()
    leaves = [t.cuda().requires_grad_() for t in (query, key, value)]
    if mask is not None:
        mask = mask.cuda()
        mask = mask if mask.dtype == torch.bool else mask.requires_grad_()
    out = elsa.attention(*leaves, mask, **case.arguments())  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    out.backward(grad.cuda())
    grads = [None if t is None or t.grad is None else t.grad.cpu() for t in (*leaves, mask)]
    return dict(zip(("out", "query", "key", "value", "mask"), (out.detach().cpu(), *grads),
                    strict=True))  # fmt: skip


@pytest.mark.parametrize(("name", "method"), NAMES)
def test_as_exact_as_one_gpu(name: str, method: str, found: list[Any]) -> None:
    """float32 and float64: 1.1 times the error of one GPU; halves twice, as between kernels, and
    gradients by one GPU's kernels of scores whose rounding is a thousandth."""
    case = gpu_ranks.CASES[name]
    parts = [found[rank][name, method] for rank in range(2)]
    assert all(same_again for _, same_again in parts)
    exact, one = by_float64(case), on_one_gpu(case)
    factor = 1.1 if case.dtype in (torch.float32, torch.float64) else 2.0
    for term, whole in joined(case, [part for part, _ in parts]).items():
        oracle, alone = exact[term], one[term]
        if whole is None or oracle is None or alone is None:
            assert whole is None and oracle is None
            continue
        if name == "huge" and method == "heads" and term != "out":
            factor = 2.0
        band = 2 * torch.finfo(case.dtype).eps * float(torch.linalg.vector_norm(oracle))
        assert error(whole, oracle) <= factor * error(alone, oracle) + band, term


def test_a_model(found: list[Any]) -> None:
    for rank in range(2):
        assert_as_exact(found[rank]["model"], "registers")
