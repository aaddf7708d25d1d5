"""The names of a model's classes, in the bundle: given, or ImageNet's where they are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elsa_core.errors import ArgumentError
from elsa_core.exporting.export_target import ExportTarget
from elsa_core.loading import names_of

LABELS_NAME = "labels.txt"


def write_labels(exported: ExportTarget, given: Sequence[str], staging: Path) -> str | None:
    """Write labels.txt, one name a line; returns its name, None where no names are known.

    Args:
        exported: what is exported.
        given: names in the order of the classes; empty for those that the weights' source has, or
            the published ones.
        staging: the bundle.

    Raises:
        ArgumentError: not as many names as the model has classes.
    """
    count = getattr(exported.model, "num_classes", 0)
    names = tuple(given) or _own(exported, count) or _published(exported, count)
    if given and len(given) != count:
        raise ArgumentError(f"labels (--labels): {len(given)} names, the model has {count} classes")
    if not names:
        return None
    lines = (" ".join(name.split()) for name in names)
    (staging / LABELS_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return LABELS_NAME


def _own(exported: ExportTarget, count: int) -> tuple[str, ...]:
    """The names that came with the weights, where they are as many as the classes."""
    cfg = getattr(exported.model, "pretrained_cfg", None)
    names = names_of(cfg.get("label_names")) if isinstance(cfg, dict) else ()
    return names if len(names) == count else ()


def _published(exported: ExportTarget, count: int) -> tuple[str, ...]:
    """ImageNet's names for published weights with as many classes as one of its sets."""
    if "pretrained (" not in exported.weights or exported.tower is not None:
        return ()
    from timm.data import ImageNetInfo, infer_imagenet_subset

    name = infer_imagenet_subset({"num_classes": count})
    if name is None:
        return ()
    info = ImageNetInfo(name)
    return tuple(info.index_to_description(i) for i in range(count))
