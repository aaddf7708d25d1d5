"""The host's time of warm calls: the document, not the numbers."""

from __future__ import annotations

import json

import pytest
import torch

from elsa_core.bench import eager, host
from elsa_core.routing import measured

pytest.importorskip("timm")


def test_document(capsys: pytest.CaptureFixture[str]) -> None:
    host.main(["--device", "cpu", "--rounds", "1", "--calls", "1"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1 and document["environment"]["device"] == "cpu"
    assert set(document["cuda_library"]) == {"ok", "reason"}
    rows = document["results"]
    assert {(row["operator"], row["dtype"]) for row in rows} == {
        (operator, dtype) for operator in host.BARS for dtype in ("float16", "float32")
    }
    for row in rows:
        assert row["ratio"] == pytest.approx(row["elsa_us"] / row["peer_us"], abs=2e-3)
        assert row["bar"] == host.BARS[row["operator"]]


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    eager.main(
        [
            "--device",
            "cpu",
            "--rounds",
            "1",
            "--calls",
            "1",
            "--match",
            "vit_tiny_patch16_224-1-fp32",
        ]
    )
    document = json.loads(capsys.readouterr().out)
    assert document["least"] == 1.0
    (row,) = document["results"]
    assert (row["model"], row["batch"], row["dtype"]) == ("vit_tiny_patch16_224", 1, "fp32")
    speed = row["us"]["original"] / row["us"]["patched"]
    assert row["speed"] == pytest.approx(speed, abs=2e-3)


def test_the_sizes_of_eager_calls_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"eager": {"linear": {"float32": 1000, "float16": 10}}}
    monkeypatch.setattr(measured, "_table", lambda: table)
    eager._scale_least(0.1)
    try:
        assert measured.eager_least("linear", torch.float32) == 100
        assert measured.eager_least("linear", torch.float16) == 1
    finally:
        measured.eager_least.cache_clear()
