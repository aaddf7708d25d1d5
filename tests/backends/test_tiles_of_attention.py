"""Attention's tiles serve every call and fit their GPU; support says why it refuses."""

from __future__ import annotations

import pytest
import torch

from elsa_core.backends import triton as backend
from elsa_core.backends.support import Request
from elsa_core.backends.triton.attention import tiling as tiles
from elsa_core.backends.triton.shared import device

pytest.importorskip("triton")
from triton_compile import planned_call

TABLES = sorted(path.stem for path in tiles.TABLES.glob("*.json"))


def request(**changes):
    given = {
        "device_type": "cuda", "dtype": torch.float32, "head_dim": 64, "value_dim": 64,
        "precision": "strict",
    }  # fmt: skip
    return Request(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"device_type": "cpu"}, "GPU"),
        ({"head_dim": 512}, "512"),
        ({"value_dim": 257}, "257"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_unsupported_says_why(changes, word):
    answer = backend.support(request(**changes))
    assert not answer.ok and word in answer.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu_says_so():
    answer = backend.support(request())
    assert not answer.ok and "GPU" in answer.reason


@pytest.mark.parametrize("name", TABLES)
def test_tables_serve_every_call(name):
    table = tiles.load_table(name)
    assert table.measured == (name == "h200")
    for mode in device.MODES:
        for dim in (16, 64, 72, 80, 96, 128, 160, 256):
            for queries, keys in ((2, 5), (197, 197), (4097, 4097), (7, 1 << 20)):
                for workspace in (True, False) if mode in ("half", "split") else (True,):
                    shape = tiles.Shape(1, 4, 4, queries, keys, dim, dim)
                    plan = tiles.plan(shape, mode, table, workspace=workspace, multiprocessors=100)
                    assert plan.chunk % plan.tile.block_n == 0
                    assert (plan.partitions - 1) * plan.chunk < keys <= plan.partitions * plan.chunk
                    assert workspace or (plan.partitions == 1 and not plan.tile.ahead)


@pytest.mark.parametrize("name", TABLES)
def test_tiles_fit_shared_memory(name):
    """Operand tiles as the kernels keep them; what the compiler adds is small."""
    table = tiles.load_table(name)
    for tile in table.tiles:
        if tile.mode == "exact":
            continue
        pairs = 2 if tile.mode == "split" else 1
        keys = tile.stages * tile.block_n * 2 * tile.dim * 2 * pairs
        if not tile.ahead and tile.mode != "half":
            keys = tile.block_n * 2 * tile.dim * 2 * pairs
        queries = tile.block_m * tile.dim * 2 * pairs
        assert keys + queries <= table.shared_memory, tile


@pytest.mark.parametrize(
    ("name", "capability", "table"),
    [("NVIDIA H200", (9, 0), "h200"), ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
     ("NVIDIA L4", (8, 9), "l4"), ("NVIDIA GeForce RTX 4090", (8, 9), "rtx4090"),
     ("NVIDIA B200", (10, 0), "h200"), ("NVIDIA GeForce RTX 5090", (12, 0), "rtx4090"),
     ("NVIDIA GeForce RTX 3090", (8, 6), "rtx4090")],
)  # fmt: skip
def test_table_of_a_gpu(name, capability, table):
    assert tiles.table_name(name, capability) == table


def test_plan_does_not_depend_on_length():
    """Lengths are run-time arguments: the lengths of one table row share every constant."""
    constants = []
    for n in (900, 941, 1500):
        call = planned_call((1, 8, n, 64), torch.float16, "strict")
        kernel = call.fold.kernel
        names = [p.name for p in kernel.params if p.is_constexpr]
        constants.append({name: call.fold.tail[name] for name in names})
    assert constants[0] == constants[1] == constants[2]
