"""`elsa profile` as a user runs it: results, files, sweeps that stop, and whatever is wrong; with
`--train` it measures steps, leaves the model as it was and says what steps lack."""

import copy
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import some

from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading.loader import load
from elsa_core.patching.rewrite import patched_sites
from elsa_core.profiling import document as documents
from elsa_core.profiling import page, sweep
from elsa_core.profiling.runs import training

from .conftest import Answer, Elsa

MODEL = "vit_tiny_patch16_224"
SMALL = "test_vit"  # for whatever does not look at sites
FAST = ("--rounds", "3", "--budget", "0.2", "--no-errors")
TINY = (MODEL, "--img", "32", *FAST)
STEPS = ("--train", "--rounds", "3", "--budget", "0.2", "--device", "cpu")
PARTS = ["forward", "backward", "optimizer"]


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    hidden = [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert not hidden, hidden


def results(answer: Answer, code: int = 0) -> dict[str, Any]:
    """The results of the one document on stdout."""
    part: dict[str, Any] = answer.document(code)["results"]
    return part


def sizes(found: dict[str, Any]) -> list[int]:
    return [row["configuration"]["image_size"][0] for row in found["points"]]


def errors_of(answer: Answer) -> list[str]:
    """What stderr holds besides the warnings about a machine that others use too."""
    beats = ("warning: ", "profiling ", "profiling: ")  # a line of progress every 10 s
    return [line for line in answer.err.splitlines() if not line.startswith(beats)]


def test_a_profile_for_people(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = elsa("profile", "vit_tiny", "--img", "32", "--rounds", "6", "--budget", "1",
                  "--sites", "--no-errors", "--baselines", "sdpa")  # fmt: skip
    assert answer.code == 0 and errors_of(answer) == []
    lines = answer.out.splitlines()
    assert lines[0] == "vit_tiny → vit_tiny_patch16_224 · weights: random (seed 0)"
    assert any(line.startswith("32 px, batch 1, fp32, strict · ") for line in lines)
    assert "without sdpa: fused attention is on already: the same as eager" in lines
    table = [line.split()[0] for line in lines if line.startswith(("eager", "patched", "blocks."))]
    assert table[:2] == ["eager", "patched"] and len(table) == 12  # ten sites of twelve
    assert any(line.startswith("2 more sites") for line in lines)
    assert any(line.startswith("rest of the model") for line in lines)
    assert any(line.startswith("12 of 12 sites patched · ") for line in lines)
    assert lines[-2].startswith("Next: elsa profile vit_tiny --img 32")
    assert lines[-1].startswith("Fastest: ")
    drawn = [line for line in lines if not line.startswith(("12 of", "Next", "Fastest"))]
    assert max(map(len, drawn)) <= 80


def test_a_sweep_as_a_document(elsa: Elsa) -> None:
    answer = elsa(
        "profile", SMALL, *FAST, "--img", "32,48", "--batch-size", "1,2", "--dtype", "bf16",
        "--precision", "turbo,strict", "--no-sites", "--json", "-o", "p.json",
    )  # fmt: skip
    found = results(answer)
    assert found["complete"] and len(found["points"]) == 8
    assert found["settings"]["baselines"] == ["eager"]
    refused = [row for row in found["points"] if row["status"] != "done"]
    asked = [row["configuration"] for row in refused]
    assert {(each["dtype"], each["precision"]) for each in asked} == {("bf16", "turbo")}
    assert "turbo" in refused[0]["reason"]
    measured = [row["profile"] for row in found["points"] if row["status"] == "done"]
    sizes = {(b, s, "bfloat16") for b in (1, 2) for s in (32, 48)}
    assert {(p["batch"], p["image_size"][0], p["dtype"]) for p in measured} == sizes
    assert json.loads(Path("p.json").read_text())["results"] == found


def test_a_file_is_told_of_progress(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    """191 s passed without a word where stderr was no terminal."""
    from elsa_cli import console
    from elsa_cli.commands.profile import command

    monkeypatch.setattr(console, "_BEAT_SECONDS", 0.02)
    answer = elsa("profile", SMALL, *FAST, "--img", "32", "--no-sites")
    lines = [line for line in answer.err.splitlines() if line.startswith("profiling")]
    assert answer.code == 0 and any(" s)" in line for line in lines)
    assert {p.name: p.default for p in command.params}["budget"] == 60.0  # an answer in a minute


def test_quiet_and_several_points(elsa: Elsa) -> None:
    answer = elsa("profile", SMALL, *FAST, "--img", "32,48", "--no-sites", "-q")
    assert answer.code == 0 and len(answer.out.splitlines()) == 1
    assert answer.out.startswith("patched against the best baseline: ") and answer.err == ""


def test_a_sweep_stops_and_goes_on(elsa: Elsa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C keeps what is finished; --resume measures the rest, and that alone."""
    real, measured = sweep.profile, []

    def interrupted(*args: Any, **named: Any) -> Any:
        measured.append(args[1][0].shape[-1])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(*args, **named)

    monkeypatch.setattr(sweep, "profile", interrupted)
    line = ("profile", SMALL, *FAST, "--img", "32,48,64", "--no-sites", "--json")
    answer = elsa(*line, "-o", "p.json")
    assert errors_of(answer) == ["interrupted; p.json is complete"]
    first = results(answer, 130)
    assert not first["complete"] and sizes(first) == [32]
    assert json.loads(Path("p.json").read_text())["results"] == first
    elsa(*line, "-o", "p.json").fails(2, "p.json exists", "--force", "--resume")
    again = results(elsa(*line, "--resume", "p.json"))
    assert again["complete"] and sizes(again) == [32, 48, 64]
    assert again["points"][0] == first["points"][0]
    assert measured == [32, 48, 48, 64]
    assert results(elsa(*line, "--resume", "p.json")) == again
    assert len(measured) == 4


def test_a_model_that_does_not_fit(elsa: Elsa) -> None:
    """Known before it is built: a row of the sweep, and the other rows are measured."""
    line = ("profile", "vit_giant_patch14_224", *FAST, "--no-sites", "--json")
    answer = elsa(*line, "--img", "16380")
    row = results(answer, 3)["points"][0]
    assert row["status"] == "out of memory" and "GiB" in row["reason"]
    assert len(errors_of(answer)) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((MODEL, "--baselines", "eager,tensorrt"), 2, ("'tensorrt' is unknown", "compile")),
        ((MODEL, "--img", "32,65"), 2, ("65", "multiple of the patch size")),
        ((MODEL, "--img", "0"), 2, ("--img-size",)),
        ((MODEL, "--img", "32,48", "--input-size", "3x32x32"), 2, ("--input-size", "one --img")),
        ((MODEL, "--img", "32,,48"), 2, ("--img-size",)),
        ((MODEL, "--batch-size", "1,x"), 2, ("--batch-size",)),
        ((MODEL, "--dtype", "fp8"), 2, ("--dtype",)),
        ((MODEL, "--dtype", "bf16", "--precision", "turbo"), 2, ("turbo",)),
        ((MODEL, "--rounds", "2"), 2, ("--rounds",)),
        ((MODEL, "-o", "none/p.json"), 2, ("none/p.json cannot be written",)),
        ((MODEL, "--html", "/proc/none/r.html"), 2, ("/proc/none/r.html cannot be written",)),
        ((MODEL, "--plot", "r.pdf"), 2, (".png or .svg",)),
        ((MODEL, "--html", "r", "-o", "r"), 2, ("the same",)),
        ((MODEL, "--html", "r", "--resume", "r"), 2, ("the same",)),
        ((MODEL, "--policy", "faster", "--precision", "strict,turbo"), 2, ("one --precision",)),
        ((MODEL, "--policy", "faster", "--no-sites"), 2, ("--no-sites",)),
        ((MODEL, "--resume", "a", "-o", "b"), 2, ("--resume",)),
        ((MODEL, "--plan", "p.json"), 2, ("--plan", "--policy")),
        (("resnet18", "--img", "32", *FAST), 1, ("nothing to patch",)),
    ],
)
def test_bad_input_is_one_line(
    elsa: Elsa, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    elsa("profile", *arguments).fails(code, *words)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no JSON"),
        ("[1]", "no object"),
        ('{"command": "check"}', "environment"),
        ('{"command": "profile", "environment": {}, "results": {"x": NaN}}', "NaN"),
        (
            '{"schema_version": 1, "command": "profile", "environment": {}, "results": {"model": '
            '{}, "settings": {}, "complete": false, "points": [{"status": "done"}]}}',
            "configuration of a point",
        ),
    ],
)
def test_a_file_to_resume_that_is_none(elsa: Elsa, content: str, words: str) -> None:
    Path("p.json").write_text(content)
    elsa("profile", *TINY, "--resume", "p.json").fails(4, "p.json", words)
    assert Path("p.json").read_text() == content


def test_a_file_to_resume_of_something_else(elsa: Elsa) -> None:
    assert elsa("profile", SMALL, "--img", "32", *FAST, "--no-sites", "-o", "p.json").code == 0
    kept = Path("p.json").read_text()
    line = (SMALL, "--img", "48", "--no-sites", "--resume", "p.json")
    elsa("profile", *line, *FAST, "--baselines", "control").fails(2, "another sweep", "baselines")
    elsa("profile", "vit_small_patch16_224", *line[1:], *FAST).fails(2, "another sweep")
    for place, name, value, words in (
        ("environment", "cpu", "Another", "cpu was Another, now"),
        ("environment", "kernels", "another", "kernels was another, now"),
        ("environment", "packages", {"torch": "2.9.0"}, "torch was 2.9.0, now"),
        ("environment", "packages", ["torch"], "torch was None, now"),
        ("", "elsa_version", "0.0.1", "elsa was 0.0.1, now"),
    ):
        document = json.loads(kept)
        (document[place] if place else document)[name] = value
        Path("p.json").write_text(json.dumps(document))
        elsa("profile", *line, *FAST).fails(2, "another machine or with other versions", words)
    document = json.loads(kept)
    document["results"]["settings"]["errors"] = True
    Path("p.json").write_text(json.dumps(document))
    elsa("profile", *line, *FAST).fails(2, "another sweep", "errors is True, now it is False")


def test_a_weights_file_is_named_and_known_again(elsa: Elsa) -> None:
    """Other weights under the same name would be two models in one document."""
    for seed in (0, 1):
        saved = elsa("patch", SMALL, "--img", "32", "--seed", seed, "-o", f"saved{seed}")
        assert saved.code == 0, saved.err
    shutil.copy("saved0/model.safetensors", "w.safetensors")
    line = ("profile", "w.safetensors", *FAST, "--no-sites")
    shown = elsa(*line, "-o", "p.json").shows()
    assert shown.startswith(f"{SMALL} · weights: w.safetensors, saved from random (seed 0)\n")
    again = results(elsa(*line, "--resume", "p.json", "--json"))
    assert again["model"]["architecture"] == SMALL and again["complete"]
    shutil.copy("saved1/model.safetensors", "w.safetensors")
    elsa(*line, "--resume", "p.json").fails(2, "another sweep", "weights_sha256")
    shown = elsa("profile", "./saved1", *FAST, "--no-sites").shows()
    assert shown.startswith(f"{SMALL} · weights: saved1/model.safetensors, saved from random")


def test_few_rounds_are_shown_without_an_interval(elsa: Elsa) -> None:
    line = ("profile", SMALL, *FAST, "--img", "32", "--no-sites")
    assert elsa(*line, "-o", "p.json").code == 0
    document = json.loads(Path("p.json").read_text())
    own = document["results"]["points"][0]["profile"]["runs"][-1]
    own["ratio"] = {"value": 1.48, "low": 1.4, "high": 1.5, "rounds": 3, "verdict": "unsure"}
    Path("p.json").write_text(json.dumps(document))
    shown = elsa(*line, "--resume", "p.json").out
    assert "1.48 (3 rounds)" in shown and "1.40-1.50" not in shown


@pytest.mark.parametrize(
    "words", some([("-o", "p.json"), ("-op.json",), ("--output=p.json",)], one_in=3)
)
def test_the_next_step_goes_on_with_what_was_written(elsa: Elsa, words: tuple[str, ...]) -> None:
    """`-o p.json` again would be refused: it exists now."""
    line = ("profile", SMALL, *FAST, "--img", "32", "--no-sites")
    last = elsa(*line, *words).out.splitlines()[-2]
    assert last.startswith("Next: elsa profile ") and "p.json --html report.html" in last
    before = json.loads(Path("p.json").read_text())["results"]["points"]
    assert elsa(*shlex.split(last)[2:]).code == 0
    assert json.loads(Path("p.json").read_text())["results"]["points"] == before
    assert Path("report.html").is_file()


def test_a_plan_leaves_slow_sites_alone(elsa: Elsa) -> None:
    """From the profile to `elsa patch --plan`: a site that measured slower stays as it was.

    A file that holds another precision too was refused after everything was measured.
    """
    line = ("profile", *TINY, "--sites")
    elsa(*line, "--precision", "turbo,strict", "-o", "p.json").shows()
    document = json.loads(Path("p.json").read_text())
    for row in document["results"]["points"]:
        for site in row["profile"]["sites"]:  # whatever this machine says of so small a model
            slow = ".1." in site["path"] or ".3." in site["path"]
            value, verdict = (0.75, "slower") if slow else (1.5, "faster")
            site["ratio"] = {"value": value, "low": value - 0.05, "high": value + 0.05,
                             "rounds": 9, "verdict": verdict}  # fmt: skip
            site["extra"] = ["slow"] if slow else []
    Path("p.json").write_text(json.dumps(document))
    answer = elsa(*line, "--resume", "p.json", "--policy", "faster")
    answer.shows("plan: plan.json (10 sites patched, 2 left out: ELSA was slower)")
    assert "Next: elsa patch vit_tiny_patch16_224 --img 32 --plan plan.json -o DIR" in answer.out
    plan = json.loads(Path("plan.json").read_text())
    assert plan["precision"] == "strict"
    assert set(plan["kept"]) == {"blocks.1.attn", "blocks.3.attn"}
    assert "0.75x" in plan["kept"]["blocks.1.attn"]
    assert plan["sites"][:3] == ["blocks.0.attn", "blocks.2.attn", "blocks.4.attn"]
    elsa("profile", *TINY, "--policy", "faster").fails(2, "plan.json exists")
    patched = elsa("patch", MODEL, "--img", "32", "--plan", "plan.json", "-o", "saved")
    patched.shows("10 of 12 sites patched", "slower when profiled: 0.75x")
    import elsa_core

    assert set(patched_sites(elsa_core.load("./saved"))) == set(plan["sites"])


def test_a_plan_stands_alone(elsa: Elsa) -> None:
    line = ("patch", SMALL, "--img", "32", "--plan", "plan.json")
    elsa(*line).fails(4, "plan.json", "no such plan")
    Path("plan.json").write_text("{}")
    for more in (("--precision", "ieee"), ("--include", "*"), ("--all-sites",)):
        elsa(*line, *more).fails(2, "--plan", "leave")


# --- training steps -----------------------------------------------------------------------------


def test_a_step_as_a_document_and_a_page(elsa: Elsa) -> None:
    line = ("profile", SMALL, *STEPS, "--img", "32", "--dtype", "fp32,bf16", "-b", "2")
    found = results(elsa(*line, "--json", "-o", "p.json", "--html", "p.html"))
    assert found["settings"]["train"] and found["settings"]["baselines"] == ["eager"]
    assert [row["configuration"]["dtype"] for row in found["points"]] == ["fp32", "bf16"]
    for row in found["points"]:
        assert row["profile"]["dtype"] == "float32" and row["profile"]["sites"] == []
        assert [run["name"] for run in row["profile"]["runs"]] == ["eager", "patched"]
        for run in row["profile"]["runs"]:
            assert list(run["parts"]) == PARTS and min(run["parts"].values()) > 0
    drawn = Path("p.html").read_text()
    assert "parts of a training step" in drawn and "32 px, batch 2, bf16, strict, training" in drawn
    elsa(*line[:2], *line[3:], "--resume", "p.json").fails(2, "another sweep", "train")


def test_a_step_for_people(elsa: Elsa) -> None:
    answer = elsa("profile", SMALL, *STEPS, "--img", "32", "--baselines", "sdpa")
    lines = answer.shows().splitlines()
    assert any(line.startswith("32 px, batch 1, fp32, strict, training step · ") for line in lines)
    heading = next(line for line in lines if "forward, ms" in line)
    rows = lines[lines.index(heading) + 2 :][:2]
    assert [row.split()[0] for row in rows] == ["eager", "patched"]
    assert all(float(cell) > 0 for row in rows for cell in row.split()[1:])
    drawn = [line for line in lines if not line.startswith(("Next", "4 of", "6 of", "12 of"))]
    assert max(map(len, drawn)) <= 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sites"], "--sites is about sites"),
        (["--policy", "faster"], "--policy is about sites"),
        (["--no-errors"], "--no-errors is about sites"),
        (["--baselines", "compile+graph"], "compile+graph is for inference"),
    ],
)
def test_what_a_step_does_not_have(elsa: Elsa, options: list[str], words: str) -> None:
    elsa("profile", SMALL, *STEPS, *options).fails(2, words)


def test_a_file_with_parts_of_other_kinds(elsa: Elsa, tmp_path: Path) -> None:
    assert elsa("profile", SMALL, *STEPS, "--img", "32", "-o", "p.json").code == 0
    kept = documents.read(Path("p.json"))
    assert "parts of a training step" in page.page(kept)
    for parts in ([1.0], {"forward": 1.0}, dict.fromkeys(PARTS, "1"), dict.fromkeys(PARTS, -1)):
        broken = copy.deepcopy(kept)
        broken["results"]["points"][0]["profile"]["runs"][0]["parts"] = parts
        Path("b.json").write_text(json.dumps(broken))
        with pytest.raises(ModelError, match="parts of a run"):
            documents.read(Path("b.json"))


def test_the_model_stays_as_it_was() -> None:
    model = load(SMALL, image_size=32).train()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    found = training.profile_training(model, x, rounds=3, budget_seconds=0.2, baselines=["control"])
    assert {"eager", "control", "patched"} <= {run.name for run in found.runs}
    assert model.training and not patched_sites(model)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.requires_grad_(False)
    with pytest.raises(ArgumentError, match="no parameter"):
        training.profile_training(model, x)
