"""A patched model in two processes over gloo, DDP and FSDP2, against one with all images."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from processes import ports
from torch import Tensor, nn

from .conftest import Gradients, assert_as_exact, gradients, loss_of, step, subject

WAYS = [(how, kind) for how in ("ddp", "fsdp2") for kind in ("vit", "swin")]
DROPPING = {"attn_drop_rate": 0.4}
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch was built without gloo",
)


def work(rank: int, port: int, folder: str) -> None:
    """One process: half of the images, and the gradients of all of them into a file."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for how, kind in WAYS:
            whole = shared_step(rank, how, kind)
            if rank == 0:
                torch.save(whole, Path(folder) / f"{how}-{kind}.pt")
        dropped = shared_step(rank, "ddp", "vit", **DROPPING)
        torch.save(dropped, Path(folder) / f"dropped-{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def shared_step(rank: int, how: str, kind: str, **options: float) -> Gradients:
    found = subject(kind, "native", **options)
    half = slice(2 * rank, 2 * rank + 2)
    model: nn.Module = found.patched
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        sharded(model, kind)
    loss_of(model, found.images[half], found.labels[half]).backward()
    return {name: full(grad) for name, grad in gradients(found.patched).items()}


def sharded(model: nn.Module, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks if kind == "vit" else model.layers[0].blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def full(grad: Tensor | None) -> Tensor | None:
    """The whole of a gradient that may be in parts."""
    whole = getattr(grad, "full_tensor", None)
    return grad if whole is None else whole()


@pytest.fixture(scope="module")
def folder(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """What two processes wrote, started once: most of their time goes to imports."""

    def start(folder: Path) -> None:
        multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed", "timm"])
        mp.start_processes(work, (ports(1)[0], str(folder)), 2, start_method="forkserver")

    return once("gradients", start)


@pytest.mark.parametrize(("how", "kind"), WAYS)
def test_two_processes(how: str, kind: str, folder: Path) -> None:
    found: Gradients = torch.load(folder / f"{how}-{kind}.pt")
    one = subject(kind, "native")
    oracle = step(one.exact(), one.images.double(), one.labels)
    assert_as_exact(found, step(one.plain, one.images, one.labels), oracle)


def test_two_processes_of_one_seed_drop_alike(folder: Path) -> None:
    """Each half by the same masks: the mean of two steps in one process."""
    found, other = (torch.load(folder / f"dropped-{rank}.pt") for rank in (0, 1))
    halves = []
    for rank in (0, 1):
        one = subject("vit", "native", **DROPPING)  # sets the seed, as in the processes
        half = slice(2 * rank, 2 * rank + 2)
        halves.append(step(one.patched, one.images[half], one.labels[half]))
    for name, grad in found.items():
        expected = (halves[0][name] + halves[1][name]) / 2
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-7, msg=name)
        assert torch.equal(grad, other[name]), name
