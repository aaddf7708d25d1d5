"""Forms of linear layers product by product: the ways agree, the command writes its rows."""

from __future__ import annotations

import json

import pytest
import torch

from elsa_core import routing
from elsa_core.bench import forms
from elsa_core.errors import ArgumentError, UnavailableError

CPU = torch.device("cpu")


@pytest.mark.parametrize("form", forms.SHAPES)
@pytest.mark.parametrize("shape", [(70, 64, 96), (70, 96, 64)])
def test_the_ways_compute_the_same(form, shape):
    rows = list(forms.measure(form, CPU, (shape,), rounds=3, budget_seconds=0.05))
    assert {row.way for row in rows} >= {"PyTorch", f"elsa, {form}"}
    bound = {"float16": 1e-3, "bfloat16": 8e-3}
    for row in rows:
        assert row.error <= bound.get(row.product.split()[-1], 1e-6)
        assert abs(row.lean) <= row.error


def test_every_form_is_measured_somewhere():
    models = {routing.NORM, routing.PADDED}
    assert set(forms.SHAPES) | models == set(routing.FORMS)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "forms.json"
    options = ["--device", "cpu", "--shape", "70x64x96", "--rounds", "3", "--budget", "0.05"]
    forms.main(["centred", *options, "-o", str(file)])
    document = json.loads(file.read_text(encoding="utf-8"))
    assert [row["way"] for row in document["rows"]] == ["PyTorch", "elsa", "elsa, centred"]
    assert capsys.readouterr().out.count("| 70x64x96 |") == 3
    with pytest.raises(ArgumentError, match="exists"):
        forms.main(["-o", str(file)])
    with pytest.raises(ArgumentError, match="unknown"):
        forms.main(["norms"])
    with pytest.raises(ArgumentError, match="shape"):
        forms.main(["centred", "--device", "cpu", "--shape", "70x64"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_without_a_gpu():
    with pytest.raises(UnavailableError, match="no CUDA GPU"):
        forms.main([])
