"""Pages of HTML in one file: for any screen, light or dark, and for paper; no script is needed."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from elsa_core.base.files import write_text
from elsa_core.errors import UnavailableError

_LIGHT: Final = """
  --text: #1d2830; --dim: #5b6770; --page: #f5f6f7; --card: #fff; --line: #dde2e6; --head: #eceff1;
  --warn: #fff3d6; --ours: #0b6e4f; --before: #9aa5b1; --b0: #5b6770; --b1: #a8660a; --b2: #7d4fb3;
  --b3: #2069a3; --p1: #2f8f5b; --p2: #12355b; --p3: #1b7f86;
"""
_DARK: Final = """
  --text: #e4e9ed; --dim: #9fb0bd; --page: #14191d; --card: #1d242a; --line: #34404a;
  --head: #27313a; --warn: #40330f; --ours: #3fc795; --before: #71808d; --b0: #a5b2bd;
  --b1: #e2a64b; --b2: #bd98e6; --b3: #74b6ea; --p1: #86dfb0; --p2: #9dbfe8; --p3: #6fd3d9;
"""
_WHOLE: Final = 28  # characters of a path that stay on one line
_STYLE: Final = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  margin: 0; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 20px; }}
h1, h2, h3, p, li {{ overflow-wrap: anywhere; }} td {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px; }}
h2 {{ font-size: 18px; margin: 32px 0 8px; }}
h3 {{ font-size: 15px; margin: 20px 0 6px; }} p {{ margin: 4px 0; }}
.dim {{ color: var(--dim); }} .gain {{ font-size: 18px; margin: 14px 0; }}
.warning {{ background: var(--warn); border-left: 4px solid #c27c0e; padding: 6px 12px;
  margin: 6px 0; }}
.charts {{ display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); }}
figure {{ background: var(--card); border: 1px solid var(--line); border-radius: 6px; margin: 0;
  padding: 12px; min-width: 0; }}
figure > svg {{ display: block; overflow: visible; }}
figcaption {{ font-weight: 600; margin-bottom: 8px; }}
.legend {{ list-style: none; display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 8px 0 0;
  padding: 0; font-size: 13px; }} .legend svg {{ vertical-align: -2px; }}
.table {{ margin-top: 14px; overflow-x: auto; }} main > figure {{ margin-top: 14px; }}
table {{ border-collapse: collapse; background: var(--card); font-size: 14px; }}
th, td {{ padding: 4px 8px; border: 1px solid var(--line); text-align: right; }}
td {{ white-space: nowrap; }} td.text {{ white-space: normal; }}
th {{ background: var(--head); vertical-align: bottom; hyphens: auto; }}
.text {{ text-align: left; }} .whole {{ white-space: nowrap; }}
@media screen and (max-width: 1000px) {{
  table, tbody, tr, td {{ display: block; }} thead {{ display: none; }} table {{ width: 100%; }}
  tr {{ border: 1px solid var(--line); padding: 6px 10px; margin-bottom: 8px; }}
  td, td.text {{ border: none; padding: 1px 0; text-align: right; overflow: hidden;
    white-space: normal; }}
  td:empty {{ display: none; }} td[colspan] {{ text-align: left; }}
  td[data-title]::before {{ content: attr(data-title); float: left; color: var(--dim);
    text-align: left; padding-right: 12px; }}
}}
@media print {{ body {{ background: none; font-size: 11px; }} table {{ font-size: 9px; }}
  main {{ max-width: none; padding: 0; }} h2, h3 {{ break-after: avoid; }}
  figure, tr {{ break-inside: avoid; }} th, td {{ padding: 2px 4px; }}
  * {{ print-color-adjust: exact; }} }}
"""


def write(page: str, path: Path) -> Path:
    """Write a page, whole or not at all."""
    try:
        return write_text(page, path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written: {error.strerror or error}") from error


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole page of these parts, each HTML; empty ones are left out."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def figure(title: str, chart: str) -> str:
    """A chart under its title."""
    caption = f"<figcaption>{text(title)}</figcaption>"
    return f'<figure role="group" aria-label="{text(title)}">{caption}{chart}</figure>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, of cards on a narrow screen. A title that starts with "." is aligned to the left. A
    row of fewer cells gives its last one the width of all that are missing."""
    titles = [text(title.lstrip(".")) for title in columns]
    kinds = [' class="text"' if title.startswith(".") else "" for title in columns]
    head = "".join(
        f'<th scope="col"{kind}>{title}</th>' for kind, title in zip(kinds, titles, strict=True)
    )
    body = []
    for row in rows:
        missing = len(columns) - len(row)
        cells = [
            f'<td data-title="{title}"{kind}>{_cell(cell)}</td>'
            for title, kind, cell in zip(titles, kinds, row, strict=False)
        ]
        if missing:
            cells[-1] = f'<td colspan="{missing + 1}" class="text">{text(row[-1])}</td>'
        body.append(f"<tr>{''.join(cells)}</tr>")
    inner = f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(body)}</tbody>"
    return f'<div class="table"><table>{inner}</table></div>'


def _cell(content: str) -> str:
    """A cell; a name stays on one line, a long path may be broken behind dots and underscores."""
    shown = text(content)
    if not re.fullmatch(r"[A-Za-z_][\w.+-]+", content):
        return shown
    if len(content) <= _WHOLE:
        return f'<span class="whole">{shown}</span>'
    return re.sub(r"([._])(?=\w)", r"\1<wbr/>", shown)


def text(content: object) -> str:
    """Text that stays text."""
    return html.escape(str(content))
