"""The tables of `elsa profile` add up, keep paths whole, and say why a site is undecided."""

from typing import Any

import pytest

from elsa_cli import profile_view
from elsa_cli.console import Session
from elsa_cli.options import Options
from elsa_core.measuring.intervals import Ratio
from elsa_core.profiling import words


def test_shares_add_up_to_100_percent() -> None:
    for count in (3, 7, 24):
        sites = [{"share": 0.9 / count} for _ in range(count)] + [{"share": 0.1}]
        shares = [float(each.rstrip("%")) for each in words.shares(sites)]
        assert sum(shares) == pytest.approx(100.0, abs=1e-9)


def site(path: str, ratio: Ratio) -> dict[str, Any]:
    return {
        "path": path, "query_tokens": 49, "key_tokens": 49, "num_heads": 3,
        "seconds_before": 0.0124, "seconds_after": 0.01, "ratio": ratio.to_dict(), "share": 0.2,
        "error": 3e-7, "backend": "native",
    }  # fmt: skip


@pytest.mark.parametrize("width", [60, 80])
def test_sites_say_why_they_are_undecided(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ratios = [Ratio(1.24, 1.2, 1.3, 9), Ratio(1.0, 0.97, 1.02, 9), Ratio(1.5, 1.2, 2.0, 4)]
    sites = [site(f"layers.0.blocks.{i}", ratio) for i, ratio in enumerate(ratios)]
    profile_view._sites(Session(), [*sites, site("rest of the model", ratios[0]) | {"share": 0.4}])
    text = capsys.readouterr().out
    assert "same ±3%" in text and "4 rounds" in text and "?" not in text
    assert ("native" in text) is (width == 80) and max(map(len, text.splitlines())) <= width


def test_long_paths_stay_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path, ratio = "visual.transformer.resblocks.11.attn", Ratio(1.24, 1.2, 1.3, 9)
    rest = site("rest of the model", ratio) | {"share": 0.8}
    profile_view._sites(Session(), [site(path, ratio), rest])
    assert path in capsys.readouterr().out


def test_the_step_after_a_policy_builds_the_same_model(capsys: pytest.CaptureFixture[str]) -> None:
    """With all that was said of the model, and nothing that is about measuring."""
    line = "profile vit --img 32 --model-kwargs a=1 --weights ema --budget 5 --sites -b1 -op.json"
    session = Session()
    session.arguments = [*line.split(), "--policy=faster", "--plan", "my plan.json"]
    options = Options(policy="faster", plan="my plan.json", img_size=((32, 32),), dtype=("fp32",))
    document = {"results": {"points": []}}
    profile_view.next_steps(session, document, options)
    assert capsys.readouterr().out == (
        "Next: elsa patch vit --img 32 --model-kwargs a=1 --weights ema --plan 'my plan.json' "
        "-o DIR\n"
    )
    options.img_size = ((32, 32), (64, 64))  # of a sweep the user chooses
    profile_view.next_steps(session, document, options)
    assert "--img" not in capsys.readouterr().out
