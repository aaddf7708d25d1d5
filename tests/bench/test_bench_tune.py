"""Tiles: candidates are pure; a user's table stands before the shipped one, never in its way."""

from __future__ import annotations

import json
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from elsa_cli.bench_tune import tile_words
from elsa_cli.main import run
from elsa_core.backends.triton.attention import planner, tiling
from elsa_core.backends.triton.attention.tiling import Shape, Tile
from elsa_core.backends.triton.shared import device, usertable
from elsa_core.bench.cases import Case
from elsa_core.bench.tune import search as tune
from elsa_core.bench.tune.search import Timed
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.measuring import busy, environment, timing

CASE = Case("t", 8, 12, 197, 197, 64)
TABLE = tiling.load_table("h200")


def listed(case: Case = CASE, precision: str = "strict", **more: Any) -> list[tiling.Plan]:
    found = tune.candidates(case, precision, TABLE, multiprocessors=132, **more)
    assert [shipped for _, shipped in found] == [True] + [False] * (len(found) - 1)
    return [plan for plan, _ in found]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ELSA_TUNING", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("precision", ["strict", "turbo", "ieee"])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_candidates(precision: str, head_dim: int) -> None:
    case = replace(CASE, head_dim=head_dim)
    plans = listed(case, precision)
    mode = device.mode_of(torch.float32, precision)
    shipped = tiling.plan(tune.shape_of(case), mode, TABLE, workspace=True, multiprocessors=132)
    assert plans[0] == shipped and 1 < len(plans) < 150
    assert {plan.tile.mode for plan in plans} == {mode}
    assert len({tune._key(plan) for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.chunk % plan.tile.block_n == 0
        assert (plan.partitions - 1) * plan.chunk < 197 <= plan.partitions * plan.chunk


def test_specialized_candidates_where_their_kernel_serves(monkeypatch) -> None:
    case = replace(CASE, queries=1025, keys=1025)
    plans = listed(case, specialized=True)
    assert plans[0].tile.specialized
    assert {plan.tile.specialized for plan in plans} == {True, False}
    for plan in plans:
        usertable._check(usertable.measured_for(plan.tile, tune.shape_of(case)))
    assert not any(plan.tile.specialized for plan in listed(case))
    monkeypatch.setattr(device, "gluon_known", lambda: True)
    assert tune.may_specialize(case, None)
    assert not tune.may_specialize(replace(case, mask="additive"), None)
    assert not tune.may_specialize(replace(case, head_dim=80), None)
    assert not tune.may_specialize(case, torch.device("cpu"))


def test_few_keys_may_stay_on_chip() -> None:
    plans = listed(CASE, specialized=True)
    short = [plan for plan in plans if plan.tile.one_launch]
    assert plans[0] in short and {p.tile.block_m for p in short} == {64, 128, 256}
    words = [tile_words(plan.tile) for plan in plans]
    assert len(set(words)) == len(words)  # what a reader chooses among can be told apart
    assert "64x64, 4 warps, all keys on chip" in words
    long = replace(CASE, queries=257, keys=257)
    assert not any(plan.tile.one_launch for plan in listed(long, specialized=True))


@pytest.mark.parametrize(
    ("queries", "sizes"), [(197, {64, 128, 256}), (100, {64, 128}), (10, {64})]
)
def test_candidates_that_hold_few_keys_at_once(queries: int, sizes: set[int]) -> None:
    """A tile of each size, and 64 queries once more for two warpgroups."""
    case = replace(CASE, queries=queries)
    plans = [plan for plan in listed(case, specialized=True) if plan.tile.one_launch]
    assert {plan.tile.block_m for plan in plans} == sizes and len(plans) == len(sizes) + 1
    assert [plan.tile.block_m for plan in plans if plan.tile.two_warpgroups] == [64]
    for plan in plans:
        assert plan.partitions == 1
        usertable._check(usertable.measured_for(plan.tile, tune.shape_of(case)))
    for more in ({"keys": 257}, {"head_dim": 80}, {"head_dim": 16}):
        case = replace(CASE, **more)
        assert not any(plan.tile.one_launch for plan in listed(case, specialized=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"part": 64}, {"mode": "single"}, {"ahead": False}, {"block_m": 32}, {"block_m": 256},
        {"warps": 8}, {"block_n": 32}, {"dim": 256},
    ],
    ids=str,
)  # fmt: skip
def test_specialized_rows_that_no_kernel_has(wrong: dict[str, Any]) -> None:
    fine = row(specialized=True, warps=4)
    usertable._check(fine)
    with pytest.raises(ValueError, match="specialized tile"):
        usertable._check(replace(fine, **wrong))


def test_a_smaller_gpu_has_fewer_candidates() -> None:
    assert len(listed(shared=64 * 1024)) < len(listed())


def test_calls_without_tiles_are_refused() -> None:
    for case in (replace(CASE, queries=1), replace(CASE, dtype="fp64")):
        with pytest.raises(ArgumentError, match="nothing to tune"):
            listed(case)
    with pytest.raises(ArgumentError, match="lean shares its tiles with strict"):
        listed(precision="lean")
    several = replace(CASE, precisions=("strict", "turbo", "lean"))
    assert tune.tasks_of([several]) == [(several, "strict"), (several, "turbo")]
    with pytest.raises(ArgumentError, match="cpu has no tile table"):
        tune.run([CASE], device="cpu")


@pytest.mark.usefixtures("no_gpu")
def test_tuning_needs_a_gpu() -> None:
    with pytest.raises(UnavailableError, match="--dry-run lists the candidates"):
        tune.run([CASE], device="cuda")


def test_the_fastest_is_chosen_where_it_is_worth_it() -> None:
    tiles = [plan.tile for plan in listed()[:3]]

    def timed(seconds: tuple[float, ...]) -> list[Timed]:
        return [
            Timed(tile, 1, i == 0, s, 1e-7)
            for i, (tile, s) in enumerate(zip(tiles, seconds, strict=True))
        ]

    wrong = Timed(tiles[1], 2, False, None, 1.0, "wrong: error 1.0e+00")
    found = tune.conclude(CASE, "strict", "split", timed((3.0, 2.0, 4.0)), [wrong])
    assert found.chosen == tiles[1] and found.gain == 1.5
    assert [each.seconds for each in found.candidates] == [2.0, 3.0, 4.0, None]
    assert tune.conclude(CASE, "strict", "split", timed((3.0, 2.99, 4.0)), []).chosen is None
    assert tune.conclude(CASE, "strict", "split", timed((1.0, 2.0, 4.0)), []).gain == 1.0
    assert tune.conclude(CASE, "strict", "split", [], [wrong]).chosen is None
    # The shipped tile does not run on this GPU: any that does is worth it.
    only = tune.conclude(CASE, "strict", "split", timed((3.0, 2.0, 4.0))[1:], [])
    assert only.chosen == tiles[1] and only.gain is None


def test_a_run_judges_times_and_concludes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("t", 1, 2, 70, 70, 16)
    launched: list[tiling.Plan] = []

    def plan_call(*given: Any, tiles: tiling.Plan) -> tiling.Plan:
        if tiles.tile.stages == 3 and tiles.tile.block_n == 64:
            raise RuntimeError("out of resource: shared memory\nmore")
        launched.append(tiles)
        return tiles

    def execute(plan: tiling.Plan, *tensors: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(*tensors[:3])
        return out + (plan.tile.warps == 8), None

    def clock(contenders: list[timing.Contender], **_: Any) -> Any:
        return {c.name: [1.0 / (1 + int(c.name))] * 3 for c in contenders}, {}

    monkeypatch.setattr(planner, "plan_call", plan_call)
    monkeypatch.setattr(planner, "execute", execute)
    monkeypatch.setattr(timing, "time_cuda", clock)
    monkeypatch.setattr(tune, "shipped_table", lambda _: (TABLE, 132, TABLE.shared_memory))
    found = tune._tune(case, "strict", torch.device("cpu"), tune.Settings(rounds=3))
    reasons = {each.reason for each in found.candidates}
    assert "out of resource: shared memory" in reasons
    assert any(reason.startswith("wrong: error") for reason in reasons)
    ran = [each for each in found.candidates if each.seconds is not None]
    assert ran and all(each.tile.warps == 4 and each.error < 1e-6 for each in ran)
    assert found.chosen is not None and found.gain is not None and found.gain > 1


SHAPE = Shape(8, 12, 12, 197, 197, 64, 64)


def row(**more: Any) -> usertable.UserTile:
    tile = Tile("split", 256, None, None, 128, 64, 8, 3, True)
    return replace(usertable.measured_for(tile, SHAPE), **more)


def test_a_measured_tile_serves_calls_like_the_measured_one() -> None:
    tile = row()
    assert tile.serves("split", 64, SHAPE)
    assert tile.serves("split", 64, SHAPE._replace(keys=256, batch=6))
    for other in (
        SHAPE._replace(keys=577), SHAPE._replace(keys=100), SHAPE._replace(batch=1),
        SHAPE._replace(batch=64),
    ):  # fmt: skip
        assert not tile.serves("split", 64, other)
    assert not tile.serves("half", 64, SHAPE)
    assert not tile.serves("split", 32, SHAPE) and not tile.serves("split", 96, SHAPE)


def test_the_users_rows_stand_first() -> None:
    gpu = "NVIDIA H200"
    assert usertable.joined(TABLE, gpu) is TABLE
    path = usertable.write(usertable.path(gpu), (row(),), {"gpu": gpu})
    assert path.name == "nvidia-h200.json" and path.parent.name == "tuning"
    table = usertable.joined(TABLE, gpu)
    assert table.tiles == (row(), *TABLE.tiles)
    plan = tiling.plan(SHAPE, "split", table, workspace=True, multiprocessors=132)
    assert plan.tile == row()
    away = SHAPE._replace(keys=4097, queries=4097)
    plans = [
        tiling.plan(away, "split", t, workspace=True, multiprocessors=132) for t in (table, TABLE)
    ]
    assert plans[0] == plans[1]
    # `lean` may not split ahead: the user's tile does not serve it.
    lean = tiling.plan(SHAPE, "split", table, workspace=False, multiprocessors=132)
    assert not lean.tile.ahead


def test_new_rows_replace_those_for_the_same_calls() -> None:
    path = usertable.path("NVIDIA H200")
    other = row(least_keys=1000, keys=2000)
    usertable.write(path, (row(), other), {})
    usertable.write(path, (row(stages=2),), {})
    assert usertable.read(path) == (row(stages=2), other)
    usertable.write(path, (), {}, retired=(row(block_m=64),))
    assert usertable.read(path) == (other,)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_row_of_strict_leaves_turbo_alone() -> None:
    """Few keys: turbo is shipped with strict's tile, and may still be tuned for itself."""
    shape = tune.shape_of(CASE)
    strict = usertable.measured_for(
        Tile("split", 64, None, None, 128, 64, 8, 1, False, 256, 0, True, True), shape
    )
    turbo = usertable.measured_for(Tile("single", 64, None, None, 64, 64, 4, 3, True), shape)
    for rows, mode, block in (((strict, turbo), "single", 64), ((strict,), "split", 256)):
        table = replace(TABLE, tiles=(*rows, *TABLE.tiles))
        plan = tiling.plan(
            shape, "single", table, workspace=True, multiprocessors=132, specialized=True
        )
        assert (plan.tile.mode, plan.tile.block_m) == (mode, block)


def test_tuning_turbo_retires_its_own_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    described = environment.describe("cpu") | {"gpu": "NVIDIA H200"}
    monkeypatch.setattr(environment, "describe", lambda _: described)
    shape = tune.shape_of(CASE)
    tiles = [Tile(mode, 64, None, None, 64, 64, 4, 3, True) for mode in ("split", "single")]
    rows = tuple(usertable.measured_for(tile, shape) for tile in tiles)
    path = usertable.write(usertable.path("NVIDIA H200"), rows, {})
    shipped, _ = listed(CASE, "turbo", specialized=True)[:2]
    assert shipped.tile.mode == "split"
    best = Timed(shipped.tile, 1, True, 1e-3, 1e-7)
    slower = Timed(tiles[1], 1, False, 2e-3, 1e-7)
    tune.save([tune.conclude(CASE, "turbo", "single", [best, slower], [])], "cpu")
    assert usertable.read(path) == rows[:1]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema": 9}, "schema 9"),
        ({"elsa_version": "0.0"}, "measured with elsa 0.0"),
        ({"tiles": [{"mode": "split"}]}, "not a tuning table"),
        ({"tiles": 3}, "not a tuning table"),
        ({"block_m": 48}, "block_m 48"),
        ({"block_n": 8}, "too few rows"),
        ({"stages": "many"}, "stages 'many'"),
        ({"mode": "fast"}, "mode 'fast'"),
        (None, "Expecting"),
    ],
)
def test_a_broken_table_is_left_aside_with_one_warning(
    change: dict[str, Any] | None, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = usertable.write(usertable.path("GPU"), (row(),), {})
    data = json.loads(path.read_text())
    for key, value in (change or {}).items():
        (data if key in data else data["tiles"][0])[key] = value
    path.write_text("{" if change is None else json.dumps(data))
    with caplog.at_level(logging.WARNING, logger="elsa"):
        assert usertable.joined(TABLE, "GPU") is TABLE
    assert len(caplog.records) == 1 and word in caplog.text
    usertable.write(path, (row(),), {})
    assert usertable.joined(TABLE, "GPU").tiles[0] == row()


def test_tables_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    usertable.write(usertable.path("GPU"), (row(),), {})
    monkeypatch.setenv("ELSA_TUNING", "0")
    assert usertable.joined(TABLE, "GPU") is TABLE


def test_every_field_of_a_tile_travels() -> None:
    tile = Tile("split", 256, None, None, 128, 64, 8, 3, True, part=128, registers=96)
    kept = usertable.measured_for(tile, SHAPE)
    aside = {"dim", "keys", "programs"}
    for each in fields(Tile):
        assert each.name in aside or getattr(kept, each.name) == getattr(tile, each.name)


@pytest.mark.usefixtures("no_gpu")
def test_the_command_lists_candidates_without_a_gpu(
    capsys: pytest.CaptureFixture[str], schema: jsonschema.Draft202012Validator
) -> None:
    arguments = ["bench", "attention", "--tune", "--device", "cuda", "--shape", "8,12,197,64"]
    assert run([*arguments, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "shipped" in out and "nothing was measured" in out
    assert run([*arguments, "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema.validate(document)
    assert document["results"]["tune"][0]["candidates"][0]["shipped"] is True
    assert run(arguments) == 3
    assert "--dry-run lists the candidates" in capsys.readouterr().err


def test_the_command_writes_the_users_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    schema: jsonschema.Draft202012Validator,
) -> None:  # fmt: skip
    described = environment.describe("cpu") | {"gpu": "NVIDIA H200"}
    best = Timed(listed()[1].tile, 1, False, 1e-3, 1e-7)
    shipped = Timed(listed()[0].tile, 1, True, 2e-3, 1e-7)
    found = tune.conclude(CASE, "strict", "split", [shipped, best], [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(busy, "reason", lambda _: "")
    monkeypatch.setattr(environment, "describe", lambda _: described)
    monkeypatch.setattr(tune, "run", lambda *_, **__: (found,))
    arguments = ["bench", "attention", "--tune", "--device", "cuda", "--shape", "8,12,197,64"]
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema.validate(document)
    assert document["results"]["tuned"][0]["gain"] == 2.0
    path = Path(document["results"]["table"])
    assert usertable.read(path)[0].block_m == best.tile.block_m
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert "1 of 1 calls get another tile; written to" in out and "2.00x" in out
    again = tune.conclude(CASE, "strict", "split", [replace(shipped, seconds=1e-4), best], [])
    monkeypatch.setattr(tune, "run", lambda *_, **__: (again,))
    assert run(arguments) == 0 and usertable.read(path) == ()
    capsys.readouterr()
    monkeypatch.setattr(busy, "reason", lambda _: "the GPU is 50% busy")
    assert run(arguments) == 3 and "--allow-busy" in capsys.readouterr().err
