"""`--dynamic-size`: model.pt2 takes other image sizes, or one line says that the model does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elsa_core.errors import ExportError
from elsa_core.exporting.bundle import export
from elsa_core.models.load import load_model
from elsa_core.models.patch import patch


def test_a_model_of_convolutions_and_attention_takes_other_sizes(tmp_path: Path) -> None:
    """Export itself runs model.pt2 at a second size and compares it with the model in float64."""
    loaded = load_model("pvt_v2_b0", image_size=64)
    patch(loaded.model)
    export(
        loaded.model, tmp_path / "out", formats=("pt2",), dynamic_size=True, loaded=loaded
    )  # fmt: skip
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["inputs"][0]["dynamic_in_pt2"] == {"2": "height", "3": "width"}


def test_a_model_of_one_size_is_refused_in_one_line(tmp_path: Path) -> None:
    loaded = load_model("vit_tiny_patch16_224", image_size=64)
    patch(loaded.model)
    with pytest.raises(ExportError) as caught:
        export(loaded.model, tmp_path / "out", formats=("pt2",), dynamic_size=True, loaded=loaded)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
