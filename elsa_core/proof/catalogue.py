"""The architectures that `inspect --all` goes through, by library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase


def _timm() -> list[str]:
    import timm

    return list(timm.list_models())


def _open_clip() -> list[str]:
    import open_clip

    return list(open_clip.list_models())


def _torchvision() -> list[str]:
    import torchvision

    return list(torchvision.models.list_models(module=torchvision.models))


# transformers lists configurations, not architectures that MODEL can name: its attention interface
# (`patching.adapters.hf_transformers`) takes them all.
CATALOGUES: dict[str, Callable[[], list[str]]] = {
    "timm": _timm, "open_clip": _open_clip, "torchvision": _torchvision
}  # fmt: skip


def architectures(match: str = "*") -> list[str]:
    """Names ("timm:...", "torchvision:...") that a glob selects; one of each family comes first.

    A library that is not installed has none.
    """
    turns: Counter[str] = Counter()
    order = []
    for library, names in CATALOGUES.items():
        try:
            found = [f"{library}:{name}" for name in names()]
        except ImportError:
            continue
        for name in found:
            if fnmatchcase(name, match):
                of = family(name)
                order.append((turns[of], name))
                turns[of] += 1
    return [name for _, name in sorted(order, key=lambda pair: pair[0])]


def family(name: str) -> str:
    """The family of an architecture "library:name": of timm the module that defines it."""
    library, _, bare = name.partition(":")
    if library != "timm":
        return library
    from timm.models import model_entrypoint

    return str(model_entrypoint(bare).__module__.rpartition(".")[2])
