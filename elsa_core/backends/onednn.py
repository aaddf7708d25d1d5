"""Projections by PyTorch's oneDNN, on processors that PyTorch's MKL gives no AVX-512."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core.backends import processor
from elsa_core.backends.support import Request, Support
from elsa_core.base import calls
from elsa_core.ops.linear.record import epilogue

# Multiply-adds from which oneDNN takes less time than MKL on a processor that MKL gives no AVX-512.
LEAST_ONEDNN = 1 << 23
# Channels that it sums at once, as MKL does: longer chains round up to twice as much.
ONEDNN_DEPTH = 192
# Rows from which it is worth to copy the weight's parts, which oneDNN wants dense.
ONEDNN_ROWS = 128
# Of a gradient of weights, whose parts are rows: elements of the weight from which, and rows up to
# which, copies and additions cost less than oneDNN saves.
LEAST_WEIGHT = 1 << 17
MOST_ROWS = 4096


def support(request: Request) -> Support:
    """Whether there are projections of this kind that oneDNN computes faster, and as exactly."""
    if request.dtype != torch.float32 or request.precision == "ieee":
        return Support(False, "takes float32, not with precision 'ieee'")
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
    if calls.differentiates(input, weight, bias):
        product: Tensor = _Trained.apply(input, weight, bias)
    else:
        product = _by_onednn(input, weight, bias)
    return epilogue(product, activation, residual, scale)


class _Trained(torch.autograd.Function):
    """A product and its gradients; where those are differentiated again, by PyTorch's formulas."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _by_onednn(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        rows, slopes = input.reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])
        plain = calls.by_operator(grad) or type(grad) is not Tensor
        found: list[Tensor | None] = [None, None, None]
        if of_input:
            found[0] = grad @ weight if plain else _by_onednn(grad, weight.t(), None)
        if of_weight:
            few = rows.shape[0] <= MOST_ROWS and weight.numel() >= LEAST_WEIGHT
            by_rows = few and not plain
            found[1] = _of_weight(slopes, rows) if by_rows else slopes.t() @ rows
        if of_bias:
            found[2] = slopes.sum(0)
        return tuple(found)


def _of_weight(grad: Tensor, input: Tensor) -> Tensor:
    """grad [M, N] and input [M, K] -> [N, K], sums of ONEDNN_DEPTH rows at most, added up."""
    product = torch.ops.mkldnn._linear_pointwise
    out: Tensor | None = None
    parts = -(-grad.shape[0] // ONEDNN_DEPTH)
    size = -(-grad.shape[0] // parts)
    for part in zip(grad.split(size), input.split(size), strict=True):
        left, right = (t.t().contiguous() for t in part)
        found = product(left, right, None, "none", [], "")
        out = found if out is None else out.add_(found)
    assert out is not None  # there is a row
    return out


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
        and not calls.differentiates_otherwise()
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
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return processor.name() == "AuthenticAMD AVX512"


def _plain(input: Tensor, weight: Tensor) -> bool:
    return type(input) is Tensor and type(weight) in (Tensor, nn.Parameter)
