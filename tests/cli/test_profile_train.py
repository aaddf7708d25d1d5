"""`elsa profile --train` measures steps and leaves the model as it was; what steps lack is said."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading.loader import load
from elsa_core.patching.rewrite import patched_sites
from elsa_core.profiling import document as documents
from elsa_core.profiling import page
from elsa_core.profiling.runs import training

from .conftest import Elsa
from .test_profile import results

MODEL = "test_vit"
FAST = ("--train", "--rounds", "3", "--budget", "0.2", "--device", "cpu")
PARTS = ["forward", "backward", "optimizer"]


def test_a_step_as_a_document_and_a_page(elsa: Elsa) -> None:
    line = ("profile", MODEL, *FAST, "--img", "32", "--dtype", "fp32,bf16", "-b", "2")
    found = results(elsa(*line, "--json", "-o", "p.json", "--html", "p.html"))
    assert found["settings"]["train"] and found["settings"]["baselines"] == ["eager"]
    assert [row["configuration"]["dtype"] for row in found["points"]] == ["fp32", "bf16"]
    for row in found["points"]:
        assert row["profile"]["dtype"] == "float32" and row["profile"]["sites"] == []
        assert [run["name"] for run in row["profile"]["runs"]] == ["eager", "patched"]
        for run in row["profile"]["runs"]:
            assert list(run["parts"]) == PARTS and min(run["parts"].values()) > 0
    drawn = Path("p.html").read_text()
    assert "parts of a training step" in drawn and "32 px, batch 2, bf16, strict, training" in drawn
    elsa(*line[:2], *line[3:], "--resume", "p.json").fails(2, "another sweep", "train")


def test_a_step_for_people(elsa: Elsa) -> None:
    lines = elsa("profile", MODEL, *FAST, "--img", "32", "--baselines", "sdpa").shows().splitlines()
    assert any(line.startswith("32 px, batch 1, fp32, strict, training step · ") for line in lines)
    heading = next(line for line in lines if "forward, ms" in line)
    rows = lines[lines.index(heading) + 2 :][:2]
    assert [row.split()[0] for row in rows] == ["eager", "patched"]
    assert all(float(cell) > 0 for row in rows for cell in row.split()[1:])
    drawn = [line for line in lines if not line.startswith(("Next", "4 of", "6 of", "12 of"))]
    assert max(map(len, drawn)) <= 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sites"], "--sites is about sites"),
        (["--policy", "faster"], "--policy is about sites"),
        (["--no-errors"], "--no-errors is about sites"),
        (["--baselines", "compile+graph"], "compile+graph is for inference"),
    ],
)
def test_what_a_step_does_not_have(elsa: Elsa, options: list[str], words: str) -> None:
    elsa("profile", MODEL, *FAST, *options).fails(2, words)


def test_a_file_with_parts_of_other_kinds(elsa: Elsa, tmp_path: Path) -> None:
    assert elsa("profile", MODEL, *FAST, "--img", "32", "-o", "p.json").code == 0
    kept = documents.read(Path("p.json"))
    assert "parts of a training step" in page.page(kept)
    for parts in ([1.0], {"forward": 1.0}, dict.fromkeys(PARTS, "1"), dict.fromkeys(PARTS, -1)):
        broken = copy.deepcopy(kept)
        broken["results"]["points"][0]["profile"]["runs"][0]["parts"] = parts
        Path("b.json").write_text(json.dumps(broken))
        with pytest.raises(ModelError, match="parts of a run"):
            documents.read(Path("b.json"))


def test_the_model_stays_as_it_was() -> None:
    model = load(MODEL, image_size=32).train()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    found = training.profile_training(model, x, rounds=3, budget_seconds=0.2, baselines=["control"])
    assert {"eager", "control", "patched"} <= {run.name for run in found.runs}
    assert model.training and not patched_sites(model)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.requires_grad_(False)
    with pytest.raises(ArgumentError, match="no parameter"):
        training.profile_training(model, x)
