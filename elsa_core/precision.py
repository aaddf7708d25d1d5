"""The precisions: what each promises, which dtypes it takes, and the bound that the scan obeys.

The depth L(n, B) and the error bound are those of ELSA, Eq. 6 and Theorem 1. The bound is about
the merges alone: the rounding of the scores themselves comes on top and is the same for every
kernel of the same dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from elsa_core.errors import ArgumentError

DEFAULT_BLOCK: Final = 128
"""Keys that the paper folds on chip before the inter-block scan."""
DTYPES: Final = MappingProxyType(
    {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp64": torch.float64,
    }
)
"""The dtypes that commands and result documents name, by their names there."""


@dataclass(frozen=True)
class Precision:
    """One precision: its name, the input dtypes it takes, what it promises and how that is met."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    promise: str
    met_by: str


_TABLE = (
    Precision(
        "strict",
        (torch.float32, torch.float16, torch.bfloat16, torch.float64),
        "error against float64 no larger than that of PyTorch's own kernels for the same dtype, "
        "merges inside Theorem 1's bound",
        "FMA, or split products on tensor cores; float32 state (float64 for float64)",
    ),
    Precision(
        "ieee",
        (torch.float32, torch.float64),
        "multiply-adds in the input's own IEEE format: no tensor core, portable to any hardware",
        "FMA only",
    ),
    Precision(
        "turbo",
        (torch.float32,),
        "one tensor-core product for each product: significands of 11 bits, rounded to nearest",
        "float16 with power-of-two scaling, or TF32; as strict where there are no tensor cores, or "
        "where few keys make that faster",
    ),
    Precision(
        "lean",
        (torch.float32, torch.float16, torch.bfloat16),
        "no workspace beyond the output and O(n) state; error as strict",
        "conversion inside the kernel, small tiles",
    ),
)

PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType({p.name: p for p in _TABLE})
"""Every precision by name, the default first. Iterating gives the names."""


def validate(precision: str, dtype: torch.dtype) -> str:
    """Return `precision` if inputs of `dtype` can be computed with it.

    Args:
        precision: one of `PRECISIONS`.
        dtype: dtype of query, key and value.

    Raises:
        TypeError: `precision` is no text.
        ArgumentError: unknown precision, or one that does not take this dtype.
    """
    known = PRECISIONS.get(precision)
    if known is None:
        if not isinstance(precision, str):
            raise TypeError(f"precision must be text, not {type(precision).__name__}")
        raise ArgumentError(f"precision: {precision!r} is unknown; use one of {_names(PRECISIONS)}")
    if dtype in known.dtypes:
        return precision
    fitting = [p.name for p in _TABLE if dtype in p.dtypes]
    if not fitting:
        raise ArgumentError(
            f"precision: no precision takes {dtype_name(dtype)} inputs; convert them to "
            f"{_names(dtype_name(t) for t in PRECISIONS['strict'].dtypes)}"
        )
    raise ArgumentError(
        f"precision: {precision!r} takes {_names(dtype_name(t) for t in known.dtypes)} inputs, not "
        f"{dtype_name(dtype)}; use {_names(fitting)}, or convert the inputs"
    )


def depth(n: int, block: int = DEFAULT_BLOCK) -> int:
    """L(n, B) = ceil(log2 B) + 2 ceil(log2(n / B)) + 3: merges on the longest path of the scan.

    Args:
        n: number of keys, at least 1.
        block: keys folded on chip; a block longer than n counts as n.

    Raises:
        ArgumentError: `n` or `block` is not positive.

    Reference: ELSA, Eq. 6.
    """
    for name, number in (("n", n), ("block", block)):
        if number < 1:
            raise ArgumentError(f"{name}: {number} keys; use a positive number")
    block = min(block, n)
    blocks = -(-n // block)
    return ceil_log2(block) + 2 * ceil_log2(blocks) + 3


def unit_roundoff(dtype: torch.dtype = torch.float32) -> float:
    """Half the distance from 1 to the next number of `dtype`: 2^-24 for float32."""
    return torch.finfo(dtype).eps / 2


def theorem1_bound(n: int, block: int = DEFAULT_BLOCK, dtype: torch.dtype = torch.float32) -> float:
    """u L(n, B): the relative L2 error that merging n exact states may add, to first order.

    Args:
        n: number of keys.
        block: keys folded on chip.
        dtype: dtype of the state.

    Raises:
        ArgumentError: as `depth`.

    Reference: ELSA, Theorem 1. It assumes finite scores and an exp with a relative error of a
    small multiple of u.
    """
    return unit_roundoff(dtype) * depth(n, block)


def ceil_log2(n: int) -> int:
    """The least e with 2**e >= n, for n > 0."""
    return (n - 1).bit_length()


def dtype_name(dtype: torch.dtype) -> str:
    """PyTorch's name of a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
