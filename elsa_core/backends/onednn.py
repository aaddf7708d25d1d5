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
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    scale: Tensor | None, precision: str,
) -> Tensor | None:  # fmt: skip
    """The call where oneDNN computes the product faster than MKL, and as exactly; None elsewhere.

    What comes after the product is PyTorch's.
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
            if plain or not few:
                found[1] = slopes.t() @ rows
            else:  # [M, N] and [M, K] -> [N, K]
                found[1] = _by_onednn(slopes.t(), rows.t(), None)
        if of_bias:
            found[2] = slopes.sum(0)
        return tuple(found)


def _by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """input weight^T + bias: sums over ONEDNN_DEPTH channels at most, added up."""
    product = torch.ops.mkldnn._linear_pointwise
    depth = weight.shape[1]
    count = -(-depth // ONEDNN_DEPTH)
    out: Tensor | None = None
    for i in range(count):
        part = slice(i * depth // count, (i + 1) * depth // count)
        left, right = input[..., part].contiguous(), weight[:, part].contiguous()
        if out is None:
            out = product(left, right, bias, "none", [], "")
        else:
            out += product(left, right, None, "none", [], "")
    assert out is not None
    return out


def _suits_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    settings: Any = torch.backends.mkldnn
    operands = [t for t in (input, weight, bias) if t is not None]
    return (
        not calls.recorded()
        and weight.dim() == 2
        and input.numel() * weight.shape[0] >= LEAST_ONEDNN
        and input.shape[-1] == weight.shape[1]
        and (weight.shape[1] <= ONEDNN_DEPTH or input.numel() >= ONEDNN_ROWS * weight.shape[1])
        and type(input) is Tensor
        and all(type(t) in (Tensor, nn.Parameter) for t in operands)
        # float32 in the CPU's memory, element by element
        and all(t.device.type == "cpu" and t.layout is torch.strided for t in operands)
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in operands)
        and (bias is None or bias.shape == weight.shape[:1])
        and not calls.differentiates_otherwise()
        and not torch.is_autocast_enabled("cpu")
        # on, and float32 products were not left to it in fewer bits
        and bool(settings.enabled)
        and settings.matmul.fp32_precision in ("none", "ieee")
    )


@lru_cache(maxsize=1)
def _mkl_lags() -> bool:
    """Whether this is a processor with AVX-512 for which MKL keeps to AVX2: one of AMD's."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return processor.name() == "AuthenticAMD AVX512"
