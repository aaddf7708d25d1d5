"""`explain` says where the published results show a loss, and nothing where they show a gain."""

from __future__ import annotations

import torch

import elsa_core as elsa
from benchmarks.losses import table
from elsa_core.dispatch import losses
from elsa_core.dispatch.losses import TABLE
from elsa_core.precision import DTYPES
from elsa_core.profiling.bench import published


def said(case: losses.Case, **more: int) -> str:
    shape = {"length": case.queries, "head_dim": case.head_dim} | more
    query = (case.batch, case.heads, shape["length"], shape["head_dim"])
    return losses.losing_case(
        "cpu", query, shape["length"], DTYPES[case.dtype], case.masked, case.precision
    )  # fmt: skip


def test_the_nearest_case_speaks() -> None:
    """And nothing does far from anything measured, nor where elsa won."""
    cases = [
        case for case in losses._cases("cpu")
        if case.queries == case.keys and not case.masked and case.precision == "strict"
    ]  # fmt: skip
    lost = next(case for case in cases if case.ratio < losses.LOST)
    won = next(case for case in cases if case.ratio >= losses.LOST)
    line = f"{lost.ratio:.2f}x the speed of {lost.peer} at {lost.name}"
    assert line in said(lost) and line in said(lost, length=lost.queries + 1)
    assert said(won) == said(lost, length=1 << 24) == said(lost, head_dim=7) == ""
    shape, dtype = (lost.batch, lost.heads, lost.queries, lost.head_dim), DTYPES[lost.dtype]
    query = torch.empty(shape, dtype=dtype)
    assert any(line in reason for reason in elsa.explain(query, query, query).reasons)


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
