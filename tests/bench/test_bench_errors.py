"""The errors of published model runs, measured without their times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elsa_core.bench import errors, models, tables
from elsa_core.bench.model_cases import ModelCase

CPU = torch.device("cpu")
CASES = (
    ModelCase("batch8", "ViT-T", "timm:vit_tiny_patch16_224", 32, 3),
    ModelCase("batch8", "Swin-T", "timm:swin_tiny_patch4_window7_224", 64, 2),
)


@pytest.fixture(scope="module")
def measured() -> str:
    document = models.started(
        models.settings(CPU, rounds=2, budget_seconds=0.2), {"device": "cpu", "packages": {}}
    )
    return json.dumps(models.run(CASES, document, device=CPU))


def without_errors(text: str) -> dict[str, Any]:
    """The document as it was published when errors were those of one image."""
    document: dict[str, Any] = json.loads(text)
    for case in document["results"]["cases"]:
        case["errors"] = [1.0, 2.0]
        for run in case["measurements"]:
            del run["error"]
    return document


def test_the_errors_are_those_of_the_calls_that_were_timed(measured: str) -> None:
    document, asked = without_errors(measured), []
    assert "Errors are of the first image" in tables.render(document, "summary")
    assert errors.renew(document, CPU, keep=lambda case, why: asked.append(why)) == 0
    assert asked == ["", ""]
    for case, before in zip(
        document["results"]["cases"], json.loads(measured)["results"]["cases"], strict=True
    ):
        found = {run["contender"]: run["error"] for run in case["measurements"]}
        assert found == {run["contender"]: run["error"] for run in before["measurements"]}
        assert case["errors"] == [found[case["best_own"]], found["eager"]]
    text = tables.render(document, "summary")
    assert "Errors of the same calls were measured apart, on " in text
    assert "first image" not in text


def test_a_run_is_limited_and_resumed(
    measured: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "models.json"
    path.write_text(json.dumps(without_errors(measured)))
    errors.main([str(path), "--limit", "-1"])
    assert json.loads(capsys.readouterr().out) == {"left": 2, "environment": None}
    errors.main([str(path), "--cases", "*/Swin*"])
    line, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["case"] == CASES[1].name and not line["why"] and not line["wrong"]
    assert last["left"] == 0 and last["environment"]["device"] == "cpu"
    document = json.loads(path.read_text())
    assert [case["case"]["name"] for case in errors.missing(document)] == [CASES[0].name]
    assert "In 1 of 2 cases errors are of the first image" in tables.render(document, "summary")


def test_what_cannot_be_measured_has_no_error(measured: str) -> None:
    document = without_errors(measured)
    document["results"]["cases"] = document["results"]["cases"][:1]
    document["results"]["cases"][0]["case"]["image_size"] = 33
    asked: list[str] = []
    errors.renew(document, CPU, keep=lambda case, why: asked.append(why))
    assert "multiple of the patch size" in asked[0]
    assert document["results"]["cases"][0]["errors"] is None
