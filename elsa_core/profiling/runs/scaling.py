"""What sharding a model over ranks gains: one process against all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elsa_core.distributed.groups import by_name, name_of
from elsa_core.measuring.timing import synchronize
from elsa_core.patching import require_shardable, shard
from elsa_core.reference import relative_l2


@dataclass(frozen=True)
class Scaling:
    """The forward of a model on one rank and on all ranks of a group; equal on every rank.

    Attributes:
        ranks: how many.
        tokens: of each rank, in their order.
        method, why: how attention is served, see `elsa_core.distributed.Plan`; "rows" where ranks
            hold rows of windows.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def scaling(
    model: nn.Module,
    images: Tensor,
    *,
    mesh: Any = None,
    rounds: int = 20,
    budget_seconds: float = 60.0,
    progress: Callable[[str], None] = lambda what: None,
) -> Scaling:
    """Time a model on rank 0, shard it (in place) and time it on all ranks.

    Args:
        model: as for `shard`, in eval mode, on this rank's device; the same weights on every rank.
        images: [B, C, H, W], the same on every rank.
        mesh: as for `shard`.
        rounds: forwards of each at most.
        budget_seconds: limit of each.
        progress: told what begins.

    Raises:
        ModelError: the model cannot be sharded.
        UnavailableError: there is no process group, or a rank is lost.
    """
    require_shardable(model)
    group = by_name(name_of(mesh))
    alone: tuple[list[float], Tensor] | None = None
    if group.rank() == 0:
        progress("one rank")
        alone = _if_it_fits(model, images, rounds, budget_seconds)
    memory_one = _peak(images.device)
    dist.barrier(group)
    shard(model, group)
    progress(f"{group.size()} ranks")
    times, out = _timed(model, images, rounds, budget_seconds, group)
    seconds_one = statistics.median(alone[0]) if alone is not None else None
    difference = relative_l2(out, alone[1]) if alone is not None else None
    plan = model.elsa_plan(images)  # type: ignore[operator]
    found = (seconds_one, difference, memory_one)
    told: list[Any] = [None] * group.size()
    mine = (statistics.median(times), plan.bytes_sent, _peak(images.device), found)
    dist.all_gather_object(told, mine, group=group)
    seconds, sent, memories, firsts = zip(*told, strict=True)
    slowest, first = max(seconds), firsts[0]
    speedup = first[0] / slowest if first[0] is not None else None
    return Scaling(
        group.size(), plan.queries, plan.method, plan.why, slowest, first[0], speedup,
        speedup / group.size() if speedup is not None else None,
        max(sent),
        None if memories[0] is None else max(memories), first[2], first[1],
    )  # fmt: skip


def _if_it_fits(
    model: nn.Module, images: Tensor, rounds: int, budget: float
) -> tuple[list[float], Tensor] | None:
    try:
        return _timed(model, images, rounds, budget)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _timed(
    model: nn.Module,
    images: Tensor,
    rounds: int,
    budget: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[float], Tensor]:
    """Seconds of forwards after a first one, begun together; and what the model gives."""
    if images.is_cuda:
        torch.cuda.reset_peak_memory_stats(images.device)
    times: list[float] = []
    with torch.inference_mode():
        out: Tensor = model(images)
        left = torch.tensor([1])
        while len(times) < rounds and left.item():
            if group is not None:
                dist.barrier(group)
            synchronize(images.device)
            begun = time.perf_counter()
            model(images)
            synchronize(images.device)
            times.append(time.perf_counter() - begun)
            left = torch.tensor([int(sum(times) < budget)], device=images.device)
            if group is not None:  # all ranks stop in the same round
                dist.all_reduce(left, dist.ReduceOp.MIN, group=group)
    return times, out


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
