"""`linear`: the projections of patched sites, by what computes them fastest and as exactly."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from elsa_core import calls, routing
from elsa_core.backends.support import Request
from elsa_core.routing import Route


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
    autocast. Half precision is computed here in few cases, see
    `elsa_core.backends.triton.linear.gate`.

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
    device_type = "cuda" if input.is_cuda else input.device.type
    for serve in routing.SERVING.get(("linear", device_type, backend), ()):
        out: Tensor | None = serve(input, weight, bias, precision)
        if out is not None:
            return out
    return functional.linear(input, weight, bias)


def explain_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    precision: str = "strict",
    backend: str = "auto",
) -> Route:
    """Say who computes products of this kind faster than PyTorch, if anybody does, and why not.

    Takes the arguments of `linear`. What is small, recorded or laid out in another way is
    PyTorch's all the same.
    """
    request = Request(
        input.device.type, input.dtype, weight.shape[-1], weight.shape[0], precision, "linear",
        gradient=calls.wanted(input=input, weight=weight, bias=bias),
    )  # fmt: skip
    serving = ("linear", input.device.type, backend) in routing.SERVING
    asked = "auto" if backend == "auto" or serving else routing.PLAIN
    return routing.route(request, asked, schedule=(input, weight, bias))
