"""The cases of alpha-entmax attention: who takes part and that each computes what it says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from elsa_core import reference
from elsa_core.backends.triton.attention import entmax as entmax_triton
from elsa_core.bench import entmax_steps
from elsa_core.bench.cases import bench_of, inputs, select
from elsa_core.bench.peers import Inputs, field_of
from elsa_core.errors import UnavailableError


def test_everyone_computes_entmax_but_softmax() -> None:
    case = dataclasses.replace(select("cpu", tables=["entmax"])[0], batch=1, heads=2)
    tensors = Inputs(*inputs(case, "cpu"))
    exact = bench_of(case).exact(*tensors)
    found = field_of(case, tensors)
    errors = {c.name: reference.relative_l2(c.output(), exact) for c in found.contenders}
    assert errors["elsa-strict"] < 1e-6 < 1e-2 < errors["softmax"]
    if "entmax" in errors:
        assert errors["entmax"] < 1e-5
    else:
        assert "not installed" in found.left_out["entmax"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases of a GPU are made there")
def test_the_gpu_has_cases_of_three_dtypes() -> None:
    cases = select("cuda", tables=["entmax"])
    assert {c.dtype for c in cases} == {"fp32", "fp16", "bf16"}
    assert {c.keys for c in cases} == {2048, 4096, 8192, 16384, 32768}


def test_cases_of_both_directions() -> None:
    names = [case.name for case in entmax_steps.CASES["cuda"]]
    assert len(set(names)) == len(names)
    for direction in ("forward", "training"):
        for tokens in (2048, 4096, 8192, 16384, 32768):
            assert f"{direction}/1x8x{tokens}x64-fp16-causal" in names
        assert f"{direction}/1x8x16384x64-fp32-sparse" in names


def test_who_takes_part_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entmax_steps, "_missing", lambda package: "")
    causal, other = (
        entmax_steps.functions(case, torch.device("cuda"))
        for case in (
            entmax_steps.Case("forward", 1, 8, 2048, 64, "fp16", True),
            entmax_steps.Case("training", 1, 8, 2048, 64, "fp16", False),
        )
    )
    assert all(callable(each) for each in causal.values())
    assert other["adasplash_v2"] == "it is causal alone" and callable(other["adasplash_v1"])


def test_plain_pytorch_stays_out_of_long_rows_on_a_gpu() -> None:
    case = entmax_steps.Case("forward", 1, 8, 16384, 64, "fp16", True)
    assert "seconds" in str(entmax_steps.functions(case, torch.device("cuda"))["elsa-eager"])
    assert callable(entmax_steps.functions(case, torch.device("cpu"))["elsa-eager"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_some_rows_judge_a_long_call(
    direction: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entmax_steps, "_JUDGED", 200 * 40)
    case = entmax_steps.Case(direction, 1, 2, 200, 16, "fp32", causal)
    operands = entmax_steps.inputs(case, torch.device("cpu"))
    expected = entmax_steps.exact(case, operands)
    assert expected.heads == 1 and expected.expected[0].shape[2] == 40
    found = entmax_steps.functions(case, torch.device("cpu"))
    right, other = found["elsa-eager"], found["softmax-torch"]
    assert callable(right) and callable(other)
    assert entmax_steps.error(case, right, operands, expected) < 1e-5
    assert entmax_steps.error(case, other, operands, expected) > 1e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_packed_sequences_are_judged_each_by_itself(direction: str, causal: bool) -> None:
    case = entmax_steps.Case(direction, 1, 2, 200, 16, "fp32", causal, sequences=5)
    assert case.name.endswith("-packed5") and case.starts == [0, 13, 40, 80, 133, 200]
    operands = entmax_steps.inputs(case, torch.device("cpu"))
    expected = entmax_steps.exact(case, operands)
    found = entmax_steps.functions(case, torch.device("cpu"))
    for name in ("elsa-auto", "each-sequence"):
        assert entmax_steps.error(case, found[name], operands, expected) < 1e-5
    assert entmax_steps.error(case, found["softmax-elsa"], operands, expected) > 1e-2


def test_most_tiles_of_sparse_operands_are_empty() -> None:
    case = entmax_steps.Case("forward", 1, 1, 4096, 64, "fp32", causal=False, sparse=True)
    operands = entmax_steps.inputs(case, torch.device("cpu"))
    assert 0.85 < entmax_steps.empty_share(case, *operands) < 1 - 1 / entmax_steps.RUNS
    normal = dataclasses.replace(case, tokens=256, sparse=False)
    assert entmax_steps.empty_share(normal, *entmax_steps.inputs(normal, torch.device("cpu"))) == 0
    seen = dataclasses.replace(normal, causal=True)
    assert entmax_steps.empty_share(seen, *entmax_steps.inputs(seen, torch.device("cpu"))) == 0


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_a_case_is_measured(direction: str, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"elsa-auto": 1e-6, "elsa-eager": 9e-6}
    monkeypatch.setattr(
        entmax_steps,
        "time_cpu",
        lambda field, **how: {c.name: [times.get(c.name, 3e-6)] for c in field},
    )
    case = entmax_steps.Case(direction, 1, 2, 256, 64, "fp32", causal=True, sparse=sparse)
    row = entmax_steps.measure(case, torch.device("cpu"), 1, 0.0)
    assert row["ratios"]["softmax-elsa / elsa"] == 3.0
    assert row["rows"]["elsa-auto"]["error"] < 1e-5
    assert row["rows"]["softmax-torch"]["error"] > (1e-4 if sparse else 1e-2)
    assert row["left_out"]["adasplash_v1"] == "it needs a GPU"
    if "entmax" in row["rows"]:
        assert row["rows"]["entmax"]["error"] < 1e-4
    assert ("empty_tiles" in row) == sparse


def test_the_dry_run_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    entmax_steps.main(["--dry-run", "--match", "training/1x8x16384x64-fp16"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("elsa-triton" in line for line in lines)
    if torch.cuda.is_available():
        return
    with pytest.raises(UnavailableError, match="no CUDA GPU"):
        entmax_steps.main([])


def test_the_table_of_the_docs_is_that_of_its_document() -> None:
    docs = Path(__file__).parents[2] / "docs"
    cases = json.loads((docs / "entmax_h200.json").read_text(encoding="utf-8"))["cases"]
    text = (docs / "entmax.md").read_text(encoding="utf-8")
    assert len(cases) == 9
    for case in cases:
        dtype, tokens, *kinds = case["case"].split()
        sizes = entmax_triton.FORWARD["half" if dtype == "fp16" else "float32"]
        served = f"{sizes.rows}x{sizes.keys}w{sizes.warps}" if dtype == "fp16" else "default"
        row = case["forward"][served]
        gradients = case.get("gradients", {}).get("64w4", {"us": None})["us"]
        others = [case["others"][f"softmax {what}"]["us"] for what in ("forward", "training")]
        cells = [
            tokens,
            dtype,
            *("yes" if kind in kinds else "no" for kind in ("causal", "sparse")),
        ]
        times = ["" if us is None else f"{us / 1e3:.3g}" for us in (row["us"], gradients, *others)]
        line = " | ".join([*cells, f"{row['tiles']:.0%}", *times, f"{row['error']:.1e}"])
        assert f"| {line} |" in text
