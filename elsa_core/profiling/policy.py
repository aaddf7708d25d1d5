"""From measured sites to a plan for `elsa patch --plan`."""

from __future__ import annotations

import json
import math
from typing import Final

from elsa_core.errors import ArgumentError
from elsa_core.loading import Plan
from elsa_core.measuring.documents import Document
from elsa_core.measuring.intervals import UNSURE
from elsa_core.patching import LAYERS
from elsa_core.profiling.document import DONE
from elsa_core.profiling.words import place

_ALIKE: Final = (
    "module_class", "kind", "num_heads", "head_dim", "query_tokens", "key_tokens", "extra"
)  # fmt: skip


def faster(document: Document) -> Plan:
    """A plan that patches what was patched, except where ELSA measured slower.

    Sites of one class and shape are judged together: they do the same work, and one of twelve
    equal ones is not slower, it was unlucky. A group is slower where the mean of its ratios, over
    its members and all points (geometric), is under 1 and most of its intervals exclude 1 from
    below. A path is left alone if its group was slower at all image sizes.
    """
    found = [row["profile"] for row in document["results"]["points"] if row["status"] == DONE]
    precisions = {each["precision"] for each in found}
    if not any(each["sites"] for each in found) or len(precisions) > 1:
        raise ArgumentError("policy: needs measured sites in one precision")
    sites = [site for each in found for site in each["sites"] if site["patched"]]
    groups: dict[str, list[Document]] = {}
    for site in sites:
        # layers have neither heads nor tokens; older documents do not count their FLOPs
        size = site.get("flops") if site["kind"] in LAYERS else None
        alike = json.dumps([*(site[key] for key in _ALIKE), size])
        groups.setdefault(alike, []).append(site)
    verdicts: dict[str, list[tuple[bool, float]]] = {}
    for members in groups.values():
        ratios = [site["ratio"] for site in members]
        mean = sum(math.log(ratio["value"]) for ratio in ratios) / len(ratios)
        sure = sum(ratio["verdict"] == "slower" for ratio in ratios)
        for site in members:
            slower = mean < 0 and sure > len(ratios) / 2
            verdicts.setdefault(site["path"], []).append((slower, mean))
    kept = {
        path: f"slower when profiled: {math.exp(sum(m for _, m in v) / len(v)):.2f}x"
        for path, v in verdicts.items()
        if all(slower for slower, _ in v)
    }

    ordered = sorted(verdicts, key=place)
    settings = document["results"]["settings"]
    layers = {site["kind"] for site in sites}.intersection(LAYERS)
    return Plan(
        precision=str(found[0]["precision"]),
        backend=str(found[0]["backend"]),
        include=tuple(map(str, settings.get("include", ()))),
        exclude=tuple(map(str, settings.get("exclude", ()))),
        sites=tuple(path for path in ordered if path not in kept),
        kept=tuple((path, kept[path]) for path in ordered if path in kept),
        scope="model" if layers else "attention",
    )


def unsure(document: Document) -> int:
    """Sites that were patched and of which no point can tell whether they are slower."""
    told: dict[str, bool] = {}
    for row in document["results"]["points"]:
        for site in row["profile"]["sites"] if row["status"] == DONE else ():
            if site["patched"]:
                sure = site["ratio"]["verdict"] != UNSURE
                told[site["path"]] = told.get(site["path"], False) or sure
    return sum(not sure for sure in told.values())
