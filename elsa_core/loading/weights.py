"""Files of weights: .safetensors, alone or joined by the hub's index (`*.safetensors.index.json`),
and PyTorch checkpoints.

Each file is hostile until read: the safetensors library checks its header, and that its tensors
fill the file without gap or overlap; checkpoints are read by `torch.load(weights_only=True)`,
within bounds, or not at all.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, NamedTuple, NoReturn

import torch
from torch import Tensor

from elsa_core.base.messages import first_line
from elsa_core.base.reading import check_fits, open_regular, read_json
from elsa_core.errors import ModelError
from elsa_core.loading.names import bare_names
from elsa_core.loading.stated import Stated, parsed, stated

# Of one tensor's name: those of the libraries are shorter than 150.
MAX_NAME = 1000
INDEX_SUFFIX = ".safetensors.index.json"
MAX_SHARDS = 4096
MAX_AXES = 64  # of a tensor that PyTorch computes with

# What a model's tensors can be made of: neither complex nor quantised numbers.
_DTYPES = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
)

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


class Header(NamedTuple):
    """What a .safetensors file says of its tensors."""

    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]


@dataclass
class Weights:
    """Tensors by name on the CPU, the file's own metadata, and where they came from. The tensors of
    a .safetensors file are read when they are asked for, so that a file that fits no architecture
    costs its header alone."""

    shapes: dict[str, tuple[int, ...]]  # by name without the wrappers of training
    metadata: dict[str, str]
    path: Path
    read: Callable[[], dict[str, Tensor]]
    notes: tuple[str, ...] = ()  # for the user: which of several groups of tensors was taken
    stated: Stated = field(default_factory=Stated)  # what the file says of its model

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors; ModelError where they are unreadable, complex, or hold NaN or infinity."""
        return self.read()


def read_header(path: Path) -> Header:
    """Read a .safetensors header, which the library validates; no tensor is read."""
    from safetensors import safe_open

    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
    if size < 8:
        what = "empty" if not size else f"{size} bytes long: too short"
        raise ModelError(f"{path} is {what}, not a safetensors file")
    if all(32 <= byte < 127 or byte in b"\r\n\t" for byte in start):
        raise ModelError(f"{path} is not a safetensors file: it looks like text")
    check_fits(path, size)  # it is mapped as a whole
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except Exception as error:
        why = first_line(error).removeprefix("Error while deserializing header: ")
        why = "".join(each if each.isprintable() else "?" for each in why)
        raise ModelError(f"{path} is damaged or no safetensors file: {why}") from None
    check_names(path, shapes)
    return Header(shapes, metadata)


def read_weights(path: Path, key: str | None = None) -> Weights:
    """Read a weights file; `key` says which of several weights to take (--weights)."""
    safe = path.name.lower().endswith((".safetensors", INDEX_SUFFIX))
    return (read_safetensors if safe else read_checkpoint)(path, key)


def read_safetensors(path: Path, key: str | None = None) -> Weights:
    """Read a .safetensors file, or the shards of an index: headers now, tensors when asked for."""
    indexed = path.name.lower().endswith(INDEX_SUFFIX)
    headers = _shards(path) if indexed else {path: read_header(path)}
    shapes = {name: shape for header in headers.values() for name, shape in header.shapes.items()}
    if not shapes:
        raise ModelError(f"{path} holds no tensors")
    check_fits(path, sum(part.stat().st_size for part in headers))
    metadata: dict[str, str] = {}
    for header in headers.values():
        metadata = header.metadata | metadata
    names, notes = bare_names(shapes, path, key)

    def read() -> dict[str, Tensor]:
        from safetensors import safe_open

        held: dict[str, Tensor] = {}
        for part, header in headers.items():
            try:
                with safe_open(part, framework="pt") as file:
                    held |= {name: file.get_tensor(name) for name in wanted & header.shapes.keys()}
            except Exception as error:
                raise ModelError(f"{part} cannot be read: {first_line(error)}") from None
        tensors = {name: held[full] for name, full in names.items()}
        check_numbers(path, tensors)
        return tensors

    wanted = set(names.values())
    bare = {name: shapes[full] for name, full in names.items()}
    said = stated({key: parsed(text) for key, text in metadata.items()})
    return Weights(bare, metadata, path, read, notes, said)


def _shards(path: Path) -> dict[Path, Header]:
    """What an index names: files beside it, which are no links."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map: not an index of safetensors shards")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and Path(file).name == file and file.isprintable()
        plain = plain and len(file.encode()) <= 255  # what file systems count
        if not plain or not str(file).lower().endswith(".safetensors") or "\\" in str(file):
            raise ModelError(
                f"{path}: tensor {name[:120]!r} is in {str(file)[:120]!r}, which is no "
                ".safetensors file beside the index"
            )
    shards, headers = sorted(set(weight_map.values())), {}
    if len(shards) > MAX_SHARDS:
        raise ModelError(f"{path} names more than {MAX_SHARDS} shards")
    for shard in shards:
        file = path.parent / shard
        # A link leads elsewhere, except within the hub's cache: there the index is a link too, and
        # both lead to the same folder of blobs.
        cached = path.is_symlink() and file.resolve().parent == path.resolve().parent
        if file.is_symlink() and not cached:
            raise ModelError(f"{path} names the shard {shard[:120]!r}, which is a link: refused")
        if not file.exists():
            raise ModelError(f"{path} names the shard {shard[:120]!r}, which is not there")
    for shard in shards:
        file = path.parent / shard
        header = read_header(file)
        wanted = {name for name, file in weight_map.items() if file == shard}
        if header.shapes.keys() != wanted:
            missing = sorted(wanted - header.shapes.keys())
            more = sorted(header.shapes.keys() - wanted)
            what = f"lacks {missing[0][:120]!r}" if missing else f"also holds {more[0][:120]!r}"
            raise ModelError(f"{path} does not fit its shards: {shard} {what}")
        headers[file] = header
    return headers


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
    check_names(path, found)
    _check_stored(path, found)
    full = {name: () if t.is_nested else tuple(t.shape) for name, t in found.items()}
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


def check_names(path: Path, names: Iterable[str]) -> None:
    """Refuse a name far longer than any module's: searching names takes its square."""
    for name in names:
        if len(name) > MAX_NAME:
            raise ModelError(
                f"{path}: tensor {name[:120]!r} has a name of {len(name)} characters; the limit is"
                f" {MAX_NAME}"
            )


def check_numbers(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that hold no numbers, or none that a model computes with."""
    for name, tensor in tensors.items():
        kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout)
        kind = kind.removeprefix("torch.")
        what = ""
        if tensor.layout != torch.strided:
            what = f"is {kind}: save it dense (tensor.to_dense())"
        elif tensor.is_nested:
            what = "is nested: save its parts"
        elif tensor.is_meta:
            what = "is on the meta device: it holds no numbers"
        elif tensor.ndim > MAX_AXES:
            what = f"has {tensor.ndim} axes; the limit is {MAX_AXES}"
        elif tensor.dtype not in _DTYPES:
            what = f"is {kind}: weights are real, plain numbers"
        elif tensor.is_floating_point():
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            if not torch.isfinite(wide).all():
                found = "NaN" if wide.isnan().any() else "infinity"
                what = f"holds {found}; the weights are damaged"
        if what:
            raise ModelError(f"{path}: tensor {name[:120]!r} {what}")


def separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors, none sharing memory: tied weights are written under each name,
    so that the file loads strictly into any model of those names."""
    seen: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        if plain.numel() and (address in seen or plain.untyped_storage().nbytes() != plain.nbytes):
            plain = plain.clone()
        seen.add(address)
        result[name] = plain
    return result
