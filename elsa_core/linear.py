"""`linear`: the projections of patched sites, by a kernel of our own where it is faster."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from elsa_core import calls, ops  # noqa: F401  (ops registers the operator)

# Of a call outside CUDA graphs and compilers: with fewer multiply-adds the host, which takes some
# microseconds more, is what one waits for.
LEAST_WORK = 1 << 28
# Half precision gains where PyTorch's library has no kernel that fits: few channels, and rows
# within these bounds.
HALF_DEPTH = 96
HALF_ROWS = (2048, 65536)
MOST_KINDS = 4096


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    precision: str = "strict",
    backend: str = "auto",
) -> Tensor:
    """input @ weight.T + bias, as `torch.nn.functional.linear`.

    On sm_90 float32 products are computed on tensor cores, as three products of TF32 halves (22
    significant bits) with float32 sums of short chains: faster than PyTorch's, and with smaller
    errors. Not with precision="ieee", nor where PyTorch itself was allowed TF32, nor under
    autocast: there, and everywhere else, PyTorch's own serves the call. Half precision is computed
    here in few cases, see HALF_DEPTH.

    Args:
        input: [..., K]. weight: [N, K]. bias: [N]. precision, backend: as in `elsa_core.attention`.

    Returns:
        [..., N] in input's dtype; differentiable.

    Source: split products as in Ootomo and Yokota, arXiv 2203.03341.
    """
    # in the order of their cost: many calls are of the host's time alone
    if not (input.is_cuda and _suits(input, weight)):
        return functional.linear(input, weight, bias)
    small = _is_small(input, weight)
    if (
        (small and _seen(input, weight))
        or not _fits(input, weight, bias)
        or not _serves(input.device, input.dtype, precision, backend)
    ):
        return functional.linear(input, weight, bias)
    plain = type(input) is Tensor and type(weight) in (Tensor, nn.Parameter)
    recorded = calls.watched() or calls.differentiates(input, weight, bias)
    if not small and (recorded or not plain):
        out: Tensor = torch.ops.elsa.linear.default(input, weight, bias)
        return out
    from elsa_core.backends.triton import linear as kernel

    if small:
        if plain:
            kernel.warm(input, weight, bias)
        return functional.linear(input, weight, bias)
    own = kernel.linear(input, weight, bias)
    return functional.linear(input, weight, bias) if own is None else own


def _suits(input: Tensor, weight: Tensor) -> bool:
    """Whether a kernel of this package takes less of the GPU's time than PyTorch's."""
    if input.dtype == torch.float32:
        return True
    depth = weight.shape[-1]
    if calls.watched() or not 0 < depth <= HALF_DEPTH:  # what is recorded must not ask for lengths
        return False
    return HALF_ROWS[0] <= input.numel() // depth <= HALF_ROWS[1]


def _is_small(input: Tensor, weight: Tensor) -> bool:
    """Whether the host would be waited for: not where a CUDA graph or a program is recorded."""
    if calls.watched() or input.numel() * weight.shape[0] >= LEAST_WORK:
        return False
    return not torch.cuda.is_current_stream_capturing()


_SEEN: set[Any] = set()


def _seen(input: Tensor, weight: Tensor) -> bool:
    """Whether such a small call was here before.

    Nothing can be loaded while a CUDA graph is recorded. So the first small call of its kind, in
    the run that warms up, has the kernel loaded that serves its like in the graph.
    """
    kind = (input.shape, weight.shape, input.dtype, input.device)
    if kind in _SEEN:
        return True
    if len(_SEEN) >= MOST_KINDS:
        _SEEN.clear()
    _SEEN.add(kind)
    return False


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are plain tensors of one dtype, which an operator may take."""
    return (
        input.dtype == weight.dtype
        and (bias is None or bias.dtype == input.dtype)
        and not hasattr(weight, "__tensor_flatten__")  # a wrapper: quantised, or distributed
        and not hasattr(input, "__tensor_flatten__")
        and not calls.differentiates_otherwise()
    )


def _serves(device: torch.device, dtype: torch.dtype, precision: str, backend: str) -> bool:
    """Whether there is a kernel for such calls, and PyTorch's settings want what it computes."""
    if backend not in ("auto", "triton") or torch.is_autocast_enabled("cuda"):
        return False
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or not _has_kernel(device):
        return False
    if dtype != torch.float32:
        return True
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return precision != "ieee" and not tf32


# A constant for the compiler, which guards its graphs on autocast and on TF32.
_serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _has_kernel(device: torch.device) -> bool:
    """Whether the kernel is known to be faster there: on sm_90, with Triton."""
    if torch.version.hip or not torch.cuda.is_available():  # a fake tensor needs no GPU
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)
