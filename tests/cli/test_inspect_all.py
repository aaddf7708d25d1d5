"""`elsa inspect --all`: table, document, page, exit codes; no model is built for the records."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from elsa_core.proof import catalogue, coverage
from elsa_core.proof.coverage import Coverage, Kept

from .conftest import Elsa
from .test_commands import document

KEPT = (Kept("timm.models.cait.TalkingHeadAttn", "mixes heads", 3, softmax=False),)
GOOD = Coverage("timm:a", "cait", 7, 5, 2, KEPT, coverage.AGREES, "", 1e-7, 2e-7)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, Coverage]:
    found = {"timm:a": GOOD, "timm:b": dataclasses.replace(GOOD, name="timm:b")}
    monkeypatch.setattr(
        catalogue, "architectures", lambda match: [n for n in found if match in ("*", n)]
    )
    monkeypatch.setattr(coverage, "examine", lambda name, *, checked: found[name])
    return found


def test_table_page_and_document(elsa: Elsa, records: dict[str, Coverage], tmp_path: Path) -> None:
    page, state = tmp_path / "coverage.md", tmp_path / "state.jsonl"
    answer = elsa("inspect", "--all", "--check", "--page", str(page), "--state", str(state))
    assert answer.code == 0, answer.err
    assert "cait" in answer.out and "6 TalkingHeadAttn" in answer.out
    last = answer.out.splitlines()[-1]
    assert last.startswith("2 of 2 architectures with softmax attention are patched whole (100.0%)")
    assert "| cait | 2 | 10 | 4 | 2/2 |" in page.read_text(encoding="utf-8")
    assert len(state.read_text(encoding="utf-8").splitlines()) == 2
    results = document(elsa("inspect", "--all", "timm:a", "--json"))["results"]
    assert [one["name"] for one in results["architectures"]] == ["timm:a"]
    assert results["summary"]["complete"] == 1


def test_a_page_says_what_wrote_it_and_is_not_replaced_unasked(
    elsa: Elsa, records: dict[str, Coverage]
) -> None:
    page = Path("page.md")
    for flags, line in (((), "elsa inspect --all timm:a"), (("--check",), "--all timm:a --check")):
        page.unlink(missing_ok=True)
        assert elsa("inspect", "--all", "timm:a", *flags, "--page", "page.md").code == 0
        assert f"{line}`. Versions: torch " in page.read_text(encoding="utf-8")
    page.write_text("mine", encoding="utf-8")
    elsa("inspect", "--all", "--page", "page.md").fails(2, "page.md exists", "--force")
    assert page.read_text(encoding="utf-8") == "mine"
    assert elsa("inspect", "--all", "--page", "page.md", "--force").code == 0
    assert "Coverage" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--state", "--page"])
def test_a_target_that_cannot_be_written_is_known_at_once(
    elsa: Elsa, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(catalogue, "architectures", lambda match: pytest.fail("too late"))
    elsa("inspect", "--all", option, "no/x").fails(2, "no/x cannot be written: No such file")


def test_an_interrupt_names_the_state_that_was_kept(
    elsa: Elsa, records: dict[str, Coverage], monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(name: str, *, checked: bool) -> Coverage:
        if name == "timm:b":
            raise KeyboardInterrupt
        return records[name]

    monkeypatch.setattr(coverage, "examine", examine)
    answer = elsa("inspect", "--all", "--state", "state.jsonl")
    assert (answer.code, answer.err) == (130, "interrupted; state.jsonl is complete\n")
    assert len(Path("state.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_a_difference_is_exit_1(elsa: Elsa, records: dict[str, Coverage]) -> None:
    records["timm:b"] = dataclasses.replace(GOOD, name="timm:b", verdict="differs", reason="far")
    answer = elsa("inspect", "--all")
    assert answer.code == 1
    assert "timm:b: differs: far" in answer.out and "timm:b first" in answer.err
    assert document(elsa("inspect", "--all", "--json"), code=1)


def test_wrong_use(elsa: Elsa, records: dict[str, Coverage], tmp_path: Path) -> None:
    elsa("inspect").fails(2, "missing MODEL")
    elsa("inspect", "vit_tiny", "--check").fails(2, "--all")
    elsa("inspect", "vit_tiny", "--force").fails(2, "--all")
    for option in (("--img", "64"), ("--pretrained",), ("--seed", "0"), ("--dtype", "fp16")):
        elsa("inspect", "--all", *option).fails(2, "is not for --all")
    elsa("inspect", "--all", "--state", "a", "--page", "./a").fails(2, "--state and --page")
    elsa("inspect", "--all", "nothing*").fails(2, "no architecture matches")
    broken = tmp_path / "state.jsonl"
    broken.write_text(json.dumps({"name": 1}), encoding="utf-8")
    elsa("inspect", "--all", "--state", str(broken)).fails(4, "coverage file")
