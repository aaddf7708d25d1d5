"""Attention and a model over two GPUs and NCCL, against float64 and one GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from processes import ports

from . import gpu_ranks
from .test_attention import by_float64, by_one, error, joined
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
    mp.spawn(gpu_ranks.everything, (*ports(1), str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("name", "method"), NAMES)
def test_as_exact_as_one_gpu(name: str, method: str, found: list[Any]) -> None:
    """float32 and float64: 1.1 times the error of one GPU; halves twice, as between kernels, and
    gradients by one GPU's kernels of scores whose rounding is a thousandth."""
    case = gpu_ranks.CASES[name]
    parts = [found[rank][name, method] for rank in range(2)]
    assert all(same_again for _, same_again in parts)
    exact, one = by_float64(case), by_one(case, "cuda")
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
