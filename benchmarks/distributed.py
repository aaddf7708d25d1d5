"""What several devices gain: `torchrun --nproc-per-node N -m benchmarks.distributed`.

Attention of long sequences on one device and sharded over all ranks, and a ViT-B of 4096 pixels in
patches of 8 (262 145 tokens): seconds (of ranks the slowest), their ratio, peak memory, and errors
of sampled rows against float64.
"""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Row, left_out, main, options, row
from elsa_core import reference
from elsa_core.distributed import attention as sharded_attention
from elsa_core.distributed import explain
from elsa_core.distributed.plan import shard_lengths
from elsa_core.measuring.memory_limit import release
from elsa_core.ops.attention.api import attention
from elsa_core.profiling.runs.scaling import scaling, timed_together

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
QUICK: Final = (Case((1, 2, 257, 16), "fp32"), Case((1, 2, 257, 16), "fp32", backward=True))


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


def measure(name: str, case: Case, given: Namespace) -> list[Row]:
    """One case on every rank; rank 0's rows are written."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), given.device
    rows: list[Row] = []
    if rank == 0:
        parts = [operands(case, each, device) for each in range(world)]
        whole = [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)]
        del parts
        times, memory, one = _timed(case, whole, attention, given.rounds, None)
        rows.append(row(name, "one", times, memory_bytes=memory))
        one = one[:, :, : shard_lengths(case.shape[2], world)[0]].clone()
        del whole
    release(device)
    dist.barrier()
    lengths = shard_lengths(case.shape[2], world)
    over_ranks = functools.partial(sharded_attention, method=given.method, lengths=lengths)
    own = operands(case, rank, device)
    plan = explain(*own[:3], method=given.method, lengths=lengths)
    times, memory, out = _timed(case, own, over_ranks, given.rounds, dist.group.WORLD)
    told: list[Any] = [None] * world
    dist.all_gather_object(told, (times, memory, *_error(case, own[0], out, device)))
    if rank == 0:
        slowest = [max(each) for each in zip(*(t[0] for t in told), strict=True)]
        rows.append(row(
            name, "all", slowest, memory_bytes=max(t[1] or 0 for t in told) or None,
            error=(sum(t[2] for t in told) / sum(t[3] for t in told)) ** 0.5,
            method=plan.method, bytes_sent=plan.bytes_sent,
        ))  # fmt: skip
        error, scale = _error(case, own[0], one, device)
        rows[0]["error"] = (error / scale) ** 0.5
        rows[1]["ratio"] = rows[0]["median"] / rows[1]["median"]
    return rows


def _timed(
    case: Case, tensors: list[Tensor], call: Callable[..., Any], rounds: int,
    group: dist.ProcessGroup | None,
) -> tuple[list[float], int | None, Tensor]:  # fmt: skip
    """Seconds after a first call, peak bytes, and the output. `backward`: of it alone."""
    *inputs, grad = tensors
    for tensor in inputs:
        tensor.requires_grad_(case.backward)

    def backward(out: Tensor) -> Tensor:
        torch.autograd.grad(out, inputs, grad)
        return out

    forward = functools.partial(call, *inputs)
    run, ready = (backward, lambda: (forward(),)) if case.backward else (forward, tuple)
    times, peak, out = timed_together(run, grad.device, rounds=rounds, group=group, ready=ready)
    return times, peak, out.detach()


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


def measure_model(name: str, size: tuple[str, int], given: Namespace) -> list[Row]:
    """A whole model on one device and on all."""
    from elsa_core.loading import load
    from elsa_core.patching import patch

    architecture, side = size
    subject = load(architecture, image_size=side, pretrained=False, device=given.device).eval()
    patch(subject)
    images = torch.randn((1, 3, side, side), generator=torch.Generator().manual_seed(0))
    found = scaling(subject, images.to(given.device), rounds=given.rounds)
    one = left_out(name, "one", "it does not fit in memory")
    if found.seconds_one is not None:
        one = row(name, "one", [found.seconds_one], memory_bytes=found.memory_one)
    return [
        one,
        row(name, "all", [found.seconds], memory_bytes=found.memory, error=found.difference,
            ratio=found.speedup, method=found.method, bytes_sent=found.bytes_sent,
            tokens=sum(found.tokens)),
    ]  # fmt: skip


def cases(given: Namespace) -> dict[str, Case | tuple[str, int]]:
    """The calls, and the model: a ViT-B of 262 145 tokens; `--quick`: a ViT-Ti of 37."""
    found: dict[str, Case | tuple[str, int]] = {
        f"{'x'.join(map(str, case.shape))}-{case.dtype}, "
        f"{'backward' if case.backward else 'forward'}": case
        for case in (QUICK if given.quick else CASES)
    }
    size = ("vit_tiny_patch16_224", 96) if given.quick else ("vit_base_patch8_224", 4096)
    return found if given.no_model else {**found, f"{size[0]}-{size[1]}-fp32": size}


def measured(name: str, case: Case | tuple[str, int], given: Namespace) -> list[Row]:
    if isinstance(case, Case):
        return measure(name, case, given)
    return measure_model(name, case, given)


def run() -> None:
    """Measure; the other ranks write nothing."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    parser = options(__doc__, device=device, rounds=5, seconds=1e9)
    parser.add_argument("--method", default="auto", help="auto, ring, gather or heads")
    parser.add_argument("--no-model", action="store_true")
    if dist.get_rank() == 0:
        main(__doc__, cases, measured, parser)
    else:
        given = parser.parse_args()
        for name, case in cases(given).items():
            if given.match in name:
                measured(name, case, given)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
