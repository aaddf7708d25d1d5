"""Items with the paths of modules, grouped: alike ones of one pattern become `blocks.0-11.attn`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

_parts = re.compile(r"(?<![A-Za-z0-9])(\d+)(?![A-Za-z0-9])").split


class HasPath(Protocol):
    """Anything with the dotted path of a module."""

    @property
    def path(self) -> str: ...


Item = TypeVar("Item", bound=HasPath)


def group(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[tuple[str, list[Item]]]:
    """`items` as (label, members), in the order of first appearance. Members have equal keys and
    paths that differ in numbers only; the label stands for exactly their paths."""
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


def _labelled(items: list[Item]) -> list[tuple[str, list[Item]]]:
    columns = list(zip(*(_parts(item.path) for item in items), strict=True))
    sets = [list(dict.fromkeys(column)) for column in columns]
    # Ranges stand for every combination of their numbers; where some are missing, divide.
    if math.prod(len(values) for values in sets) == len(items):
        return [("".join(_range(values) for values in sets), items)]
    varying = next(i for i, values in enumerate(sets) if len(values) > 1)
    parts = [
        [item for item in items if _parts(item.path)[varying] == value] for value in sets[varying]
    ]
    return [pair for part in parts for pair in _labelled(part)]


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
