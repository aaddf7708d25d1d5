"""Names of tensors without what training wraps around them and keeps beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from elsa_core.base.messages import listed
from elsa_core.errors import ModelError

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

# Wrappers around single names: DistributedDataParallel, torch.compile.
_without_parts = partial(re.compile(r"^((_orig_mod|module)\.)+").sub, "")
# Copies of a model in one file. The first that is there is taken: averaged weights, as timm does,
# and the teacher, which DINO evaluates.
_COPIES = (
    *("ema_model.", "model_ema.", "ema.", "averaged_model."),
    *("teacher.", "target_encoder.", "momentum_encoder."),
)
# torch.optim.swa_utils counts its updates in a tensor beside the model's.
_COUNTERS = ("n_averaged",)
# Wrappers around a whole model, dropped only where every tensor of the model has them: a backbone
# beside a classifier of its own is another model.
_WHOLE = (
    *("model.", "net.", "network.", "backbone.", "encoder.", "student.", "base_encoder."),
    *_COPIES,
)
# What training alone uses: losses, metrics, the decoder of MAE, the heads of DINO and iBOT.
_TRAINING = re.compile(
    r"(criterion|loss|losses|loss_fn|loss_func|\w+_loss|\w*(acc|accuracy|metrics?|auroc|f1))\..*"
    r"|decoder(_\w+)?(\..*|$)|(dino|ibot)_head\..*"
)
_DINO_HEAD = "head.last_layer."


def bare_names(
    shapes: Shapes, path: Path, key: str | None = None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the full name of each tensor by the model's own name for it, and notes for the user;
    of the tensors whose names begin with `key`, where it is given."""
    kept = [name for name in shapes if name not in _COUNTERS]
    notes: list[str] = []
    if key is not None:
        kept = [name for name in kept if _without_parts(name).startswith(f"{key}.")]
        if not kept:
            some = ", ".join(
                list(dict.fromkeys(_without_parts(name).partition(".")[0] for name in shapes))[:8]
            )
            raise ModelError(
                f"{path} has no weights {key[:60]!r} (--weights): its names begin with {some[:200]}"
            )
        notes.append(f"weights {key} taken, {len(shapes) - len(kept)} other tensors left")
    else:
        kept, notes = _one_copy(kept, shapes)
    bare, left = _core(kept, shapes, "" if key is None else f"{key}.")
    if left:
        notes.append(f"left out, for training alone: {listed(left)}")
    names: dict[str, str] = {}
    for name, new in zip(bare, _renamed(list(bare.values())), strict=True):
        if new in names:
            raise ModelError(
                f"{path}: {names[new][:120]!r} and {name[:120]!r} are both {new[:120]!r}"
                " without the wrappers of training"
            )
        names[new] = name
    return names, tuple(notes)


def _one_copy(full: list[str], shapes: Shapes) -> tuple[list[str], list[str]]:
    for prefix in _COPIES:
        inside = [name for name in full if _without_parts(name).startswith(prefix)]
        outside = [name for name in full if not _without_parts(name).startswith(prefix)]
        if not inside or not outside:
            continue
        one, other = (_core(names, shapes)[0] for names in (inside, outside))
        if set(one.values()) <= set(other.values()):
            key = _without_parts(outside[0]).partition(".")[0]
            kind = "averaged weights" if "ema" in prefix or "averaged" in prefix else "weights"
            return inside, [
                f"{kind} ({prefix}*) taken, {len(outside)} other tensors left"
                f" (--weights {key} takes those)"
            ]
    return full, []


def _core(full: list[str], shapes: Shapes, key: str = "") -> tuple[dict[str, str], list[str]]:
    bare = {name: _without_parts(_without_parts(name).removeprefix(key)) for name in full}
    left: list[str] = []
    while True:
        prefix = next((p for p in _WHOLE if all(n.startswith(p) for n in bare.values())), None)
        if prefix is not None and bare:
            bare = {k: _without_parts(n.removeprefix(prefix)) for k, n in bare.items()}
            continue
        extra = _for_training(bare, shapes)
        if not extra or len(extra) == len(bare):
            return bare, left
        left += extra
        gone = set(extra)
        bare = {name: new for name, new in bare.items() if name not in gone}


def _for_training(bare: Mapping[str, str], shapes: Shapes) -> list[str]:
    dino = any(name.startswith(_DINO_HEAD) for name in bare.values())
    found = [
        full
        for full, name in bare.items()
        if _TRAINING.fullmatch(name) or (dino and name.startswith("head."))
    ]
    if found:
        return found
    for prefix in _WHOLE:
        # A loss's or a metric's buffers beside the model. A classifier would have a matrix.
        outside = [full for full, name in bare.items() if not name.startswith(prefix)]
        if 2 * len(outside) < len(bare) and all(len(shapes[full]) < 2 for full in outside):
            return outside
    return []


def _renamed(names: list[str]) -> list[str]:
    if any(name.startswith("layers.0.downsample.reduction.") for name in names):
        # Swin's authors put the downsampling at the end of a stage, timm at the beginning.
        names = [re.sub(r"^head\.(weight|bias)$", r"head.fc.\1", name) for name in names]
        stage = re.compile(r"^layers\.(\d+)\.(?=downsample\.)")
        return [stage.sub(lambda n: f"layers.{int(n[1]) + 1}.", name) for name in names]
    found = [re.match(r"blocks\.(\d+)\.(\d+)\.", n) for n in names if n.startswith("blocks.")]
    chunks = {(one[1], one[2]) for one in found if one is not None}
    whole = {number for _, number in chunks}
    if "cls_token" in names and chunks and all(found) and len(whole) == len(chunks):
        # DINOv2 trains its blocks in chunks; the second number counts through all of them.
        return [re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name) for name in names]
    return names
