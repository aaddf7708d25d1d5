"""`elsa bench models` and `--compare`: cases, documents, tables, regressions."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from command import Elsa

from benchmarks import tables
from elsa_core.errors import ArgumentError
from elsa_core.loading import libraries
from elsa_core.loading.fit import with_image_size
from elsa_core.loading.spec import parse
from elsa_core.profiling.bench import models, runner
from elsa_core.profiling.bench import published as results
from elsa_core.profiling.bench.runner import ModelCase

TINY = {
    "cpu": {
        "batch8": (
            ModelCase("batch8", "ViT-T", "timm:vit_tiny_patch16_224", 32, 2, quick=True),
            ModelCase("batch8", "Swin-T W4", "timm:swin_tiny_patch4_window7_224", 64, 1, window=4),
        )
    }
}
SHORT = ("--device", "cpu", "--rounds", "3", "--budget", "0.3")


@pytest.fixture(autouse=True)
def _place(free_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.TABLES, "cpu", TINY["cpu"])


@pytest.fixture(scope="module")
def held() -> str:
    """What a run of the first model writes."""
    device = torch.device("cpu")
    document = models.RUNNER.started(device, rounds=3, budget_seconds=0.3)
    models.RUNNER.run(TINY["cpu"]["batch8"][:1], document, device=device)
    return json.dumps(document)


def test_the_papers_models_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for device in ("cpu", "cuda"):
        cases = models.RUNNER.select(device)
        assert len({case.name for case in cases}) == len(cases)
        labels = {case.label for case in cases if case.table == "batch8"}
        assert {"ViT-T", "ViT-S", "ViT-M", "ViT-B", "Swin-T W8", "Swin-S W16", "SAM B"} <= labels
        assert {"CLIP B/32", "CLIP B/16", "CLIP L/14", "CLIP L/14@336"} <= labels
        assert 1 < len(models.RUNNER.select(device, quick=True)) <= 10
    assert {case.batch for case in models.RUNNER.select("cuda", tables=["batch8"])} == {8}
    with pytest.raises(ArgumentError, match="no table 'x'"):
        models.RUNNER.select("cpu", tables=["x"])
    with pytest.raises(ArgumentError, match="--dry-run"):
        models.RUNNER.select("cpu", patterns=["x"])


@pytest.mark.parametrize("case", models.TABLES["cpu"]["batch8"], ids=lambda case: case.name)
def test_every_model_can_be_built(case: ModelCase) -> None:
    """On the meta device: shapes alone, as the case asks for them."""
    if case.model.startswith("open_clip:"):
        pytest.importorskip("open_clip")
    if case.window is None:
        spec = parse(case.model)
        usual = libraries.of(spec.source).recipe(spec.name, spec.tag)
        recipe = with_image_size(usual, case.image_size)
        assert recipe.size == (case.image_size, case.image_size)
        return
    if not hasattr(timm.layers, "calculate_drop_path_rates"):
        pytest.skip("this timm reads numbers of tensors on the meta device")
    with torch.device("meta"):
        model, _ = models.build(case, torch.device("meta"), 0)
    windows = {m.window_size for m in model.modules() if hasattr(m, "window_size")}
    assert (case.window, case.window) in windows


def test_a_run_is_kept_resumed_shown_and_rendered(elsa: Elsa, held: str) -> None:
    line = ["bench", "models", *SHORT, "-o", "m.json", "--json"]
    Path("m.json").write_text(held)
    [first] = json.loads(held)["results"]["cases"]
    assert first["sites"] == [12, 12] and first["wrong"] == []
    assert first["errors"][0] <= 2 * first["errors"][1] + 5e-7
    assert {m["contender"] for m in first["measurements"]} == {"eager", "patched"}
    elsa(*line).fails(2, "--resume")
    again = elsa(*line, "--resume").document()
    assert again["command"] == "bench models" and again["results"]["complete"]
    assert again["results"]["cases"][0] == first
    swin = again["results"]["cases"][1]
    assert swin["case"]["window"] == 4
    assert "sdpa" in {m["contender"] for m in swin["measurements"]}  # Swin leaves it off
    kept = results.load(Path("m.json"))
    assert kept["results"] == again["results"]
    lines = tables.of_document(kept, "batch8").splitlines()
    assert lines[0].startswith("| model | px | batch | eager, ms | sdpa, ms | patched, ms | gain")
    assert lines[2].startswith("| ViT-T | 32 | 2 | ") and len(lines) == 4
    assert "faster than the fastest baseline in " in tables.of_document(kept, "summary")
    elsa(*line[:-1], "--resume", "--rounds", "4").fails(2, "other settings")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"elsa_version": "0.0.1"}, 2, "with other versions (elsa was 0.0.1, now it is"),
        ({"environment": {"packages": {"torch": "2.9.0"}}}, 2, "torch was 2.9.0, now it is"),
        ({"environment": {"kernels": "another"}}, 2, "kernels was another, now it is"),
        ({"environment": []}, 4, "m.json is no result of `elsa bench models`"),
        ({"results": {"cases": 3}}, 4, "m.json is no result of `elsa bench models`"),
        (None, 4, "m.json is no result of `elsa bench models`"),
    ],
)
def test_what_is_resumed_is_of_the_same_versions(
    elsa: Elsa, held: str, change: Any, code: int, words: str
) -> None:
    document = json.loads(held)
    for key, value in (change or {}).items():
        document[key] = document[key] | value if isinstance(value, dict) else value
    content = "[]" if change is None else json.dumps(document)
    Path("m.json").write_text(content)
    elsa("bench", "models", *SHORT, "--quick", "-o", "m.json", "--resume").fails(code, words)
    assert Path("m.json").read_text() == content


def test_few_rounds_are_shown_without_an_interval(elsa: Elsa, held: str) -> None:
    document = json.loads(held)
    document["results"]["cases"][0]["gain"] |= {"rounds": 4, "verdict": "unsure"}
    Path("m.json").write_text(json.dumps(document))
    shown = elsa("bench", "models", *SHORT, "--quick", "-o", "m.json", "--resume").shows()
    [row] = [line for line in shown.splitlines() if line.startswith("batch8/ViT-T")]
    assert " 4 rounds " in row and row.endswith("unsure")
    assert "undecided in 1 for want of rounds" in shown


def test_a_limit_leaves_models_for_later(elsa: Elsa) -> None:
    clock = iter([0.0, 0.5, 100.0])

    class Time:
        monotonic = staticmethod(lambda: next(clock))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "time", Time)
        out = elsa("bench", "models", *SHORT, "-o", "m.json", "--limit", "1").shows()
    assert "1 of 2 models are left; --resume -o m.json goes on" in out
    assert not results.load(Path("m.json"))["results"]["complete"]


def test_a_model_that_fails_is_a_row(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = ModelCase("batch8", "Odd", "timm:vit_tiny_patch16_224", 33, 1)
    monkeypatch.setitem(models.TABLES, "cpu", {"batch8": (bad, TINY["cpu"]["batch8"][0])})
    code, out, err = elsa("bench", "models", *SHORT, "-o", "m.json")
    assert code == 0 and "no: not measured" in out and "multiple of the patch size" in err
    document = results.load(Path("m.json"))
    assert "| Odd | 33 | 1 | - |" in tables.of_document(document, "batch8")
    assert "Not measured: batch8/Odd-33x1-fp32 (" in tables.of_document(document, "summary")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_backend_that_served_no_model(elsa: Elsa) -> None:
    code, out, err = elsa("bench", "models", *SHORT, "--quick", "--backend", "triton")
    assert code == 3 and "no: not measured" in out
    assert err.splitlines()[-1].startswith("error: --backend triton served no model: ")


# --compare


@pytest.mark.parametrize(
    ("field", "environments", "words"),
    [
        ("x" * 200_000, "{}", "field larger than field limit"),
        ("x", "[" * 100_000, "nested too deeply"),
        ("x", "{}", "'here'"),
        ("x", "3", "not a JSON object"),
    ],
    ids=["long", "deep", "unknown", "number"],
)
def test_a_file_that_was_not_published(
    field: str, environments: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / results.ENVIRONMENTS).write_text(environments)
    path = tmp_path / "some.csv"
    path.write_text(f"{','.join(results.FIRST)}\n{field},elsa,here,1,1,1,1,1\n")
    with pytest.raises(ArgumentError, match=f"(?s)not a published result.*{words}"):
        results.load(path)
    path.unlink()
    os.mkfifo(path)  # to which nobody writes
    with pytest.raises(ArgumentError, match="not a regular file"):
        results.load(path)


@pytest.fixture(name="published")
def published_cpu() -> dict[str, Any]:
    """With what a run's own document has besides."""
    document = results.read(results.RESULTS / "attention_cpu.csv")
    for case in document["results"]["cases"]:
        case["case"]["quick"], case["reached"] = False, None
        for measured in case["measurements"]:
            measured["samples"] = [measured["seconds"]]
    return document


def worse(document: dict[str, Any]) -> dict[str, Any]:
    """The same run with elsa slower in its first case, by more than the rounds scatter."""
    changed = copy.deepcopy(document)
    own = changed["results"]["cases"][0]["measurements"][0]
    own |= {name: own[name] / 10 for name in ("ratio", "ratio_p10", "ratio_p90")}
    own["seconds"] *= 10
    return changed


def test_the_same_run_is_no_regression(published: dict[str, Any]) -> None:
    found = results.compare(published, published)
    assert found.same_machine and not found.missing
    assert not [row for row in found.rows if row.verdict == results.REGRESSION]
    assert {row.verdict for row in found.rows} == {"same"}
    rows = found.to_dict()["rows"]
    assert len(rows) > 80 and rows[0]["seconds"] is not None


def test_regressions_are_called(published: dict[str, Any]) -> None:
    name = published["results"]["cases"][0]["case"]["name"]
    found = results.compare(worse(published), published)
    assert [row.name for row in found.rows if row.verdict == results.REGRESSION] == [name]
    assert results.compare(published, worse(published)).rows[0].verdict == "better"
    wrong = copy.deepcopy(published)
    wrong["results"]["cases"][0]["measurements"][0]["error"] *= 3
    wrong["environment"]["cpu"] = "Another"
    found = results.compare(wrong, published)
    assert [row.name for row in found.rows if row.verdict == results.REGRESSION] == [name]
    assert "error" in found.rows[0].note and found.to_dict()["rows"][0]["seconds"] is None


def test_compare_of_two_files(elsa: Elsa, published: dict[str, Any]) -> None:
    Path("mine.json").write_text(json.dumps(worse(published)))
    Path("same.json").write_text(json.dumps(published))
    line = ["bench", "--compare", "attention_cpu", "--from"]
    elsa(*line, "same.json").shows("cases compared, 0 worse")
    code, out, err = elsa(*line, "mine.json")
    assert code == 1
    assert "FAIL worse" in out and err.startswith("error: worse than published: vit/")
    other = json.loads(json.dumps(published))
    for case in other["results"]["cases"]:
        case["case"]["name"] += "-of-another-run"
    Path("other.json").write_text(json.dumps(other))
    answer = elsa(*line, "other.json")
    assert answer.code == 1
    assert "error: nothing was compared: no case of this run" in answer.err
    document = elsa(*line, "mine.json", "--json").document(1)
    assert document["results"]["comparison"]["rows"][0]["verdict"] == "regression"
    Path("mine.json").write_text('{"command": "bench attention", "results": {}}')
    assert elsa(*line, "mine.json").code == 4


def test_a_comparison_names_another_processor_and_a_busy_machine(
    elsa: Elsa, published: dict[str, Any]
) -> None:
    """Ratios of an Intel processor stood beside those of an AMD one without a word."""
    Path("same.json").write_text(json.dumps(published))
    other = worse(published)
    other["environment"]["cpu"] = "Another Processor"
    other["results"]["busy"] = "other programs use 90% of the processors"
    Path("mine.json").write_text(json.dumps(other))
    line = ["bench", "--compare", "attention_cpu", "--from"]
    assert "Not the same processor" not in elsa(*line, "same.json").shows()
    code, out, err = elsa(*line, "mine.json")
    assert code == 1
    assert "Not the same processor (here Another Processor" in " ".join(out.split())
    assert err.rstrip().endswith("the machine was not free: " + other["results"]["busy"])


def test_a_run_is_compared_with_a_file(elsa: Elsa, held: str) -> None:
    document = json.loads(held)
    gain = document["results"]["cases"][0]["gain"]
    gain |= {"value": 900.0, "low": 800.0, "high": 1000.0}  # nobody's machine gets there
    Path("m.json").write_text(json.dumps(document))
    code, out, err = elsa("bench", *SHORT, "--compare", "m.json")
    assert code == 1
    assert "1 case compared, 1 worse" in out and "batch8/ViT-T-32x2-fp32" in err
