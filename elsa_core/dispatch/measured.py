"""The shipped table of measurements that route calls: data, with its date and hardware."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from elsa_core.backends import processor
from elsa_core.base import calls
from elsa_core.base.switches import SWITCHES
from elsa_core.precision import dtype_name

TABLE = Path(__file__).with_name("measured.json")
# In the driver's name of a part of a GPU: "NVIDIA H200 MIG 1g.18gb".
_SLICE = " MIG "


class Row(NamedTuple):
    """Shapes for which another backend was measured to be faster in inference.

    `ratio` is the least and the largest speed of this package's kernels over that backend's.
    `masked`: of calls with an additive mask of a row for each query, else of calls without one.
    `causal`: of causal calls, else of others.
    """

    backend: str
    head_dim: int
    batch_heads: tuple[int, int]
    tokens: tuple[int, int]
    multiple: int
    ratio: tuple[float, float]
    masked: bool = False
    causal: bool = False

    def holds(
        self,
        query: Sequence[int],
        key: Sequence[int],
        mask: Sequence[int] | None = None,
        known: Callable[[Any], bool] = bool,
        *,
        causal: bool = False,
    ) -> bool:
        """Whether [B, H, Nq, D], [B, H, Nk, D] and the shape of an additive mask lie in the ranges,
        as far as it is `known`."""
        if (mask is not None) != self.masked or causal != self.causal:
            return False
        if mask is not None and not (known(mask[2] == query[2]) and known(mask[3] == key[2])):
            return False
        batch, heads, queries, head_dim = query
        return (
            known(self.tokens[0] <= queries)
            and known(queries <= self.tokens[1])
            and known(queries == key[2])
            and known(heads == key[1])
            and known(queries % self.multiple == 0)
            and known(head_dim == self.head_dim)
            and known(self.batch_heads[0] <= batch * heads)
            and known(batch * heads <= self.batch_heads[1])
        )


class Products(NamedTuple):
    """Products [rows, channels] x [columns, channels]^T, with at most a bias, that PyTorch computes
    no slower than this package's kernels. `ratio` is the kernels' speed over PyTorch's.
    """

    channels: int
    columns: int
    rows: tuple[int, int]
    ratio: tuple[float, float]

    def holds(
        self, elements: Any, channels: Any, columns: Any, known: Callable[[Any], bool] = bool
    ) -> bool:
        """Whether an input of so many elements and a weight [columns, channels] make one of them,
        as far as that is `known`."""
        least, most = self.rows
        return (
            known(channels == self.channels)
            and known(columns == self.columns)
            and known(least * self.channels <= elements)
            and known(elements <= most * self.channels)
        )


class InGraphs(NamedTuple):
    """Small training calls without a mask for which this package's kernels were measured to be the
    faster ones where a CUDA graph saves the host's time. `ratio` is their least and largest speed
    over PyTorch's.
    """

    capability: tuple[int, int]
    head_dim: tuple[int, int]
    tokens: int
    ratio: tuple[float, float]

    def holds(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether operands [B, H, N, D] are of such a call."""
        return (
            query.shape == key.shape == value.shape
            and query.shape[2] >= self.tokens
            and self.head_dim[0] <= query.shape[3] <= self.head_dim[1]
            and _capability(query.device) == self.capability
        )


class Training(NamedTuple):
    """Who serves calls of which a gradient is wanted.

    Attributes:
        whole: the backend that takes forward and backward; empty where the chosen one does.
        otherwise: the one that takes both where no backend in `backward` has a kernel for the call.
        backward: who is asked for the gradients of this package's forward, in order.
        small, small_below: the backend that takes both in eager calls of fewer multiply-adds of
            query key^T than that: it takes the host less time, which such calls wait for.
        small_masked: whether it takes those with a boolean mask too.
        in_graphs: those that it does not take where a CUDA graph records them.
    """

    whole: str
    otherwise: str
    backward: tuple[str, ...]
    small: str = ""
    small_below: int = 0
    small_masked: bool = True
    in_graphs: InGraphs | None = None


def rows(
    operator: str, device: torch.device, dtype: torch.dtype, precision: str = "strict"
) -> tuple[Row, ...]:
    """The rows for a device: none but for GPUs that they were measured on, as a whole."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ()
    gpu = torch.cuda.get_device_name(device)
    if _SLICE in gpu:
        return ()
    return tuple(
        Row(
            row["backend"], head_dim, tuple(row["batch_heads"]), tuple(row["tokens"]),
            row["multiple"], tuple(row["ratio"]), row.get("masked", False),
            row.get("causal", False),
        )
        for row in _table()["inference"]
        for head_dim in row["head_dims"]
        if row["operator"] == operator and dtype_name(dtype) in row["dtypes"]
        and row.get("precision", "strict") == precision
        and any(mark in gpu for mark in row["gpu"])
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def training(operator: str, device_type: str, dtype: torch.dtype) -> Training | None:
    """The row for calls of which a gradient is wanted; None where plain PyTorch recomputes."""
    for row in _table()["training"]:
        alike = row["operator"] == operator and row["device"] == device_type
        if alike and dtype_name(dtype) in row["dtypes"]:
            return Training(
                row["whole"], row["otherwise"], tuple(row["backward"]), row.get("small", ""),
                _small_below(row), row.get("small_masked", True), _in_graphs(row),
            )  # fmt: skip
    return None


def _small_below(row: dict[str, Any]) -> int:
    # products of PyTorch's attention are MKL's, which is slower on AMD's and keeps to AVX2
    below: dict[str, int] = row.get("small_below_on", {})
    found: int = below.get(processor.name(), row.get("small_below", 0))
    return found


def _in_graphs(row: dict[str, Any]) -> InGraphs | None:
    found = row.get("small_in_graphs")
    if found is None:
        return None
    return InGraphs(
        tuple(found["capability"]), tuple(found["head_dim"]), found["tokens"], tuple(found["ratio"])
    )


def originals(operator: str) -> tuple[str, ...]:
    """The devices on which a patched site trains by its original module's forward."""
    found: list[str] = _table()["training_by_original"].get(operator, [])
    return tuple(found)


@functools.lru_cache(maxsize=64)
def eager_least(operator: str, dtype: torch.dtype) -> int:
    """The multiply-adds from which an eager call on a GPU takes longer there than on the host."""
    least: int = _table()["eager"][operator].get(dtype_name(dtype), 0)
    return least


def _is_of(device: torch.device, capability: list[int] | None) -> bool:
    """Whether a device is a whole GPU of this compute capability; None: any device."""
    if capability is None:
        return True
    if device.type != "cuda" or _capability(device) != tuple(capability):
        return False
    return _SLICE not in torch.cuda.get_device_name(device)


@functools.lru_cache(maxsize=64)
def eager_rows(device: torch.device, dtype: torch.dtype) -> int:
    """The least rows that a layer of `eager_products` has: with fewer no kernel serves it."""
    rows = (row for row in _table()["eager_products"] if _is_of(device, row["capability"]))
    return max((row["rows"].get(dtype_name(dtype), 1) for row in rows), default=1)


@functools.lru_cache(maxsize=64)
def eager_products(device: torch.device, dtype: torch.dtype) -> int:
    """The most multiply-adds of a small eager linear layer of patched blocks that is elsa's where
    the cache can hold the launch; 0 where none is, see `elsa_core.dispatch.launches`.
    """
    rows = (row for row in _table()["eager_products"] if _is_of(device, row["capability"]))
    return max((row["most"].get(dtype_name(dtype), 0) for row in rows), default=0)


def product_by_pytorch(input: Tensor, weight: Tensor) -> bool:
    """Whether the shipped table says that PyTorch's own product, with at most a bias, is as fast.

    It holds in eager calls, CUDA graphs and what `torch.compile` makes for these lengths alone, not
    in programs for other lengths.
    """
    rows = linear_by_pytorch(input.device, input.dtype)
    if not rows or input.is_nested or weight.dim() != 2:
        return False
    known: Callable[[Any], bool] = bool
    if calls.recorded():
        if calls.exporting() or not is_compiling():
            return False
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        known = statically_known_true
    columns, depth = weight.shape
    return any(each.holds(input.numel(), depth, columns, known) for each in rows)


def linear_by_pytorch(device: torch.device, dtype: torch.dtype) -> tuple[Products, ...]:
    """The products that are left to PyTorch on a device whose kernels serve the others."""
    return _by_pytorch(device, dtype)


linear_by_pytorch._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=64)
def _by_pytorch(device: torch.device, dtype: torch.dtype) -> tuple[Products, ...]:
    return tuple(
        Products(row["channels"], row["columns"], tuple(row["rows"]), tuple(row["ratio"]))
        for row in _table()["linear_by_pytorch"]
        if row["device"] == device.type and dtype_name(dtype) in row["dtypes"]
        and _capability(device) == tuple(row["capability"])
    )  # fmt: skip


def scope(device: torch.device, dtype: torch.dtype) -> str:
    """What `patch` takes over by default: "model" where that was measured to be faster."""
    for row in _table()["scope"]:
        if row["device"] != device.type or dtype_name(dtype) not in row["dtypes"]:
            continue
        if row.get("processor", processor.name()) != processor.name():
            continue
        capability = row.get("capability")
        if capability is None or _capability(device) == tuple(capability):
            return str(row["scope"])
    return "attention"


# The form of `elsa.linear` in float32 that a device has kernels of: a gated unit in one launch.
GATED = "gated"
_TRIED: set[str] = set()
# What is told when that changes: whoever keeps something by layouts alone.
ON_CHANGE: list[Callable[[], None]] = []


def linear_form(form: str, device: torch.device) -> bool:
    """Whether a form of linear layers is used on a device: where the shipped table says
    that it was measured to be faster, and within `unmeasured`.
    """
    return form in linear_forms(device)


def linear_forms(device: torch.device) -> frozenset[str]:
    """The forms for which `linear_form` holds. Eager calls ask it each time."""
    found = _forms_measured(device)
    return found | _TRIED if _TRIED else found


linear_form._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compilers open no file


@functools.lru_cache(maxsize=64)
def _forms_measured(device: torch.device) -> frozenset[str]:
    return frozenset(
        row["form"] for row in _table()["linear_forms"]
        if row["device"] == device.type and _capability(device) == tuple(row["capability"])
    )  # fmt: skip


@contextmanager
def unmeasured(*forms: str) -> Iterator[None]:
    """Use forms of linear layers that no table names yet, in every thread: to test and to measure
    them. They are not chosen by auto until measured.
    """
    before = set(_TRIED)
    _try({*before, *forms})
    try:
        yield
    finally:
        _try(before)


def _try(forms: set[str]) -> None:
    _TRIED.clear()
    _TRIED.update(forms)
    SWITCHES["unmeasured"] = frozenset(forms)
    for forget in ON_CHANGE:
        forget()


def _capability(device: torch.device) -> tuple[int, int] | None:
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table
