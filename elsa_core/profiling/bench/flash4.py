"""FlashAttention 4 as a peer: the package flash-attn-4, half precision on Hopper and Blackwell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any, Final

import torch
from torch import Tensor

from elsa_core.errors import UnavailableError
from elsa_core.measuring.timing import Contender

NAME: Final = "flash-attn-4"
_MAJORS: Final = (9, 10, 11, 12)  # compute capabilities with kernels for its gradients
_DTYPES: Final = (torch.float16, torch.bfloat16)


def refusal(query: Tensor, mask: Tensor | None) -> str:
    """Why it cannot take these inputs on this GPU, installed or not; empty where it can."""
    if query.dtype not in _DTYPES:
        return f"it takes float16 and bfloat16, not {query.dtype}".replace("torch.", "")
    if mask is not None:
        return "it takes no mask"
    major, minor = torch.cuda.get_device_capability(query.device)
    if major not in _MAJORS:
        return f"it is for Hopper and Blackwell, not for compute capability {major}.{minor}"
    return ""


def attention() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Its attention of [B, H, N, D], with gradients.

    It takes tokens before heads. Strides are arguments of its kernels, so that transposed views of
    queries, keys, values and gradients reach them without a copy.
    """
    try:
        from flash_attn.cute import flash_attn_func
    except ModuleNotFoundError as error:
        # FlashAttention 2 is a package `flash_attn` too, without this part.
        if error.name not in ("flash_attn", "flash_attn.cute"):
            raise
        raise UnavailableError("the package flash-attn-4 is not installed") from None
    function: Any = flash_attn_func

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        returned = function(*(t.transpose(1, 2) for t in (query, key, value)))
        # The lse comes with the output.
        out: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return out.transpose(1, 2)

    return attend


def contender(query: Tensor, key: Tensor, value: Tensor) -> Contender:
    """Its forward. The first call compiles kernels, a second or two for each."""
    call = functools.partial(attention(), query, key, value)
    try:
        package = f"{NAME} {metadata.version(NAME)}"
    except metadata.PackageNotFoundError:
        package = NAME
    return Contender(NAME, call, notes={"package": package})
