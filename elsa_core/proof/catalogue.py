"""The architectures that `inspect --all` goes through: one record a library that lists its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Catalogue:
    """One library.

    Attributes:
        library: its name, in front of the colon of an architecture's.
        names: its architectures, without the library; ImportError where it is not installed.
        family: of an architecture, the module that defines it.
    """

    library: str
    names: Callable[[], list[str]]
    family: Callable[[str], str]


def _timm_names() -> list[str]:
    import timm

    return list(timm.list_models())


def _timm_family(name: str) -> str:
    from timm.models import model_entrypoint

    return str(model_entrypoint(name).__module__.rpartition(".")[2])


def _open_clip_names() -> list[str]:
    import open_clip

    return list(open_clip.list_models())


def _torchvision_names() -> list[str]:
    import torchvision

    return list(torchvision.models.list_models(module=torchvision.models))


# transformers lists configurations, not architectures that MODEL can name: its attention interface
# (`patching.adapters.hf_transformers`) takes them all.
CATALOGUES = (
    Catalogue("timm", _timm_names, _timm_family),
    Catalogue("open_clip", _open_clip_names, lambda name: "open_clip"),
    Catalogue("torchvision", _torchvision_names, lambda name: "torchvision"),
)


def architectures(match: str = "*") -> list[str]:
    """Names ("timm:...", "torchvision:...") that a glob selects; one of each family comes first.

    A library that is not installed has none.
    """
    chosen = [name for name in _all_names() if fnmatchcase(name, match)]
    turns: Counter[str] = Counter()
    order = []
    for name in chosen:
        of = family(name)
        order.append((turns[of], name))
        turns[of] += 1
    return [name for _, name in sorted(order, key=lambda pair: pair[0])]


def family(name: str) -> str:
    """The family of an architecture "library:name"."""
    library, _, bare = name.partition(":")
    record = next(record for record in CATALOGUES if record.library == library)
    return record.family(bare)


def _all_names() -> list[str]:
    found = []
    for record in CATALOGUES:
        try:
            found += [f"{record.library}:{name}" for name in record.names()]
        except ImportError:
            continue
    return found
