"""Weights of .safetensors files, alone or joined by the hub's index (`*.safetensors.index.json`).

Each file is hostile until checked: its header is validated here before the safetensors library is
given the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from elsa_core.base.files import scratch
from elsa_core.base.messages import first_line
from elsa_core.base.reading import check_fits, json_problem, open_regular, read_json, unique_pairs
from elsa_core.errors import ModelError
from elsa_core.loading.names import bare_names
from elsa_core.loading.stated import Stated, stated_in_metadata

# The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 64
# Of one tensor's name: those of the libraries are shorter than 150.
MAX_NAME = 1000
INDEX_SUFFIX = ".safetensors.index.json"
MAX_SHARDS = 4096

_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
# What a model's tensors can be made of: neither complex nor quantised numbers.
_DTYPES = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
)


class TensorEntry(NamedTuple):
    """One tensor of a .safetensors file: its shape, and its bytes in the data part."""

    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The validated header of a .safetensors file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        return {name: entry.shape for name, entry in self.tensors.items()}


@dataclass
class Weights:
    """Tensors by name on the CPU, the file's own metadata, and where they came from.

    Shapes, dtypes and metadata are there at once; the tensors of a .safetensors file are read when
    they are asked for, so that a file that fits no architecture costs its header alone.

    Attributes:
        shapes: of every tensor, by name without the wrappers of training.
        metadata: text by name.
        path: the file.
        read: gives the tensors.
        notes: lines for the user: which of several groups of tensors was taken.
        stated: what the file says of its model.
    """

    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]
    path: Path
    read: Callable[[], dict[str, Tensor]]
    notes: tuple[str, ...] = ()
    stated: Stated = field(default_factory=Stated)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors; ModelError where they are unreadable, complex, or hold NaN or infinity."""
        return self.read()


def read_header(path: Path) -> Header:
    """Read and validate a .safetensors header; the tensors themselves are not touched.

    Raises:
        ModelError: the file is not a well-formed .safetensors file. The message names the file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(8), size)
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        content = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique_pairs, parse_constant=_no_constant
        )
    except UnicodeDecodeError:
        raise ModelError(f"{path} has a header that is not UTF-8: not a safetensors file") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a header that is not JSON: {json_problem(error)}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} has a header that is not a JSON object")
    metadata = content.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise ModelError(f"{path} has __metadata__ that is not a map of text to text")
    entries = {name: _parse_entry(path, name, entry) for name, entry in content.items()}
    _check_coverage(path, entries, size - 8 - length)
    return Header(entries, metadata)


def read_safetensors(path: Path, key: str | None = None) -> Weights:
    """Read a .safetensors file: the header now, the tensors when they are asked for.

    Args:
        path: the file.
        key: take the tensors whose names begin with it.

    Raises:
        ModelError: malformed file, no tensors, none under `key`, or more than the memory holds.
    """
    return _joined(path, {path: read_header(path)}, key)


def is_index(path: Path) -> bool:
    """Whether the name is that of an index of shards."""
    return path.name.lower().endswith(INDEX_SUFFIX)


def read_sharded(path: Path, key: str | None = None) -> Weights:
    """Read what an index names, from the files beside it: headers now, tensors when asked for.

    Raises:
        ModelError: a malformed index, a shard that is missing, malformed, a link or outside the
            index's directory, or tensors that are not where the index says.
    """
    weight_map = _weight_map(path)
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        _check_place(path, shard)
    headers = {}
    for shard in shards:
        header = read_header(path.parent / shard)
        wanted = {name for name, file in weight_map.items() if file == shard}
        if header.tensors.keys() != wanted:
            missing = sorted(wanted - header.tensors.keys())
            more = sorted(header.tensors.keys() - wanted)
            what = f"lacks {missing[0][:120]!r}" if missing else f"also holds {more[0][:120]!r}"
            raise ModelError(f"{path} does not fit its shards: {shard} {what}")
        headers[path.parent / shard] = header
    return _joined(path, headers, key)


def _joined(path: Path, headers: Mapping[Path, Header], key: str | None) -> Weights:
    """The weights of one file or of several, under the model's own names."""
    shapes = {name: shape for header in headers.values() for name, shape in header.shapes.items()}
    if not shapes:
        raise ModelError(f"{path} holds no tensors")
    entries = [entry for header in headers.values() for entry in header.tensors.values()]
    check_fits(path, sum(entry.stop - entry.start for entry in entries))
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
                    held |= {name: file.get_tensor(name) for name in wanted & header.tensors.keys()}
            except Exception as error:
                raise ModelError(f"{part} cannot be read: {first_line(error)}") from None
        tensors = {name: held[full] for name, full in names.items()}
        check_numbers(path, tensors)
        return tensors

    wanted = set(names.values())
    bare = {name: shapes[full] for name, full in names.items()}
    return Weights(bare, metadata, path, read, notes, stated_in_metadata(metadata))


def _check_place(path: Path, shard: str) -> None:
    """A shard lies beside the index: a link leads elsewhere, except within the hub's cache.

    There the index is a link too, and both lead to the same folder of blobs.
    """
    file = path.parent / shard
    if file.is_symlink():
        same = path.is_symlink() and file.resolve().parent == path.resolve().parent
        if not same:
            raise ModelError(f"{path} names the shard {shard[:120]!r}, which is a link: refused")
    if not file.exists():
        raise ModelError(f"{path} names the shard {shard[:120]!r}, which is not there")


def _weight_map(path: Path) -> dict[str, str]:
    given = read_json(path).get("weight_map")
    if not isinstance(given, dict) or not given:
        raise ModelError(f"{path} has no weight_map: not an index of safetensors shards")
    for name, file in given.items():
        plain = isinstance(file, str) and Path(file).name == file and file.isprintable()
        plain = plain and len(file.encode()) <= 255  # what file systems count
        if not plain or not str(file).lower().endswith(".safetensors") or "\\" in str(file):
            raise ModelError(
                f"{path}: tensor {name[:120]!r} is in {str(file)[:120]!r}, which is no "
                ".safetensors file beside the index"
            )
    if len(set(given.values())) > MAX_SHARDS:
        raise ModelError(f"{path} names more than {MAX_SHARDS} shards")
    return given


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if size == 0:
        raise ModelError(f"{path} is empty: not a safetensors file")
    if len(prefix) < 8:
        raise ModelError(f"{path} is {size} bytes long: too short for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if 8 + length > size and all(32 <= byte < 127 or byte in b"\r\n\t" for byte in prefix):
        raise ModelError(f"{path} is not a safetensors file: it looks like text")
    if length > MAX_HEADER_BYTES:
        raise ModelError(
            f"{path} is not a safetensors file: its header claims {length} bytes"
            f" (the format allows {MAX_HEADER_BYTES})"
        )
    if 8 + length > size:
        raise ModelError(
            f"{path} is truncated: its header claims {length} bytes and {size - 8} are there"
        )
    return length


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _parse_entry(path: Path, name: str, entry: Any) -> TensorEntry:
    where = f"{path}: tensor {name[:120]!r}"
    check_name(path, name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{where} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ModelError(f"{where} has an unknown dtype {str(dtype)[:40]!r}")
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise ModelError(f"{where} has a shape that is not a list of sizes >= 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where} has data_offsets that are not [start, end] with start <= end")
    needed = _DTYPE_BYTES[dtype]
    for extent in shape:
        needed *= extent
    if needed != offsets[1] - offsets[0]:
        raise ModelError(
            f"{where} of dtype {dtype} and shape {shape} needs {needed} bytes"
            f" and its offsets span {offsets[1] - offsets[0]}"
        )
    return TensorEntry(tuple(shape), *offsets)


def check_name(path: Path, name: str) -> None:
    """Refuse a name far longer than any module's: searching names takes its square."""
    if len(name) > MAX_NAME:
        raise ModelError(
            f"{path}: tensor {name[:120]!r} has a name of {len(name)} characters; the limit is"
            f" {MAX_NAME}"
        )


def _naturals(values: Any) -> bool:
    """True for a list of whole numbers >= 0 that fit 63 bits (True and False are no numbers)."""
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _check_coverage(path: Path, entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """The tensors must tile the data: no overlap, no gap, nothing beyond the end."""
    position = 0
    for name, (_, start, stop) in sorted(entries.items(), key=lambda item: item[1][1:]):
        if stop > data_bytes:
            raise ModelError(
                f"{path} is truncated or wrong: tensor {name[:120]!r} ends at byte {stop}"
                f" of {data_bytes} bytes of data"
            )
        if start != position:
            what = "overlaps the one before it" if start < position else "leaves a gap"
            raise ModelError(f"{path}: tensor {name[:120]!r} {what} at byte {start}")
        position = stop
    if position != data_bytes:
        raise ModelError(f"{path} has {data_bytes - position} bytes that belong to no tensor")


def check_numbers(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that hold no numbers, or none that a model computes with."""
    for name, tensor in tensors.items():
        what = _damage(tensor)
        if what is not None:
            raise ModelError(f"{path}: tensor {name[:120]!r} {what}")


def _damage(tensor: Tensor) -> str | None:
    """What is wrong with a tensor, in words; None for nothing."""
    if tensor.layout != torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}: save it dense (tensor.to_dense())"
    if tensor.is_meta:
        return "is on the meta device: it holds no numbers"
    if tensor.dtype not in _DTYPES:
        return f"is {str(tensor.dtype).removeprefix('torch.')}: weights are real, plain numbers"
    if not tensor.is_floating_point():
        return None
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    if torch.isfinite(wide).all():
        return None
    return f"holds {'NaN' if wide.isnan().any() else 'infinity'}; the weights are damaged"


@contextmanager
def one_file(weights: Weights) -> Iterator[Path]:
    """One file of the tensors under their plain names, which vanishes afterwards."""
    from safetensors.torch import save_file

    with scratch("elsa-weights-") as folder:
        path = folder / "model.safetensors"
        save_file(separate(weights.tensors), path)
        yield path


def separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors, none sharing memory: tied weights are written under each name.

    So the file loads strictly into any model that has those names, tied or not.
    """
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
