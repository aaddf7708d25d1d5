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
ORIGINAL = "original"  # the forward of the module that was patched
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


class Trained(NamedTuple):
    """Who takes training calls, forward and gradients.

    Attributes:
        backend: its name.
        least, below: the multiply-adds of query key^T from which, and below which, the row holds
            for eager calls: the host's time bounds small ones. None: for all calls.
        boolean: whether it holds for calls with a boolean mask too.
        without_gradients: it holds where no backend has a kernel of the call's gradients.
    """

    backend: str
    least: int | None = None
    below: int | None = None
    boolean: bool = True
    without_gradients: bool = False

    def holds(self, work: int | None, masked: bool) -> bool:
        """Whether it holds for an eager call of so many multiply-adds (None: any other call), as
        far as lengths and a boolean mask decide."""
        if masked and not self.boolean:
            return False
        if self.least is not None and (work is None or work < self.least):
            return False
        return self.below is None or (work is not None and work < self.below)


def found(
    operator: str, mode: str, device: torch.device, dtype: torch.dtype | None, precision: str = ""
) -> Iterator[dict[str, Any]]:
    """The rows of the shipped table for calls of one kind, in order.

    mode: "infer", "train" (forward and gradients as a whole), "gradients" (of elsa's forwards),
    "site" (what a patched module leaves to its original forward), "patch" (the default scope).
    """
    for row in _table()["rows"]:
        if (row["operator"], row["mode"], row["device"]) != (operator, mode, device.type):
            continue
        if "dtypes" in row and (dtype is None or dtype_name(dtype) not in row["dtypes"]):
            continue
        if "precision" in row and row["precision"] != precision:
            continue
        if "processor" in row and row["processor"] != processor.name():
            continue
        if "capability" in row and _capability(device) != tuple(row["capability"]):
            continue
        if "gpu" in row and not any(mark in _gpu(device) for mark in row["gpu"]):
            continue
        if ("gpu" in row or row.get("whole")) and _SLICE in _gpu(device):
            continue
        yield row


def rows(
    operator: str, device: torch.device, dtype: torch.dtype, precision: str = "strict"
) -> tuple[Row, ...]:
    """Where another backend serves inference: none but for GPUs that were measured, as a whole."""
    return tuple(
        Row(
            row["by"], head_dim, tuple(row["batch_heads"]), tuple(row["tokens"]),
            row["multiple"], tuple(row["ratio"]), row.get("masked", False),
            row.get("causal", False),
        )
        for row in found(operator, "infer", device, dtype, precision)
        for head_dim in row.get("head_dims", ())
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def trained(operator: str, device: torch.device, dtype: torch.dtype) -> tuple[Trained, ...]:
    """Who takes training calls as a whole, in order; none: who serves inference."""
    return tuple(
        Trained(
            row["by"], row.get("from"), row.get("below"), row.get("boolean", True),
            row.get("without") == "gradients",
        )
        for row in found(operator, "train", device, dtype)
        if "in_graphs" not in row
    )  # fmt: skip


def leads_in_graphs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether this package's kernels are the faster ones for a small training call, [B, H, N, D]
    without a mask, where a CUDA graph saves the host's time.
    """
    if not query.shape == key.shape == value.shape:
        return False
    kinds = found("attention", "train", query.device, query.dtype)
    for graphs in (row["in_graphs"] for row in kinds if "in_graphs" in row):
        least, most = graphs["head_dim"]
        if query.shape[2] >= graphs["tokens"] and least <= query.shape[3] <= most:
            return True
    return False


@functools.lru_cache(maxsize=64)
def gradients(operator: str, device_type: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Who is asked for the gradients of this package's forward, in order; none: plain PyTorch
    recomputes."""
    row = next(found(operator, "gradients", torch.device(device_type), dtype), None)
    return () if row is None else tuple(row["by"])


@functools.lru_cache(maxsize=64)
def originals(operator: str, device_type: str) -> bool:
    """Whether a patched site trains by its original forward where no backend has the gradients."""
    rows = found(operator, "site", torch.device(device_type), None)
    return any(row.get("without") == "gradients" for row in rows)


@functools.lru_cache(maxsize=64)
def eager_least(operator: str, dtype: torch.dtype) -> int:
    """The multiply-adds from which an eager call on a GPU takes longer there than on the host."""
    rows = found(operator, "site", torch.device("cuda"), dtype)
    return next((int(row["below"]) for row in rows if row["by"] == ORIGINAL), 0)


@functools.lru_cache(maxsize=64)
def eager_products(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Of small eager linear layers of patched blocks that are elsa's where the cache can hold the
    launch: multiply-adds below which, and rows from which. (0, 1) where none are.
    """
    rows = (row for row in found("linear", "site", device, dtype) if row["by"] != ORIGINAL)
    return next(((row["below"], row["least_rows"]) for row in rows), (0, 1))


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
        for row in found("linear", "infer", device, dtype)
    )


def scope(device: torch.device, dtype: torch.dtype) -> str:
    """What `patch` takes over by default: "model" where that was measured to be faster."""
    row = next(found("linear", "patch", device, dtype), None)
    return "attention" if row is None else str(row["by"])


# The form of `elsa.linear` in float32 that a device has kernels of: a gated unit in one launch.
GATED = "gated"
_TRIED: set[str] = set()
# What is told when that changes: whoever keeps something by layouts alone.
ON_CHANGE: list[Callable[[], None]] = []


def linear_form(form: str, device: torch.device) -> bool:
    """Whether a form of linear layers is used on a device: where the shipped table says
    that it was measured to be faster, and within `unmeasured`. Eager calls ask it each time.
    """
    return form in _TRIED or _form_measured(form, device)


linear_form._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compilers open no file


@functools.lru_cache(maxsize=64)
def _form_measured(form: str, device: torch.device) -> bool:
    return any(found(f"{form}_linear", "infer", device, torch.float32))


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


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


def _capability(device: torch.device) -> tuple[int, int] | None:
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table
