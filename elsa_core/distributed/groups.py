"""Process groups by name, and their collectives with one line for what goes wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elsa_core.base.messages import first_line
from elsa_core.errors import ArgumentError, UnavailableError

_RING = "passing shards around the ring"
_ASK = "call torch.distributed.init_process_group, or start the program with torchrun"


def name_of(group: Any) -> str:
    """The name of a process group, a one-dimensional DeviceMesh or, for None, of all ranks."""
    if isinstance(group, str):
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise UnavailableError(f"torch.distributed has no process group here: {_ASK}")
    if group is None:
        return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ArgumentError(
                f"a mesh of {group.ndim} dimensions: name the one of the sequence, mesh['sequence']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group must be a process group that this rank is in, a mesh or None")
    return str(group.group_name)


# A constant for the compiler: a group is no tensor.
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def by_name(name: str) -> dist.ProcessGroup:
    """The process group of a name; UnavailableError where there is none any more."""
    from torch.distributed import distributed_c10d  # there may be builds without it

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    try:
        found: dist.ProcessGroup = resolve(name)
        return found
    except (RuntimeError, ValueError, KeyError):
        raise UnavailableError(f"the process group {name!r} is gone: {_ASK}") from None


def place(name: str) -> tuple[int, int]:
    """This rank in the process group of a name, and how many ranks there are."""
    group = by_name(name)
    return group.rank(), group.size()


place._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as above


@contextmanager
def _watching(group: dist.ProcessGroup, doing: str) -> Iterator[None]:
    """Turn what a collective raises into one line of UnavailableError: a rank has ended, hangs or
    does something else, as far as PyTorch tells."""
    try:
        yield
    except RuntimeError as error:  # those of this package are none, but for UnavailableError
        if isinstance(error, UnavailableError | torch.OutOfMemoryError):
            raise
        raise UnavailableError(
            f"rank {group.rank()} of {group.size()} waited in vain while {doing}: a rank has ended "
            f"or hangs, or makes another call ({first_line(error)[:140]})"
        ) from None


def unpacked(message: Tensor, shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    """The tensors of a flat message, as views."""
    whole = [torch.Size(shape) for shape in shapes]
    pieces = message.split([shape.numel() for shape in whole])
    return [piece.view(shape) for piece, shape in zip(pieces, whole, strict=True)]


def all_gather(group: dist.ProcessGroup, tensor: Tensor, doing: str) -> Tensor:
    """[P, *shape] of all ranks' tensors of one shape."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    # its name until torch 2.13
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _watching(group, doing):
        gather(gathered.view(-1), tensor.contiguous().view(-1), group=group)
    return gathered


def gather(
    group: dist.ProcessGroup, tensor: Tensor, sizes: Sequence[int], doing: str
) -> list[Tensor]:
    """The flat tensors of all ranks, `sizes` elements each: padded to the longest on their way."""
    message = tensor.new_zeros(max(sizes))
    message[: tensor.numel()] = tensor
    rows = all_gather(group, message, doing)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def exchange(
    group: dist.ProcessGroup, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], doing: str
) -> list[Tensor]:
    """Send parts[r] to rank r; what comes from each rank, of the shapes given."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(sizes))
    with _watching(group, doing):
        dist.all_to_all_single(received, sent, sizes, [each.numel() for each in parts], group=group)
    return unpacked(received, shapes)


@contextmanager
def passing(
    group: dist.ProcessGroup, sent: Tensor | None, received: Tensor | None
) -> Iterator[None]:
    """Send to the rank before and receive from the one behind, while what stands within runs; None
    and empty tensors are no message. On a GPU the current stream waits, the host does not."""
    rank, size = group.rank(), group.size()
    operations = []
    if sent is not None and sent.numel():
        before = (rank - 1) % size
        operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=before))
    if received is not None and received.numel():
        behind = (rank + 1) % size
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=behind))
    with _watching(group, _RING):
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    yield
    with _watching(group, _RING):
        for work in works:
            work.wait()
