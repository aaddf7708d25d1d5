"""`elsa bench linear`: products beside PyTorch's own, errors of the outputs that were timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch.nn import functional

from elsa_cli.main import run
from elsa_core.bench import products
from elsa_core.bench.products import ProductCase
from elsa_core.measuring import busy, timing
from elsa_core.routing import measured

LINE = ["bench", "linear", "--device", "cpu", "--rounds", "6", "--budget", "0.3"]
TINY = {
    "products": (ProductCase("products", 12, 16, 24, quick=True), ProductCase("products", 8, 8, 8)),
    "swin": (ProductCase("swin", 9, 16, 16),),
}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(busy, "reason", lambda _: "")
    monkeypatch.setattr(products, "TABLES", {"cpu": TINY, "cuda": TINY})


def test_the_products_that_goals_are_set_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shapes = [(c.rows, c.channels, c.columns) for c in products.select("cuda")]
    assert shapes == [(1576, 768, 2304), (1576, 3072, 768), (32800, 768, 3072)]
    small = products.select("cuda", tables=["swin"])
    assert len({case.name for case in small}) == len(small) == 24
    for row in measured._table()["linear_by_pytorch"]:  # what is left to PyTorch is measured again
        assert any(
            row["rows"][0] <= case.rows and case.channels == row["channels"]
            and case.columns == row["columns"] for case in small
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


def test_an_interrupted_run_shows_and_keeps_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = products.measure

    def measure(case: ProductCase, *rest: Any) -> Any:
        if case.rows == 8:
            raise KeyboardInterrupt
        return real(case, *rest)

    monkeypatch.setattr(products, "measure", measure)
    assert run([*LINE, "-o", "p.json"]) == 130
    assert "products/12x16x24" in capsys.readouterr().out
    results = json.loads(Path("p.json").read_text())["results"]
    assert len(results["cases"]) == 1 and not results["complete"]


def test_a_wrong_product_ends_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "linear", lambda x, w, b, **_: functional.linear(x, w, b) + 1)
    assert run([*LINE, "--quick"]) == 1
    out, err = capsys.readouterr()
    assert "wrong" in out and "wrong results: products/12x16x24" in err


def test_what_fails_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    code = run([*LINE, "--quick", "--backend", "triton"])
    out = capsys.readouterr().out
    assert code in (0, 3) and "products/12x16x24" in out


def test_a_gpus_ways_and_errors_of_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 is never the peer, frozen halves are a way of their own, and where the table leaves a
    product to PyTorch the kernels are timed all the same."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    def timed(contenders: Any, **_: Any) -> Any:
        for contender in contenders:
            with contender.context():
                contender.call()
                contender.call()
        fast = {"tf32": 0.1, "elsa": 0.8, "elsa-frozen": 0.5}
        return {c.name: [fast.get(c.name, 1.0)] * 6 for c in contenders}

    row = measured.Products(16, 24, (1, 64), (0.9, 0.9))
    monkeypatch.setattr(products.routing, "linear_by_pytorch", lambda *_: (row,))
    monkeypatch.setattr(timing, "time_cpu", timed)
    ways = products._ways

    def on_gpu(case: ProductCase, x: Any, weight: Any, bias: Any, backend: str) -> Any:
        monkeypatch.setattr(products, "served", lambda x, w, b, **_: functional.linear(x, w, b))
        monkeypatch.setattr(products, "linear", lambda x, w, b, **_: functional.linear(x, w, b))
        return ways(case, x.as_subclass(OnGpu), weight, bias, backend)

    monkeypatch.setattr(products, "_ways", on_gpu)
    how = products.settings(torch.device("cpu"))
    found = products.measure(TINY["products"][0], torch.device("cpu"), how, lambda *_: None)
    runs = {m["contender"]: m for m in found["measurements"]}
    assert list(runs) == ["pytorch", "elsa", "tf32", "elsa-frozen", "kernels"]
    assert found["best_peer"] == "pytorch" and found["best_own"] == "elsa-frozen"
    assert found["gain"]["value"] == 2.0 and runs["elsa"]["ratio_to_best"]["value"] == 1.25
    assert not runs["tf32"]["exact"] and runs["tf32"]["ratio_to_best"] is None
    assert all(0 < each["error"] < 1e-6 for each in runs.values()) and not found["wrong"]
    columns, [cells] = products.table_of([found])
    assert ">tf32 (inexact), ms" in columns and cells.count("2.00") == 1
    other = products.measure(TINY["products"][1], torch.device("cpu"), how, lambda *_: None)
    assert "kernels" not in {m["contender"] for m in other["measurements"]}
