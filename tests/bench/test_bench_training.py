"""`elsa bench training`: steps are measured, kept, resumed and shown; a wrong gradient fails."""

from pathlib import Path
from typing import Any

import pytest
import torch
from command import Elsa
from torch import Tensor, nn

from benchmarks import tables
from elsa_core.profiling.bench import published, training
from elsa_core.profiling.bench.runner import ModelCase
from elsa_core.profiling.runs.training import gradient_comparison

from .conftest import Offered

TINY = {
    "cpu": {
        "steps": (ModelCase("steps", "ViT-T", "timm:vit_tiny_patch16_224", 32, 2, quick=True),),
        "paper": (ModelCase("paper", "ViT-T", "timm:vit_tiny_patch16_224", 32, 2, "bf16"),),
    }
}
SHORT = ("--device", "cpu", "--rounds", "3", "--budget", "0.1")


@pytest.fixture(autouse=True)
def _place(free_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.TABLES, "cpu", TINY["cpu"])


def test_the_papers_table_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cases = training.RUNNER.select("cuda", tables=["paper"])
    rows = {(label, dtype) for label in ("ViT-T", "Swin-T") for dtype in ("fp32", "fp16")}
    assert {(case.label, case.dtype) for case in cases} == rows
    for device in ("cpu", "cuda"):
        cases = training.RUNNER.select(device)
        assert len({case.name for case in cases}) == len(cases)
        assert len(training.RUNNER.select(device, quick=True)) >= 2


def test_steps_are_kept_resumed_and_rendered(elsa: Elsa) -> None:
    line = ["bench", "training", *SHORT, "-o", "t.json", "--json"]
    document = elsa(*line, "--table", "steps", "--quick").document()
    assert document["command"] == "bench training" and document["results"]["complete"]
    again = elsa(*line, "--resume").document()
    assert again["results"]["cases"][0] == document["results"]["cases"][0]
    assert len(again["results"]["cases"]) == 2
    for case in again["results"]["cases"]:
        assert case["wrong"] == [] and case["sites"] == [12, 12]
        assert 0 < case["errors"][0] <= 2 * case["errors"][1] + 5e-7
        for measured in case["measurements"]:
            assert set(measured["parts"]) == {"forward", "backward", "optimizer"}
            assert all(seconds > 0 for seconds in measured["parts"].values())
    assert again["results"]["cases"][1]["errors"][1] > 1e-4  # bf16 was asked for
    kept = published.load(Path("t.json"))
    lines = tables.of_document(kept, "steps").splitlines()
    assert lines[0].endswith("| forward + backward + optimizer of elsa, ms |") and len(lines) == 3
    assert "faster than the fastest baseline in " in tables.of_document(kept, "summary")
    other = elsa("bench", "models", *SHORT, "-o", "t.json", "--resume")
    other.fails(4, "no result of `elsa bench models`")


def test_a_wrong_gradient_ends_with_1(elsa: Elsa, offered: Offered) -> None:
    """The value is right and its gradient is not."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *terms: Any) -> Any:
        scores = query.detach() @ key.mT * terms[2]
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    with offered(attend):
        code, out, err = elsa("bench", "training", *SHORT, "--quick")
    assert code == 1 and "FAIL wrong" in out and "wrong results" in err
    graphed = elsa("bench", "training", "--device", "cpu", "--baselines", "eager+graph")
    graphed.fails(3, "eager+graph needs a CUDA GPU")


class _Two(nn.Module):
    def __init__(self, *, loses: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.loses = nn.Linear(4, 4), nn.Linear(4, 4), loses

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden.detach() if self.loses else hidden)


def test_a_gradient_that_is_lost_is_wrong() -> None:
    """Parameters without a gradient were left out of the comparison."""
    whole, loses = _Two(loses=False), _Two(loses=True)
    assert not gradient_comparison(whole, _Two(loses=False), torch.randn(2, 4), "fp32").reason()
    assert gradient_comparison(whole, loses, torch.randn(2, 4), "fp32").patched_error > 0.1
