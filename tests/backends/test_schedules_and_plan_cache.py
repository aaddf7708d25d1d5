"""Plans hold no tensor, their caches are bounded, and a user's tiles stand first."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elsa_core.backends.triton.attention import planner, schedules, tiling
from elsa_core.backends.triton.attention.tiling import Shape, Tile
from elsa_core.backends.triton.shared import usertable
from elsa_core.backends.triton.shared.plans import PlanCache

TABLE = tiling.load_table("h200")


def test_a_plan_holds_no_tensor():
    """Plans outlive calls: what they referred to would never be freed."""
    import gc
    import weakref

    q = torch.empty(1, 2, 0, 8)
    watched = weakref.ref(q)
    call = planner.plan_call(q, q, q, None, False, 1.0, "strict")
    del q
    gc.collect()
    assert watched() is None and call.schedule is schedules.EMPTY


# tile tables


def test_a_users_row_stands_before_the_shipped_ones(tmp_path):
    shape = Shape(8, 12, 12, 197, 197, 64, 64)
    row = usertable.measured_for(Tile("split", 256, None, None, 128, 64, 8, 3, True), shape)
    file = usertable.write(tmp_path / "gpu.json", (row,), {})
    assert usertable.read(file) == (row,)
    table = dataclasses.replace(TABLE, tiles=(*usertable.read(file), *TABLE.tiles))
    assert tiling.plan(shape, "split", table, workspace=True, multiprocessors=132).tile == row


# the plan cache


def test_the_bound_holds_for_all_operators_together():
    cache = PlanCache(4)
    for i in range(50):
        for operator in ("attention", "window", "linear"):
            assert cache.get((operator, i), lambda *given: given, operator, i) == (operator, i)
            assert len(cache) <= 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "value_dim"), [(20, 16), (60, 32), (92, 32), (63, 33), (100, 16)])
def test_unaligned_rows_of_half_precision_fill_128_bytes(dtype, dim, value_dim):
    """Shorter tiles that the loop writes to shared memory were seen miscompiled (Triton 3.6,
    sm_90): head dimension 60 with values of 32 gave wrong results without a word."""
    pytest.importorskip("triton")

    def constants(dim, value_dim):
        q, v = (torch.empty(1, 2, 96, d, dtype=dtype, device="meta") for d in (dim, value_dim))
        call = planner.plan_call(q, q, v, None, False, 1.0, "strict", specialized=False)
        return call.launches["fold"].tail

    known = constants(dim, value_dim)
    assert (known["UNIT"], known["D1"], known["V1"]) == (1, 0, 0)
    assert known["D0"] >= max(64, dim) and known["V0"] >= max(64, value_dim)
    assert constants(32, 16)["V0"] == 16  # aligned rows are copied ahead of the loop


@pytest.mark.parametrize("kind", [None, torch.bool, torch.float16])
def test_masks_in_half_precision_have_all_registers(kind):
    """The tables' limits were measured without them: within those they spilled 1 KB a thread."""
    pytest.importorskip("triton")
    q = torch.empty(1, 8, 196, 32, dtype=torch.float16, device="meta")
    mask = None if kind is None else torch.empty(1, 8, 196, 196, dtype=kind, device="meta")
    call = planner.plan_call(q, q, q, mask, False, 0.125, "strict", specialized=False)
    assert call.fold.options.get("maxnreg") == (96 if kind is None else None)
