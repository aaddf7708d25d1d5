"""`save`: a patched model as a directory that loads again, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elsa_core.base import files
from elsa_core.errors import ArgumentError, ModelError
from elsa_core.loading import libraries
from elsa_core.loading.fromfile import CONFIG_METADATA
from elsa_core.loading.loader import Loaded
from elsa_core.loading.plan import PLAN_NAME, Plan, plan_of
from elsa_core.loading.transformers_models import LIBRARY, PROCESSORS, write_folder
from elsa_core.loading.weights import separate

if TYPE_CHECKING:
    from elsa_core.patching import PatchReport

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
OPEN_CLIP_CONFIG_NAME = "open_clip_config.json"
# What `save` and `elsa_core.exporting` write: a directory that holds nothing else may be replaced.
_OWN_NAMES = frozenset(
    (
        *(WEIGHTS_NAME, CONFIG_NAME, OPEN_CLIP_CONFIG_NAME, PLAN_NAME),
        *("model.ts", "model.onnx", "model.onnx.data", "model.pt2", "model.aoti.pt2", "lib"),
        *("model.int8.onnx", "model.int8.onnx.data", "labels.txt", "reference.npz", "README.md"),
        *("manifest.json", "manifest.sig", "load.py", "__pycache__", *PROCESSORS),
    )
)


def save(
    loaded: Loaded,
    report: PatchReport,
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
) -> Path:
    """Write model.safetensors, config.json and elsa_plan.json; `load` opens the directory again. Of
    a model that the user's own code makes there is no config.json: `elsa patch --plan` takes the
    plan. After a failure or an interrupt at any point the target is as it was before. `force`
    replaces a directory that elsa wrote. ArgumentError: the target exists, or cannot be written;
    UnavailableError: the disk is full."""
    given = files.located(directory)
    try:
        target = given.resolve()
        check_target(target, given, force)
        with files.staged(target) as staging:
            write_model(staging, loaded.model, plan_of(report), loaded)
    except OSError as error:
        raise files.explained(error, given) from error
    return given


def write_model(directory: Path, model: nn.Module, plan: Plan, loaded: Loaded | None) -> None:
    """Write weights and plan, and where elsa has loaded the model its configuration."""
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(
                f"tensor {name!r} holds NaN or infinity: not saved, it would not load again"
            )
    files.write_json(directory / PLAN_NAME, plan.to_dict())
    if loaded is None or loaded.recipe.library == "python":
        _write_tensors(tensors, directory / WEIGHTS_NAME, {"format": "pt"})
        return
    if loaded.recipe.library == LIBRARY:
        write_folder(loaded.model, directory, loaded.spec.path)
        return
    config = loaded.recipe.to_config()
    # the names that its library needs to fit another classifier
    known = getattr(loaded.model, "pretrained_cfg", None)
    keys = libraries.of(loaded.recipe.library).config_keys
    if keys and isinstance(known, dict):
        config["pretrained_cfg"].update({key: known.get(key) for key in keys})
    said = {"elsa_weights": loaded.weights, CONFIG_METADATA: json.dumps(config)}
    metadata = {"format": "pt", **said}
    _write_tensors(tensors, directory / WEIGHTS_NAME, metadata)
    files.write_json(directory / CONFIG_NAME, config)
    if loaded.recipe.two_towers:
        files.write_json(directory / OPEN_CLIP_CONFIG_NAME, loaded.recipe.to_open_clip_config())


def _write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(separate(tensors), path, metadata=metadata)
    except SafetensorError as error:
        text = str(error)
        full = "os error 28" in text or "No space left" in text
        raise OSError(errno.ENOSPC if full else errno.EIO, text.splitlines()[0][:200]) from error
    # safetensors makes files that only their owner may read.
    path.chmod(0o666 & ~files.umask())
    files.flush(path)


def check_target(target: Path, given: Path, force: bool) -> None:
    """Refuse a target that exists without `force`, or that elsa did not write."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ArgumentError(f"{given} (-o) is a file: give a directory")
    present = {entry.name for entry in target.iterdir()}
    if not force and present:
        raise ArgumentError(f"{given} (-o) exists: use --force to replace it, or another directory")
    foreign = sorted(present - _OWN_NAMES)
    if foreign or (present and PLAN_NAME not in present):
        what = foreign[0] if foreign else "no elsa_plan.json"
        raise ArgumentError(
            f"{given} (-o) is not a directory that elsa wrote (it has {what}): not replaced"
        )
