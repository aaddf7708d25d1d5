"""The cases of `elsa bench attention`, as data: shapes, dtypes, precisions and goals."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from elsa_core import ops
from elsa_core.errors import ArgumentError
from elsa_core.measuring.documents import Plain
from elsa_core.precision import DTYPES, validate

if TYPE_CHECKING:
    from elsa_core.profiling.bench.peers import Bench

SWEEP_TOKENS: Final = (16, 49, 64, 100, 197, 256, 577, 785, 1025, 2048)
SWEEP_HEAD_DIMS: Final = (32, 64, 80, 128)
GRADIENTS_TABLE: Final = "gradients"  # a forward, and the gradients of all that went into it
ENTMAX_TABLE: Final = "entmax"  # another function than softmax attention
VARLEN_TABLE: Final = "varlen"  # its batches are sequences of different length
OTHER_TABLES: Final = (ENTMAX_TABLE, VARLEN_TABLE, GRADIENTS_TABLE)  # not of one forward's softmax
WINDOW_IMAGES: Final = 4  # images that the windows of a case come from


@dataclass(frozen=True)
class Case(Plain):
    """One attention call to measure: query [batch, heads, queries, head_dim], key and value
    [batch, heads, keys, head_dim].

    Attributes:
        mask: "none", or "additive": one of shape [1, heads, queries, keys] in the inputs' dtype.
        window: 0; or the side of square windows, of which `batch` counts all: elsa reads them with
            `window_attention` from `WINDOW_IMAGES` square images as a projection leaves them, the
            mask being the bias, and peers are given windows ready-made.
        precisions: those of `elsa_core.attention` to measure side by side.
        goal: the least ratio (best peer's time / time of the first precision) aimed at.
        quick: whether --quick includes it.
    """

    also = ("name",)
    table: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str = "fp32"
    mask: str = "none"
    window: int = 0
    precisions: tuple[str, ...] = ("strict",)
    goal: float | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        """Unique in its device's tables: `vit/8x12x197x64-fp32`, `decode/1x32x1:32768x64-fp16`."""
        tokens = str(self.keys) if self.keys == self.queries else f"{self.queries}:{self.keys}"
        mask = "-mask" if self.mask != "none" else ""
        shape = f"{self.batch}x{self.heads}x{tokens}x{self.head_dim}"
        return f"{self.table}/{shape}-{self.dtype}{mask}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two matrix products: 4 B H Nq Nk D; of packed
        sequences without what is padding in a batch of them. With gradients of seven products."""
        if self.table == VARLEN_TABLE:
            scores = sum(n * n for n in lengths_of(self.batch, self.queries))
            return 4 * self.heads * scores * self.head_dim
        products = 7 if self.table == GRADIENTS_TABLE else 2
        return 2 * products * self.batch * self.heads * self.queries * self.keys * self.head_dim

    @property
    def score_bytes(self) -> int:
        """Bytes of one score matrix in the inputs' dtype: what an eager softmax holds."""
        elements = self.batch * self.heads * self.queries * self.keys
        return elements * DTYPES[self.dtype].itemsize


def lengths_of(batch: int, longest: int) -> list[int]:
    """The lengths of a case of packed sequences: in even steps down from the longest."""
    return [longest * (batch - i) // batch for i in range(batch)]


class Inputs(NamedTuple):
    """The tensors of a case."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


def inputs(case: Case, device: torch.device | str, seed: int = 0) -> Inputs:
    """Random normal query, key, value, and the mask (or None) of a case."""
    drawn = torch.device(device).type != "meta"
    generator = torch.Generator(device=device).manual_seed(seed) if drawn else None

    # Drawn in the dtype itself: a float32 copy of a long case would not fit beside it.
    normal = partial(torch.randn, generator=generator, dtype=DTYPES[case.dtype], device=device)
    query = normal(case.batch, case.heads, case.queries, case.head_dim)
    key = normal(case.batch, case.heads, case.keys, case.head_dim)
    value = normal(case.batch, case.heads, case.keys, case.head_dim)
    mask = None if case.mask == "none" else normal(1, case.heads, case.queries, case.keys)
    return Inputs(query, key, value, mask)


def from_shape(text: str, *, dtype: str = "fp32", precision: str = "strict") -> Case:
    """A case of its own: `B,H,N,D`, or `B,H,NQ:NK,D` where queries and keys differ in number."""
    one = r"(\d{1,18})"  # an integer of 64 bits
    found = re.fullmatch(f"{one},{one},{one}(?::{one})?,{one}", text.replace(" ", ""))
    sizes = [int(size) for size in found.groups(default=found[3])] if found else [0]
    if min(sizes) < 1:
        raise ArgumentError(
            f"shape: {text!r} is not B,H,N,D or B,H,NQ:NK,D in positive numbers, like 8,12,197,64"
        )
    validate(precision, DTYPES[dtype])
    batch, heads, queries, keys, head_dim = sizes
    return Case("shape", batch, heads, queries, keys, head_dim, dtype, precisions=(precision,))


def square(table: str, shape: tuple[int, int, int, int], **more: Any) -> Case:
    """A case with as many queries as keys: [batch, heads, tokens, head_dim]."""
    batch, heads, tokens, head_dim = shape
    return Case(table, batch, heads, tokens, tokens, head_dim, **more)


_VIT: Final = {
    (8, 12, 197, 64): 1.4, (1, 12, 197, 64): 1.4, (1, 12, 577, 64): 1.2, (1, 12, 1025, 64): 1.1,
    (1, 12, 4097, 64): 1.0,
}  # fmt: skip
# Windows, heads, side: the stages of Swin at 224 with windows of 7, and larger windows.
_WINDOWS: Final = {(256, 3, 7): 2.2, (16, 12, 7): 2.2, (64, 4, 12): 1.9, (16, 3, 16): 1.45}
# Shape: goals of fp32 strict and of fp16/bf16 against the best exact peer of the same dtype.
_CUDA_GOALS: Final = {
    (8, 12, 197, 64): (2.2, 1.2),
    (1, 12, 197, 64): (2.5, 1.2),
    (8, 16, 577, 64): (3.5, 1.05),
    (8, 12, 1025, 64): (4.2, 1.15),
    (1, 12, 4097, 64): (5.0, 1.03),
    (1, 8, 4096, 64): (5.0, 1.0),
    (1, 8, 16384, 64): (6.0, 1.0),
    (1, 4, 65536, 64): (6.0, 1.0),
    (8, 12, 1024, 32): (5.5, 1.0),
    (4, 16, 1024, 80): (3.2, 1.0),
    (1, 8, 4096, 128): (4.0, 1.0),
    (1, 8, 16384, 128): (4.0, 0.85),
}
_DECODE: Final = ((1, 32, 32768, 64), (1, 32, 262144, 64), (1, 8, 524288, 64), (4, 16, 65536, 128))
_CUDA_QUICK: Final = ((8, 12, 197, 64), (1, 8, 4096, 64))


CPU_TABLES: Final = {
    "vit": tuple(
        square("vit", shape, goal=goal, quick=shape[2] < 1000) for shape, goal in _VIT.items()
    ),
    "sweep": tuple(
        square("sweep", (1, 12, tokens, head_dim), mask=mask, goal=0.97,
               quick=head_dim == 64 and tokens in (49, 197))
        for mask in ("none", "additive")
        for head_dim in SWEEP_HEAD_DIMS
        for tokens in SWEEP_TOKENS
    ),
}  # fmt: skip
CPU_WINDOW_TABLES: Final = {
    "window": tuple(
        square("window", (windows, heads, side * side, 32), mask="additive", window=side,
               goal=goal, quick=side == 7)
        for (windows, heads, side), goal in _WINDOWS.items()
    )
}  # fmt: skip
CUDA_TABLES: Final = {
    **{
        dtype: tuple(
            square(dtype, shape, dtype=dtype, precisions=precisions, goal=goals[dtype != "fp32"],
                   quick=shape in _CUDA_QUICK)
            for shape, goals in _CUDA_GOALS.items()
        )
        for dtype, precisions in (
            ("fp32", ("strict", "turbo", "lean")), ("fp16", ("strict",)), ("bf16", ("strict",))
        )
    },
    "decode": tuple(
        Case("decode", batch, heads, 1, keys, head_dim, dtype, goal=goal,
             quick=keys == 32768 and dtype != "bf16")
        for dtype, goal in (("fp16", 1.0), ("bf16", 1.0), ("fp32", 3.5))
        for batch, heads, keys, head_dim in _DECODE
    ),
    "lengths": tuple(
        square("lengths", (1, 8, 2**exponent, 64), dtype=dtype)
        for dtype in ("fp32", "fp16")
        for exponent in range(8, 16)
    ),
    "million": (square("million", (1, 1, 2**20, 64)),),
}  # fmt: skip


def _benches() -> list[Bench]:
    """What the operators' records call their measurements."""
    kinds = ("bench", "bench_gradients")
    found = [record.part(kind) for kind in kinds for record in ops.RECORDS.values()]
    return [bench for bench in found if bench is not None]


def bench_of(case: Case) -> Bench:
    """What measures a case: that of the operator in whose tables it is, or of attention."""
    own = (b for b in _benches() if any(case.table in each for each in b.tables.values()))
    return next(own, ops.ATTENTION.part("bench"))


def of_softmax(cases: Sequence[Case], flag: str) -> tuple[Case, ...]:
    """The calls of softmax attention, whose partitions and tiles `flag` is about."""
    found = tuple(case for case in cases if case.table != ENTMAX_TABLE)
    if not found:
        raise ArgumentError(f"{flag}: none of these calls is of softmax attention")
    return found


def select(device_type: str, precision: str | None = None, **chosen: Any) -> tuple[Case, ...]:
    """The cases of a device, of every operator whose record has some, in `precision` alone where
    one is named, whose goal stays with the precision that it was set for; the rest as of
    `selected`."""
    tables: dict[str, dict[str, tuple[Case, ...]]] = {}
    for bench in _benches():
        for kind, own in bench.tables.items():
            tables.setdefault(kind, {}).update(own)
    found = selected(tables, device_type, **chosen)
    if precision is None:
        return found
    return tuple(
        replace(
            case, precisions=(validate(precision, DTYPES[case.dtype]),),
            goal=case.goal if precision == case.precisions[0] else None,
        )
        for case in found
    )  # fmt: skip


def selected(
    measured: Mapping[str, Mapping[str, tuple[Any, ...]]], device_type: str, *,
    tables: Sequence[str] = (), patterns: Sequence[str] = (), quick: bool = False,
    dtype: str | None = None, aside: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    """The cases of a device among `measured`: of these tables (all where empty), whose name matches
    one of the globs, of --quick, and with inputs of this dtype.

    The table `aside` is chosen by its name, or by it in every pattern.
    """
    of_device = measured.get(device_type)
    if of_device is None:
        known = ", ".join(measured)
        raise ArgumentError(f"device: no cases for {device_type!r}; use one of {known}")
    for table in tables:
        if table not in of_device:
            known = ", ".join(of_device)
            raise ArgumentError(f"table: {device_type} has no table {table!r}; use one of {known}")
    named = bool(patterns) and all(each.startswith(f"{aside}/") for each in patterns)
    chosen = tuple(
        case
        for name, cases in of_device.items()
        for case in cases
        if (name in tables if tables else name != aside or named)
        and (not quick or case.quick)
        and dtype in (None, case.dtype)
        and (not patterns or any(fnmatch.fnmatchcase(case.name, glob) for glob in patterns))
    )
    if not chosen:
        raise ArgumentError(
            f"cases: none of {device_type}'s match {', '.join(patterns) or 'the selection'}; "
            "--dry-run lists them"
        )
    return chosen
