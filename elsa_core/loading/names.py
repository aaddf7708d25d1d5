"""Names of tensors without what training wraps around them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from elsa_core.errors import ModelError

# Wrappers around single names: DistributedDataParallel, torch.compile.
_PARTS = ("_orig_mod.", "module.")
# Wrappers around a whole model, dropped only where every tensor has them: a backbone beside a head
# of its own is another model. Averaged weights come first where both are there, as in timm.
_AVERAGED = ("ema_model.", "model_ema.", "ema.", "averaged_model.")
# torch.optim.swa_utils counts its updates in a tensor beside the model's.
_COUNTERS = ("n_averaged",)
_WHOLE = ("model.", "net.", "network.", "backbone.", "encoder.", *_AVERAGED)


def bare_names(full: Collection[str], path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the full name of each tensor by its name without wrappers, and notes for the user.

    Raises:
        ModelError: two tensors have the same name without wrappers.
    """
    kept, notes = _averaged([name for name in full if name not in _COUNTERS])
    names: dict[str, str] = {}
    for name, bare in zip(kept, _stripped(kept), strict=True):
        if bare in names:
            raise ModelError(
                f"{path}: {names[bare][:120]!r} and {name[:120]!r} are both {bare[:120]!r}"
                " without the wrappers of training"
            )
        names[bare] = name
    return names, notes


def _averaged(full: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the averaged copy alone where a file holds both, and what was left out."""
    for prefix in _AVERAGED:
        inside = [name for name in full if name.startswith(prefix)]
        outside = [name for name in full if not name.startswith(prefix)]
        if inside and outside and set(_stripped(inside)) == set(_stripped(outside)):
            count = len(outside)
            return inside, (f"averaged weights ({prefix}*) taken, {count} other tensors left",)
    return full, ()


def _stripped(names: Iterable[str]) -> list[str]:
    bare = [_without_parts(name) for name in names]
    while prefix := next((p for p in _WHOLE if all(name.startswith(p) for name in bare)), None):
        bare = [_without_parts(name.removeprefix(prefix)) for name in bare]
    return bare


def _without_parts(name: str) -> str:
    while name.startswith(_PARTS):
        for part in _PARTS:
            name = name.removeprefix(part)
    return name
