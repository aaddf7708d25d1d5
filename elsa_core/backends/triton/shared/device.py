"""What a plan asks of the GPU, of Triton's version, and of a call's precision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.tiling import Table
from elsa_core.backends.triton.shared import usertable
from elsa_core.backends.triton.shared.plans import PLANS
from elsa_core.base.switches import SWITCHES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MODES = {"half": 0, "split": 1, "single": 2, "exact": 3}
# the first and the last Triton that the Gluon kernels compile with
GLUON = ((3, 6), (3, 9))
# the first and the last Triton whose compiled kernels take their arguments as `launch.Launch`
# passes them: read in their sources (CompiledKernel.__getitem__), run with 3.6
DIRECT_LAUNCH = ((3, 4), (3, 9))
# from here on Triton puts a barrier of all warpgroups behind a product: with turns at a product
# those of `one_launch.py` would wait for one another for ever
BARRIER_BEHIND_PRODUCTS = (3, 9)


class Described(NamedTuple):
    """A GPU that plans are made for without it: what its driver would say."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


_described: list[Described] = []  # plans are for the last of these, else for the GPU that is there


@contextmanager
def describing(gpu: Described) -> Iterator[None]:
    """Plan for a GPU that is described by data: tensors of any device then count as its own.

    For the whole process: plans of other threads would be for that GPU as well. No plan outlives
    it, and a user's own tuning table is not read.
    """
    PLANS.clear()
    _described.append(gpu)
    SWITCHES["describing"] = tuple(_described)
    try:
        yield
    finally:
        _described.pop()
        SWITCHES["describing"] = tuple(_described)
        PLANS.clear()


def mode_of(dtype: torch.dtype, precision: str) -> str:
    """How products are computed: half, split, single or exact (see `attention/forward.py`)."""
    if dtype != torch.float32:
        return "half"
    return {"strict": "split", "lean": "split", "turbo": "single", "ieee": "exact"}[precision]


def table_of(device: int) -> str:
    """The name of the tuning table that serves a device; -1: no device."""
    if _described:
        return tiling.table_name(_described[-1].name, _described[-1].capability)
    if device < 0:
        return "h200"
    properties = torch.cuda.get_device_properties(device)
    name = "MI300" if torch.version.hip else properties.name
    return tiling.table_name(name, (properties.major, properties.minor))


def device_table(index: int) -> tuple[Table, int]:
    """The tuning table of a device, and its multiprocessors. Index -1: no device (interpreter)."""
    if _described:
        return tiling.load_table(table_of(index)), _described[-1].multiprocessors
    return _device_table(index)


@lru_cache(maxsize=64)
def _device_table(index: int) -> tuple[Table, int]:
    table = tiling.load_table(table_of(index))
    if index < 0:
        return table, table.multiprocessors
    properties = torch.cuda.get_device_properties(index)
    return usertable.joined(table, properties.name), properties.multi_processor_count


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for every other device."""
    if _described:
        return _described[-1].capability
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    if device.index is None:  # the current one, which may be another later
        return torch.cuda.get_device_capability(device)
    return capability_at(device.index)


@lru_cache(maxsize=64)  # every eager backward asks
def capability_at(index: int) -> tuple[int, int]:
    """`capability_of` an NVIDIA GPU that is there, by its number."""
    return torch.cuda.get_device_capability(index)


def overlaps(device: torch.device) -> bool:
    """Whether a launch may start while the one before it runs (programmatic dependent launch, sm_90
    on).
    """
    capability = capability_of(device)
    return capability is not None and capability >= (9, 0)


def specializes(device: torch.device) -> bool:
    """Whether the Gluon kernels run there: on sm_90, with a Triton they were tried with."""
    return not INTERPRETED and capability_of(device) == (9, 0) and gluon_known()


def gluon_known() -> bool:
    """Gluon is young and changes: a Triton that is not known gets plain Triton kernels alone."""
    return GLUON[0] <= triton_version() <= GLUON[1]


def triton_version() -> tuple[int, ...]:
    """Major and minor version of the Triton that is installed."""
    import triton

    return tuple(int(n) for n in triton.__version__.split(".")[:2])
