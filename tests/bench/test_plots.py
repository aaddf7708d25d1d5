"""`elsa bench attention --plot`: which cases are drawn, and files that are written whole."""

from pathlib import Path
from typing import Any

import pytest
from command import Elsa

from elsa_core.errors import ArgumentError
from elsa_core.profiling import figures


def case(tokens: int, **more: Any) -> dict[str, Any]:
    shape = {
        "batch": 1, "heads": 12, "queries": tokens, "keys": tokens, "head_dim": 64,
        "dtype": "fp32", "mask": "none", "table": "vit",
    } | more  # fmt: skip
    runs = [
        {"contender": name, "seconds": tokens * 1e-5, "seconds_p10": tokens * 0.9e-5,
         "seconds_p90": tokens * 1.1e-5, "workspace_bytes": 2_000_000}
        for name in ("elsa-strict", "sdpa-flash")
    ]  # fmt: skip
    return {"case": shape, "measurements": runs, "wrong": []}


@pytest.fixture
def document() -> dict[str, Any]:
    cases = [case(197), case(577), case(16), case(49, mask="additive"), case(49, head_dim=32)]
    environment = {"cpu": "A CPU", "threads": 2, "isa": "AVX2", "date": "2026-01-02T03:04:05"}
    return {"environment": environment, "results": {"cases": cases}}


def test_the_longest_family_is_drawn(document: dict[str, Any]) -> None:
    title, times, memory = figures.family(document)
    assert title == "fp32 attention, batch 1, 12 heads, head_dim 64"
    assert [tokens for tokens, _ in times["elsa-strict"]] == [16, 197, 577]
    assert memory["sdpa-flash"][0] == (16, 2_000_000)
    document["results"]["cases"] = document["results"]["cases"][:1]
    with pytest.raises(ArgumentError, match="no two of these cases differ"):
        figures.family(document)


def test_operators_are_not_drawn_as_one_line(document: dict[str, Any]) -> None:
    """A length of packed sequences stood in the line of plain attention, if that lacked it."""
    document["results"]["cases"] += [case(n, table="varlen") for n in (64, 128, 256, 512)]
    title, times, _ = figures.family(document)
    assert title == "fp32 attention, batch 1, 12 heads, head_dim 64, varlen"
    assert [tokens for tokens, _ in times["elsa-strict"]] == [64, 128, 256, 512]


def test_a_plot_of_one_length_is_refused_before_it_is_measured(elsa: Elsa, tmp_path: Path) -> None:
    out, plot = tmp_path / "a.json", tmp_path / "a.png"
    arguments = ["bench", "attention", "--device", "cpu", "--allow-busy", "--shape", "1,2,9,16"]
    answer = elsa(*arguments, "-o", out, "--plot", plot)
    answer.fails(2, "no two of these cases differ")
    assert not answer.out


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_are_written_whole(document: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = figures.of_attention(document, tmp_path / f"plot{suffix}")
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in head
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
