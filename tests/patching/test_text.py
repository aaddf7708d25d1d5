"""Grouping of sites: short labels that stand for exactly their members."""

from typing import NamedTuple

import pytest

from elsa_core.base.grouping import group


class Site(NamedTuple):
    path: str
    heads: int = 12


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        ([], []),
        (["attn"], ["attn"]),
        ([""], [""]),
        (["blocks.0.attn"], ["blocks.0.attn"]),
        ([f"blocks.{i}.attn" for i in range(12)], ["blocks.0-11.attn"]),
        (["b.0.attn", "b.2.attn", "b.4.attn"], ["b.0,2..4.attn"]),
        (["b.1.attn", "b.5.attn", "b.6.attn"], ["b.1,5,6.attn"]),
        (["a.0.x", "b.0.x", "a.1.x"], ["a.0-1.x", "b.0.x"]),
        ([f"s.{i}.b.{j}.a" for i in range(3) for j in range(2)], ["s.0-2.b.0-1.a"]),
        (["l.layer_0.attn", "l.layer_1.attn"], ["l.layer_0-1.attn"]),
        (["b.0.attn1", "b.0.attn2", "b.1.attn1"], ["b.0-1.attn1", "b.0.attn2"]),
        (["0", "1"], ["0-1"]),
        (["s.0.b.0.a", "s.0.b.1.a", "s.1.b.0.a"], ["s.0.b.0-1.a", "s.1.b.0.a"]),
    ],
)
def test_labels(paths: list[str], labels: list[str]) -> None:
    groups = group([Site(path) for path in paths], lambda site: site.heads)
    assert [label for label, _ in groups] == labels
    assert sorted(site.path for _, members in groups for site in members) == sorted(paths)


def test_unequal_sites_stay_apart() -> None:
    sites = [Site("layers.0.attn", 3), Site("layers.1.attn", 6), Site("layers.2.attn", 3)]
    labels = [label for label, _ in group(sites, lambda site: site.heads)]
    assert labels == ["layers.0,2.attn", "layers.1.attn"]
