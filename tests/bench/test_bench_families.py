"""`elsa bench models --table families`: every family of the coverage table, a few rounds each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from command import Elsa

from benchmarks import tables
from elsa_core.errors import ArgumentError
from elsa_core.loading import libraries
from elsa_core.loading.spec import parse
from elsa_core.measuring import busy
from elsa_core.profiling.bench import families, models, published
from elsa_core.profiling.bench.runner import ModelCase
from elsa_core.proof import coverage

ROOT = Path(__file__).parents[2]
TINY = (
    ("vision_transformer", "timm:test_vit", 160),
    ("swin_transformer", "timm:test_vit2", 160),
    ("no such thing", "timm:resnet10t", 176),
)


def test_the_families_are_those_of_the_coverage_table() -> None:
    """Of each of which something is patched there is one; torchvision came after the table."""
    rows = [line.split(" | ") for line in (ROOT / "docs/coverage.md").read_text().splitlines()]
    patched = [row[0].removeprefix("| ") for row in rows if len(row) == 7 and row[3].isdigit()
               and int(row[3])]  # fmt: skip
    named = [family for family, _, _ in families.FAMILIES]
    assert len(patched) >= 50 and [name for name in named if name != "torchvision"] == patched
    assert len(set(named)) == len(named)


def test_an_architecture_is_of_its_family_and_size() -> None:
    pytest.importorskip("open_clip")
    pytest.importorskip("timm", minversion="1.0.31")  # older ones lack some
    for family, name, side in families.FAMILIES:
        assert coverage.family(name) == family
        spec = parse(name)
        recipe = libraries.of(spec.source).recipe(spec.name, spec.tag)
        assert recipe.size == (side, side), name


def test_the_first_pass_sees_every_family_where_they_are_named() -> None:
    count = len(families.FAMILIES)
    cases = models.RUNNER.select("cuda", tables=["families"])
    assert len(cases) == 4 * count == len({case.name for case in cases})
    for i, expected in enumerate([(1, "fp32"), (1, "fp16"), (8, "fp32"), (8, "fp16")]):
        part = cases[i * count : (i + 1) * count]
        assert {(case.batch, case.dtype) for case in part} == {expected}
        assert len({case.label for case in part}) == count
    named = models.RUNNER.select("cuda", patterns=["*"])
    assert not any(case.table == "families" for case in named)
    [case] = models.RUNNER.select("cuda", patterns=["families/beit-224x1-fp16"])
    assert case.label == "beit"
    both = models.RUNNER.select("cpu", tables=["batch8", "families"])
    with pytest.raises(ArgumentError, match="measure them alone"):
        families.protocol(torch.device("cpu"), both, {})


def test_a_run_is_cut_resumed_and_shown(
    elsa: Elsa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(busy, "reason", lambda _: "")
    cases = tuple(ModelCase("families", *row, batch, "fp32") for batch in (1, 2) for row in TINY)
    monkeypatch.setitem(models.TABLES, "cpu", {"families": cases})
    line = ["bench", "models", "--device", "cpu", "--table", "families", "-o", "m.json"]
    line += ["--rounds", "3", "--budget", "0.3"]
    document = elsa(*line, "--case", "families/vision*", "--json").document()
    first, second = document["results"]["cases"]
    assert first["case"]["batch"] == 1 and first["sites"] == [6, 6] and not first["wrong"]
    assert first["errors"][0] <= 2 * first["errors"][1] + 5e-7
    assert second["errors"] is None  # of batch 1 alone
    assert {run_["memory_bytes"] for run_ in first["measurements"]} == {None}
    assert document["results"]["settings"]["rounds"] == 3
    said = elsa(*line, "--resume", "--limit", "300").shows()
    assert "patched against eager: " in said and "slowest: " in said and "of 4 under 0.99" in said
    assert "Not measured: families/no-such-thing-176x1-fp32 (" in said
    kept = published.load(Path("m.json"))
    assert kept["results"]["complete"] and kept["results"]["cases"][0] == first
    lines = tables.of_document(kept, "families").splitlines()
    assert lines[0] == (
        "| family | architecture | px | batch | dtype | sites | eager, ms | patched, ms | gain |"
    )
    assert len(lines) == 8 and lines[2].startswith("| vision_transformer | test_vit | 160 | 1 |")


def test_runs_of_one_kind_stand_beside_each_other() -> None:
    """A graph is not set against an eager run, and the slowest of each kind are named."""

    def result(name: str, seconds: dict[str, float], **more: Any) -> dict[str, Any]:
        case = ModelCase("families", name, f"timm:{name}", 224, 1).to_dict()
        runs = [{"contender": run, "seconds": each} for run, each in seconds.items()]
        return {"case": case, "measurements": runs, "sites": [2, 2], "wrong": []} | more

    fast = result("a", {"eager": 2.0, "eager+graph": 0.3, "patched": 1.0, "patched+graph": 0.2})
    slow = result("b", {"eager": 2.0, "eager+graph": 0.3, "patched": 1.0, "patched+graph": 0.4})
    lost = result("c", {"eager": 1.0, "patched": 9.0}, wrong=["patched"])
    text = families.summary({"results": {"cases": [fast, slow, lost]}})
    assert "patched against eager: 0 of 2 under 0.99; slowest: a-224x1-fp32 (2.00), b-" in text
    assert "patched+graph against eager+graph: 1 of 2 under 0.99; slowest: b-224x1-fp32" in text
    _, rows = tables.families_table([fast, slow, lost])
    assert rows[0][6:] == ["2000", "1000", "2.00", "300", "200", "1.50"]
    assert rows[1][6:] == ["2000", "1000", "2.00", "300", "400", "**0.75**"]
    assert rows[2][6:] == ["1000", "9000", "wrong", "-", "-", "-"]
