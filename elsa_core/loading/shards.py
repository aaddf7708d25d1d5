"""Weights in several .safetensors files, joined by the hub's index (`*.safetensors.index.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from elsa_core.base.reading import check_fits, read_json
from elsa_core.errors import ModelError
from elsa_core.loading.names import bare_names
from elsa_core.loading.stated import stated_in_metadata
from elsa_core.loading.weights import Weights, read_header, read_safetensors

INDEX_SUFFIX = ".safetensors.index.json"
MAX_SHARDS = 4096


def is_index(path: Path) -> bool:
    """Whether the name is that of an index."""
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
    parts = {}
    for shard in shards:
        _check_shard(path, shard, {name for name, file in weight_map.items() if file == shard})
        parts[shard] = read_safetensors(path.parent / shard, wrapped=True)
    shapes = {name: shape for part in parts.values() for name, shape in part.shapes.items()}
    metadata: dict[str, str] = {}
    for part in parts.values():
        metadata = part.metadata | metadata
    check_fits(path, sum(part.size for part in parts.values()))
    names, notes = bare_names(shapes, path, key)
    return Weights(
        {name: shapes[full] for name, full in names.items()},
        metadata,
        path,
        lambda: _tensors(parts, names),
        notes,
        stated=stated_in_metadata(metadata),
    )


def _tensors(parts: Mapping[str, Weights], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Read every shard, and keep the tensors of the full `names`."""
    tensors: dict[str, Tensor] = {}
    for part in parts.values():
        tensors.update(part.tensors)
    return {name: tensors[full] for name, full in names.items()}


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
    result = {}
    for name, file in given.items():
        plain = isinstance(file, str) and Path(file).name == file and file.isprintable()
        plain = plain and len(file.encode()) <= 255  # what file systems count
        if not plain or not str(file).lower().endswith(".safetensors") or "\\" in str(file):
            raise ModelError(
                f"{path}: tensor {name[:120]!r} is in {str(file)[:120]!r}, which is no "
                ".safetensors file beside the index"
            )
        result[name] = str(file)
    if len(set(result.values())) > MAX_SHARDS:
        raise ModelError(f"{path} names more than {MAX_SHARDS} shards")
    return result


def _check_shard(path: Path, shard: str, wanted: set[str]) -> None:
    """The shard holds the tensors that the index puts in it, and no others."""
    held = set(read_header(path.parent / shard).tensors)
    if held != wanted:
        missing, more = sorted(wanted - held), sorted(held - wanted)
        what = f"lacks {missing[0][:120]!r}" if missing else f"also holds {more[0][:120]!r}"
        raise ModelError(f"{path} does not fit its shards: {shard} {what}")
