"""`linear`: the projections of patched sites, by what computes them fastest and as exactly."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
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
# Multiply-adds from which oneDNN takes less time than MKL on a processor that MKL gives no AVX-512.
LEAST_ONEDNN = 1 << 23
# Channels that it sums at once, as MKL does: longer chains round up to twice as much.
ONEDNN_DEPTH = 192
# Rows from which it is worth to copy the weight's parts, which oneDNN wants dense.
ONEDNN_ROWS = 128
CPUINFO = Path("/proc/cpuinfo")


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
    autocast. Half precision is computed here in few cases, see HALF_DEPTH.

    On AMD's processors with AVX-512, PyTorch's MKL computes float32 products with AVX2; there
    larger ones that nobody records and that need no gradient are left to PyTorch's oneDNN, in
    parts that round like MKL's. Everything else, and all with precision="ieee", is
    `torch.nn.functional.linear`.

    Args:
        input: [..., K]. weight: [N, K]. bias: [N]. precision, backend: as in `elsa_core.attention`.

    Returns:
        [..., N] in input's dtype; differentiable.

    Source: split products as in Ootomo and Yokota, arXiv 2203.03341.
    """
    if input.is_cuda:
        out = _on_gpu(input, weight, bias, precision, backend)
        return functional.linear(input, weight, bias) if out is None else out
    if backend != "eager" and precision != "ieee" and _suits_onednn(input, weight, bias):
        return _by_onednn(input, weight, bias)
    return functional.linear(input, weight, bias)


def _by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sums of ONEDNN_DEPTH channels at most, added up."""
    product = torch.ops.mkldnn._linear_pointwise
    depth = weight.shape[1]
    parts = -(-depth // ONEDNN_DEPTH)
    out: Tensor | None = None
    for i in range(parts):
        part = slice(i * depth // parts, (i + 1) * depth // parts)
        x, w = input[..., part].contiguous(), weight[:, part].contiguous()
        if out is None:
            out = product(x, w, bias, "none", [], "")
        else:
            out += product(x, w, None, "none", [], "")
    assert out is not None  # there is a channel
    return out


def _on_gpu(
    input: Tensor, weight: Tensor, bias: Tensor | None, precision: str, backend: str
) -> Tensor | None:
    """By the kernel of this package; None where PyTorch's own is to serve.

    Questions are in the order of their cost: many calls are of the host's time alone.
    """
    if not _suits(input, weight):
        return None
    small = _is_small(input, weight)
    if (
        (small and _seen(input, weight))
        or not _fits(input, weight, bias)
        or not _serves(input.device, input.dtype, precision, backend)
    ):
        return None
    plain = _plain(input, weight)
    through = calls.recorded() or calls.differentiates(input, weight, bias)
    if not small and (through or not plain):
        out: Tensor = torch.ops.elsa.linear.default(input, weight, bias)
        return out
    from elsa_core.backends.triton.linear import gemm as kernel

    if not small:
        return kernel.linear(input, weight, bias)
    if plain:
        kernel.warm(input, weight, bias)
    return None


def _plain(input: Tensor, weight: Tensor) -> bool:
    return type(input) is Tensor and type(weight) in (Tensor, nn.Parameter)


def _suits_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether PyTorch's oneDNN computes this faster than the MKL that PyTorch would take."""
    return (
        input.dtype == torch.float32
        and not calls.recorded()
        and weight.dim() == 2
        and input.numel() * weight.shape[0] >= LEAST_ONEDNN
        and input.shape[-1] == weight.shape[1]
        and (weight.shape[1] <= ONEDNN_DEPTH or input.numel() >= ONEDNN_ROWS * weight.shape[1])
        and _mkl_lags()
        and _plain(input, weight)
        and _dense(input)
        and _dense(weight)
        and _suits_bias(bias, weight)
        and not calls.differentiates(input, weight, bias)
        and not torch.is_autocast_enabled("cpu")
        and _onednn_is_exact()
    )


def _suits_bias(bias: Tensor | None, weight: Tensor) -> bool:
    if bias is None:
        return True
    plain = type(bias) in (Tensor, nn.Parameter)
    return plain and _dense(bias) and bias.shape == weight.shape[:1]


def _dense(t: Tensor) -> bool:
    """Whether this is float32 in the CPU's memory, element by element."""
    return (
        t.device.type == "cpu"
        and t.dtype == torch.float32
        and t.layout is torch.strided
        and t.is_contiguous()
    )


def _onednn_is_exact() -> bool:
    """Whether oneDNN is on, and float32 products were not left to it in fewer bits."""
    settings: Any = torch.backends.mkldnn
    return bool(settings.enabled) and settings.matmul.fp32_precision in ("none", "ieee")


@lru_cache(maxsize=1)
def _mkl_lags() -> bool:
    """Whether this is a processor with AVX-512 for which MKL keeps to AVX2: one of AMD's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        with CPUINFO.open(encoding="utf-8") as lines:
            return any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in lines)
    except OSError:
        return False


def _suits(input: Tensor, weight: Tensor) -> bool:
    """Whether a kernel of this package takes less of the GPU's time than PyTorch's."""
    if input.dtype == torch.float32:
        return True
    depth = weight.shape[-1]
    if calls.recorded() or not 0 < depth <= HALF_DEPTH:  # what is recorded must not ask for lengths
        return False
    return HALF_ROWS[0] <= input.numel() // depth <= HALF_ROWS[1]


def _is_small(input: Tensor, weight: Tensor) -> bool:
    """Whether the host would be waited for: not where a CUDA graph or a program is recorded."""
    if calls.recorded() or input.numel() * weight.shape[0] >= LEAST_WORK:
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
