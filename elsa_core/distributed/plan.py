"""Which way the shards of a call meet: a model of cost, and the choice in words.

The model's numbers are orders of magnitude of current hardware (an H200 with NVLink; two processes
on one CPU), not measurements, and only decide between ways that give the same result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from elsa_core.distributed.agreement import Agreement
from elsa_core.errors import ArgumentError

METHODS = ("auto", "ring", "gather", "heads")
_LARGEST_GATHER = 1 << 30  # bytes of the keys and values of all ranks
# Multiply-adds a second, bytes a second from one rank to another, and seconds of a message, by
# device and width of an element.
_DEVICES = {
    ("cuda", 2): (300e12, 200e9, 20e-6),
    ("cuda", 4): (50e12, 200e9, 20e-6),
    ("cpu", 2): (50e9, 2e9, 200e-6),
    ("cpu", 4): (50e9, 2e9, 200e-6),
}


@dataclass(frozen=True)
class Plan:
    """How a call is served.

    Attributes:
        method: "ring", "gather" or "heads".
        why: the reason in words.
        queries, keys: tokens of each rank's shard.
        bytes_sent: what this rank sends in the forward.
        bytes_sent_backward: what it sends in the backward, all gradients wanted.
        seconds: the model's estimate of each method that could serve the forward; orders of
            magnitude.
    """

    method: str
    why: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    bytes_sent: int
    bytes_sent_backward: int
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def shard_lengths(tokens: int, world: int) -> tuple[int, ...]:
    """The tokens of each rank: equal, the first ranks one more where they do not divide."""
    least, more = divmod(tokens, world)
    return tuple(least + (rank < more) for rank in range(world))


def plan(agreed: Agreement) -> Plan:
    """The method for a call that all ranks make; the same on every rank."""
    common, world, rank = agreed.common, len(agreed.queries), agreed.rank
    asked, width = common["method"], getattr(torch, common["the dtype"]).itemsize
    heads, of_keys = (common[f"the number of {which} heads"] for which in ("query", "key"))
    channels = common["head_dim"] + common["the width of value"]
    # bytes of keys and values, and of queries and outputs
    shards = [common["the batch"] * of_keys * channels * width * n for n in agreed.keys]
    whole = [common["the batch"] * heads * channels * width * n for n in agreed.queries]
    pace, bandwidth, latency = _DEVICES.get(
        (common["the device"], min(4, width)), _DEVICES["cpu", 4]
    )
    fold = max(whole) / width * max(agreed.keys) / pace
    shard = max(shards) / bandwidth
    moved = shard + max(whole) / bandwidth
    seconds = {
        "gather": latency + (world - 1) * shard + world * fold,
        # a step of the ring is a call and a merge of its own
        "ring": fold + (world - 1) * (max(latency + shard, fold) + latency),
        "heads": 4 * latency + moved * (world - 1) / world + world * fold,
    }
    if heads % world or of_keys % world:
        if asked == "heads":
            raise ArgumentError(
                f"method='heads' needs numbers of heads that {world} ranks divide, not {heads} and "
                f"{of_keys}"
            )
        seconds.pop("heads")
    if asked != "auto":
        method, why = asked, "asked for"
    elif world == 1:
        method, why = "gather", "there is one rank"
    else:
        fitting = dict(seconds)
        if sum(shards) > _LARGEST_GATHER:
            fitting.pop("gather")
        method = min(fitting, key=fitting.__getitem__)
        why = f"the least estimated time of {', '.join(fitting)}"
    # bytes that this rank sends; masks, which rings keep, are left out
    wide = max(1, 4 // width)  # gradients go in float32
    if method == "heads":
        sent = (shards[rank] + whole[rank]) * (world - 1) // world
        back = 3 * sent
    elif method == "gather":
        sent = max(shards) * (world - 1)
        back = sent + (sum(shards) - shards[rank]) * wide
    else:  # all shards but the last one that comes here are sent on; gradients go round once
        sent = sum(shards) - shards[(rank - 1) % world]
        back = sent + (sum(shards) * wide if world > 1 else 0)
    return Plan(method, why, agreed.queries, agreed.keys, sent, back, seconds)
