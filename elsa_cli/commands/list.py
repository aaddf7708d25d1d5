"""`elsa list`: the models that MODEL may name, with what can be patched of each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from elsa_cli.console import Session
from elsa_cli.errors import ModelFileError
from elsa_cli.options import elsa_command, flag


@elsa_command(
    "list",
    click.argument("glob", required=False),
    flag("--all", "everything", text="Also models without attention that can be patched."),
)  # fmt: skip
def command(session: Session, /, glob: str | None, everything: bool, **_: Any) -> None:
    """List the models of timm, open_clip and torchvision that are installed here: attention sites,
    how many of them can be patched, and parameters.

    GLOB selects names: 'swin*', 'open_clip:*', '*dino*'; a word without wildcards is looked for
    anywhere in the name. No model is built: the numbers were counted ahead, at each model's
    default size, and are left empty for models that are newer. `elsa inspect MODEL` counts.
    """
    from elsa_cli import known_models, names

    found = known_models.matching(known_models.installed(), glob)
    if not found:
        close = names.close_names(glob or "")
        hint = f"; close names: {', '.join(close)}" if close else ""
        raise ModelFileError(f"no model of an installed library matches {glob!r}{hint}")
    shown = found if everything else [model for model in found if model.patchable != 0]
    results = {
        "counted_with": known_models.read(known_models.TABLE)[0],
        "models": [asdict(model) for model in shown],
    }
    session.document("list", results)
    rows = []
    for model in shown:
        counts = ["" if n is None else str(n) for n in (model.sites, model.patchable)]
        weights = "" if model.parameters is None else f"{model.parameters / 1e6:.1f} M"
        rows.append([model.name, *counts, weights])
    session.table(["model", ">sites", ">patchable", ">parameters"], rows)
    session.line()
    left = len(found) - len(shown)
    more = f" · {left} more have nothing to patch: --all lists them" if left else ""
    session.verdict(f"{len(shown)} model{'s' * (len(shown) != 1)}{more}")
    if shown:
        session.line(f"Next: elsa inspect {shown[0].name}", "dim")
