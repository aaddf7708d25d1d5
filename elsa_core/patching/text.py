"""Attention sites as rows and lines, for `print` and notebooks.

Identical sites of one pattern become `blocks.0-11.attn`, 12 times.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from elsa_core.patching.sites import AttentionSite

_TITLES = ("site", ">count", "class", "kind", ">heads", ">tokens", ">FLOPs", "terms")


class HasPath(Protocol):
    """Anything with the dotted path of a module."""

    @property
    def path(self) -> str: ...


Item = TypeVar("Item", bound=HasPath)


def group(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[tuple[str, list[Item]]]:
    """`items` as (label, members), in the order of first appearance.

    Members of a group have equal keys and paths that differ in numbers only; the label stands for
    exactly the members' paths.
    """
    buckets: dict[Hashable, list[Item]] = {}
    for item in items:
        template = tuple("#" if part.isdigit() else part for part in _parts(item.path))
        buckets.setdefault((template, key(item)), []).append(item)
    return [pair for bucket in buckets.values() for pair in _labelled(bucket)]


def group_by(items: Iterable[Item], key: Callable[[Item], str]) -> list[tuple[str, list[Item]]]:
    """`items` by what `key` says of them, in the order of first appearance."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())


def _parts(path: str) -> list[str]:
    """The path cut around its counters: numbers that dots or underscores stand around."""
    return re.split(r"(?<![A-Za-z0-9])(\d+)(?![A-Za-z0-9])", path)


def _labelled(items: list[Item]) -> list[tuple[str, list[Item]]]:
    columns = list(zip(*(_parts(item.path) for item in items), strict=True))
    sets = [list(dict.fromkeys(column)) for column in columns]
    # Ranges speak for every combination of their numbers; where some are missing, cut in pieces.
    if math.prod(len(values) for values in sets) == len(items):
        return [("".join(_range(values) for values in sets), items)]
    varying = next(i for i, values in enumerate(sets) if len(values) > 1)
    pieces = [
        [item for item in items if _parts(item.path)[varying] == value] for value in sets[varying]
    ]
    return [pair for piece in pieces for pair in _labelled(piece)]


def _range(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    numbers = sorted(int(value) for value in values)
    step = numbers[1] - numbers[0]
    even = all(b - a == step for a, b in itertools.pairwise(numbers))
    if even and step == 1:
        return f"{numbers[0]}-{numbers[-1]}"
    if even and len(numbers) > 2:
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    return ",".join(map(str, numbers))


def sites_table(
    sites: Sequence[AttentionSite],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles, and a row for each group of equal sites; columns of which nothing is known are left
    out."""
    rows = [_row(label, members) for label, members in group(sites, _alike)]
    kept = [i for i, title in enumerate(_TITLES) if title == "site" or any(row[i] for row in rows)]
    return tuple(_TITLES[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


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
