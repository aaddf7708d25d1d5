"""Which projections the GPU kernel of this package computes: those that it computes faster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from elsa_core.backends import cuda
from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.linear import LEAST_WEIGHT
from elsa_core.base import calls
from elsa_core.ops.linear.record import Eager, plain, plain_backward, plain_gated

# Where a gradient is wanted, of an eager call: the operator's formulas take more of the host.
LEAST_TRAINED = 1 << 31
# `torch.backends.cuda.matmul.fp32_precision`, which takes nine times as long
_precision = torch._C._get_fp32_precision_getter


def support(request: Request) -> Support:
    """Whether there are projections of this kind that the kernel computes faster: of gated units
    all in one launch, of others the product with what follows it.
    """
    if request.dtype != torch.float32:
        return Support(False, f"takes float32, not {request.dtype}")
    if request.precision == "ieee":
        return Support(False, "takes tensor cores: not with precision 'ieee'")
    if _least_served(request.device) is None:
        return Support(False, "is measured on sm_90 alone; see `elsa bench linear --tune`")
    if request.operator == "gated_linear" and request.gradient:
        return Support(False, "is for calls without gradients")
    return Support(True)


def _by_kernel(input: Tensor, weight: Tensor, *terms: object) -> Tensor | None:
    """`elsa::linear` by the kernel of this package; None where it takes no such tensors."""
    if input.dtype != torch.float32:
        return None
    from elsa_core.backends.triton.linear import planner

    return planner.linear(input, weight, *terms)  # type: ignore[arg-type]


def kernel(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, precision: str = "strict",
) -> Tensor:  # fmt: skip
    """The CUDA kernel of `elsa::linear`."""
    given = (input, weight, bias, activation, residual, scale)
    out = _by_kernel(*given, precision)
    return plain(*given) if out is None else out


def gated_kernel(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str = "silu", precision: str = "strict",
) -> Tensor:  # fmt: skip
    """The CUDA kernel of `elsa::gated_linear`."""
    given = (input, weight, bias, value, value_bias, activation)
    out = None
    if input.dtype == torch.float32 and _serves(input.device, precision):
        from elsa_core.backends.triton.linear import gated

        out = gated.gated_linear(*given, precision)
    return plain_gated(*given) if out is None else out


def backward(
    grad_out: Tensor, input: Tensor, weight: Tensor, precision: str, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The CUDA kernel of `elsa::linear_backward`."""
    if grad_out.dtype == torch.float32 and _serves(grad_out.device, precision):
        from elsa_core.backends.triton.linear import planner

        grads = planner.backward(grad_out, input, weight, needs)
        if grads is not None:
            return grads
    return plain_backward(grad_out, input, weight, precision, needs)


def serve(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, precision: str = "strict",
) -> Tensor | None:  # fmt: skip
    """By the kernel of this package; None where PyTorch's own is to serve.

    Questions are in the order of their cost: eager calls are host-bound.
    """
    if not _gains(input, weight) or not _fits(input, weight, bias):
        return None
    if not _serves(input.device, precision):
        return None
    fused = activation != "none" or residual is not None or scale is not None
    ordinary = type(input) is Tensor and type(weight) in (Tensor, nn.Parameter)
    recorded = calls.recorded()
    wanted = calls.differentiates(input, weight, bias)
    if wanted and not recorded and input.numel() * weight.shape[0] < LEAST_TRAINED:
        return None
    if wanted and ordinary and not (fused or calls.traced()):
        by_kernel: Tensor = Eager.apply(input, weight, bias, precision, _forward, _backward)
        return by_kernel
    operator = torch.ops.elsa.linear.default
    call = operator if recorded or wanted or not ordinary else _eager
    out: Tensor | None = call(input, weight, bias, activation, residual, scale, precision)
    return out


def serve_gated(
    input: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, value_bias: Tensor | None,
    activation: str = "silu", precision: str = "strict",
) -> Tensor | None:  # fmt: skip
    """By the kernel that computes both products and the gate; None where these are apart."""
    if (
        not _gains(input, weight)
        or not _fits(input, weight, bias)
        or not _fits(input, value, value_bias)
        or not _serves(input.device, precision)
        or calls.differentiates(input, weight, bias, value, value_bias)
    ):
        return None
    given = (input, weight, bias, value, value_bias, activation, precision)
    ordinary = type(input) is Tensor and type(weight) in (Tensor, nn.Parameter)
    if calls.recorded() or not ordinary:
        out: Tensor = torch.ops.elsa.gated_linear.default(*given)
        return out
    from elsa_core.backends.triton.linear import gated

    return gated.gated_linear(*given)


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are plain tensors of one dtype, which an operator may take."""
    return (
        input.dtype == weight.dtype
        and (bias is None or bias.dtype == input.dtype)
        and not hasattr(weight, "__tensor_flatten__")  # a wrapper: quantised, or distributed
        and not hasattr(input, "__tensor_flatten__")
        and not calls.differentiates_otherwise()
    )


def _serves(device: torch.device, precision: str) -> bool:
    """Whether there is a kernel for such calls, and PyTorch's settings want what it computes."""
    if torch.is_autocast_enabled("cuda") or _least_served(device) is None:
        return False
    return precision != "ieee" and _precision("cuda", "matmul") != "tf32"


# A constant for the compiler, which guards its graphs on autocast and on TF32.
_serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _least_served(device: torch.device) -> int | None:
    """The multiply-adds from which the float32 kernel is known to be faster there: 0 on sm_90, what
    `elsa bench linear --tune` found on another GPU; None where it is not known, or without Triton.
    """
    if torch.version.hip or not torch.cuda.is_available():  # a fake tensor needs no GPU
        return None
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    if torch.cuda.get_device_capability(device) == (9, 0):
        return 0
    from elsa_core.backends.triton.shared import usertable

    return usertable.least_work(torch.cuda.get_device_name(device))


def _served_from(device: torch.device) -> int | None:
    return _least_served(device)


# A constant for the compiler, which opens no file.
_served_from._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget() -> None:
    """Read the user's tables again."""
    _least_served.cache_clear()
    cuda.forget()


def _gains(input: Tensor, weight: Tensor) -> bool:
    """Whether a float32 product of this size gains. Recorded programs must not ask for lengths: in
    them only the shipped figures count.
    """
    if input.is_nested or input.dtype != torch.float32:
        return False
    least = _served_from(input.device)
    if not least:
        return least == 0
    return not calls.recorded() and input.numel() * weight.shape[0] >= least


_eager = cuda.direct(torch.ops.elsa.linear.default, _by_kernel)
_forward = cuda.direct(torch.ops.elsa.linear.default, kernel)
_by_plan = cuda.direct(torch.ops.elsa.linear_backward.default, backward)


def _backward(
    grad_out: Tensor, input: Tensor, weight: Tensor, precision: str, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward`; small weights are PyTorch's without a question."""
    if grad_out.shape[-1] * max(input.shape[-1], weight.shape[-1]) < LEAST_WEIGHT:
        return plain_backward(grad_out, input, weight, precision, needs)
    return _by_plan(grad_out, input, weight, precision, needs)  # type: ignore[no-any-return]
