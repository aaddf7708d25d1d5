"""`elsa bench linear`: products beside PyTorch's own, errors of the outputs that were timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from torch import Tensor
from torch.nn import functional

from elsa_cli.main import run
from elsa_core.dispatch import measured
from elsa_core.measuring import busy
from elsa_core.profiling.bench import linear
from elsa_core.profiling.bench.linear import ProductCase

from .conftest import Offered

LINE = ["bench", "linear", "--device", "cpu", "--rounds", "6", "--budget", "0.3"]
TINY = {
    "products": (ProductCase("products", 12, 16, 24, quick=True), ProductCase("products", 8, 8, 8)),
    "swin": (ProductCase("swin", 9, 16, 16),),
}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(busy, "reason", lambda _: "")
    monkeypatch.setitem(linear.TABLES, "cpu", TINY)


def test_the_products_that_goals_are_set_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shapes = [(c.rows, c.channels, c.columns) for c in linear.RUNNER.select("cuda")]
    assert shapes == [(1576, 768, 2304), (1576, 3072, 768), (32800, 768, 3072)]
    small = linear.RUNNER.select("cuda", tables=["swin"])
    assert len({case.name for case in small}) == len(small) == 24
    rows = [row for row in measured._table()["rows"] if row["operator"] == "linear"]
    for row in (row for row in rows if row["mode"] == "infer"):  # left to PyTorch: measured again
        of = row["ranges"]
        assert any(
            of["rows"][0] <= case.rows and [case.channels] * 2 == of["channels"]
            and [case.columns] * 2 == of["columns"] for case in small
        )  # fmt: skip


def test_products_are_kept_resumed_and_shown(
    capsys: pytest.CaptureFixture[str], schema: jsonschema.Draft202012Validator
) -> None:
    assert run([*LINE, "--quick", "-o", "p.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema.validate(document)
    [first] = document["results"]["cases"]
    assert document["command"] == "bench linear" and first["case"]["columns"] == 24
    assert {m["contender"] for m in first["measurements"]} == {"pytorch", "elsa"}
    assert set(first["left_out"]) == {"tf32", "elsa-frozen"} and first["wrong"] == []
    own, peer = first["errors"]
    assert own <= 2 * peer + 2.0**-24 and first["gain"]["rounds"] >= 3
    assert run([*LINE, "-o", "p.json"]) == 2 and "--resume" in capsys.readouterr().err
    assert run([*LINE, "-o", "p.json", "--resume"]) == 0
    out = capsys.readouterr().out
    assert "products/12x16x24" in out and "products/8x8x8" in out and "swin" not in out
    assert "of 2 products" in out
    kept = json.loads(Path("p.json").read_text())
    schema.validate(kept)
    assert kept["results"]["complete"] and kept["results"]["cases"][0] == first
    assert run([*LINE, "--dry-run", "--table", "swin", "--json"]) == 0
    schema.validate(json.loads(capsys.readouterr().out))


def by_pytorch(x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    return functional.linear(x, weight, bias)


def test_an_interrupted_run_shows_and_keeps_what_it_has(
    capsys: pytest.CaptureFixture[str], offered: Offered
) -> None:
    def interrupted(x: Tensor, *rest: Any) -> Tensor:
        if len(x) == 8:
            raise KeyboardInterrupt
        return by_pytorch(x, *rest)

    with offered(by_pytorch, "linear", direct=interrupted):
        assert run([*LINE, "-o", "p.json"]) == 130
    assert "products/12x16x24" in capsys.readouterr().out
    results = json.loads(Path("p.json").read_text())["results"]
    assert len(results["cases"]) == 1 and not results["complete"]


def test_a_wrong_product_ends_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], offered: Offered
) -> None:
    with offered(by_pytorch, "linear", direct=lambda *given: by_pytorch(*given) + 1):
        assert run([*LINE, "--quick"]) == 1
    out, err = capsys.readouterr()
    assert "wrong" in out and "wrong results: products/12x16x24" in err


def test_what_fails_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    code = run([*LINE, "--quick", "--backend", "triton"])
    out = capsys.readouterr().out
    assert code in (0, 3) and "products/12x16x24" in out
