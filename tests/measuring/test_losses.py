"""`explain` says where the published results show a loss, and nothing where they show a gain."""

from __future__ import annotations

import pytest
import torch

import elsa_core as elsa
from benchmarks.losses import table
from elsa_core.dispatch import losses
from elsa_core.dispatch.losses import TABLE
from elsa_core.profiling.bench import published

CASE = {
    "batch": 1, "heads": 8, "queries": 1024, "keys": 1024, "head_dim": 64, "dtype": "fp32",
    "masked": False, "precision": "strict", "peer": "sdpa-flash", "machine": "a test",
}  # fmt: skip


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        losses.Case(name="lost", ratio=0.9, **CASE),
        losses.Case(name="won", ratio=1.4, **(CASE | {"queries": 256, "keys": 256})),
    )
    monkeypatch.setattr(losses, "_cases", lambda device_type: cases)


@pytest.mark.parametrize(
    ("length", "head_dim", "dtype", "said"),
    [
        (1024, 64, torch.float32, True),
        (1400, 64, torch.float32, True),  # near
        (256, 64, torch.float32, False),  # won
        (8192, 64, torch.float32, False),  # far from anything measured
        (1024, 80, torch.float32, False),  # not measured
        (1024, 64, torch.bfloat16, False),
    ],
)
def test_the_nearest_case_speaks(
    results: None, length: int, head_dim: int, dtype: torch.dtype, said: bool
) -> None:
    query = torch.empty(1, 8, length, head_dim, dtype=dtype)
    reasons = elsa.explain(query, query, query).reasons
    line = [r for r in reasons if "published results: 0.90x the speed of sdpa-flash at lost" in r]
    assert len(line) == said


def test_the_shipped_table_is_what_the_results_give() -> None:
    assert TABLE.read_text(encoding="utf-8") == table(), "run: python -m benchmarks.losses"
    assert TABLE.stat().st_size < 20_000
    for device_type in ("cpu", "cuda"):
        cases = losses._cases(device_type)
        assert any(case.ratio < losses.LOST for case in cases)
        assert all(case.ratio > 0 and case.queries > 0 and case.machine for case in cases)


def test_a_kind_that_lost_nowhere_is_left_out() -> None:
    """What `explain` says does not change by it: every case of the results that lost is found."""
    lost = 0
    for path in published.RESULTS.glob("attention_*.csv"):
        document = published.read(path)
        device_type = document["environment"]["device"]
        for row in document["results"]["cases"]:
            case = row["case"]
            for measured in row["measurements"]:
                if not measured.get("precision") or "queries" not in case:
                    continue
                if measured["ratio"] is None or measured["ratio"] >= losses.LOST:
                    continue
                shape = (case["batch"], case["heads"], case["queries"], case["head_dim"])
                dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
                line = losses.losing_case(
                    device_type, shape, case["keys"], dtype[case["dtype"]],
                    case["mask"] != "none", measured["precision"],
                )  # fmt: skip
                lost += bool(line)
    assert lost > 5
