"""Weights in several .safetensors files, joined by the hub's index (`*.safetensors.index.json`)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from elsa_core.errors import ModelError
from elsa_core.loading.recipe import read_json
from elsa_core.loading.weights import Weights, read_header, read_safetensors

INDEX_SUFFIX = ".safetensors.index.json"
MAX_SHARDS = 4096


def is_index(path: Path) -> bool:
    """Whether the name is that of an index."""
    return path.name.lower().endswith(INDEX_SUFFIX)


def read_sharded(path: Path) -> Weights:
    """Read every tensor that an index names, from the files beside it.

    The headers of all shards are read before any tensor, so that an index that does not fit them
    costs nothing.

    Raises:
        ModelError: a malformed index, a shard that is missing, malformed or outside the index's
            directory, or tensors that are not where the index says.
    """
    weight_map = _weight_map(path)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (path.parent / shard).is_file()]
    if absent:
        raise ModelError(f"{path} names the shard {absent[0][:120]!r}, which is not there")
    for shard in shards:
        _check_shard(path, shard, {name for name, file in weight_map.items() if file == shard})
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        part = read_safetensors(path.parent / shard)
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise ModelError(f"{path}: tensor {min(twice)[:120]!r} is in two shards")
        tensors.update(part.tensors)
        metadata = part.metadata | metadata
    return Weights(tensors, metadata, path)


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
