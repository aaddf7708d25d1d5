"""Schedules as records, tile tables, and the plan cache: nothing here needs a GPU."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from elsa_core.backends.triton.attention import planner, schedules, tiling
from elsa_core.backends.triton.attention.schedules import Call
from elsa_core.backends.triton.attention.tiling import Shape, Tile
from elsa_core.backends.triton.shared import layout, usertable
from elsa_core.backends.triton.shared.plans import PlanCache

TABLE = tiling.load_table("h200")


def planned(
    shape: Shape, precision: str = "strict", *, causal: bool = False, specialized: bool = False
) -> Call:
    pytest.importorskip("triton")
    b, h, hk, n, m, d, dv, _ = shape
    q = torch.empty(b, h, n, d, device="meta")
    k, v = torch.empty(b, hk, m, d, device="meta"), torch.empty(b, hk, m, dv, device="meta")
    return planner.plan_call(q, k, v, None, causal, 0.125, precision, specialized=specialized)


CALLS = [
    # shape, precision, specialized: the schedule, its launches
    ((1, 2, 2, 0, 9, 64, 64), "strict", False, "empty", []),
    ((1, 2, 2, 1, 100, 64, 64), "strict", False, "decode", ["fold"]),
    ((1, 2, 2, 1, 9000, 64, 64), "strict", True, "decode", ["fold", "merge"]),
    ((1, 12, 12, 197, 197, 64, 64), "strict", True, "two_warpgroups", ["fold"]),
    ((8, 12, 12, 197, 197, 64, 64), "strict", True, "one_launch", ["fold"]),
    ((8, 12, 12, 197, 197, 64, 64), "turbo", True, "one_launch", ["fold"]),
    ((8, 12, 12, 577, 577, 64, 64), "strict", True, "hopper", ["ahead", "fold", "fma_fallback"]),
    (
        (1, 2, 2, 300, 9000, 64, 64), "strict", True, "hopper",
        ["ahead", "fold", "fma_fallback", "merge"],
    ),
    ((8, 12, 12, 577, 577, 64, 64), "strict", False, "split_ahead", ["ahead", "fold"]),
    ((1, 2, 2, 100, 4000, 64, 64), "strict", False, "split_ahead", ["ahead", "fold", "merge"]),
    ((8, 12, 12, 577, 577, 64, 64), "lean", True, "forward", ["fold"]),
    ((1, 1, 1, 20, 9000, 32, 32), "ieee", True, "forward", ["fold", "merge"]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "precision", "specialized", "name", "launches"), CALLS, ids=str)
def test_the_schedule_of_a_call(shape, precision, specialized, name, launches):
    call = planned(Shape(*shape), precision, specialized=specialized)
    assert call.schedule.name == name and list(call.launches) == launches
    b, h, _, n, _, _, dv, *_ = shape
    assert call.out_shape == (b, h, n, dv)
    assert bool(call.workspace) == ("ahead" in launches)
    assert (call.states is not None) == ("split keys" in call.words or launches[1:] == ["merge"])


def test_every_schedule_serves_some_call():
    names = [schedule.name for schedule in schedules.SCHEDULES]
    assert set(names) == {name for *_, name, _ in CALLS} and len(set(names)) == len(names)


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


def test_rows_for_masks_serve_calls_with_a_mask_alone():
    pytest.importorskip("triton")
    given = {"workspace": True, "multiprocessors": 132, "specialized": True}
    for batch, keys, head_dim in ((8, 49, 32), (8, 196, 32), (1, 196, 96)):
        shape = Shape(batch, 8, 8, keys, keys, head_dim, head_dim)
        plain, masked = (
            tiling.plan(s, "half", TABLE, **given).tile
            for s in (shape, shape._replace(masked=True))
        )
        assert masked.masked and not plain.masked
        q = torch.empty(batch, 8, keys, head_dim, dtype=torch.float16, device="meta")
        bias = torch.empty(1, 8, keys, keys, dtype=torch.float16, device="meta")
        for mask, tile in ((bias, masked), (bias < 0, masked), (None, plain)):
            call = planner.plan_call(q, q, q, mask, False, 0.125, "strict", specialized=True)
            assert call.fold.tail["BM"] == tile.block_m and call.fold.tail["BN"] == tile.block_n


def test_a_users_row_stands_before_the_shipped_ones(tmp_path):
    shape = Shape(8, 12, 12, 197, 197, 64, 64)
    row = usertable.measured_for(Tile("split", 256, None, None, 128, 64, 8, 3, True), shape)
    file = usertable.write(tmp_path / "gpu.json", (row,), {})
    assert usertable.read(file) == (row,)
    table = dataclasses.replace(TABLE, tiles=(*usertable.read(file), *TABLE.tiles))
    assert tiling.plan(shape, "split", table, workspace=True, multiprocessors=132).tile == row


# the plan cache


def test_a_plan_is_made_once_even_where_it_is_none():
    cache, made = PlanCache(10), []

    def plan(x):
        made.append(x)

    for _ in range(3):
        assert cache.get("a", plan, 1) is None
    assert made == [1] and len(cache) == 1
    cache.clear()
    assert cache.get("a", plan, 2) is None and made == [1, 2]


def test_the_bound_holds_for_all_operators_together():
    cache = PlanCache(4)
    for i in range(50):
        for operator in ("attention", "window", "linear"):
            assert cache.get((operator, i), lambda *given: given, operator, i) == (operator, i)
            assert len(cache) <= 4


def test_threads_share_one_plan():
    cache, barrier, found = PlanCache(8), threading.Barrier(8), []

    def work():
        barrier.wait()
        found.append(cache.get("key", object))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_the_operators_share_one_cache():
    pytest.importorskip("triton")
    from elsa_core.backends.triton.linear import planner as linear
    from elsa_core.backends.triton.window import planner as windows

    assert planner.PLANS is linear.PLANS is windows.PLANS


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


def test_half_precision_lies_in_rows():
    """Channels apart, as a convolution leaves them, are brought together; float32 stays."""
    turned = torch.randn(1, 2, 8, 5).transpose(2, 3)
    assert layout.in_rows(turned, turned, turned) == (turned, turned, turned)
    half = turned.half()
    found = layout.in_rows(half, half.contiguous(), half)
    assert all(torch.equal(t, half) and t.stride(-1) == 1 for t in found)
    assert layout.in_rows(*found) == found
