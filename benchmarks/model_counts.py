"""Writes the table of `elsa list` from the records of `elsa inspect --all --state FILE`.

python -m benchmarks.model_counts FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from elsa_cli import completion
from elsa_cli.known_models import TABLE


def counted_torchvision() -> list[dict[str, Any]]:
    """The records of torchvision's models, which `elsa inspect --all` leaves out."""
    from elsa_core.loading import meta_model
    from elsa_core.patching import find_sites

    found = []
    for name in sorted(completion.known("torchvision")):
        model = meta_model(f"torchvision:{name}")
        sites = find_sites(model)
        found.append({
            "name": f"torchvision:{name}", "sites": len(sites),
            "patchable": sum(site.patchable for site in sites),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        })  # fmt: skip
    return found


def write(records: Iterable[dict[str, Any]], path: Path) -> int:
    """Write the table from the records of `elsa inspect --all --state`; returns how many."""
    rows = [
        "\t".join([each["name"].removeprefix("timm:"),
                   *(str(each[key]) for key in ("sites", "patchable", "parameters"))])
        for each in records
        if each["parameters"]
    ]  # fmt: skip
    packages = {"timm": "timm", "open_clip": "open_clip_torch", "torchvision": "torchvision"}
    used = ", ".join(f"{name} {version(package)}" for name, package in packages.items())
    path.write_text("\n".join([f"# {used}", *sorted(rows)]) + "\n", encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    write([*map(json.loads, lines), *counted_torchvision()], TABLE)
