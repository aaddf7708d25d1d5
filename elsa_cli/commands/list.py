"""`elsa list`: the models that MODEL may name, with what can be patched of each.

Counting needs an import of torch and timm and a minute for some hundred models; data/models.tsv
holds the counts. `elsa inspect --all --check --state FILE` and `python -m benchmarks.model_counts
FILE` write it anew.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from elsa_cli import completion, names
from elsa_cli.console import Session
from elsa_cli.errors import ModelFileError
from elsa_cli.options import elsa_command, flag

TABLE = Path(__file__).parents[1] / "data" / "models.tsv"


@dataclass(frozen=True)
class KnownModel:
    """A model of an installed library, by the name that MODEL takes.

    `sites`, `patchable` of them and `parameters` are None where they have not been counted.
    """

    name: str
    library: str
    sites: int | None = None
    patchable: int | None = None
    parameters: int | None = None


def installed() -> list[KnownModel]:
    """Every model of the libraries that are installed, without importing one."""
    counted = {model.name: model for model in read(TABLE)[1]}
    found = []
    for library, prefix in names.PREFIXES.items():
        named = {f"{prefix}{name}" for name in completion.known(library)}
        if named:  # the library is here: so are its models that its sources name in another way
            named |= {name for name, model in counted.items() if model.library == library}
        found += [counted.get(name, KnownModel(name, library)) for name in sorted(named)]
    return found


def read(path: Path) -> tuple[str, list[KnownModel]]:
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    models = []
    for line in lines:
        name, *numbers = line.split("\t")
        library = name.partition(":")[0] if ":" in name else "timm"
        models.append(KnownModel(name, library, *map(int, numbers)))
    return head.lstrip("# "), models


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
    wanted = (glob or "").lower()
    pattern = wanted if re.search(r"[*?\[]", wanted) else f"*{wanted}*"
    found = []
    for model in installed():
        spelt = (model.name, f"{model.library}:{model.name}", model.name.rpartition(":")[2])
        if any(fnmatchcase(each.lower(), pattern) for each in spelt):
            found.append(model)
    found.sort(key=lambda model: not model.name.lower().startswith(wanted))  # those come first
    if not found:
        close = names.close_names(glob or "")
        hint = f"; close names: {', '.join(close)}" if close else "; `elsa list` names all"
        raise ModelFileError(f"no model of an installed library matches {glob!r}{hint}")
    shown = found if everything else [model for model in found if model.patchable != 0]
    results = {
        "counted_with": read(TABLE)[0],
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
