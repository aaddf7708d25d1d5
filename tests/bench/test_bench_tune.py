"""`elsa bench attention --tune`: its candidates, its choice, and the user's table of tiles."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Elsa

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.tiling import Shape, Tile
from elsa_core.backends.triton.shared import device, usertable
from elsa_core.errors import ArgumentError
from elsa_core.measuring import environment
from elsa_core.profiling.bench import tune
from elsa_core.profiling.bench.attention import Settings
from elsa_core.profiling.bench.cases import Case
from elsa_core.profiling.bench.tune import Timed

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
    launched = {
        replace(plan, tile=replace(plan.tile, dim=0, keys=None, programs=None)) for plan in plans
    }
    assert len(launched) == len(plans)
    for plan in plans:
        assert plan.chunk % plan.tile.block_n == 0
        assert (plan.partitions - 1) * plan.chunk < 197 <= plan.partitions * plan.chunk


def test_a_smaller_gpu_has_fewer_candidates() -> None:
    assert len(listed(shared=64 * 1024)) < len(listed())


def test_calls_without_tiles_are_refused() -> None:
    for case in (replace(CASE, queries=1), replace(CASE, dtype="fp64")):
        with pytest.raises(ArgumentError, match="nothing to tune"):
            listed(case)
    with pytest.raises(ArgumentError, match="lean shares its tiles with strict"):
        listed(precision="lean")
    several = replace(CASE, precisions=("strict", "turbo", "lean"))
    entmax = replace(CASE, table="entmax")
    assert tune.tasks_of([several, entmax]) == [(several, "strict"), (several, "turbo")]
    with pytest.raises(ArgumentError, match="cpu has no tile table"):
        tune.run([CASE], device=torch.device("cpu"), settings=Settings())


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
    # One that was timed briefly alone is shown in its place, and never chosen.
    *final, brief = timed((3.0, 2.0, 1.0))
    found = tune.conclude(CASE, "strict", "split", final, [brief, wrong])
    assert found.chosen == tiles[1] and found.candidates[0] == brief


SHAPE = Shape(8, 12, 12, 197, 197, 64, 64)


def row(**more: Any) -> usertable.UserTile:
    tile = Tile("split", 256, None, None, 128, 64, 8, 3, True)
    return replace(usertable.measured_for(tile, SHAPE), **more)


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
        ({"keys": "many"}, "keys 'many'"),
        ({"programs": [1]}, "programs [1]"),
        ({"over_dim": None}, "over_dim None"),
        ("{", "Expecting"),
        ("[" * 100_000, "not a tuning table"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_a_broken_table_is_left_aside_with_one_warning(
    change: dict[str, Any] | str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = usertable.write(usertable.path("GPU"), (row(),), {})
    data = json.loads(path.read_text())
    for key, value in change.items() if isinstance(change, dict) else ():
        (data if key in data else data["tiles"][0])[key] = value
    path.write_text(change if isinstance(change, str) else json.dumps(data))
    with caplog.at_level(logging.WARNING, logger="elsa"):
        assert usertable.joined(TABLE, "GPU") is TABLE
    assert len(caplog.records) == 1 and word in caplog.text
    usertable.write(path, (row(),), {})
    assert usertable.joined(TABLE, "GPU").tiles[0] == row()


def test_tables_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    usertable.write(usertable.path("GPU"), (row(),), {})
    monkeypatch.setenv("ELSA_TUNING", "0")
    assert usertable.joined(TABLE, "GPU") is TABLE


@pytest.mark.usefixtures("no_gpu")
def test_the_command_lists_candidates_without_a_gpu(elsa: Elsa) -> None:
    arguments = ["bench", "attention", "--tune", "--device", "cuda", "--shape", "8,12,197,64"]
    code, out, err = elsa(*arguments, "--dry-run")
    assert code == 0
    assert err == "" and "shipped" in out and "nothing was measured" in out
    document = elsa(*arguments, "--dry-run", "--json").document()
    assert document["results"]["tune"][0]["candidates"][0]["shipped"] is True
    elsa(*arguments).fails(3, "--dry-run lists the candidates")


def test_a_users_table_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best tile serves calls like those that were measured, until the shipped one is best."""
    described = environment.describe("cpu") | {"gpu": "NVIDIA H200"}
    monkeypatch.setattr(environment, "describe", lambda _: described)
    best = Timed(listed()[1].tile, 1, False, 1e-3, 1e-7)
    shipped = Timed(listed()[0].tile, 1, True, 2e-3, 1e-7)
    path = tune.save([tune.conclude(CASE, "strict", "split", [shipped, best], [])], "cpu")
    assert path == usertable.path("NVIDIA H200")
    assert usertable.read(path)[0].block_m == best.tile.block_m
    again = tune.conclude(CASE, "strict", "split", [replace(shipped, seconds=1e-4), best], [])
    tune.save([again], "cpu")
    assert usertable.read(path) == ()
