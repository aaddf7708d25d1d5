"""Every study that a CPU can run gives rows of the published form; what one computes is judged."""

import argparse
import csv
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import convergence, entmax, harness, packed_decoding
from elsa_core.errors import ArgumentError, ElsaError, ModelError
from elsa_core.measuring.timing import Contender
from elsa_core.profiling.bench import published

SHORT = ("--device", "cpu", "--rounds", "1", "--budget", "0.05", "--quick")
CPU = torch.device("cpu")
STUDIES = {
    "convergence": ("--match", "few/ViT-fp32", "--seeds", "1", "--epochs", "1"),
    "eager": ("--match", "vit_tiny_patch16_224-1-fp32"),
    "host": ("--match", "attention-float32"),
    "long_context": ("--match", "host"),
    "packed_decoding": (),
    "sparsity": ("--match", "runs/256-fp32"),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_writes_rows_and_its_environment(name: str, tmp_path: Path) -> None:
    study = importlib.import_module(f"benchmarks.{name}")
    words = [*SHORT, *STUDIES[name], "-o", str(tmp_path / f"{name}.csv")]
    parser = harness.options(study.__doc__)
    for option, value in (("--seeds", 5), ("--epochs", 1), ("--workers", 0)):
        parser.add_argument(option, type=int, default=value)
    images = np.random.default_rng(0).random((100, 16, 16))
    np.savez(tmp_path / "few.npz", images=images, labels=np.arange(100) % 10)
    parser.set_defaults(data=[str(tmp_path / "few.npz")])
    rows = harness.main(study.__doc__, study.cases, study.measure, parser, words)
    assert rows and all(row.get("error", 0.0) < 1e-4 for row in rows)
    assert not [row for row in rows if row["contender"] == "all"], rows
    with (tmp_path / f"{name}.csv").open(encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0])[:8] == published.FIRST and len(read) == len(rows)
    held = json.loads((tmp_path / published.ENVIRONMENTS).read_text(encoding="utf-8"))
    assert held[name]["device"] == "cpu" and {row["environment"] for row in read} == {name}


@pytest.mark.parametrize("name", ["distributed", "entmax", "graphed", "portable", "recognised"])
def test_a_dry_run_needs_no_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    study = importlib.import_module(f"benchmarks.{name}")
    parser = harness.options(study.__doc__, no_model=False)
    words = ["--dry-run", "--device", "cpu" if name == "distributed" else "cuda"]
    assert harness.main(study.__doc__, study.cases, study.measure, parser, words) == []
    names = capsys.readouterr().out.splitlines()
    assert len(names) > 4 and len(set(names)) == len(names)


def test_contenders_that_fail_and_cases_without_time_are_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel\nmore")

    def measure(name: str, case: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
        field = [Contender("good", lambda: None), Contender("bad", fails)]
        return harness.compared(name, field, given, lambda each: {"error": each.call() or 0.5})

    cases = {"one": 1, "another": 2}
    rows = harness.main("Doc.", lambda given: cases, measure, None, [*SHORT, "--match", "one"])
    assert [row["contender"] for row in rows] == ["good", "bad"]
    assert rows[0]["error"] == 0.5 and rows[0]["p10"] <= rows[0]["median"] <= rows[0]["p90"]
    assert rows[1] == {"case": "one", "contender": "bad", "note": "no such kernel"}
    assert capsys.readouterr().out.startswith("case,contender,environment,n,median,p10,p90,error")

    def interrupted(name: str, case: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
        if name == "another":
            raise KeyboardInterrupt
        return measure(name, case, given)

    with pytest.raises(KeyboardInterrupt):
        harness.main("Doc.", lambda given: cases, interrupted, None, SHORT)
    assert "\none,good," in capsys.readouterr().out
    late = harness.main("Doc.", lambda given: cases, measure, None, [*SHORT, "--seconds", "-1"])
    assert [row["note"] for row in late] == ["no time was left"] * 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_packed_entmax_is_judged_sequence_by_sequence(direction: str, causal: bool) -> None:
    case = entmax.Case(direction, 1, 2, 200, 16, "fp32", causal, sequences=5)
    assert case.name.endswith("-packed5") and case.starts == [0, 13, 40, 80, 133, 200]
    operands = entmax.inputs(case, CPU)
    expected = entmax.exact(case, operands)
    found = entmax.functions(case, CPU)
    for name in ("elsa-auto", "each-sequence"):
        assert entmax.error(case, found[name], operands, expected) < 1e-5
    assert entmax.error(case, found["softmax-elsa"], operands, expected) > 1e-2


def test_a_context_is_judged_without_the_others() -> None:
    (case,) = packed_decoding.QUICK
    given = packed_decoding.inputs(case, CPU)
    expected = packed_decoding.exact(case, given)
    for i, n in enumerate(case.lengths):
        k, v = (t[i, :, :n].double().repeat_interleave(2, 0) for t in (given.key, given.value))
        weights = (given.query[i].double() @ k.mT / 4.0).softmax(-1)
        assert torch.allclose(expected[i], weights @ v, rtol=1e-12, atol=1e-13)


def test_every_fifth_image_of_a_class_is_for_the_test() -> None:
    images = np.random.default_rng(0).random((50, 28, 28))
    data = convergence.split("x", images, np.arange(50) % 5)
    assert data.test[0].shape == (10, 1, 28, 28) and data.train[0].shape == (40, 1, 28, 28)
    assert torch.equal(data.test[1].bincount(), torch.full((5,), 2))
    assert abs(float(data.train[0].mean())) < 1e-5


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [("cats", ArgumentError, "'cats' is none of digits"), ("none.npz", ModelError, "no arrays")],
)
def test_data_that_is_none(name: str, error: type[ElsaError], words: str) -> None:
    with pytest.raises(error, match=words):
        convergence.arrays(name)
