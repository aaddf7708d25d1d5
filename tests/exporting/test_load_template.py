"""load.py of a bundle, alone: what it says of the preprocessing, and which images it opens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elsa_core.exporting.templates import load as template

GIVEN: dict[str, Any] = {
    "input_size": [3, 224, 224],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "assumed": ["mean", "std"],
}


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps({"preprocess": GIVEN}))
    monkeypatch.setattr(template, "HERE", tmp_path)
    return tmp_path


def test_what_was_assumed_is_said(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"preprocess": GIVEN}
    monkeypatch.setattr(template, "manifest", lambda *_: facts)
    monkeypatch.setattr(template, "load", lambda *_: lambda x: [np.zeros((1, 3), np.float32)])
    Image.new("RGB", (30, 20)).save(bundle / "a.png")
    assert template.main([str(bundle / "a.png")]) == 0
    said = capsys.readouterr()
    assert "mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5] assumed" in said.err
    assert "assumed" not in said.out
    facts["preprocess"] = GIVEN | {"assumed": []}
    assert template.main([str(bundle / "a.png")]) == 0
    assert capsys.readouterr().err == ""


def test_images_that_are_none(bundle: Path) -> None:
    (bundle / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n")
    with pytest.raises(OSError, match="cannot identify"):
        template.preprocess(str(bundle / "eps.png"), bundle)
    os.mkfifo(bundle / "fifo.png")
    for path in (bundle / "fifo.png", "/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            template.preprocess(path, bundle)
    Image.new("L", (1, 60_000)).save(bundle / "thin.png")
    with pytest.raises(ValueError, match="after resizing"):
        template.preprocess(bundle / "thin.png", bundle)
