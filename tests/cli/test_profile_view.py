"""The tables of `elsa profile` for people."""

from __future__ import annotations

import io
import sys

import pytest

from elsa_cli import profile_view
from elsa_cli.console import Session
from elsa_core.measuring.intervals import Ratio
from elsa_core.profiling import words


def test_shares_add_up_to_100_percent() -> None:
    for count in (3, 7, 24):
        sites = [{"share": 0.9 / count} for _ in range(count)] + [{"share": 0.1}]
        shares = [float(each.rstrip("%")) for each in words.shares(sites)]
        assert sum(shares) == pytest.approx(100.0, abs=1e-9)


def test_sites_say_why_they_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "80")
    ratios = [Ratio(1.24, 1.2, 1.3, 9), Ratio(1.0, 0.97, 1.02, 9), Ratio(1.5, 1.2, 2.0, 4)]
    sites = [
        {
            "path": f"layers.0.blocks.{i}", "query_tokens": 49, "key_tokens": 49, "num_heads": 3,
            "seconds_before": 0.0124, "seconds_after": 0.01, "ratio": ratio.to_dict(),
            "share": 0.2, "error": 3e-7, "backend": "native",
        }
        for i, ratio in enumerate(ratios)
    ]  # fmt: skip
    rest = {**sites[0], "path": "rest of the model", "share": 0.4}
    profile_view._sites(Session(), [*sites, rest])
    text = out.getvalue()
    assert "same ±3%" in text and "4 rounds" in text and "?" not in text and "native" in text
    assert max(map(len, text.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "60")
    out.seek(0)
    out.truncate()
    profile_view._sites(Session(), [*sites, rest])
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 60 and "4 rounds" in text and "native" not in text


def test_long_paths_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "60")
    site = {
        "path": "visual.transformer.resblocks.11.attn", "query_tokens": 50, "key_tokens": 50,
        "num_heads": 12, "seconds_before": 0.0124, "seconds_after": 0.01,
        "ratio": Ratio(1.24, 1.2, 1.3, 9).to_dict(), "share": 0.2, "error": 3e-7,
        "backend": "native",
    }  # fmt: skip
    profile_view._sites(Session(), [site, {**site, "path": "rest of the model", "share": 0.8}])
    assert "visual.transformer.resblocks.11.attn" in out.getvalue()
