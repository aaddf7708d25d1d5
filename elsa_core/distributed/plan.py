"""Which way the shards of a call meet: a model of cost, and the choice in words.

The model is arithmetic on three numbers of a device: multiply-adds a second, bytes a second between
two ranks, and seconds a message takes at least. They are orders of magnitude of current hardware
(an H200 with NVLink; two processes on one CPU), not measurements, and only decide between ways that
give the same result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from elsa_core.distributed.agreement import Agreement
from elsa_core.errors import ArgumentError

METHODS = ("auto", "ring", "gather", "heads")
_LARGEST_GATHER = 1 << 30  # bytes of the keys and values of all ranks


class _Device(NamedTuple):
    multiply_adds: float  # a second
    bandwidth: float  # bytes a second from one rank to another
    latency: float  # seconds


_DEVICES = {
    ("cuda", 2): _Device(300e12, 200e9, 20e-6),
    ("cuda", 4): _Device(50e12, 200e9, 20e-6),
    ("cpu", 2): _Device(50e9, 2e9, 200e-6),
    ("cpu", 4): _Device(50e9, 2e9, 200e-6),
}
_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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
    asked, world = agreed.common["method"], agreed.world
    heads, of_keys = (agreed.common[f"the number of {which} heads"] for which in ("query", "key"))
    seconds = _seconds(agreed)
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
        if _bytes(agreed, "key", sum(agreed.keys)) > _LARGEST_GATHER:
            fitting.pop("gather")
        method = min(fitting, key=fitting.__getitem__)
        why = f"the least estimated time of {', '.join(fitting)}"
    sent = _sent(agreed, method)
    return Plan(method, why, agreed.queries, agreed.keys, *sent, seconds)


def _bytes(agreed: Agreement, which: str, tokens: int) -> int:
    """Of keys and values, or of queries and outputs."""
    common = agreed.common
    channels = common["head_dim"] + common["the width of value"]
    rows = common["the batch"] * common[f"the number of {which} heads"]
    return int(rows * channels * tokens * _WIDTHS[common["the dtype"]])


def _sent(agreed: Agreement, method: str) -> tuple[int, int]:
    """Bytes that this rank sends forward and backward. Masks, which rings keep, are left out."""
    world, rank = agreed.world, agreed.rank
    shards = [_bytes(agreed, "key", tokens) for tokens in agreed.keys]
    wide = max(1, 4 // _WIDTHS[agreed.common["the dtype"]])  # gradients go in float32
    if method == "heads":
        whole = shards[rank] + _bytes(agreed, "query", agreed.queries[rank])
        away = whole * (world - 1) // world
        return away, 3 * away
    if method == "gather":
        padded = max(shards) * (world - 1)
        return padded, padded + (sum(shards) - shards[rank]) * wide
    # all shards but the last one that comes here are sent on; gradients go round once
    total = sum(shards)
    sent = total - shards[(rank - 1) % world]
    return sent, sent + (total * wide if world > 1 else 0)


def _seconds(agreed: Agreement) -> dict[str, float]:
    """The forward by each method, in the model."""
    common, world = agreed.common, agreed.world
    width = min(4, _WIDTHS[common["the dtype"]])
    device = _DEVICES.get((common["the device"], width), _DEVICES["cpu", 4])
    channels = common["head_dim"] + common["the width of value"]
    rows = common["the batch"] * common["the number of query heads"] * max(agreed.queries)
    fold = rows * max(agreed.keys) * channels / device.multiply_adds
    shard = _bytes(agreed, "key", max(agreed.keys)) / device.bandwidth
    moved = shard + _bytes(agreed, "query", max(agreed.queries)) / device.bandwidth
    return {
        "gather": device.latency + (world - 1) * shard + world * fold,
        # a step of the ring is a call and a merge of its own
        "ring": fold + (world - 1) * (max(device.latency + shard, fold) + device.latency),
        "heads": 4 * device.latency + moved * (world - 1) / world + world * fold,
    }
