"""`python -m elsa_core.bench.long_context` on small cases: the code that a GPU runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from elsa_core.bench import long_context


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["long_context", "--quick", *flags])
    long_context.main()
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert [json.loads(line) for line in said.err.splitlines() if line[0] == "{"] == document[
        "cases"
    ]
    return document


def test_attention(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ("million", "host", "exceeding", "vggt")
    flags = [flag for name in groups for flag in ("--only", name)]
    document = run(capsys, monkeypatch, *flags)
    assert document["environment"]["device"] == "cpu"
    found = [(case["case"], case["contender"]) for case in document["cases"]]
    away = "elsa, keys and values on the host"
    assert found == [
        ("million", "elsa"), ("million", away), ("million", "sdpa"), ("host", "elsa"),
        ("host", away), ("exceeding", away), ("vggt", "elsa"), ("vggt", "sdpa"),
    ]  # fmt: skip
    for case in document["cases"]:
        assert case["seconds"] > 0 and case["error"] < 2e-6


def test_llama(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    document = run(capsys, monkeypatch, "--only", "llama", "--layers", "3", "--dtypes", "fp32")
    resident, streamed = document["cases"]
    assert resident["weights"] == "resident" and streamed["weights"] == "host"
    for case in (resident, streamed):
        assert case["layers"] == 3 and case["difference"] < 1e-5
        assert case["speedup"] == pytest.approx(case["seconds_sdpa"] / case["seconds_elsa"])
    assert streamed["wait_per_layer_elsa"] >= 0


def test_as_many_layers_as_fit() -> None:
    sizes, much = long_context.Sizes(), 1 << 40
    assert long_context.fitting(sizes, "fp32", much, much) == 40
    layer = 4 * (4 * 5120**2 + 3 * 5120 * 13824)
    prefill = 4 * 65536 * (10 * 5120 + 3 * 13824)
    assert long_context.fitting(sizes, "fp32", int((prefill + 7.5 * layer) / 0.9), much) == 7
    assert long_context.fitting(sizes, "fp32", much, int(3.6 * layer / 0.9)) == 3
    assert long_context.fitting(sizes, "fp16", much, int(3.6 * layer / 0.9)) == 7
    assert long_context.fitting(sizes, "fp32", 0, much) == 1


def test_layers_are_counted_for_each_dtype(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(long_context, "_LAYERS", 2)
    document = run(capsys, monkeypatch, "--only", "llama", "--dtypes", "fp32")
    assert [case["layers"] for case in document["cases"]] == [2, 2]


def test_streamed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the two buffers the weights are the layers' own, in every forward."""
    monkeypatch.setattr(long_context.streaming, "stays", lambda tensor, device: False)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    x = torch.randn(2, 4)
    with torch.inference_mode():
        expected = nn.Sequential(*layers)(x)
        runner = long_context.Streamed(layers, torch.device("cpu"))
        for _ in range(2):
            assert torch.equal(nn.Sequential(*layers)(x), expected)
            runner.finish()
    report = runner.timeline.report()
    assert report.blocks == 3 and report.copied_bytes == 3 * (16 + 4) * 4
