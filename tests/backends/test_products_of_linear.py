"""Split products of linear layers have tiles that fit a GPU, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from elsa_core.backends.triton.linear import launches, planner
from elsa_core.backends.triton.linear.product import product
from elsa_core.backends.triton.pack import cases
from elsa_core.backends.triton.shared.device import describing
from elsa_core.backends.triton.shared.launch import recording
from elsa_core.profiling.bench.linear import SHAPES


def meta(rows, depth, columns, dtype=torch.float32):
    x = torch.empty(rows, depth, dtype=dtype, device="meta")
    w = torch.empty(columns, depth, dtype=dtype, device="meta")
    return x, w


def products(call):
    """The products that a call on tensors without memory launches."""
    found = []
    with recording(lambda launch, _: found.append(launch)):
        call()
    return [launch for launch in found if launch.kernel is product]


SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
TILES = {name: getattr(launches, name) for name in ("LARGE", "NARROW", "WIDE", "SHALLOW", "SMALL")}


@pytest.mark.parametrize("wide", ["columns", "depth"])
def test_gradients_of_more_columns_than_a_grid_takes_are_pytorchs(wide):
    """The launch failed: blocks of turned columns lie along the grid's second axis."""
    for blocks, served in (((1 << 16) - 1, True), (1 << 16, False)):
        columns, depth = (64 * blocks, 64) if wide == "columns" else (64, 64 * blocks)
        x, w = meta(64, depth, columns)
        grad = torch.empty(64, columns, device="meta")
        assert (planner._plan_backward(grad, x, w, (True, True, False)) is not None) == served


@pytest.mark.parametrize("gpu", [gpu for arch in SHARED for gpu in cases.gpus(arch)], ids=str)
def test_products_fit(gpu):
    """Those of `elsa bench linear --tune`, and their gradients' products."""
    found = []
    with describing(gpu.facts):
        limits = launches.gpu_of(torch.device("meta"))
        assert limits.shared_memory == gpu.shared_memory == SHARED[gpu.arch] << 10
        for rows, depth, columns in SHAPES:
            x, w = meta(rows, depth, columns)
            grad = torch.empty(rows, columns, device="meta")
            found += products(lambda g=(x, w, None): planner.linear(*g))
            found += products(lambda g=(grad, x, w, (True,) * 3): planner.backward(*g))
    assert len(found) > 2 * len(SHAPES)
    for multiply in found:
        tail, options = multiply.tail, multiply.options
        tile = launches.Tile(
            tail["BM"], tail["BN"], tail["BK"], options["num_warps"], tail["STAGES"]
        )  # fmt: skip
        assert tile in (*TILES.values(), launches.MEDIUM)
        # only these read the tile that is multiplied from shared memory
        held = tile.stages if 90 <= gpu.arch < 120 else tile.stages - 1
        assert held * (tile.rows + tile.columns) * tile.depth * 4 <= gpu.shared_memory


def test_no_length_is_compiled_in():
    planner.PLANS.clear()
    calls = [
        products(lambda rows=rows: planner.linear(*meta(rows, 768, 2304), None))[0]
        for rows in (1576, 1577, 3152)
    ]
    constants = [
        {n: v for n, v in call.tail.items() if n.isupper()} | call.options for call in calls
    ]
    assert constants[0] == constants[1] == constants[2]
