"""The precisions: what each promises, which dtypes it takes, and the bound that the scan obeys.

The depth L(n, B) and the error bound are those of ELSA, Eq. 6 and Theorem 1. The bound is about
the merges alone: the rounding of the scores themselves comes on top and is the same for every
kernel of the same dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

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


class Precision(NamedTuple):
    """The input dtypes that a precision takes, and how it is met."""

    dtypes: tuple[torch.dtype, ...]
    met_by: str


PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType(
    {
        # error against float64 no larger than that of PyTorch's own kernels for the same dtype,
        # merges inside Theorem 1's bound
        "strict": Precision(
            (torch.float32, torch.float16, torch.bfloat16, torch.float64),
            "FMA, or split products on tensor cores; float32 state (float64 for float64)",
        ),
        # multiply-adds in the input's own IEEE format: portable to any hardware
        "ieee": Precision((torch.float32, torch.float64), "FMA only"),
        # one tensor-core product for each product: significands of 11 bits, rounded to nearest
        "turbo": Precision(
            (torch.float32,),
            "float16 with power-of-two scaling, or TF32; as strict where there are no tensor cores,"
            " or where few keys make that faster",
        ),
        # no workspace beyond the output and O(n) state; error as strict
        "lean": Precision(
            (torch.float32, torch.float16, torch.bfloat16),
            "conversion inside the kernel, small tiles",
        ),
    }
)
"""Every precision by name, the default first."""


def validate(precision: str, dtype: torch.dtype) -> str:
    """Return `precision` if inputs of `dtype` can be computed with it; ArgumentError where not."""
    known = PRECISIONS.get(precision)
    if known is None:
        if not isinstance(precision, str):
            raise TypeError(f"precision must be text, not {type(precision).__name__}")
        raise ArgumentError(
            f"precision: {precision!r} is unknown; use one of {', '.join(PRECISIONS)}"
        )
    if dtype in known.dtypes:
        return precision
    fitting = ", ".join(name for name, each in PRECISIONS.items() if dtype in each.dtypes)
    taken = ", ".join(map(dtype_name, (known if fitting else PRECISIONS["strict"]).dtypes))
    if not fitting:
        raise ArgumentError(
            f"precision: no precision takes {dtype_name(dtype)} inputs; convert them to {taken}"
        )
    raise ArgumentError(
        f"precision: {precision!r} takes {taken} inputs, not {dtype_name(dtype)}; use {fitting}, or"
        " convert the inputs"
    )


def depth(n: int, block: int = DEFAULT_BLOCK) -> int:
    """L(n, B) = ceil(log2 B) + 2 ceil(log2(n / B)) + 3: merges on the longest path of the scan of n
    keys, `block` of them folded on chip (n at most). ArgumentError: not positive. Reference: ELSA,
    Eq. 6."""
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
    """u L(n, B): the relative L2 error that merging n exact states of `dtype` may add, to first
    order. Arguments and errors as `depth`.

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
