"""Writes what is kept of the records of `elsa inspect --all --check --state FILE`: the table of
`elsa list`, and docs/coverage.md.

python -m benchmarks.model_counts FILE
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from elsa_cli.commands.list import TABLE
from elsa_core.proof import coverage
from elsa_core.proof.coverage import Coverage


def write(records: Iterable[Coverage], path: Path) -> None:
    """Write the table of `elsa list`."""
    rows = [
        "\t".join([r.name.removeprefix("timm:"), *map(str, (r.sites, r.patchable, r.parameters))])
        for r in records
        if r.parameters
    ]
    packages = {"timm": "timm", "open_clip": "open_clip_torch", "torchvision": "torchvision"}
    used = ", ".join(f"{name} {version(package)}" for name, package in packages.items())
    path.write_text("\n".join([f"# {used}", *sorted(rows)]) + "\n", encoding="utf-8")


def page(records: Sequence[Coverage]) -> str:
    """The coverage page of the documentation."""
    total = coverage.summarise(records)
    verdicts = ", ".join(f"{count} {name}" for name, count in sorted(total["verdicts"].items()))
    used = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm", "open_clip_torch"))
    lines = [
        f"# Coverage\n\nWritten by `elsa inspect --all --check`. Versions: {used}.\n",
        f"{total['architectures']} architectures, {total['attentive']} of them with softmax "
        f"attention; in {total['complete']} ({total['share']:.1%}) all of it is patched. "
        f"{total['patchable']} of {total['sites']} attention sites are. Checks: {verdicts}.",
        "",
        "| family | architectures | sites | patched | checked: agree | worst error (original) "
        "| kept |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    problems = []
    for family, members in coverage.by_family(records).items():
        kept = Counter[tuple[str, str]]()
        for record in members:
            for one in record.kept:
                kept[one.module_class.rpartition(".")[2], one.reason] += one.sites
            if record.verdict in (coverage.DIFFERS, coverage.FAILED):
                problems.append(f"- `{record.name}`: {record.verdict}: {record.reason}")
        checked = [r for r in members if r.verdict in (coverage.AGREES, coverage.DIFFERS)]
        agree = sum(r.verdict == coverage.AGREES for r in checked)
        worst = max(checked, key=lambda record: record.error or 0.0, default=None)
        errors = "" if worst is None else f"{worst.error:.1e} ({worst.original_error:.1e})"
        reasons = "; ".join(f"{n} {cls}: {reason}" for (cls, reason), n in kept.items())
        sites, patched = (sum(getattr(r, of) for r in members) for of in ("sites", "patchable"))
        counts = f"{len(members)} | {sites} | {patched} | {agree}/{len(checked)}"
        lines.append(f"| {family} | {counts} | {errors} | {reasons} |")
    if problems:
        lines += ["", "What did not agree, or failed:", "", *problems]
    if missing := [record for record in records if record.verdict == coverage.UNAVAILABLE]:
        names = ", ".join(f"`{record.name}`" for record in missing)
        lines += ["", f"Could not be examined: {names}. The first: {missing[0].reason}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = [*coverage.read_state(Path(sys.argv[1])).values()]
    write(found, TABLE)
    Path("docs/coverage.md").write_text(page(found), encoding="utf-8")
