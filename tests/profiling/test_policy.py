"""From measured sites to a plan: what is left alone, and why; and the grid of a sweep."""

import json
from pathlib import Path
from typing import Any

import pytest

from elsa_core.errors import ArgumentError, ModelError, UnavailableError
from elsa_core.loading.plan import read_plan
from elsa_core.measuring.documents import write
from elsa_core.profiling import document as documents
from elsa_core.profiling import policy, sweep


def site(path: str, value: float, width: float = 0.05, tokens: int = 37) -> dict[str, Any]:
    low, high = value - width, value + width
    verdict = "slower" if high < 1 else "faster" if low > 1 else "no difference"
    ratio = {"value": value, "low": low, "high": high, "rounds": 20, "verdict": verdict}
    return {
        "path": path, "module_class": "timm.Attention", "kind": "global", "num_heads": 3,
        "head_dim": 64, "query_tokens": tokens, "key_tokens": tokens, "extra": [], "patched": True,
        "ratio": ratio,
    }  # fmt: skip


def sweep_of(*points: list[dict[str, Any]], precision: str = "strict") -> dict[str, Any]:
    rows = [
        {"status": "done", "profile": {"sites": sites, "precision": precision, "backend": "auto"}}
        for sites in points
    ]
    return {"results": {"points": rows, "settings": {"include": ["blocks.*"], "exclude": []}}}


def test_slower_sites_are_kept_as_they_were() -> None:
    sites = [site("blocks.10.attn", 1.2), site("blocks.2.attn", 0.8, tokens=99)]
    plan = policy.faster(sweep_of(sites))
    assert plan.sites == ("blocks.10.attn",)
    assert plan.kept == (("blocks.2.attn", "slower when profiled: 0.80x"),)
    assert (plan.precision, plan.backend, plan.include) == ("strict", "auto", ("blocks.*",))


def test_equal_sites_are_judged_together() -> None:
    """One of twelve equal sites that looks slower was unlucky."""
    sites = [site(f"blocks.{i}.attn", 0.9 if i == 3 else 1.1) for i in range(12)]
    plan = policy.faster(sweep_of(sites))
    assert plan.kept == () and plan.sites == tuple(f"blocks.{i}.attn" for i in range(12))


def test_layers_of_other_sizes_are_judged_apart() -> None:
    """A small linear layer that was slower is left alone, and large ones of its class are not."""
    layer = {"kind": "linear-layer", "num_heads": None, "head_dim": None, "query_tokens": None,
             "key_tokens": None}  # fmt: skip
    sizes = {"small": (0.8, 10), "large.0": (1.5, 90), "large.1": (1.6, 90)}
    sites = [site(path, gain) | layer | {"flops": n} for path, (gain, n) in sizes.items()]
    plan = policy.faster(sweep_of(sites))
    assert plan.sites == ("large.0", "large.1") and [path for path, _ in plan.kept] == ["small"]
    for each in sites:
        del each["flops"]  # a document of an older version
    assert policy.faster(sweep_of(sites)).kept == ()


def test_no_difference_is_no_reason() -> None:
    assert policy.faster(sweep_of([site("a", 0.98)])).sites == ("a",)


def test_sites_of_which_too_few_rounds_tell() -> None:
    unknown = [site("a", 0.98), site("b", 1.2)]
    unknown[0]["ratio"]["verdict"] = "unsure"
    assert policy.unsure(sweep_of(unknown)) == 1
    assert policy.unsure(sweep_of(unknown, [site("a", 0.98)])) == 0


def test_a_site_that_gains_at_one_size_is_patched() -> None:
    small, large = [site("a", 0.8, tokens=17)], [site("a", 1.5, tokens=577)]
    assert policy.faster(sweep_of(small, large)).sites == ("a",)
    assert policy.faster(sweep_of(small, small)).sites == ()


def test_what_is_no_ground_for_a_plan() -> None:
    with pytest.raises(ArgumentError, match="measured sites"):
        policy.faster(sweep_of([]))
    both = sweep_of([site("a", 1.1)])
    both["results"]["points"] += sweep_of([site("a", 1.1)], precision="turbo")["results"]["points"]
    with pytest.raises(ArgumentError, match="one precision"):
        policy.faster(both)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    sites = [site("blocks.0.attn", 1.2), site("blocks.1.attn", 0.8, tokens=99)]
    plan = policy.faster(sweep_of(sites))
    path = write(plan.to_dict(), tmp_path / "plan.json")
    assert read_plan(path) == plan
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(UnavailableError, match="cannot be written"):
        write(plan.to_dict(), tmp_path / "none" / "plan.json")


def test_a_grid_has_every_combination_once() -> None:
    points = sweep.grid([(32, 32), (48, 64)], [1, 8], ["fp32", "fp16"], ["strict", "turbo"])
    assert len(points) == len(set(points)) == 16
    assert points[0] == sweep.Configuration((32, 32)) and points[-1].image_size == (48, 64)
    assert sweep.grid([None], [1], ["fp32"], ["strict"])[0].image_size is None
    with pytest.raises(ArgumentError, match="turbo"):
        sweep.grid([None], [1], ["fp16"], ["turbo"])


def test_a_document_survives_its_file(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    assert documents.read(path) == document


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("points", 0, "status"), "fine", "unknown status"),
        (("points", 0, "configuration", "image_size"), [0, 1], "height and width"),
        (("points", 0, "profile"), None, "profile is no object"),
        (("points", 0, "profile", "runs", 0, "seconds"), -1.0, "not positive"),
        (("points", 0, "profile", "runs", 0, "seconds"), True, "wrong type"),
        (("points", 0, "profile", "runs", 0, "memory_bytes"), 10**310, "not finite"),
        (("points", 0, "profile", "runs", 0, "ratio"), {"value": 1}, "of a ratio"),
        (("points", 0, "profile", "sites", 0, "path"), 3, "wrong type"),
        (("points", 0, "profile", "best_patched"), "mine", "lacks its runs"),
        (("points", 0, "profile", "warnings"), [3], "no texts"),
        (("complete",), "yes", "wrong type"),
    ],
    ids=str,
)
def test_a_hostile_document(
    document: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], value: Any, words: str
) -> None:
    inner = document["results"]
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=words):
        documents.read(path)
