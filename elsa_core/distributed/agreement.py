"""What the ranks of a call must have in common, compared before the first byte of data.

Each rank writes what it was called with (dtype, sizes, mask, method, version of this package) and
the lengths of its shards into one message of fixed size; all messages are gathered, and every rank
compares them in the same order. So all ranks go on, or all of them raise the same line.

A rank cannot know that the lengths of another one have changed, so that a call without `lengths`
asks each time. With `lengths`, those of all ranks, the answer is kept for calls of that kind, and
later ones compare nothing: each rank checks its own tensors against the answer, and a rank that
makes another call, or whose arguments are wrong, leaves the others to the group's timeout. Sharded
models, which pass `lengths`, compare each forward as a whole by `compare`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from elsa_core.base.version import __version__
from elsa_core.distributed import groups
from elsa_core.errors import ArgumentError
from elsa_core.precision import dtype_name

_BYTES = 2048  # of a message
LONGEST = 300  # characters of an error in it, of up to four bytes each
_NO_MASK = "none"
_SHOWN = 100  # characters of lengths in it
_KEPT = 4096  # answers of a group


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of a call."""

    queries: tuple[int, ...]  # tokens of each rank's shard, in the order of the ranks
    keys: tuple[int, ...]
    rank: int  # this one
    common: dict[str, Any]  # what is equal on all ranks, by name


_ANSWERS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], Agreement]]
_ANSWERS = weakref.WeakKeyDictionary()


def described(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **terms: Any
) -> dict[str, Any]:
    """What a rank says of its call. Lengths and the first two dims of a mask are its own."""
    mask = _NO_MASK if attn_mask is None else dtype_name(attn_mask.dtype)
    return {
        "the version of elsa": __version__,
        "the device": query.device.type,
        "the dtype": dtype_name(query.dtype),
        "the batch": query.shape[0],
        "the number of query heads": query.shape[1],
        "the number of key heads": key.shape[1],
        "head_dim": query.shape[3],
        "the width of value": value.shape[3],
        "attn_mask": mask,
        **terms,
        "mask": [] if attn_mask is None else list(attn_mask.shape),
        "queries": query.shape[2],
        "keys": key.shape[2],
    }


_OWN = ("queries", "keys", "mask", "error")  # may differ between ranks


def agree(
    group: dist.ProcessGroup,
    said: dict[str, Any],
    device: torch.device,
    lengths: Sequence[int] = (),
    tokens: Sequence[Sequence[int]] | None = None,
) -> Agreement:
    """The ranks' common answer to `said` (see `described`), by one small all_gather; by none where
    they have agreed before on `tokens`, the queries and keys of each.

    ArgumentError, the same line on every rank: they differ, or one has an argument that is wrong.
    UnavailableError: a rank does not answer.
    """
    common = {name: value for name, value in said.items() if name not in _OWN}
    if tokens is not None:
        return Agreement(tuple(tokens[0]), tuple(tokens[1]), group.rank(), common)
    answers = _ANSWERS.setdefault(group, {})
    given = tuple(lengths)
    kind = (*common.items(), given)
    if kind in answers:
        answer = answers[kind]
        for name, agreed in (("queries", answer.queries), ("keys", answer.keys)):
            if said[name] != agreed[answer.rank]:
                raise ArgumentError(
                    f"rank {answer.rank} has {said[name]} {name}, lengths says "
                    f"{agreed[answer.rank]}"
                )
        _check_mask(answer.rank, said["mask"], answer)
        return answer
    shown = str(given)  # or what tells them apart: a message has one size
    if len(shown) > _SHOWN:
        shown = f"{len(given)} with checksum {crc32(shown.encode())}"
    told = compare(group, {**said, "lengths": shown}, device)
    queries, keys = (tuple(each[name] for each in told) for name in ("queries", "keys"))
    answer = Agreement(queries, keys, group.rank(), common)
    for rank, each in enumerate(told):
        _check_mask(rank, each["mask"], answer)
    if not given:
        return answer
    for name, own in (("query", queries), ("key", keys)):
        if given != own:
            raise ArgumentError(f"lengths={given}, but the shards of {name} have {own} tokens")
    if len(answers) >= _KEPT:
        answers.clear()
    answers[kind] = answer
    return answer


def compare(
    group: dist.ProcessGroup, said: dict[str, Any], device: torch.device
) -> list[dict[str, Any]]:
    """What all ranks say of a call, in their order, by one all_gather of a message; raises as
    `agree`.

    said: what must be equal on all ranks, by names that a line can hold, and of `_OWN` what may
    differ: less than a message of text. With "error", of `LONGEST` characters at most, this rank's
    arguments are wrong: ArgumentError on all ranks.
    """
    message = torch.zeros(_BYTES, dtype=torch.uint8)
    text = json.dumps(said, sort_keys=True, ensure_ascii=False)
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    message[: encoded.numel()] = encoded
    gathered = groups.all_gather(group, message.to(device), "comparing calls").cpu()
    told: list[dict[str, Any]]
    told = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in gathered]
    for rank, each in enumerate(told):
        if "error" in each:
            raise ArgumentError(f"rank {rank}: {each['error']}")
    for rank, each in enumerate(told):
        for name, value in told[0].items():
            if name not in _OWN and each.get(name) != value:
                raise ArgumentError(
                    f"the ranks make different calls: {name} is {value} on rank 0 and "
                    f"{each.get(name)} on rank {rank}"
                )
    return told


def _check_mask(rank: int, shape: list[int], answer: Agreement) -> None:
    if answer.common["attn_mask"] == _NO_MASK:
        return
    batch, heads = answer.common["the batch"], answer.common["the number of query heads"]
    full = (batch, heads, answer.queries[rank], sum(answer.keys))
    if any(size not in (1, wanted) for size, wanted in zip(shape, full, strict=True)):
        raise ArgumentError(
            f"rank {rank}: attn_mask of shape {shape} does not broadcast to "
            f"{list(full)}: the rank's own queries by the keys of all ranks"
        )
