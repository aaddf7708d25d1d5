"""What each fusion gives alone: the variants, on a CPU where they are all the same products."""

from __future__ import annotations

import json

import pytest
import torch

from elsa_core import routing
from elsa_core.bench import fusions
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.patching import adapters
from elsa_core.patching.adapters import common, torch_layers

timm = pytest.importorskip("timm")


def model():
    torch.manual_seed(0)
    options = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    made = timm.create_model("vit_tiny_patch16_224", init_values=0.5, **options)
    return made.eval(), torch.randn(1, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "activations", "residuals", "norms"),
    [("products alone", 0, 0, 0), ("activation", 1, 0, 0), ("residual", 0, 2, 0),
     ("both", 1, 2, 0), ("both, norm", 1, 2, 2), ("all", 1, 2, 2),
     ("turbo, rounded", 1, 2, 0), ("both, half", 1, 2, 0)],
)  # fmt: skip
def test_a_variant_folds_what_it_says(monkeypatch, name, activations, residuals, norms):
    made, x = model()
    variant = next(v for v in fusions.VARIANTS if v.name == name)
    call = fusions._runner(made, x, variant)
    seen = []
    inner = common.served

    def served(*given):
        norm = given[10] if len(given) > 10 else None
        seen.append((given[3] != "none", given[4] is not None, norm is not None))
        return inner(*given)

    for module in (common, torch_layers):
        monkeypatch.setattr(module, "served", served)
    with torch.inference_mode():
        torch.testing.assert_close(call(), made(x))
    counts = tuple(sum(each) for each in zip(*seen, strict=True))
    assert counts == (activations, residuals, norms)


def test_the_rows_and_the_table():
    made, x = model()
    rows = fusions.measure(made, x, rounds=3, budget_seconds=0.5)
    assert [row.variant for row in rows] == [v.name for v in fusions.variants_of(x.dtype)]
    assert not any("half" in row.variant for row in rows)
    assert rows[0].gain == 1.0 and all(row.error < 1e-5 for row in rows)
    text = fusions.table("vit", 1, rows)
    assert text.count("\n| ") == len(rows) + 1
    with pytest.raises(ArgumentError, match="training"):
        fusions.measure(made.train(), x)


def test_half_precision():
    made, x = model()
    rows = fusions.measure(made.bfloat16(), x.bfloat16(), rounds=3, budget_seconds=0.5)
    names = [row.variant for row in rows]
    assert names[0] == "original" and "both, half" in names and "turbo" not in names


def test_nothing_stays_switched():
    with pytest.raises(ZeroDivisionError), adapters.left_out("activation"):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), routing.unmeasured(routing.NORM):
        raise ZeroDivisionError
    device = torch.device("cpu")
    assert not routing.linear_form(routing.NORM, device)
    assert not common.leaves_out("activation")


def test_the_command(tmp_path, capsys):
    file = tmp_path / "fusions.json"
    options = ["--size", "32", "--batch", "1", "--rounds", "3", "--budget", "0.5"]
    fusions.main(["vit_tiny_patch16_224", "--device", "cpu", *options, "-o", str(file)])
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["rows"][0]["model"] == "vit_tiny_patch16_224"
    assert len(document["rows"][0]["variants"]) == len(fusions.variants_of(torch.float32))
    assert "products alone" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="exists"):
        fusions.main(["-o", str(file)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_without_a_gpu():
    with pytest.raises(UnavailableError, match="no CUDA GPU"):
        fusions.main([])
