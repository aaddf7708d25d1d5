"""Results show themselves as tables, in `print` and at the prompt."""

import pytest
import timm
import torch

import elsa_core as elsa
from elsa_core.base.summary import Summarised, Summary

WORDS = {
    "patch": ["blocks.0-5.attn", "Attention"],
    "check": ["blocks.0", "top-1 1/1", "agree"],
    "profile": ["eager", "patched", "rest of the model", "fast"],
}


@pytest.fixture(scope="module")
def reports() -> dict[str, Summarised]:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32).eval()
    images = torch.randn(1, 3, 32, 32)
    return {
        "patch": elsa.patch(model),
        "check": elsa.check(model, images),
        "profile": elsa.profile(model, images, rounds=3, budget_seconds=2, sites=True),
    }


@pytest.mark.parametrize("name", ["patch", "check", "profile"])
def test_a_report_is_a_table_wherever_python_shows_it(
    reports: dict[str, Summarised], name: str
) -> None:
    report = reports[name]
    text = str(report)
    assert repr(report) == text and "Report(" not in text
    assert all(words in text for words in WORDS[name])


def test_a_failed_check_says_so_in_its_table(
    reports: dict[str, Summarised], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = timm.create_model("test_vit", img_size=32).eval()
    path = elsa.patch(model).patched[0].path
    monkeypatch.setenv("ELSA_FAULT_INJECTION", f"{path}:1e-2")
    text = str(elsa.check(model, torch.randn(1, 3, 32, 32), stress=False))
    assert text.startswith("outputs do NOT agree") and f"failed: {path}: " in text
    assert "ELSA_FAULT_INJECTION is on" in text
    assert any(line.startswith("FAIL") and path in line for line in text.splitlines())


def test_columns_are_in_line() -> None:
    shown = Summary("a < b", ("name", ">count"), [("x", "1"), ("long name", "100")], ["<end>"])
    assert shown.text() == "a < b\nname       count\nx              1\nlong name    100\n<end>"
    assert Summary("nothing").text() == "nothing"
