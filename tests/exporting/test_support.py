"""The table of formats, devices and dtypes: one answer for refusals and for the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elsa_core.errors import ArgumentError
from elsa_core.exporting import support
from elsa_core.exporting.bundle import export
from elsa_core.loading.loader import load_model
from elsa_core.patching.rewrite import patch

PAGE = Path(__file__).parents[2] / "docs" / "bundles.md"
BEGIN, END = "<!-- begin:export:support -->\n", "<!-- end:export:support -->"


def test_every_combination_has_an_answer_and_a_reason() -> None:
    answers = list(support.rows())
    assert len(answers) == 5 * 2 * 3 == len({row[:3] for row in answers})
    assert all(answer.reason for *_, answer in answers)
    table = support.table()
    assert all(answer.reason in table for *_, answer in answers)


def test_the_refusal_is_the_table_s(tmp_path: Path) -> None:
    loaded = load_model("test_vit", image_size=32, dtype=torch.bfloat16)
    patch(loaded.model)
    with pytest.raises(ArgumentError) as caught:
        export(loaded.model, tmp_path / "out", loaded=loaded)
    assert support.support("onnx", "cpu", "bfloat16").reason in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_docs_show_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == support.table()
