"""`elsa inspect --all`: table, document, page, exit codes; no model is built for the records."""

import dataclasses
import json
from pathlib import Path

from processes import signalled, started

from elsa_core.proof import coverage
from elsa_core.proof.coverage import Coverage, Kept

from .conftest import Elsa

TWO = "timm:test_vit[23]"
KEPT = (Kept("timm.models.cait.TalkingHeadAttn", "mixes heads", 3, softmax=False),)
GOOD = Coverage("timm:test_vit2", "cait", 7, 5, 2, KEPT, coverage.AGREES, "", 1e-7, 2e-7)


def kept(**second: str) -> str:
    """The file of an earlier run that examined two architectures."""
    records = (GOOD, dataclasses.replace(GOOD, name="timm:test_vit3", **second))
    lines = (json.dumps(record.to_dict()) + "\n" for record in records)
    Path("state.jsonl").write_text("".join(lines), encoding="utf-8")
    return "state.jsonl"


def test_table_and_document(elsa: Elsa) -> None:
    answer = elsa("inspect", "--all", TWO, "--check", "--state", kept())
    answer.shows("cait", "6 TalkingHeadAttn")
    last = answer.out.splitlines()[-1]
    assert last.startswith("2 of 2 architectures with softmax attention are patched whole (100.0%)")
    line = ("inspect", "--all", "timm:test_vit2", "--json")
    results = elsa(*line, "--state", "new.jsonl").document()["results"]
    assert [one["name"] for one in results["architectures"]] == ["timm:test_vit2"]
    assert results["summary"]["complete"] == 1
    assert elsa(*line, "--state", "new.jsonl").document()["results"] == results
    assert len(Path("new.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_an_interrupt_names_the_state_that_was_kept() -> None:
    state = Path("state.jsonl")
    child = started("-m", "elsa_cli", "inspect", "--all", "timm:vit_*", "--state", state)
    code, _, err = signalled(
        child, lambda: state.exists() and state.read_text(encoding="utf-8").endswith("\n")
    )
    assert code == 130 and err.splitlines()[-1] == "interrupted; state.jsonl is complete"
    assert coverage.read_state(state)


def test_a_difference_is_exit_1(elsa: Elsa) -> None:
    line = ("inspect", "--all", TWO, "--state", kept(verdict="differs", reason="far"))
    answer = elsa(*line)
    assert answer.code == 1
    assert "timm:test_vit3: differs: far" in answer.out and "timm:test_vit3 first" in answer.err
    assert elsa(*line, "--json").document(code=1)


def test_wrong_use(elsa: Elsa, tmp_path: Path) -> None:
    elsa("inspect").fails(2, "missing MODEL")
    elsa("inspect", "vit_tiny", "--check").fails(2, "--all")
    elsa("inspect", "vit_tiny", "--force").fails(2, "--html")
    for option in (("--img", "64"), ("--pretrained",), ("--seed", "0"), ("--dtype", "fp16")):
        elsa("inspect", "--all", *option).fails(2, "is not for --all")
    elsa("inspect", "--all", "nothing*").fails(2, "no architecture matches")
    elsa("inspect", "--all", "--state", "no/x").fails(2, "no/x cannot be written: No such file")
    broken = tmp_path / "state.jsonl"
    broken.write_text(json.dumps({"name": 1}), encoding="utf-8")
    elsa("inspect", "--all", "--state", str(broken)).fails(4, "coverage file")
