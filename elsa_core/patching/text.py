"""Attention sites as plain text, for `print` and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elsa_core.patching.labels import group, group_by

if TYPE_CHECKING:
    from elsa_core.patching.sites import AttentionSite

_GAP = "  "
_TITLES = ("site", "count", "class", "kind", "heads", "tokens", "FLOPs", "terms")
_TO_THE_RIGHT = ("count", "heads", "tokens", "FLOPs")


def sites_table(sites: Sequence[AttentionSite]) -> list[str]:
    """One line for each group of equal sites; columns of which nothing is known are left out."""
    rows = [_row(label, members) for label, members in group(sites, _alike)]
    kept = [i for i, title in enumerate(_TITLES) if title == "site" or any(row[i] for row in rows)]
    cells = [[row[i] for i in kept] for row in (_TITLES, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [_TITLES[i] in _TO_THE_RIGHT for i in kept]
    return [
        _GAP.join(
            cell.rjust(width) if by_right else cell.ljust(width)
            for cell, width, by_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]


def reasons(sites: Sequence[AttentionSite], word: str) -> list[str]:
    """One line for each reason why sites stay as they are; `word` says what they are."""
    lines = []
    for reason, members in group_by(sites, lambda site: site.reason):
        labels = ", ".join(
            label or "the model" for label, _ in group(members, lambda site: site.reason)
        )
        lines.append(f"{word} {labels} ({_class(members[0])}): {reason}")
    return lines


def sites_of(scope: str) -> str:
    """What the sites of a scope are called in a sentence."""
    return "attention sites" if scope == "attention" else "sites"


def as_html(text: str) -> str:
    """A notebook's form of a plain text."""
    return f"<pre>{html.escape(text)}</pre>"


def _row(label: str, members: Sequence[AttentionSite]) -> tuple[str, ...]:
    one = members[0]
    share = sum(site.flops_share or 0.0 for site in members)
    heads, tokens = str(one.num_heads or ""), str(one.query_tokens or "")
    if one.num_heads and one.head_dim:
        heads = f"{heads}x{one.head_dim}"
    if one.query_tokens != one.key_tokens:
        tokens = f"{tokens}:{one.key_tokens}"
    return (
        label or "the model", f"{len(members)}x", _class(one), one.kind, heads, tokens,
        f"{share:.1%}" if share else "", ", ".join(one.extra),
    )  # fmt: skip


def _alike(site: AttentionSite) -> tuple[Any, ...]:
    return (site.module_class, site.kind, site.num_heads, site.head_dim, site.query_tokens,
            site.key_tokens, site.extra, site.patchable, site.reason, site.patched)  # fmt: skip


def _class(site: AttentionSite) -> str:
    return site.module_class.rpartition(".")[2]
