"""Draws README's chart from the published results: `python docs/chart.py` writes docs/speed.svg.

One bar a case: the time of the fastest peer of the same run over elsa's; the peer is named beside
it. Cases that lose are drawn like the others. Plain SVG, so that no plotting package is needed to
build the documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from elsa_core.profiling.bench import published

CHART = Path(__file__).with_name("speed.svg")

ATTENTION = ("8x12x197x64", "8x16x577x64", "8x12x1025x64", "1x8x16384x64", "1x8x16384x128")
MODELS = ("ViT-T-224", "ViT-B-224", "CLIP-L/14-224", "Swin-T-W8-256", "SwinV2-T-W8-256")
PEERS = {
    "sdpa-efficient": "PyTorch memory-efficient",
    "sdpa-cudnn": "PyTorch cuDNN",
    "sdpa-flash": "PyTorch flash",
    "sdpa-math": "PyTorch math",
    "flex": "FlexAttention",
    "eager": "original, eager",
    "eager+graph": "original, CUDA graph",
}
"""What the chart calls a contender of the result files."""
LABEL, SCALE, ROW, TOP, PEER, END = 210, 50, 22, 64, 580, 750
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-size: 14px; font-weight: 600 } .group { font-weight: 600 } .note { fill: #57606a }
.win { fill: #1a7f5a } .lose { fill: #c4572f } .one { stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .note { fill: #9da7b1 } .win { fill: #3fb68b } .lose { fill: #e08a63 }
.one { stroke: #9da7b1 } }
"""


class Bar(NamedTuple):
    label: str
    ratio: float
    peer: str


def main() -> None:
    """Write the chart."""
    CHART.write_text(drawn(), encoding="utf-8")


def drawn() -> str:
    """The chart as an SVG document."""
    attention, models = (
        published.read(published.RESULTS / f"{name}_h200.csv") for name in ("attention", "models")
    )
    groups = [
        (f"attention, {dtype}", _attention(attention, dtype)) for dtype in ("fp32", "fp16")
    ] + [(f"whole models, {dtype}", _models(models, dtype)) for dtype in ("fp32", "fp16")]
    lines, y = [], TOP
    for title, bars in groups:
        lines.append(f'<text class="group" x="8" y="{y}">{title}</text>')
        y += ROW
        for bar in bars:
            lines += _row(bar, y)
            y += ROW
        y += 8
    gpu, date = attention["environment"]["gpu"], models["environment"]["date"][:10]
    one = LABEL + SCALE
    head = [
        '<text class="title" x="8" y="20">Speed against the fastest peer of the same run</text>',
        f'<text class="note" x="8" y="40">{gpu}, {date}; models as CUDA graphs; '
        "batch x heads x tokens x head_dim; 1.0 = equal</text>",
        f'<text class="group" x="{PEER}" y="{TOP}">fastest peer</text>',
        f'<line class="one" x1="{one}" x2="{one}" y1="{TOP - 12}" y2="{y - 16}"/>',
    ]
    size = f'width="{END}" height="{y}" viewBox="0 0 {END} {y}"'
    body = "\n".join([*head, *lines])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _row(bar: Bar, y: int) -> list[str]:
    kind = "win" if bar.ratio >= 1.0 else "lose"
    width = round(bar.ratio * SCALE, 1)
    after = max(width, SCALE) + 6  # never across the line of 1.0
    return [
        f'<text x="{LABEL - 8}" y="{y}" text-anchor="end">{bar.label}</text>',
        f'<rect class="{kind}" x="{LABEL}" y="{y - 12}" width="{width}" height="15" rx="2"/>',
        f'<text x="{LABEL + after:.1f}" y="{y}">{bar.ratio:.2f}x</text>',
        f'<text class="note" x="{PEER}" y="{y}">{bar.peer}</text>',
    ]


def _attention(document: dict[str, Any], dtype: str) -> list[Bar]:
    found = {case["case"]["name"]: case for case in document["results"]["cases"]}
    own = {"fp32": "elsa-strict", "fp16": "elsa"}[dtype]
    bars = []
    for shape in ATTENTION:
        case = found[f"{dtype}/{shape}-{dtype}"]
        ratio = next(m["ratio"] for m in case["measurements"] if m["contender"].startswith(own))
        bars.append(Bar(shape.replace("x", " x "), ratio, _peer(case)))
    return bars


def _models(document: dict[str, Any], dtype: str) -> list[Bar]:
    found = {case["case"]["name"]: case for case in document["results"]["cases"]}
    bars = []
    for model in MODELS:
        case = found[f"batch8/{model}x8-{dtype}"]
        own = next(m for m in case["measurements"] if m["contender"] == "patched+graph")
        label = f"{case['case']['label']}, {case['case']['image_size']} px, batch 8"
        bars.append(Bar(label, own["ratio_to_best"]["value"], _peer(case)))
    return bars


def _peer(case: dict[str, Any]) -> str:
    return PEERS.get(case["best_peer"], case["best_peer"])


if __name__ == "__main__":
    main()
