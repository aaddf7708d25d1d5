"""Attention sites as rows and lines, for `print` and notebooks.

Identical sites of one pattern become `blocks.0-11.attn`, 12 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elsa_core.base.grouping import group, group_by

if TYPE_CHECKING:
    from elsa_core.patching.sites import AttentionSite

_TITLES = ("site", ">count", "class", "kind", ">heads", ">tokens", ">FLOPs", "terms")


def sites_table(
    sites: Sequence[AttentionSite],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles, and a row for each group of equal sites; columns of which nothing is known are left
    out."""
    rows = [_row(label, members) for label, members in group(sites, lambda site: site.alike)]
    kept = [i for i, title in enumerate(_TITLES) if title == "site" or any(row[i] for row in rows)]
    return tuple(_TITLES[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def reasons(sites: Sequence[AttentionSite], word: str) -> list[str]:
    """One line for each reason why sites stay as they are; `word` says what they are."""
    lines = []
    for reason, members in group_by(sites, lambda site: site.reason):
        labels = ", ".join(
            label or "the model" for label, _ in group(members, lambda site: site.reason)
        )
        lines.append(f"{word} {labels} ({members[0].class_name}): {reason}")
    return lines


def sites_of(scope: str) -> str:
    """What the sites of a scope are called in a sentence."""
    return "attention sites" if scope == "attention" else "sites"


def _row(label: str, members: Sequence[AttentionSite]) -> tuple[str, ...]:
    one = members[0]
    share = sum(site.flops_share or 0.0 for site in members)
    heads, tokens = str(one.num_heads or ""), str(one.query_tokens or "")
    if one.num_heads and one.head_dim:
        heads = f"{heads}x{one.head_dim}"
    if one.query_tokens != one.key_tokens:
        tokens = f"{tokens}:{one.key_tokens}"
    return (
        label or "the model", f"{len(members)}x", one.class_name, one.kind, heads, tokens,
        f"{share:.1%}" if share else "", ", ".join(one.extra),
    )  # fmt: skip
