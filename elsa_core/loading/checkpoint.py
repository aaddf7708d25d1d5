"""PyTorch checkpoints: read by `torch.load(weights_only=True)`, within bounds, or not at all."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from elsa_core.base.messages import first_line
from elsa_core.base.reading import check_fits, open_regular
from elsa_core.errors import ModelError
from elsa_core.loading.names import bare_names
from elsa_core.loading.stated import stated
from elsa_core.loading.weights import Weights, check_name, check_numbers, read_header

# What views may make of the bytes that a checkpoint stores; tied weights are twice theirs.
_REPEATED = 4
_REPEATED_BYTES = 64 * 2**20

# Where training checkpoints keep the state dict: averaged weights first, then DINO's and I-JEPA's
# teachers.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema")
_STATES = (
    *(*_AVERAGED, "teacher", "target_encoder", "state_dict", "model_state_dict", "model"),
    *("module", "net", "network", "weights", "student", "encoder", "backbone"),
)
_MAX_WRAPPED = 4


def read_checkpoint(path: Path, key: str | None = None) -> Weights:
    """Read a PyTorch checkpoint without running any code of its pickle. A training checkpoint is
    unwrapped: averaged weights first, then a teacher's, then `state_dict` and `model`; `key` takes
    others (a key, or the beginning of tensors' names). ModelError where `weights_only=True` cannot
    read it, it is compressed or holds no state dict, or a tensor cannot be a weight."""
    with open_regular(path) as file:
        _check_archive(path, file)
        file.seek(0)
        try:
            # Training scripts store their arguments; these classes run no code when rebuilt.
            plain: Any = [argparse.Namespace, PosixPath, (PosixPath, "pathlib._local.PosixPath")]
            with torch.serialization.safe_globals(plain), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            _refuse_checkpoint(path, error)
    # A key names a mapping of the checkpoint, the beginning of the tensors' names, or both.
    parts, taken = key.split(".") if key else [], []
    inner = content
    while parts and isinstance(inner, Mapping) and isinstance(inner.get(parts[0]), Mapping):
        taken.append(parts[0])
        inner = inner[parts.pop(0)]
    state, said = _unwrap(inner)
    if key is not None:
        said = [f"weights {'.'.join(taken)} taken"] if taken else []
    found = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not found or any(not isinstance(name, str) for name in state):
        raise ModelError(f"{path} holds no state dict (tensors by name): not a model's checkpoint")
    for name in found:
        check_name(path, name)
    _check_stored(path, found)
    full = {name: tuple(tensor.shape) for name, tensor in found.items()}
    names, notes = bare_names(full, path, ".".join(parts) or None)
    tensors = {name: found[full] for name, full in names.items()}
    check_numbers(path, tensors)
    shapes = {name: full[key] for name, key in names.items()}
    return Weights(shapes, {}, path, lambda: tensors, (*said, *notes), stated=stated(content))


def check_file(path: Path) -> None:
    """Refuse a weights file that is malformed, or that needs pickle to run code."""
    if path.suffix == ".safetensors":
        read_header(path)
    elif path.suffix in (".bin", ".pt", ".pth"):
        read_checkpoint(path)


def _check_stored(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that repeat their memory: a stride of 0 makes gigabytes of four bytes."""
    shown = {n: t for n, t in tensors.items() if t.layout == torch.strided and not t.is_meta}
    stored = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in shown.values()}
    limit = max(_REPEATED * sum(stored.values()), _REPEATED_BYTES)
    total = 0
    for name, tensor in shown.items():
        total += tensor.numel() * tensor.element_size()
        if total > limit:
            raise ModelError(
                f"{path}: tensor {name[:120]!r} of shape {list(tensor.shape)[:8]} is a view that"
                f" repeats what is stored of it ({tensor.untyped_storage().nbytes()} bytes):"
                " refused"
            )
    check_fits(path, total)


def _check_archive(path: Path, file: BinaryIO) -> None:
    """Refuse an archive that unpacks to more than the file has: `torch.save` stores its members as
    they are, and compressed or overlapping ones would let kilobytes fill the memory."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        raise ModelError(f"{path} is empty: not a PyTorch checkpoint")
    check_fits(path, size)
    if file.read(4) != b"PK\x03\x04":
        return
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError):
        raise ModelError(f"{path} is not a PyTorch checkpoint: its archive is damaged") from None
    if any("/code/" in member.filename for member in members):
        raise ModelError(
            f"{path} is a TorchScript archive: save its state_dict as .safetensors instead"
        )
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise ModelError(
                f"{path}: {member.filename[:120]!r} in it is compressed, which torch.save never"
                " does: refused"
            )
    if sum(member.file_size for member in members) > size:
        raise ModelError(f"{path}: the members of its archive overlap: refused")


def _refuse_checkpoint(path: Path, error: Exception) -> NoReturn:
    with path.open("rb") as file:
        start = file.read(16)
    text = str(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        raise ModelError(f"{path} claims more tensors than this machine has memory for") from None
    if start[:1] != b"\x80" and not zipfile.is_zipfile(path):
        raise ModelError(f"{path} is not a PyTorch checkpoint") from None
    if isinstance(error, pickle.UnpicklingError) and "nsupported" in text:
        found = re.search(r"GLOBAL ([\w.]+)", text)
        what = f" ({found.group(1)})" if found else ""
        raise ModelError(
            f"{path} needs pickle{what}, which can run any code: refused;"
            " save the state_dict as .safetensors"
        ) from None
    raise ModelError(
        f"{path} cannot be read as a PyTorch checkpoint without pickle: {first_line(error)}"
    ) from None


def _unwrap(content: Any) -> tuple[Mapping[Any, Any], list[str]]:
    notes: list[str] = []
    for _ in range(_MAX_WRAPPED):
        if not isinstance(content, Mapping):
            return {}, []
        inside = {k: v for k in _STATES if isinstance(v := content.get(k), Mapping)}
        # a state dict, or a mapping that holds one
        found = [
            key
            for key, inner in inside.items()
            if any(isinstance(value, Tensor) for value in inner.values())
            or any(name in inner for name in _STATES)
        ]
        if not found:
            return content, notes
        if found[1:]:
            kind = "averaged weights" if found[0] in _AVERAGED else "weights"
            notes.append(f"{kind} ({found[0]}) taken; --weights {found[1]} takes those")
        content = content[found[0]]
    return {}, []
