"""`elsa bench models --table families`: every family of the coverage table, a few rounds each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from benchmarks import tables
from elsa_cli.main import run
from elsa_core.bench import families, models, published
from elsa_core.bench.model_cases import ModelCase
from elsa_core.errors import ArgumentError
from elsa_core.loading.libraries import default_recipe
from elsa_core.loading.spec import parse
from elsa_core.measuring import busy, rounds
from elsa_core.measuring.timing import Contender
from elsa_core.model_runs import runs
from elsa_core.patching import patched_sites
from elsa_core.surveying import catalogue

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
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


@pytest.mark.parametrize(("family", "name", "side"), families.FAMILIES, ids=str)
def test_an_architecture_is_of_its_family_and_size(family: str, name: str, side: int) -> None:
    if name.startswith("open_clip:"):
        pytest.importorskip("open_clip")
    assert catalogue.family(name) == family
    assert default_recipe(parse(name)).size == (side, side)


def test_the_first_pass_sees_every_family() -> None:
    count = len(families.FAMILIES)
    cases = models.select("cuda", tables=["families"])
    assert len(cases) == 4 * count == len({case.name for case in cases})
    order = [(1, "fp32"), (1, "fp16"), (8, "fp32"), (8, "fp16")]
    for i, expected in enumerate(order):
        part = cases[i * count : (i + 1) * count]
        assert {(case.batch, case.dtype) for case in part} == {expected}
        assert len({case.label for case in part}) == count
    assert {case.dtype for case in models.select("cpu", tables=["families"])} == {"fp32"}


def test_families_are_measured_where_they_are_named() -> None:
    assert not any(case.table == "families" for case in models.select("cuda"))
    assert not any(case.table == "families" for case in models.select("cuda", patterns=["*"]))
    [case] = models.select("cuda", patterns=["families/beit-224x1-fp16"])
    assert case.label == "beit"
    both = models.select("cpu", tables=["batch8", "families"])
    with pytest.raises(ArgumentError, match="measure them alone"):
        families.protocol(CPU, both, {})
    with pytest.raises(ArgumentError, match="no table 'families'"):
        from elsa_core.bench import training

        training.select("cpu", tables=["families"])


def test_the_protocol_is_short_unless_another_is_asked_for() -> None:
    cases = models.select("cuda", tables=["families"])
    cuda = torch.device("cuda")
    short = families.protocol(cuda, cases, {"rounds": None, "budget_seconds": None})
    assert short == {"rounds": 9, "budget_seconds": 2.0, "baselines": ("eager", "eager+graph")}
    asked = families.protocol(cuda, cases, {"rounds": 30, "baselines": None})
    assert asked["rounds"] == 30 and asked["baselines"] == ("eager", "eager+graph")
    others = models.select("cuda", tables=["batch8"])
    assert families.protocol(cuda, others, {"rounds": None}) == {}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(busy, "reason", lambda _: "")
    cases = tuple(ModelCase("families", *row, batch, "fp32") for batch in (1, 2) for row in TINY)
    monkeypatch.setattr(models, "TABLES", {"cpu": {"families": cases}})


@pytest.mark.usefixtures("small")
def test_a_run_is_cut_resumed_and_shown(
    capsys: pytest.CaptureFixture[str], schema: jsonschema.Draft202012Validator
) -> None:
    line = ["bench", "models", "--device", "cpu", "--table", "families", "-o", "m.json"]
    line += ["--rounds", "3", "--budget", "0.3"]
    assert run([*line, "--case", "families/vision*", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema.validate(document)
    first, second = document["results"]["cases"]
    assert first["case"]["batch"] == 1 and first["sites"] == [6, 6] and not first["wrong"]
    assert first["errors"][0] <= 2 * first["errors"][1] + 5e-7
    assert second["errors"] is None  # of batch 1 alone
    assert {run_["memory_bytes"] for run_ in first["measurements"]} == {None}
    assert document["results"]["settings"]["rounds"] == 3
    assert run([*line, "--resume", "--limit", "300"]) == 0
    said = capsys.readouterr().out
    assert "patched against eager: " in said and "slowest: " in said and "of 4 under 0.99" in said
    assert "Not measured: families/no-such-thing-176x1-fp32 (" in said
    kept = published.load(Path("m.json"))
    assert kept["results"]["complete"] and kept["results"]["cases"][0] == first
    lines = tables.of_document(kept, "families").splitlines()
    assert lines[0] == (
        "| family | architecture | px | batch | dtype | sites | eager, ms | patched, ms | gain |"
    )
    assert len(lines) == 8 and lines[2].startswith("| vision_transformer | test_vit | 160 | 1 |")


def result(name: str, seconds: dict[str, float], **more: Any) -> dict[str, Any]:
    case = ModelCase("families", name, f"timm:{name}", 224, 1).to_dict()
    runs = [{"contender": run, "seconds": each} for run, each in seconds.items()]
    return {"case": case, "measurements": runs, "sites": [2, 2], "wrong": []} | more


def test_runs_of_one_kind_stand_beside_each_other() -> None:
    """A graph is not set against an eager run, and the slowest of each kind are named."""
    fast = result("a", {"eager": 2.0, "eager+graph": 0.3, "patched": 1.0, "patched+graph": 0.2})
    slow = result("b", {"eager": 2.0, "eager+graph": 0.3, "patched": 1.0, "patched+graph": 0.4})
    lost = result("c", {"eager": 1.0, "patched": 9.0}, wrong=["patched"])
    assert families.pairs(slow) == {"eager": 2.0, "eager+graph": 0.3 / 0.4}
    document = {"results": {"cases": [fast, slow, lost]}}
    text = families.summary(document)
    assert "patched against eager: 0 of 2 under 0.99; slowest: a-224x1-fp32 (2.00), b-" in text
    assert "patched+graph against eager+graph: 1 of 2 under 0.99; slowest: b-224x1-fp32" in text
    _, rows = tables.families_table([fast, slow, lost])
    assert rows[0][6:] == ["2000", "1000", "2.00", "300", "200", "1.50"]
    assert rows[1][6:] == ["2000", "1000", "2.00", "300", "400", "**0.75**"]
    assert rows[2][6:] == ["1000", "9000", "wrong", "-", "-", "-"]


def test_the_compiled_original_is_a_peer_with_columns() -> None:
    """The bar is the faster of the original's CUDA graph and its compiled graph."""
    seconds = {"eager": 2.0, "eager+graph": 0.4, "compile+graph": 0.3, "patched": 1.0,
               "patched+graph": 0.2}  # fmt: skip
    found = result("a", seconds | {"patched+compile+graph": 0.25}, gain={"value": 1.5})
    lost = result("b", seconds, gain={"value": 1.5})  # the compiler failed on the patched model
    columns, rows = tables.families_table([found, lost])
    assert columns[9:] == [
        ">eager+graph, ms", ">patched+graph, ms", ">gain", ">compile+graph, ms",
        ">patched+compile+graph, ms", ">gain", ">gain, best of both",
    ]  # fmt: skip
    assert rows[0][9:] == ["400", "200", "2.00", "300", "250", "1.20", "1.50"]
    assert rows[1][9:] == ["400", "200", "2.00", "300", "-", "-", "1.50"]
    text = families.summary({"results": {"cases": [found, lost]}})
    assert "patched+compile+graph against compile+graph: 0 of 1 under 0.99" in text


@pytest.mark.usefixtures("small")
def test_a_compiled_original_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **kw: compile_(m, backend="eager", **kw))
    line = ["bench", "models", "--device", "cpu", "--table", "families", "-o", "m.json"]
    line += ["--rounds", "3", "--budget", "0.3", "--baselines", "eager,compile"]
    assert run([*line, "--case", "families/vision_transformer-160x1-fp32"]) == 0
    capsys.readouterr()
    [found] = published.load(Path("m.json"))["results"]["cases"]
    assert set(families.pairs(found)) == {"eager", "compile"} and not found["wrong"]
    assert {m["contender"] for m in found["measurements"]} >= {"compile", "patched+compile"}
    head = tables.of_document(published.load(Path("m.json")), "families").splitlines()[0]
    assert "| compile, ms | patched+compile, ms | gain | gain, best of both |" in head


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_family_on_a_gpu() -> None:
    """Both kinds of run are there, and weights are made on the GPU."""
    device = torch.device("cuda")
    case = ModelCase("families", "vision_transformer", "timm:test_vit", 160, 1, "fp16")
    how = families.protocol(device, [case], {})
    found = models.measure(case, device, models.settings(device, **how), lambda *_: None)
    assert set(families.pairs(found)) == {"eager", "eager+graph"} and not found["wrong"]


def test_each_copy_is_patched_in_one_half_of_the_rounds() -> None:
    """Where a copy lies in the host's memory costs up to 5%: the mean of both halves is free of
    it. The graphs of the first half go on."""
    model = families.built(ModelCase("families", *TINY[0], 1, "fp32"), CPU, 0)
    images = torch.randn(1, 3, 160, 160)
    ready = runs.prepare(
        model, (images,), ("eager",), lambda *_: None, precision="strict", backend="auto"
    )
    graph = Contender("patched+graph", lambda: None)
    built = dataclasses.replace(ready.built, contenders=(*ready.built.contenders, graph))
    ready = dataclasses.replace(ready, built=built)
    with torch.inference_mode():
        first = [contender.call() for contender in ready.built.contenders[:2]]
        contenders = families._exchanged(ready, "auto", lambda *_: None)
        second = [contender.call() for contender in contenders[:2]]
    assert [each.name for each in contenders] == ["eager", "patched", "patched+graph"]
    assert contenders[2] is graph
    assert patched_sites(ready.plain) and not patched_sites(ready.patched)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_samples_of_two_halves_are_averaged() -> None:
    one = {"eager": [rounds.Sample(1.0, 0.5, 0.25), rounds.Sample(9.0)]}
    other = {"eager": [rounds.Sample(3.0, 1.5, 0.75)]}
    assert rounds.averaged(one, other) == {"eager": [rounds.Sample(2.0, 1.0, 0.5)]}
