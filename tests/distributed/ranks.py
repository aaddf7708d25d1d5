"""What the processes of a test do: one start of Python for all calls of a world size."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import elsa_core as elsa

from .cases import CASES, Case

Result = dict[str, Tensor | None]


def start(work: Any, world: int, *arguments: Any) -> None:
    """Run work(rank, port, world, *arguments) in as many processes."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    mp.spawn(work, (port, world, *arguments), nprocs=world)


def join(rank: int, port: int, world: int, seconds: float = 60.0) -> None:
    """Make this process a rank over gloo."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)


def call(case: Case, rank: int, method: str, function: Any = None, **options: Any) -> Result:
    """Output and gradients of one rank."""
    *inputs, grad = case.shard(rank)
    leaves = [
        t if t is None or t.dtype == torch.bool else t.detach().requires_grad_() for t in inputs
    ]
    function = function or elsa.distributed.attention
    out = function(*leaves, method=method, **case.arguments(), **options)
    out.backward(grad)
    found: Result = {"out": out.detach()}
    for name, leaf in zip(("query", "key", "value", "mask"), leaves, strict=True):
        found[name] = None if leaf is None else leaf.grad
    return found


def equal(one: Result, two: Result) -> bool:
    """Whether two results are equal bit for bit, NaN included."""
    pairs = [(a, two[name]) for name, a in one.items()]
    return all(
        a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in pairs
    )


def calls(rank: int, port: int, world: int, folder: str) -> None:
    """Every case by every method, twice; results and whether both were equal into a file."""
    join(rank, port, world)
    found: dict[tuple[str, str], Any] = {}
    for name, case in CASES[world].items():
        for method in case.methods:
            first = call(case, rank, method)
            found[name, method] = (first, equal(first, call(case, rank, method)))
    torch.save(found, Path(folder) / f"{world}-{rank}.pt")
    dist.destroy_process_group()
