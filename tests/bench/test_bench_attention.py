"""Measuring: who takes part, how rounds interleave, what a result holds, when it is refused."""

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from elsa_core import reference
from elsa_core.profiling.bench import attention, peers
from elsa_core.profiling.bench.attention import Settings
from elsa_core.profiling.bench.cases import Case, inputs

CASE = Case("vit", 1, 2, 33, 33, 16, goal=1e-6)
MASKED = Case("sweep", 1, 2, 21, 21, 16, mask="additive")
WINDOWS = Case("window", 16, 2, 9, 9, 16, mask="additive", window=3)
QUICK = Settings(rounds=3, budget_seconds=0.05)
CPU = torch.device("cpu")


def test_everyone_takes_part_and_is_right() -> None:
    seen: list[tuple[str, int, int]] = []
    cases = [CASE, MASKED, WINDOWS]
    found = attention.run(
        cases, device=CPU, settings=QUICK, progress=lambda *args: seen.append(args)
    )["results"]
    assert seen == [(case.name, i, 3) for i, case in enumerate(cases)]
    expected = {"elsa-strict", "sdpa-flash", "sdpa-math", "eager"}
    if importlib.util.find_spec("onnxruntime"):
        expected.add("onnxruntime")
    for case, result in zip(cases, found["cases"], strict=True):
        assert {m["contender"] for m in result["measurements"]} == expected, result["left_out"]
        for m in result["measurements"]:
            assert m["error"] < 1e-6 and len(m["samples"]) == 3
            assert 0 < m["seconds_p10"] <= m["seconds"] <= m["seconds_p90"]
            assert m["flops_per_second"] == pytest.approx(case.flops / m["seconds"], rel=1e-5)
            assert m["ceiling_share"] is not None
            assert (m["ratio"] is None) == (m["precision"] is None)
        own = result["measurements"][0]
        peers = [m for m in result["measurements"] if m["precision"] is None]
        best = min(peers, key=lambda m: m["seconds"])
        assert result["best_peer"] == best["contender"]
        assert own["ratio"] == pytest.approx(best["seconds"] / own["seconds"], rel=1e-4)
        assert own["notes"]["backend"] and own["host_seconds"] is None
        # windows are explained by the operator that is timed
        assert ("window" in own["notes"]["schedule"]) == (case is WINDOWS)
    assert [result["reached"] for result in found["cases"]] == [True, None, None]


def test_the_ceilings_say_what_the_threads_add() -> None:
    torch.set_num_threads(2)
    try:
        found = attention.ceilings(CPU, ["fp32"], QUICK)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert 0.05 < found["gemm_fp32"] / found["gemm_fp32_one_thread"] < 20  # others run beside it


def test_a_contender_that_takes_no_half_precision_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(attention._GEMM_SIZE, "cpu", 128)  # slow in half precision
    half = replace(CASE, dtype="fp16", precisions=("turbo", "strict"))
    found = attention.run([half], device=CPU, settings=replace(QUICK, memory=False))
    (result,) = found["results"]["cases"]
    left_out = result["left_out"]
    assert "turbo" in left_out["elsa-turbo"] and "float16" in left_out["elsa-turbo"]
    assert "float32" in left_out.get("onnxruntime", "takes float32")
    assert result["reached"] is None  # the first precision was not measured
    assert all(m["workspace_bytes"] is None for m in result["measurements"])


def test_score_matrices_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "available_bytes", lambda _: 1000)
    _, left_out = peers.field_of(CASE, inputs(CASE, "cpu"))
    assert {"sdpa-math", "eager"} <= set(left_out) and "GiB are there" in left_out["eager"]


def test_memory_that_runs_out_after_warming_up_ends_one_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every case that was measured before was lost with it."""
    calls = []

    def greedy(*tensors: torch.Tensor) -> torch.Tensor:
        calls.append(tensors)
        if len(calls) == 3:  # two contenders have warmed up
            raise torch.OutOfMemoryError("out of memory")
        return reference.attention(*tensors)[0]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", greedy)
    cases = [replace(CASE, queries=9, keys=9), MASKED]
    found = attention.run(cases, device=CPU, settings=QUICK)["results"]["cases"]
    assert found[0]["left_out"] == {"all": "out of memory"} and found[0]["measurements"] == []
    assert found[1]["measurements"]


def test_matmul_precision_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ZeroDivisionError):
            attention.run([CASE], device=CPU, settings=QUICK, progress=lambda *_: 1 // 0)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def measurement(
    name: str, seconds: float, samples: tuple[float, ...], error: float = 1e-7
) -> dict[str, Any]:
    precision = name.removeprefix("elsa-") if name.startswith("elsa") else None
    return {"contender": name, "precision": precision, "seconds": seconds, "samples": samples,
            "error": error}  # fmt: skip


def test_ratios_are_against_the_fastest_peer() -> None:
    found = [
        measurement("elsa-strict", 2.0, (1.0, 2.0, 4.0)),
        measurement("slow", 9.0, (9.0, 9.0, 9.0)),
        measurement("fast", 3.0, (3.0, 3.0, 2.0)),
    ]
    result = attention.judged(replace(CASE, goal=1.6), found, {})
    own = result["measurements"][0]
    assert result["best_peer"] == "fast" and own["ratio"] == 1.5 and result["reached"] is False
    assert (own["ratio_p10"], own["ratio_p90"]) == (0.5, 3.0)
    alone = attention.judged(CASE, found[:1], {})
    assert alone["best_peer"] is None and alone["reached"] is None


@pytest.mark.parametrize("error", [1.0, 3e-6, math.nan])
def test_a_wrong_result_is_never_a_fast_one(error: float) -> None:
    def field(own: float, peer: float) -> dict[str, Any]:
        errors = {"elsa-strict": own, "elsa-turbo": 1e-3, "fast": peer, "right": 2e-7}
        found = [measurement(name, 1.0, (1.0,), e) for name, e in errors.items()]
        return attention.judged(CASE, found, {})

    result = field(error, 1e-7)
    assert result["wrong"] == ["elsa-strict"] and result["reached"] is False
    result = field(3e-7, error)
    assert result["wrong"] == ["fast"] and result["best_peer"] == "right"
    assert result["reached"] is True


def test_a_case_that_does_not_fit_ends_nothing() -> None:
    large = Case("vit", 1, 1, 2 * 10**11, 2 * 10**11, 64)
    found = attention.run([large, CASE], device=CPU, settings=QUICK)["results"]["cases"]
    assert "allocate memory" in found[0]["left_out"]["all"] and not found[0]["measurements"]
    assert found[1]["measurements"]
