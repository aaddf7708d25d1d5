"""Projections by PyTorch's oneDNN, on processors that PyTorch's MKL gives no AVX-512."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core import calls
from elsa_core.backends import processor
from elsa_core.backends.support import Request, Support
from elsa_core.operators.linear import epilogue

# Multiply-adds from which oneDNN takes less time than MKL on a processor that MKL gives no AVX-512.
LEAST_ONEDNN = 1 << 23
# Channels that it sums at once, as MKL does: longer chains round up to twice as much.
ONEDNN_DEPTH = 192
# Rows from which it is worth to copy the weight's parts, which oneDNN wants dense.
ONEDNN_ROWS = 128


def support(request: Request) -> Support:
    """Whether there are projections of this kind that oneDNN computes faster, and as exactly."""
    if request.dtype != torch.float32 or request.precision == "ieee" or request.gradient:
        return Support(False, "takes float32 in inference, not with precision 'ieee'")
    if not _mkl_lags():
        return Support(False, "MKL is no slower on this processor")
    return Support(True)


def serve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    scale: Tensor | None,
    precision: str,
    *derived: Tensor | None,
) -> Tensor | None:
    """The call where oneDNN computes the product faster than MKL, and as exactly; None elsewhere.

    What comes after the product is PyTorch's; `derived` (halves and powers) is not read.
    """
    if precision == "ieee" or torch.compiler.is_compiling() or not _mkl_lags():
        return None
    if not _suits_onednn(input, weight, bias):
        return None
    return epilogue(_by_onednn(input, weight, bias), activation, residual, scale)


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
    return processor.vendor() == "AuthenticAMD"


def _plain(input: Tensor, weight: Tensor) -> bool:
    return type(input) is Tensor and type(weight) in (Tensor, nn.Parameter)
