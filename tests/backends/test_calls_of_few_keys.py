"""The one-launch kernels for few keys: who is given them, and what the compiler makes of them."""

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from triton_compile import compile_launch

from elsa_core.backends.triton.attention import planner, schedules, tiling
from elsa_core.backends.triton.attention.schedules import Call
from elsa_core.backends.triton.shared import device

TABLE = tiling.load_table("h200")
known = pytest.mark.skipif(not device.gluon_known(), reason="a Triton whose Gluon is not known")


def planned(
    queries: int, keys: int, dim: int, value_dim: int, block_m: int, causal: bool = False
) -> Call:  # fmt: skip
    """A call on one tile, whatever the table says."""
    q = torch.empty(2, 4, queries, dim, device="meta")
    k = torch.empty(2, 2, keys, dim, device="meta")
    v = torch.empty(2, 2, keys, value_dim, device="meta")
    tile = tiling.Tile(
        "split", 64, None, None, block_m, 64, block_m // 16, 1, False, 256, 0, True, True
    )
    plan = tiling.Plan(tile, 1, 256)
    return planner.plan_call(q, k, v, None, causal, 0.1, "strict", tiles=plan)


def test_turbo_of_few_keys_is_strict_in_one_launch() -> None:
    """Three products in one launch beat one product in two; `explain` says so."""
    for keys, dim, fits in (
        (50, 64, True), (197, 64, True), (208, 60, True), (209, 64, False), (577, 64, False),
        (197, 32, False),
    ):  # fmt: skip
        shape = tiling.Shape(8, 12, 12, keys, keys, dim, dim)
        for there in (True, False):
            plan = tiling.plan(
                shape, "single", TABLE, workspace=True, multiprocessors=132, specialized=there
            )
            assert plan.tile.one_launch is (fits and there)
            assert plan.tile.mode == ("split" if fits and there else "single")
    q = torch.empty(8, 12, 197, 64, device="meta")
    call = planner.plan_call(q, q, q, None, False, 0.125, "turbo", specialized=True)
    assert call.schedule is schedules.ONE_LAUNCH and "strict's products" in call.words
    call = planner.plan_call(q, q, q, None, False, 0.125, "strict", specialized=True)
    assert call.schedule is schedules.ONE_LAUNCH and "strict's products" not in call.words


@known
@pytest.mark.parametrize("form", [(197, 197, 60, 60, 256, True), (300, 200, 64, 32, 64)], ids=str)
def test_every_form_compiles(form: tuple[Any, ...]) -> None:
    call = planned(*form)
    compiled = compile_launch(call.fold, torch.float32, "cuda", 90)
    assert compiled.metadata.shared <= TABLE.shared_memory
    code = compiled.asm["ptx"]
    assert "wgmma.mma_async" in code
    # several warpgroups take turns at the first tile. A barrier of all of them in between would
    # never be passed: those that wait for their turn do not come to it
    turns = re.findall(r"bar\.sync\s+w, 256;(.*?)bar\.arrive", code, re.DOTALL)
    takes_turns = device.triton_version() < device.BARRIER_BEHIND_PRODUCTS
    assert len(turns) == (form[4] > 64 and takes_turns)
    assert not any(re.search(r"\bbar(rier)?\.(cta\.)?(sync|red)", between) for between in turns)
    assert len(re.findall(r"bar\.arrive", code)) == len(turns)


def test_no_turns_where_the_compiler_lets_all_warps_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    for version, turns in (("3.6.0", True), ("3.8.0", True), ("3.9.0", False)):
        monkeypatch.setattr(triton, "__version__", version)
        for block_m in (64, 128, 256):
            fold = planned(197, 197, 64, 64, block_m).fold
            assert fold.tail["TURNS"] == (turns and block_m > 64)
