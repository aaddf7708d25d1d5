"""What the processes of the tests do: one start of Python for everything of a world size."""

import datetime
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import ports
from torch import Tensor

import elsa_core as elsa
from elsa_core.distributed import agreement, ways

from . import models
from .cases import CASES, Case, Result, differentiated
from .models import said

SHORT = 4.0  # seconds: the timeout of a group in which a rank hangs


def start(
    worlds: tuple[int, ...], folder: Path, run: Callable[[int, int, int, str], None] | None = None
) -> None:
    """Run `everything` in as many processes, all worlds side by side; all end where one fails.

    The processes are forked from one that has imported torch, which is most of what they do.
    """
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed", "timm"])
    begun = []
    try:
        for world, port in zip(worlds, ports(len(worlds)), strict=True):
            given = (port, world, str(folder))
            how: Any = {"join": False, "start_method": "forkserver"}
            begun.append(mp.start_processes(run or everything, given, world, **how))
        waiting = list(begun)
        while waiting:  # a failure is noticed in whichever world it is
            waiting = [each for each in waiting if not each.join(timeout=0.1)]
    finally:
        left = [process for each in begun for process in each.processes if process.is_alive()]
        for process in left:
            process.kill()
        for process in left:
            process.join()


def found(worlds: tuple[int, ...], folder: Path) -> dict[int, list[Any]]:
    """What each rank of each world wrote."""
    return {w: [torch.load(folder / f"{w}-{rank}.pt") for rank in range(w)] for w in worlds}


def everything(rank: int, port: int, world: int, folder: str) -> None:
    """One process: all that is tested in this number of ranks, into a file."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
    found: dict[str, Any] = {"calls": calls(rank, world)}
    found["models"] = {name: models.sharded(name) for name in models.VITS}
    found["heads"] = models.of_earlier_features(world)
    if world == 2:
        found["later hooks"] = models.of_later_hooks()
        found["models differ"] = models_differ(rank)
        found |= {"agreement": disagreements(rank), "one rank": alone(rank), "plans": plans(rank)}
        found["compiled"] = compiled(rank) | {"vit": compiled_model()}
        found["ddp"] = models.by_ddp("registers")
        found["undone"] = models.undone("class token")
        found["refused"] = models.refused()
        found["again"] = lengths_are_kept(rank)
        short = dist.new_group(timeout=datetime.timedelta(seconds=SHORT))
        found["faults"] = {"backward by heads": dies_in_backward(short, "heads", rank == 1)}
    else:
        found["order"] = order_of_a_ring(rank)
        found["faults"] = faults(rank)
    torch.save(found, Path(folder) / f"{world}-{rank}.pt")
    os._exit(0)  # after a fault there is nobody to say goodbye to


def call(
    case: Case, rank: int, method: str, function: Any = None, device: str = "cpu", **options: Any
) -> Result:
    """Output and gradients of one rank."""
    run = partial(
        function or elsa.distributed.attention, method=method, **case.arguments(), **options
    )
    return differentiated(run, case.shard(rank), case.dtype, device)


def equal(one: Result, two: Result) -> bool:
    """Whether two results are equal bit for bit."""
    pairs = [(a, two[name]) for name, a in one.items()]
    return all(a is b or (a is not None and b is not None and a.equal(b)) for a, b in pairs)


def calls(rank: int, world: int) -> dict[tuple[str, str], Any]:
    """Every case by every method, and whether a second call, of some, was equal bit for bit."""
    found: dict[tuple[str, str], Any] = {}
    for name, case in CASES[world].items():
        for method in case.methods:
            first = call(case, rank, method)
            again = call(case, rank, method) if name in ("uneven", "causal", "bool") else first
            found[name, method] = (first, equal(first, again))
    return found


def disagreements(rank: int) -> dict[str, str]:
    """What this rank is told where the ranks make different calls."""
    attention = elsa.distributed.attention
    x = torch.randn(1, 2, 4, 8)
    mine = bool(rank)
    mask = torch.zeros(1, 1, 4, 8)

    def other_version() -> None:
        before = agreement.__version__
        agreement.__version__ = f"{before}+{rank}"
        try:
            attention(x, x, x)
        finally:
            agreement.__version__ = before

    y = x.double() if mine else x
    wide = torch.randn(1, 2, 4, 9) if mine else x
    leaf = x.clone().requires_grad_(mine)

    def other_dims() -> None:
        """What a rank's mask leaves out is its own matter."""
        row = torch.arange(4.0 * 8).reshape(1, 1, 4, 8) + 100 * rank
        own = row.expand(1, 2, 4, 8).contiguous() if mine else row
        out, same = (attention(x, x, x, m, method=w) for m, w in ((own, "heads"), (row, "ring")))
        torch.testing.assert_close(out, same)

    return {
        "types": said(lambda: attention(x, [1] if mine else x, x)),  # type: ignore[arg-type]
        "query": said(lambda: attention([1] if mine else x, x, x)),  # type: ignore[arg-type]
        "kind of lengths": said(lambda: attention(x, x, x, lengths=(4, 4.0 if mine else 4))),  # type: ignore[arg-type]
        "scale": said(lambda: attention(x, x, x, scale="a" if mine else 1.0)),  # type: ignore[arg-type]
        "mask of other dims": said(other_dims),
        "dtype": said(lambda: attention(y, y, y)),
        "head_dim": said(lambda: attention(wide, wide, wide)),
        "mask": said(lambda: attention(x, x, x, mask.bool() if mine else mask)),
        "no mask": said(lambda: attention(x, x, x, mask if mine else None)),
        "method": said(lambda: attention(x, x, x, method="ring" if mine else "gather")),
        "causal": said(lambda: attention(x, x, x, is_causal=mine)),
        "gradients": said(lambda: attention(leaf, x, x)),
        "version": said(other_version),
        "wrong here": said(lambda: attention(x, x[:, :, :3] if mine else x, x)),
        "method name": said(lambda: attention(x, x, x, method="star" if mine else "ring")),
        "mask of own keys": said(lambda: attention(x, x, x, mask[..., : 4 if mine else 8])),
        "heads": said(lambda: attention(x[:, :1], x[:, :1], x[:, :1], method="heads")),
        "lengths": said(lambda: attention(x, x, x, lengths=(4, 5))),
        "other lengths": said(lambda: attention(x, x, x, lengths=(4, 5) if mine else (4, 4))),
        "agreed": said(lambda: attention(x, x, x, mask)),
    }


def models_differ(rank: int) -> dict[str, str]:
    """What this rank is told where the ranks call a sharded model differently, a second time."""
    mine = bool(rank)
    model, batch = models.vit("any size"), models.images("any size")
    elsa.distributed.shard(model)

    def gradients() -> Any:
        with torch.set_grad_enabled(mine):
            return model(batch)

    model(batch)
    mask = torch.zeros(1, 1, 1, 1 + 3 * 4) if mine else None
    given = {
        "batch": partial(model, batch[: 1 + mine]),
        "size": partial(model, batch[..., : 4 + 4 * mine, :]),
        "dtype": partial(model, batch.double() if mine else batch),
        "gradients": gradients,
        "wrong here": partial(model, batch[..., :3] if mine else batch),
        "causal": partial(model, batch, is_causal=mine),
        "mask": partial(model, batch, attn_mask=mask),
        "agreed": partial(model, batch),
    }
    return {what: said(call) for what, call in given.items()}


def alone(rank: int) -> dict[str, Any]:
    """A group of one rank: the call is the one of a single process, bit for bit."""
    groups = [dist.new_group([each]) for each in range(2)]
    found: dict[str, Any] = {}
    for name in ("causal", "additive", "grouped"):
        case = CASES[2][name]
        whole = Case(**{**vars(case), "queries": (sum(case.queries),)})
        for method in case.methods:
            one = call(whole, 0, method, group=groups[rank])
            found[f"{name} {method}"] = one["out"]
    return {"calls": found, "vit": models.sharded("registers", groups[rank])}


def order_of_a_ring(rank: int) -> list[str]:
    """When this rank posts the messages of a ring, and when it folds."""
    events: list[str] = []
    before = ways.groups.passing, ways.shards.state

    def posted(*given: Any) -> Any:
        if given[1] is not None:
            events.append("post")
        return before[0](*given)

    def folded(*given: Any) -> Any:
        events.append("fold")
        return before[1](*given)

    x = torch.randn(1, 1, 4, 8)
    ways.groups.passing, ways.shards.state = posted, folded
    try:
        elsa.distributed.attention(x, x, x, method="ring")
    finally:
        ways.groups.passing, ways.shards.state = before
    return events


def plans(rank: int) -> dict[str, Any]:
    """How calls of several sizes are served, and by a mesh instead of a group."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, tokens, count in (("short", 8, 3), ("long", 20000, 3), ("heads", 64, 64)):
        x = torch.empty(1, count, tokens + rank, 64)
        found[name] = elsa.distributed.explain(x, x, x, group=mesh).to_dict()
    two = said(lambda: elsa.distributed.explain(x, x, x, group=init_device_mesh("cpu", (1, 2))))
    return {**found, "mesh of two dimensions": two}


def compiled(rank: int) -> dict[str, bool]:
    """Whether a caller compiled as a whole gives what it gives uncompiled."""
    case = CASES[2]["uneven"]

    def caller(*tensors: Any, **options: Any) -> Tensor:
        out = elsa.distributed.attention(*tensors, **options)
        return out * 2.0 + 1.0

    whole = torch.compile(caller, fullgraph=True, backend="aot_eager")
    return {
        method: equal(call(case, rank, method, whole), call(case, rank, method, caller))
        for method in ("ring", "gather", "heads")
    }


def compiled_model() -> bool:
    """The same of a sharded model and its gradients, compiled without a break."""
    model, images = models.vit("registers"), models.images("registers")
    elsa.distributed.shard(model)
    torch._dynamo.reset()
    steps = []
    for forward in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        model.zero_grad()
        out = forward(images)
        out.sin().sum().backward()
        steps.append([out, *(parameter.grad for parameter in model.parameters())])
    return all(torch.equal(one, two) for one, two in zip(*steps, strict=True))


def lengths_are_kept(rank: int) -> dict[str, Any]:
    """How often the ranks compare: with lengths once for each kind of call, else each time."""
    gathered = []
    before = agreement.groups.all_gather

    def counted(group: Any, tensor: Tensor, doing: str) -> Tensor:
        gathered.append(tensor.numel())
        return before(group, tensor, doing)

    x = torch.randn(1, 1, 4 + rank, 8)
    agreement.groups.all_gather = counted
    try:
        outs = [
            elsa.distributed.attention(x, x, x, method="ring", lengths=lengths)
            for lengths in (None, None, (4, 5), (4, 5))
        ]
    finally:
        agreement.groups.all_gather = before
    return {"messages": len(gathered), "equal": all(out.equal(outs[0]) for out in outs)}


def _hang(module: torch.nn.Module, inputs: Any) -> None:
    raise RuntimeError("this rank stops here")


def faults(rank: int) -> dict[str, Any]:
    """A rank that hangs, in groups with a short timeout; ranks that end in a backward; then calls
    after that.
    """
    x = torch.randn(1, 2, 5, 8)
    found: dict[str, Any] = {}
    timeout = datetime.timedelta(seconds=SHORT)
    ways = {"hangs": (5, 5, 5), "ended": None}
    groups = {name: dist.new_group(timeout=timeout) for name in (*ways, "vit", "ring")}
    pair: Any = dist.new_group([0, 2], timeout=timeout)
    vit: Any = elsa.distributed.shard(models.vit("class token"), groups["vit"])
    batch = models.images("class token")
    with torch.no_grad():
        vit(batch)
    if rank == 1:  # leaves the others in the middle of a forward
        vit.blocks[1].register_forward_pre_hook(_hang)
    begun = time.monotonic()
    found["vit"] = (said(lambda: vit(batch)), time.monotonic() - begun)
    dist.barrier()
    for name, lengths in ways.items():
        if name == "ended":
            found["backward by ring"] = dies_in_backward(groups["ring"], "ring", rank == 1)
            if rank == 1:
                return found
        attention = partial(
            elsa.distributed.attention, x, x, x,
            group=groups[name], method="ring", lengths=lengths,
        )  # fmt: skip
        if lengths is not None:  # agreed before the rank hangs
            attention()
        if rank != 1:
            begun = time.monotonic()
            found[name] = (said(attention), time.monotonic() - begun)
        if name == "ended":
            break
        dist.barrier()  # in which rank 1 waits for the others
    found["backward by gather"] = dies_in_backward(pair, "gather", rank == 2)
    return found


def dies_in_backward(group: Any, method: str, dies: bool) -> tuple[str, float]:
    """What a rank is told, and after how many seconds, where another one ends in its backward; the
    one that `dies` has to end when this returns.
    """
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    out: Any = elsa.distributed.attention(x, x, x, group=group, method=method)
    if dies:
        out.register_hook(_stop)
    begun = time.monotonic()
    return said(lambda: out.sum().backward()), time.monotonic() - begun


def _stop(grad: Tensor) -> None:
    raise RuntimeError("this rank stops here")
