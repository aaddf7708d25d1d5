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


def check_method(method: str) -> None:
    """Refuse a method that there is not.

    Raises:
        ArgumentError: names the choices.
    """
    if method not in METHODS:
        raise ArgumentError(f"method={method!r} is unknown: choose one of {', '.join(METHODS)}")


def plan(agreed: Agreement) -> Plan:
    """The method for a call that all ranks make; the same on every rank.

    Raises:
        ArgumentError: the method asked for cannot serve the call.
    """
    asked = agreed.common["method"]
    refusal = _why_not_heads(agreed)
    if asked == "heads" and refusal:
        raise ArgumentError(f"method='heads' {refusal}")
    seconds = _seconds(agreed)
    if refusal:
        seconds.pop("heads")
    if asked != "auto":
        method, why = asked, "asked for"
    elif agreed.world == 1:
        method, why = "gather", "there is one rank"
    else:
        fitting = dict(seconds)
        if _kv_bytes(agreed, sum(agreed.keys)) > _LARGEST_GATHER:
            fitting.pop("gather")
        method = min(fitting, key=fitting.__getitem__)
        why = f"the least estimated time of {', '.join(fitting)}"
    sent = _sent(agreed, method)
    return Plan(method, why, agreed.queries, agreed.keys, *sent, seconds)


def _why_not_heads(agreed: Agreement) -> str:
    heads, of_keys = (agreed.common[f"the number of {which} heads"] for which in ("query", "key"))
    if heads % agreed.world or of_keys % agreed.world:
        return f"needs numbers of heads that {agreed.world} ranks divide, not {heads} and {of_keys}"
    return ""


def _width(agreed: Agreement) -> int:
    return _WIDTHS[agreed.common["the dtype"]]


def _kv_bytes(agreed: Agreement, tokens: int) -> int:
    common = agreed.common
    channels = common["head_dim"] + common["the width of value"]
    rows = common["the batch"] * common["the number of key heads"]
    return int(rows * channels * tokens * _width(agreed))


def _q_bytes(agreed: Agreement, tokens: int) -> int:
    """Of queries and outputs."""
    common = agreed.common
    channels = common["head_dim"] + common["the width of value"]
    rows = common["the batch"] * common["the number of query heads"]
    return int(rows * channels * tokens * _width(agreed))


def _sent(agreed: Agreement, method: str) -> tuple[int, int]:
    """Bytes that this rank sends forward and backward. Masks, which rings keep, are left out."""
    world, rank = agreed.world, agreed.rank
    own = _kv_bytes(agreed, agreed.keys[rank])
    if method == "heads":
        whole = own + _q_bytes(agreed, agreed.queries[rank])
        away = whole * (world - 1) // world
        return away, 3 * away
    if method == "gather":
        padded = _kv_bytes(agreed, max(agreed.keys))
        others = _kv_bytes(agreed, sum(agreed.keys)) - own
        wide = max(1, 4 // _width(agreed))
        return padded * (world - 1), padded * (world - 1) + others * wide
    # all shards but the last one that comes here are sent on; gradients go round once, in float32
    shards = [_kv_bytes(agreed, n) for n in agreed.keys]
    kept = shards[(rank - 1) % world]
    wide = max(1, 4 // _width(agreed))
    total = sum(shards)
    return total - kept, total - kept + (total * wide if world > 1 else 0)


def _seconds(agreed: Agreement) -> dict[str, float]:
    """The forward by each method, in the model."""
    common, world = agreed.common, agreed.world
    device = _DEVICES.get((common["the device"], min(4, _width(agreed))), _DEVICES["cpu", 4])
    channels = common["head_dim"] + common["the width of value"]
    rows = common["the batch"] * common["the number of query heads"] * max(agreed.queries)
    fold = rows * max(agreed.keys) * channels / device.multiply_adds
    shard = _kv_bytes(agreed, max(agreed.keys)) / device.bandwidth
    moved = shard + _q_bytes(agreed, max(agreed.queries)) / device.bandwidth
    return {
        "gather": device.latency + (world - 1) * shard + world * fold,
        # a step of the ring is a call and a merge of its own
        "ring": fold + (world - 1) * (max(device.latency + shard, fold) + device.latency),
        "heads": 4 * device.latency + moved * (world - 1) / world + world * fold,
    }
