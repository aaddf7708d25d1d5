"""The page of --html and the charts of --plot: whole, escaped, and right in a real browser."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from elsa_core.patching.page import write_page
from elsa_core.patching.sites import inspect
from elsa_core.profiling import figures, page

SCHEMES = {"light": 1, "dark": 0}


def dumped(browser: str, path: Path, profile: Path, scheme: str) -> tuple[str, str]:
    """The page's DOM after loading, and what the browser's console said."""
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", "--dump-dom",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, "\n".join(console)


# Runs beside the page, which is shown in frames as wide as a telephone, a tablet and a screen: what
# a reader would miss is told in the title. Text is faint where its contrast with what is drawn
# below it is less than 4.5, the least that WCAG 2 asks for.
_LOOK = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><title>not run</title>
<body style="margin: 0"><script>
const source = SOURCE, words = WORDS, widths = [390, 800, 1280], said = [];
function channels(colour) {
  return (colour.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
}
function light(colour) {
  const [r, g, b] = channels(colour).map((c) => c / 255).map(
    (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(page, box) {
  const stack = page.elementsFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
  for (const one of stack) {
    const style = page.defaultView.getComputedStyle(one);
    const drawn = one instanceof page.defaultView.SVGElement;
    if (drawn && !["rect", "path", "polygon"].includes(one.tagName)) continue;
    const colour = drawn ? style.fill : style.backgroundColor;
    if (colour !== "none" && channels(colour)[3] !== 0) return colour;
  }
  return "rgb(255, 255, 255)";
}
function is_faint(page, node) {
  const range = page.createRange();
  range.selectNodeContents(node);
  const box = range.getBoundingClientRect(), one = node.parentElement;
  if (!node.data.trim() || !box.width || one.closest("title, style")) return false;
  const style = page.defaultView.getComputedStyle(one);
  const ink = one instanceof page.defaultView.SVGElement ? style.fill : style.color;
  const [a, b] = [light(ink), light(ground(page, box))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
}
function faint(page) {
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), found = [];
  while (walk.nextNode()) if (is_faint(page, walk.currentNode)) found.push(walk.currentNode.data);
  return found;
}
function look(frame, width) {
  const page = frame.contentDocument, root = page.documentElement;
  const charts = [...page.querySelectorAll("figure > svg")];
  const drawn = charts.map((chart) => chart.getBoundingClientRect());
  const small = drawn.filter((box) => box.width < 200 || box.height < 60).length;
  const out = [...page.querySelectorAll("main *")].filter((one) => {
    const box = one.getBoundingClientRect();
    return box.right > width + 0.5 || box.left < -0.5;
  });
  const tables = [...page.querySelectorAll(".table")];
  const scrolls = tables.filter((one) => one.scrollWidth > one.clientWidth + 1).length;
  const texts = [...page.querySelectorAll("svg text")].map((one) => one.getBoundingClientRect());
  const meet = texts.filter((a, i) => texts.some((b, j) => i < j && a.left < b.right - 1 &&
    b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)).length;
  frame.style.height = `${root.scrollHeight}px`;  // a point below the frame has no element
  const pale = faint(page);
  const dark = light(frame.contentWindow.getComputedStyle(page.body).backgroundColor) < 0.2;
  const gone = words.filter((word) => !page.body.innerText.includes(word));
  const loads = frame.contentWindow.performance.getEntriesByType("resource").length;
  return `${width}: ${charts.length} charts, ${small} small, ${out.length} outside, ` +
    `${scrolls} scroll, ${meet} meet, ${pale.length} faint, ${gone.length} gone, ${loads} loads, ` +
    `wide ${root.scrollWidth > width}, ${dark ? "dark" : "light"}`;
}
let left = widths.length;
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `display: block; border: 0; width: ${width}px; height: 900px`;
  frame.srcdoc = source;
  frame.onload = () => {
    said[widths.indexOf(width)] = look(frame, width);
    if (--left === 0) document.title = said.join("; ");
  };
  document.body.append(frame);
}
</script></body>"""


def seen(
    browser: str, text: str, folder: Path, scheme: str = "light", words: Sequence[str] = ()
) -> list[str]:
    """What a browser makes of a page at three widths, one line each; its console is silent."""
    path = folder / "look.html"
    program = _LOOK.replace("WORDS", json.dumps(words))
    program = program.replace("SOURCE", json.dumps(text).replace("</", "<\\/"))
    path.write_text(program, encoding="utf-8")
    dom, console = dumped(browser, path, folder / "browser", scheme)
    title = re.search("<title>(.*?)</title>", dom)
    assert title is not None and console == ""
    return title[1].split("; ")


def right(charts: int, scheme: str = "light") -> list[str]:
    """What `seen` says of a page that shows all of it."""
    rest = "0 small, 0 outside, 0 scroll, 0 meet, 0 faint, 0 gone, 0 loads, wide false"
    return [f"{width}: {charts} charts, {rest}, {scheme}" for width in (390, 800, 1280)]


def long_names(document: dict[str, Any]) -> dict[str, Any]:
    """The same with the longest names that models have."""
    document["results"]["model"]["name"] = "vit_base_patch16_clip_quickgelu_224.laion400m_e32" * 2
    for row in document["results"]["points"]:
        for site in row["profile"]["sites"][:-1]:
            site["path"] = f"visual.transformer.resblocks.11.attention.{site['path']}"
            site["schedule"] = "avx512_kernels_tiles_of_query_rows_over_2_threads"
        row["profile"]["left_out"] = {"compile+graph": "a reason of many words " * 8}
    return document


def chart_count(document: dict[str, Any]) -> int:
    """Latency, throughput, memory (where it could be measured), one of the sites of each point."""
    runs = document["results"]["points"][0]["profile"]["runs"]
    return 5 if any(run["memory_bytes"] for run in runs) else 4


@pytest.mark.parametrize(("names", "scheme"), [("short", "light"), ("long", "dark")])
def test_a_browser_shows_all_of_it_at_every_width(
    chromium: str, document: dict[str, Any], tmp_path: Path, names: str, scheme: str
) -> None:
    """Tables were cut at 1280 px, and the title at 390."""
    text = page.page(long_names(document) if names == "long" else document)
    assert "<script" not in text
    words = ["192 px, batch 1, fp32, strict", "Where the time goes", "rest of the model"]
    words += [run["name"] for run in document["results"]["points"][0]["profile"]["runs"]]
    found = seen(chromium, text, tmp_path, scheme, words)
    assert found == right(chart_count(document), scheme)


@pytest.mark.parametrize(
    ("pattern", "other", "told"),
    [
        (r"--text: #1d2830", "--text: #9aa5b1", r"[1-9]\d* faint"),
        (r"main \{ max-width: 1180px", "main { min-width: 1400px", r"[1-9]\d* outside"),
    ],
)
def test_a_fault_of_a_page_is_seen(
    chromium: str, document: dict[str, Any], tmp_path: Path, pattern: str, other: str, told: str
) -> None:
    text, count = re.subn(pattern, other, page.page(document))
    assert count
    found = seen(chromium, text, tmp_path, words=["192 px, batch 1, fp32, strict"])
    assert all(re.search(told, line) for line in found), found


def test_a_browser_shows_the_sites_of_inspect(chromium: str, tmp_path: Path) -> None:
    import timm

    found = inspect(timm.create_model("pvt_v2_b0"), 64)
    path = tmp_path / "sites.html"
    write_page("pvt_v2_b0 <of timm>", "weights: random", found, path)
    text = path.read_text(encoding="utf-8")
    assert "pvt_v2_b0 &lt;of timm&gt;" in text and ">256:4<" in text and "<script" not in text
    assert "8 of 8 attention sites can be patched, with " in text
    assert seen(chromium, text, tmp_path) == right(0)


def test_a_page_holds_everything_and_fetches_nothing(document: dict[str, Any]) -> None:
    text = page.page(document)
    assert text.count("<svg") == text.count("</svg>") and text.count("<figure ") >= 4
    ElementTree.fromstring(text.partition("</head>\n")[2].rpartition("</html>")[0])  # closed tags
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//)""", text)
    assert "A &lt;CPU&gt; &amp; more" in text and "<CPU>" not in text
    assert "2026-01-02" in text and "rest of the model" in text
    assert "192 px, batch 1, fp32, strict" in text
    for run in document["results"]["points"][0]["profile"]["runs"]:
        assert run["name"] in text
    assert "not complete" not in text


def test_hostile_names_stay_text(document: dict[str, Any]) -> None:
    evil = "<img src=x onerror=alert(1)>$\\frac"
    document["results"]["model"]["name"] = evil
    for row in document["results"]["points"]:
        row["profile"]["runs"][0]["name"] = evil
        row["profile"]["sites"][0]["path"] = evil
        row["profile"]["warnings"] = [evil]
    text = page.page(document)
    assert "<img" not in text and "&lt;img" in text


def test_rows_that_were_not_measured(document: dict[str, Any], tmp_path: Path) -> None:
    document["results"]["complete"] = False
    document["results"]["points"][1] |= {
        "status": "out of memory", "reason": "too <large>", "profile": None,
    }  # fmt: skip
    text = page.page(document)
    assert "out of memory: too &lt;large&gt;" in text and "not complete" in text
    assert text.count("<figure ") in (3, 4)  # one of that point's sites
    document["results"]["points"] = document["results"]["points"][1:]
    assert "<svg" not in page.page(document)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plots_are_written(document: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = figures.of_profile(document, tmp_path / f"plot{suffix}")
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in head


def test_a_page_needs_no_matplotlib(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """README's own install has none, and --html is no extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert page.page(document).count("<figure ") >= 4


def test_bars_are_as_long_as_their_times() -> None:
    sites = [
        {"path": "a", "seconds_before": 0.2571, "seconds_after": 0.0803},
        {"path": "rest of the model", "seconds_before": 2.536, "seconds_after": 1.528},
    ]
    chart = page.site_chart(sites)
    widths = [float(each) for each in re.findall(r'<rect x="0" y="\d+" width="([\d.]+)%', chart)]
    assert widths == pytest.approx(
        [78 * each / 2.536 for each in (0.2571, 0.0803, 2.536, 1.528)], abs=0.01
    )
    assert re.findall(r"[\d.]+ m?s(?=<)", chart) == ["257 ms", "80.3 ms", "2.54 s", "1.53 s"]


def test_a_page_is_for_any_screen(document: dict[str, Any]) -> None:
    """Charts take the width there is, texts keep their size, colours follow the system."""
    text = page.page(document)
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    sizes = re.findall(r"<figure .*?<svg ([^>]*)>", text, re.DOTALL)
    assert sizes and all('width="100%"' in each and "viewBox" not in each for each in sizes)
    styled = text[text.index("<style>") : text.index("</style>")]
    used = {name for each in re.findall(r'class="([^"]+)"', text) for name in each.split()}
    assert used - {"table"} <= {name for name in used if f".{name}" in styled}
    for name in re.findall(r"var\((--\w+)\)", styled):
        assert styled.count(f"{name}:") == 2  # in light and in dark
    assert not re.search(r"\de[+-]?\d", re.sub(r"\d\.\de-\d\d", "", text[text.index("<body>") :]))
