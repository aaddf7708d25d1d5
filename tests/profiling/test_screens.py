"""Pictures of the page of --html in a real browser, compared with those that were looked at."""

from __future__ import annotations

import re

import pytest
from PIL import Image

from tests.profiling import screens

pytest.importorskip("matplotlib")  # whose font makes pages alike on every machine


@pytest.mark.parametrize("scheme", screens.SCHEMES)
@pytest.mark.parametrize("width", screens.WIDTHS)
def test_the_page_looks_as_it_did(chromium: str, width: int, scheme: str) -> None:
    """After a change that is meant: `python -m tests.profiling.screens`, and look at them."""
    picture = screens.shot(chromium, screens.html(), width, scheme)
    with Image.open(screens.kept(width, scheme)) as kept:
        worst, place = screens.difference(picture, kept.convert("RGB"))
    assert worst <= screens.TOLERANCE, f"{width} px, {scheme}: another picture at {place}"


@pytest.mark.parametrize(
    ("pattern", "other"),
    [
        (r"<b>224 px, batch 1, fp32, strict</b>", ""),
        (r"--ours: #0b6e4f", "--ours: #ffffff"),
        (r">before: 100 ms<", "> <"),
        (r"main \{ max-width: 1180px", "main { max-width: 1100px"),
    ],
)
def test_a_change_is_seen(chromium: str, pattern: str, other: str) -> None:
    """A text or a colour that is gone, and parts that are elsewhere."""
    text, count = re.subn(pattern, other, screens.html())
    assert count
    picture = screens.shot(chromium, text, 1280, "light")
    with Image.open(screens.kept(1280, "light")) as kept:
        assert screens.difference(picture, kept.convert("RGB"))[0] > 1.5 * screens.TOLERANCE


@pytest.mark.parametrize("width", screens.WIDTHS)
def test_light_and_dark_differ_in_colour_alone(width: int) -> None:
    """As much is drawn in one as in the other: no text has the colour of its ground."""
    shares = []
    for scheme, ground in (("light", 245), ("dark", 24)):
        with Image.open(screens.kept(width, scheme)) as kept:
            values = kept.convert("L").tobytes()
        assert abs(values[0] - ground) < 4
        shares.append(sum(abs(value - values[0]) > 24 for value in values) / len(values))
    assert min(shares) > 0.02 and max(shares) < 2 * min(shares)
