"""What `python -m elsa_core.bench.sparsity` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from elsa_core.bench import sparsity


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one step, and as few rounds as there may be."""
    monkeypatch.setattr(sparsity, "ROUNDS", 3)
    monkeypatch.setattr(sparsity, "BUDGET", {"cpu": 0.1})
    whole = sparsity.trained_model.__wrapped__
    monkeypatch.setattr(sparsity, "trained_model", lambda: whole(epochs=1))


def test_rows_say_what_is_left_out(short: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = sparsity.document("cpu", ["fp32"], ["runs", "trained"], [256], seconds=600.0)
    assert json.loads(json.dumps(found)) and found["left_out"] == []
    assert 0.0 < found["trained_accuracy"] <= 1.0
    kinds = [(row["kind"], row["causal"]) for row in found["rows"]]
    assert kinds == [(k, c) for k in ("runs", "trained") for c in (False, True)]
    for row in found["rows"]:
        calls = row["calls"]
        assert set(calls) == {*(name for name, _, _ in sparsity.ASKED), "elsa", "pytorch"}
        assert calls["nothing left out"]["speed_up"] == 1.0
        assert calls["nothing left out"]["left_out"] == calls["frozen"]["left_out"] == 0
        assert calls["exact"]["error"] <= 2 * calls["elsa"]["error"] + 2.4e-7
    runs = found["rows"][0]["calls"]
    assert runs["1e-2, order"]["skip_rate"] >= runs["exact"]["skip_rate"] > 0


def test_no_row_begins_after_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    found = sparsity.document("cpu", ["fp32"], ["local", "random"], [64], seconds=-1.0)
    assert found["rows"] == [] and len(found["left_out"]) == 4


@pytest.mark.parametrize("kind", ["runs", "local", "random"])
def test_operands_are_the_same_each_time(kind: str) -> None:
    first, second = (sparsity.operands(kind, 100, torch.float16, "cpu") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(t.shape == (1, 2, 100, 32) and t.isfinite().all() for t in first)


def test_the_table_of_the_docs_is_that_of_its_document() -> None:
    docs = Path(__file__).parents[2] / "docs"
    files = [docs / "sparsity_cpu.json", docs / "sparsity_cpu_16k.json"]
    rows = [row for f in files for row in json.loads(f.read_text(encoding="utf-8"))["rows"]]
    text = (docs / "sparsity.md").read_text(encoding="utf-8")
    asked = ("exact", "exact, order", "1e-2, order", "summaries", "frozen", "all relief")
    for row in (row for row in rows if row["length"] >= 4096):
        calls = row["calls"]
        plain = calls["nothing left out"]["least_ms"]
        shares = [f"{calls[name]['skip_rate']:.0%}" for name in asked[1:3]]
        speeds = [f"{plain / calls[name]['least_ms']:.2f}" for name in asked]
        error = f"{calls['1e-2, order']['error']:.0e}"
        causal = "yes" if row["causal"] else "no"
        cells = [row["kind"], str(row["length"]), causal, *shares, *speeds[:3], error, *speeds[3:]]
        assert f"| {' | '.join(cells)} |" in text


def test_the_gpu_tables_are_those_of_their_document() -> None:
    docs = Path(__file__).parents[2] / "docs"
    rows = json.loads((docs / "sparsity_h200.json").read_text(encoding="utf-8"))["rows"]
    text = (docs / "sparsity.md").read_text(encoding="utf-8")
    for row in rows:
        calls = row["calls"]
        causal = "yes" if row["causal"] else "no"
        if row["kind"] != "random" and row["length"] > 4096:
            shares = [f"{calls[name]['skip_rate']:.0%}" for name in ("exact, order", "1e-4, order")]
            timed = ("nothing left out", "exact, order", "1e-4, order", "elsa", "pytorch")
            times = [f"{calls[name]['ms']:.3g}" for name in timed]
            cells = [row["kind"], str(row["length"]), row["dtype"], causal, *shares, *times]
            assert f"| {' | '.join(cells)} | {calls['1e-4, order']['error']:.0e} |" in text
        if row["kind"] in ("random", "runs") and not row["causal"]:
            plain = calls["nothing left out"]
            parts = ("summaries", "order", "frozen", "all relief")
            gains = [f"{plain['ms'] / calls[name]['ms']:.2f}" for name in parts]
            gone = [
                f"{1 - calls['all relief']['rescaled'] / plain['rescaled']:.0%}",
                f"{1 - calls['frozen']['maxima'] / plain['maxima']:.0%}",
            ]
            cells = [row["kind"], str(row["length"]), row["dtype"], *gains, *gone]
            assert f"| {' | '.join(cells)} |" in text
