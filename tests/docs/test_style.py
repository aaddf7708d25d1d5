"""Pages are short, and so are their sentences."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
GENERATED = "coverage"
LINES = {"limits": 60, "cuda": 80, "linear": 80}
ALL_LINES, WORDS = 1800, 25
_LEFT_OUT = re.compile(
    r"^(`{3,})[^\n]*\n.*?^\1$|<!-- begin:[\w:.-]+ -->.*?<!-- end:[\w:.-]+ -->|\$\$.*?\$\$",
    re.DOTALL | re.MULTILINE,
)


def sentences(text: str) -> list[list[str]]:
    """The sentences of a page as words; each item of a list and each cell of a table begins one."""
    text = _LEFT_OUT.sub("\n\n", text)
    text = re.sub(r"`[^`]+`|\$[^$]+\$", "x", text)  # code and mathematics count as one word
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)|\{\w+\}x", r"\1 x", text)
    text = re.sub(r"\n\s*(?:[-*|#]|\d+\.|[a-zA-Z*`]+\n\s+:)", "\n\n", text)
    found = re.split(r"\n\s*\n|\||(?<=[.?!])\s+|(?<=[.?!][*)])\s+|(?<=[.?!]\*\*)\s+|:\s*\n", text)
    return [words for each in found if len(words := re.findall(r"[^\s*_]*\w[^\s*_]*", each)) > 0]


def test_a_sentence_ends_at_a_stop_a_cell_or_an_item() -> None:
    page = (
        "One two `a b c` three. Four:\n- five\n- six\n\n| seven | eight |\n|---|---|\n\n$$x + y$$"
    )
    found = sentences(page)
    assert [len(each) for each in found] == [4, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_are_short(page: Path) -> None:
    if page.stem != GENERATED:
        found = sentences(page.read_text(encoding="utf-8"))
        assert [" ".join(each) for each in found if len(each) > WORDS] == []


def test_pages_are_short() -> None:
    pages = {page: len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES}
    for name, most in LINES.items():
        assert pages[DOCS / f"{name}.md"] <= most, name
    counted = [n for page, n in pages.items() if DOCS in page.parents and page.stem != "benchmarks"]
    assert sum(counted) <= ALL_LINES
