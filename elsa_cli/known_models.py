"""The models that `elsa list` names: their attention sites and weights, counted ahead.

Counting needs an import of torch and timm and a minute for some hundred models; data/models.tsv
holds the counts. `elsa inspect --all --check --state FILE` and `python -m benchmarks.model_counts
FILE` write it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from elsa_cli import completion

TABLE = Path(__file__).parent / "data" / "models.tsv"
LIBRARIES = ("timm", "open_clip", "torchvision")


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
    for library in LIBRARIES:
        prefix = "" if library == "timm" else f"{library}:"
        named = {f"{prefix}{name}" for name in completion.known(library)}
        if named:  # the library is here: so are its models that its sources name in another way
            named |= {name for name, model in counted.items() if model.library == library}
        found += [counted.get(name, KnownModel(name, library)) for name in sorted(named)]
    return found


def matching(models: Iterable[KnownModel], glob: str | None) -> list[KnownModel]:
    """The models whose name a glob selects; a text without wildcards is looked for anywhere, and
    names that begin with it come first."""
    if not glob:
        return list(models)
    wanted = glob.lower() if re.search(r"[*?\[]", glob) else f"*{glob.lower()}*"
    found = [
        model
        for model in models
        if fnmatchcase(model.name.lower(), wanted)
        or fnmatchcase(f"{model.library}:{model.name}".lower(), wanted)
        or fnmatchcase(model.name.rpartition(":")[2].lower(), wanted)
    ]
    return sorted(found, key=lambda model: not model.name.lower().startswith(glob.lower()))


def read(path: Path) -> tuple[str, list[KnownModel]]:
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    models = []
    for line in lines:
        name, *numbers = line.split("\t")
        library = name.partition(":")[0] if ":" in name else "timm"
        models.append(KnownModel(name, library, *map(int, numbers)))
    return head.lstrip("# "), models
