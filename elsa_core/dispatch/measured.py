"""The shipped table of measurements that route calls: conditions, a mode and who serves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from elsa_core.backends import processor
from elsa_core.base import calls
from elsa_core.precision import dtype_name

TABLE = Path(__file__).with_name("measured.json")
ORIGINAL = "original"  # the forward of the module that was patched
# In the driver's name of a part of a GPU: "NVIDIA H200 MIG 1g.18gb".
_SLICE = " MIG "
Facts = Mapping[str, Any]


class Row(NamedTuple):
    """A row that decides by lengths.

    Attributes:
        by: the backend that serves.
        ranges: of facts of a call, as `attention_facts` gives them: least and most.
        ratio: the least and the largest speed of this package's kernels over that backend's.
        without_gradients: it holds where no backend has a kernel of the call's gradients.
    """

    by: str
    ranges: tuple[tuple[str, tuple[int, int]], ...]
    ratio: tuple[float, float]
    without_gradients: bool

    def holds(self, facts: Facts | None, known: Callable[[Any], bool] = bool) -> bool:
        """Whether every range holds, as far as lengths are `known`; a fact that is None lies in
        none."""
        if facts is None:
            return False
        for name, (least, most) in self.ranges:
            fact = facts.get(name)
            if fact is None or not (known(least <= fact) and known(fact <= most)):
                return False
        return True


def attention_facts(
    query: Sequence[int], key: Sequence[int], mask: Sequence[int] | None = None,
    known: Callable[[Any], bool] = bool, *, causal: bool = False,
) -> Facts | None:  # fmt: skip
    """What rows of inference read of [B, H, Nq, D], [B, H, Nk, D] and the shape of an additive
    mask; None where queries and keys are not alike, or the mask has no row for each query."""
    batch, heads, tokens, _ = query
    if not (known(tokens == key[2]) and known(heads == key[1])):
        return None
    if mask is not None and not (known(mask[2] == tokens) and known(mask[3] == tokens)):
        return None
    return {
        "batch_heads": batch * heads, "tokens": tokens, "tail": tokens % 128,
        "masked": int(mask is not None), "causal": int(causal),
    }  # fmt: skip


def _found(
    operator: str, mode: str, device: torch.device, dtype: torch.dtype | None, precision: str = ""
) -> Iterator[dict[str, Any]]:
    """The rows of the shipped table for calls of one kind, in order.

    mode: "infer", "train" (forward and gradients as a whole), "gradients" (of elsa's forwards),
    "site" (what a patched module leaves to its original forward), "patch" (the default scope).
    """
    for row in _table():
        if (row["operator"], row["mode"], row["device"]) != (operator, mode, device.type):
            continue
        if "dtypes" in row and (dtype is None or dtype_name(dtype) not in row["dtypes"]):
            continue
        if "precision" in row and row["precision"] != precision:
            continue
        if "processor" in row and row["processor"] != processor.name():
            continue
        there = torch.cuda.is_available()
        if "capability" in row and (
            not there
            or torch.version.hip
            or torch.cuda.get_device_capability(device) != tuple(row["capability"])
        ):
            continue
        if "gpu" in row or row.get("whole"):
            gpu = torch.cuda.get_device_name(device) if there else ""
            if _SLICE in gpu or not any(mark in gpu for mark in row.get("gpu", ("",))):
                continue
        yield row


def rows(
    operator: str, mode: str, device: torch.device, dtype: torch.dtype, precision: str = "strict",
    head_dim: int | None = None,
) -> tuple[Row, ...]:  # fmt: skip
    """Where lengths decide who serves inference, or training as a whole; those of a GPU's name
    hold on a whole one alone."""
    return tuple(
        Row(
            row["by"], tuple((name, (least, most)) for name, (least, most) in
                             row.get("ranges", {}).items()),
            tuple(row.get("ratio", (1.0, 1.0))), row.get("without") == "gradients",
        )
        for row in _found(operator, mode, device, dtype, precision)
        if head_dim is None or head_dim in row.get("head_dims", ())
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def gradients(operator: str, device_type: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Who is asked for the gradients of this package's forward, in order; none: plain PyTorch
    recomputes."""
    row = next(_found(operator, "gradients", torch.device(device_type), dtype), None)
    return () if row is None else tuple(row["by"])


@functools.lru_cache(maxsize=64)
def originals(operator: str, device_type: str) -> bool:
    """Whether a patched site trains by its original forward where no backend has the gradients."""
    found = _found(operator, "site", torch.device(device_type), None)
    return any(row.get("without") == "gradients" for row in found)


@functools.lru_cache(maxsize=64)
def eager_least(operator: str, dtype: torch.dtype) -> int:
    """The multiply-adds from which an eager call on a GPU takes longer there than on the host."""
    found = _found(operator, "site", torch.device("cuda"), dtype)
    return next((int(row["below"]) for row in found if row["by"] == ORIGINAL), 0)


@functools.lru_cache(maxsize=64)
def eager_products(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Of small eager linear layers of patched blocks that are elsa's where the cache can hold the
    launch: multiply-adds below which, and rows from which. (0, 1) where none are.
    """
    found = (row for row in _found("linear", "site", device, dtype) if row["by"] != ORIGINAL)
    return next(((row["below"], row["least_rows"]) for row in found), (0, 1))


def product_by_pytorch(input: Tensor, weight: Tensor) -> Row | None:
    """The row by which PyTorch's own product, with at most a bias, is as fast.

    It holds in eager calls, CUDA graphs and what `torch.compile` makes for these lengths alone, not
    in programs for other lengths.
    """
    found = product_rows("linear", input.device, input.dtype)
    if not found or input.is_nested or weight.dim() != 2:
        return None
    known: Callable[[Any], bool] = bool
    if calls.recorded():
        if calls.exporting() or not is_compiling():
            return None
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        known = statically_known_true
    columns, depth = weight.shape
    facts = {"channels": depth, "columns": columns, "rows": input.numel() // max(depth, 1)}
    for row in found:
        if row.holds(facts, known):
            return row
    return None


def product_rows(operator: str, device: torch.device, dtype: torch.dtype) -> tuple[Row, ...]:
    """The rows of `linear`; of `gated_linear` those by which a gated unit is one launch."""
    return _cached_rows(operator, device, dtype)


# Compilers open no file, and look behind a cache: the function ahead of it is the constant.
product_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]
_cached_rows = functools.lru_cache(maxsize=64)(lambda each, *kind: rows(each, "infer", *kind))


def scope(device: torch.device, dtype: torch.dtype) -> str:
    """What `patch` takes over by default: "model" where that was measured to be faster."""
    row = next(_found("linear", "patch", device, dtype), None)
    return "attention" if row is None else str(row["by"])


@functools.cache
def _table() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    return rows
