"""What sharding a model over ranks gains: one process against all of them."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elsa_core.distributed.groups import by_name, name_of
from elsa_core.measuring.documents import Plain
from elsa_core.measuring.memory_limit import release
from elsa_core.measuring.timing import synchronize
from elsa_core.patching import require_shardable, shard
from elsa_core.reference import relative_l2


@dataclass(frozen=True)
class Scaling(Plain):
    """The forward of a model on one rank and on all ranks of a group; equal on every rank.

    Attributes:
        ranks: how many.
        tokens: of each rank, in their order.
        method, why: how attention is served, see `elsa_core.distributed.Plan`.
        seconds: of a sharded forward, the median of rounds, each by its slowest rank.
        seconds_one: of the patched model on rank 0 alone; None where it does not fit in memory.
        speedup: seconds_one / seconds; efficiency: speedup / ranks.
        bytes_sent: by the rank that sends most, in one forward, pooling left out.
        memory, memory_one: peak bytes of a device, weights included; None on a CPU.
        difference: ||sharded - one|| / ||one|| of the outputs.
    """

    ranks: int
    tokens: tuple[int, ...]
    method: str
    why: str
    seconds: float
    seconds_one: float | None
    speedup: float | None
    efficiency: float | None
    bytes_sent: int
    memory: int | None
    memory_one: int | None
    difference: float | None


def scaling(
    model: nn.Module,
    images: Tensor,
    *,
    rounds: int = 20,
    budget_seconds: float = 60.0,
    progress: Callable[[str], None] = lambda what: None,
) -> Scaling:
    """Time a model on rank 0, shard it (in place) and time it on all ranks.

    Model and images [B, C, H, W] are the same on every rank; `budget_seconds` limits the forwards
    of each.
    """
    require_shardable(model)
    group = by_name(name_of(None))
    forwards = partial(
        timed_together, partial(model, images), images.device, rounds=rounds, budget=budget_seconds
    )
    seconds_one, memory_one, out_one = None, None, None
    if group.rank() == 0:
        progress("one rank")
        with contextlib.suppress(torch.OutOfMemoryError), torch.inference_mode():
            times, memory_one, out_one = forwards()
            seconds_one = statistics.median(times)
    release(images.device)
    dist.barrier(group)
    shard(model, group)
    progress(f"{group.size()} ranks")
    with torch.inference_mode():
        times, peak, out = forwards(group=group)
    difference = None if out_one is None else relative_l2(out, out_one)
    plan = model.elsa_plan(images)  # type: ignore[operator]
    told: list[Any] = [None] * group.size()
    mine = (statistics.median(times), plan.bytes_sent, peak, (seconds_one, difference, memory_one))
    dist.all_gather_object(told, mine, group=group)
    seconds, sent, memories, firsts = zip(*told, strict=True)
    slowest, (seconds_one, difference, memory_one) = max(seconds), firsts[0]
    speedup = None if seconds_one is None else seconds_one / slowest
    return Scaling(
        ranks=group.size(),
        tokens=plan.queries,
        method=plan.method,
        why=plan.why,
        seconds=slowest,
        seconds_one=seconds_one,
        speedup=speedup,
        efficiency=None if speedup is None else speedup / group.size(),
        bytes_sent=max(sent),
        memory=max(memories) if images.is_cuda else None,
        memory_one=memory_one,
        difference=difference,
    )


def timed_together(
    call: Callable[..., Tensor], device: torch.device, *, rounds: int, budget: float = math.inf,
    group: dist.ProcessGroup | None = None, ready: Callable[[], tuple[Any, ...]] = tuple,
) -> tuple[list[float], int | None, Tensor]:  # fmt: skip
    """Seconds of calls after a first one, begun together on all ranks of a group; peak bytes of a
    GPU, and the last output. `ready` makes the arguments of a call, whose time does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    left = torch.tensor([1])
    while len(times) <= rounds and left.item():
        given = ready()
        if group is not None:
            dist.barrier(group)
        synchronize(device)
        begun = time.perf_counter()
        out = call(*given)
        synchronize(device)
        times.append(time.perf_counter() - begun)
        left = torch.tensor([int(len(times) < 2 or sum(times[1:]) < budget)], device=device)
        if group is not None:  # all ranks stop in the same round
            dist.all_reduce(left, dist.ReduceOp.MIN, group=group)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return times[1:], peak, out
