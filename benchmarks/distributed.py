"""`torchrun --nproc-per-node N -m elsa_core.bench.distributed`: what several devices gain.

Attention of long sequences on one device and sharded over all ranks, and a ViT-B of 4096 pixels in
patches of 8 (262 145 tokens). Rank 0 prints one JSON document: seconds (medians; of ranks the
slowest), their ratio, peak memory, and errors of sampled rows against float64.

`--model 4,8` adds to each forward what the model of cost that chooses between the methods
(`elsa_core.distributed.plan`) says of as many ranks, and of those that were measured. It is
arithmetic on three numbers of a device, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from elsa_core import reference
from elsa_core.attention import attention
from elsa_core.distributed import attention as sharded_attention
from elsa_core.distributed import explain
from elsa_core.distributed import plan as costs
from elsa_core.distributed.agreement import Agreement
from elsa_core.distributed.plan import shard_lengths
from elsa_core.measuring import environment
from elsa_core.measuring.timing import synchronize
from elsa_core.model_runs.scaling import scaling

_SAMPLED: Final = 16  # rows of each rank and head
_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16}


class Case(NamedTuple):
    """Shape [batch, heads, tokens, head_dim] of the whole call."""

    shape: tuple[int, int, int, int]
    dtype: str
    backward: bool = False


_LARGE: Final = ((1, 8, 262144, 64), (1, 1, 1048576, 64))
CASES: Final = (
    *(Case(shape, dtype) for shape in _LARGE for dtype in _DTYPES),
    *(Case((1, 8, 65536, 64), dtype, backward=True) for dtype in _DTYPES),
)
QUICK: Final = (
    Case((1, 2, 257, 16), "fp32"),
    Case((1, 2, 257, 16), "fp32", backward=True),
)


def operands(case: Case, rank: int, device: torch.device) -> list[Tensor]:
    """Query, key, value and the output's gradient of a rank's shard; any rank can draw them."""
    batch, heads, tokens, head_dim = case.shape
    own = shard_lengths(tokens, dist.get_world_size())[rank]
    generator = torch.Generator(device).manual_seed(rank)
    return [
        torch.randn((batch, heads, own, head_dim), generator=generator, device=device).to(
            _DTYPES[case.dtype]
        )
        for _ in range(4)
    ]


def modelled(case: Case, world: int, device_type: str) -> dict[str, dict[str, float]]:
    """What the model of cost says of a case's forward over `world` ranks, by method.

    Of each: bytes that the last rank sends, seconds, the share of the messages' time that runs
    under a fold, and the efficiency: seconds of one rank / (ranks x seconds). Methods that cannot
    serve the case are left out.
    """
    batch, heads, tokens, head_dim = case.shape

    def agreed(ranks: int, method: str) -> Agreement:
        lengths = shard_lengths(tokens, ranks)
        common = {
            "the device": device_type, "the dtype": str(_DTYPES[case.dtype]).removeprefix("torch."),
            "the batch": batch, "the number of query heads": heads,
            "the number of key heads": heads, "head_dim": head_dim, "the width of value": head_dim,
            "method": method,
        }  # fmt: skip
        return Agreement(lengths, lengths, ranks - 1, common)

    device = costs._DEVICES[device_type, _DTYPES[case.dtype].itemsize]
    one = costs.plan(agreed(1, "ring")).seconds["ring"]
    found = {}
    for method, seconds in costs.plan(agreed(world, "auto")).seconds.items():
        sent = costs.plan(agreed(world, method)).bytes_sent
        messages = {"ring": 2 * (world - 1), "gather": 1, "heads": 4}[method]
        moving = sent / device.bandwidth + messages * device.latency
        exposed = seconds - one / world
        found[method] = {
            "bytes_sent": sent,
            "seconds": seconds,
            "overlap": max(0.0, 1 - exposed / moving),
            "efficiency": one / world / seconds,
        }
    return found


def measure(case: Case, rounds: int, device: torch.device, method: str) -> dict[str, Any]:
    """One case on every rank; rank 0's answer is the document's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"shape": list(case.shape), "dtype": case.dtype,
                             "direction": "backward" if case.backward else "forward"}  # fmt: skip
    one: Tensor | None = None
    if rank == 0:
        parts = [operands(case, each, device) for each in range(world)]
        whole = [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)]
        del parts
        seconds, memory, one = _timed(case, whole, attention, rounds, None)
        found |= {"seconds_one": seconds, "memory_one": memory}
        one = one[:, :, : shard_lengths(case.shape[2], world)[0]].clone()
        del whole
    _release(device)
    dist.barrier()
    lengths = shard_lengths(case.shape[2], world)

    def over_ranks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sharded_attention(query, key, value, method=method, lengths=lengths)

    own = operands(case, rank, device)
    plan = explain(*own[:3], method=method, lengths=lengths)
    seconds, memory, out = _timed(case, own, over_ranks, rounds, dist.group.WORLD)
    told: list[Any] = [None] * world
    error, scale = _error(case, own[0], out, device)
    dist.all_gather_object(told, (seconds, memory, error, scale))
    found |= {
        "seconds": max(each[0] for each in told),
        "memory": max(each[1] or 0 for each in told) or None,
        "relative_error": (sum(e[2] for e in told) / sum(e[3] for e in told)) ** 0.5,
        "method": plan.method, "why": plan.why, "bytes_sent": plan.bytes_sent,
    }  # fmt: skip
    if one is not None:
        error, scale = _error(case, own[0], one, device)
        found["relative_error_one"] = (error / scale) ** 0.5
        found["speedup"] = found["seconds_one"] / found["seconds"]
    return found


def _timed(
    case: Case,
    tensors: list[Tensor],
    call: Callable[..., Any],
    rounds: int,
    group: dist.ProcessGroup | None,
) -> tuple[float, int | None, Tensor]:
    """Median seconds after a first call, peak bytes, and the output. `backward`: of it alone."""
    device = tensors[0].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    *inputs, grad = tensors
    for tensor in inputs:
        tensor.requires_grad_(case.backward)
    times = []
    for _ in range(rounds + 1):
        out = call(*inputs) if case.backward else None
        if group is not None:
            dist.barrier(group)
        synchronize(device)
        begun = time.perf_counter()
        if out is None:
            out = call(*inputs)
        else:
            torch.autograd.grad(out, inputs, grad)
        synchronize(device)
        times.append(time.perf_counter() - begun)
    assert isinstance(out, Tensor)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return statistics.median(times[1:]), peak, out.detach()


def _error(case: Case, query: Tensor, out: Tensor, device: torch.device) -> tuple[float, float]:
    """Squared norms of the error and of the float64 output, over some of this rank's rows."""
    if not query.shape[2]:
        return 0.0, 0.0
    step = max(1, query.shape[2] // _SAMPLED)
    rows = query.detach()[:, :, ::step][:, :, :_SAMPLED].double()
    shards = [operands(case, rank, device)[1:3] for rank in range(dist.get_world_size())]
    key, value = (torch.cat(parts, 2) for parts in zip(*shards, strict=True))
    exact = reference.attention(rows, key, value)[0]
    difference = out[:, :, ::step][:, :, :_SAMPLED].double() - exact
    return float(difference.square().sum()), float(exact.square().sum())


def model(quick: bool, rounds: int, device: torch.device) -> dict[str, Any]:
    """A ViT-B of 262 145 tokens; `quick`: a ViT-Ti of 37."""
    from elsa_core.loading import load
    from elsa_core.patching import patch

    name, side = ("vit_tiny_patch16_224", 96) if quick else ("vit_base_patch8_224", 4096)
    subject = load(name, image_size=side, pretrained=False, device=device).eval()
    patch(subject)
    images = torch.randn((1, 3, side, side), generator=torch.Generator().manual_seed(0)).to(device)
    found = scaling(subject, images, rounds=rounds)
    return {"model": name, "image_size": side, "dtype": "fp32", **found.to_dict()}


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, and print on rank 0; each case is a line on stderr when it is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Small cases, on a CPU too.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="auto", help="auto, ring, gather or heads.")
    parser.add_argument("--no-model", action="store_true")
    parser.add_argument("--model", default="", help="Ranks that the model of cost is asked of: 4,8")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    asked = {int(count) for count in given.model.split(",") if count}
    worlds = sorted(asked | {dist.get_world_size()}) if asked else []
    rows: list[dict[str, Any]] = []
    for case in QUICK if given.quick else CASES:
        rows.append(measure(case, given.rounds, device, given.method))
        if worlds and not case.backward:
            rows[-1]["model_of_cost"] = {
                str(world): modelled(case, world, device.type) for world in worlds
            }
        if dist.get_rank() == 0:
            sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    document = {
        "environment": environment.describe(device),
        "ranks": dist.get_world_size(),
        "attention": rows,
        "model": None if given.no_model else model(given.quick, given.rounds, device),
    }
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
