"""`linear`: a linear layer with its activation, LayerScale and residual in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from elsa_core import dispatch
from elsa_core.backends.support import Request
from elsa_core.base import calls
from elsa_core.base.operands import require_tensor
from elsa_core.dispatch import Route, launches
from elsa_core.errors import ArgumentError
from elsa_core.ops.arguments import explain_types
from elsa_core.ops.linear.record import ACTIVATIONS, epilogue
from elsa_core.precision import validate

# The weight [N, K] and the bias [N], perhaps None, of the product that a gate multiplies.
Value = tuple[Tensor, Tensor | None]


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    value: Value | None = None,
    precision: str = "strict",
    backend: str = "auto",
) -> Tensor:
    """`residual + scale * activation(input @ weight.T + bias)`, with a second product as a factor
    of the activation where `value` is given: a gated linear unit.

    The first three arguments are those of `torch.nn.functional.linear`, and so is the result
    without the others; an absent term is left out. Operands may have any strides.

    On sm_90 float32 products are computed on tensor cores, faster than PyTorch's and with smaller
    errors: operands are split into halves of 11 significant bits, sums are float32. Not with
    precision="ieee", nor where PyTorch itself was allowed TF32, nor under autocast. On AMD's
    processors with AVX-512 PyTorch's oneDNN computes larger float32 products that no tracer records
    and that need no gradient. Everything else is `torch.nn.functional.linear` and what PyTorch has
    for the rest.

    Args:
        input: [..., K], any floating dtype. weight: [N, K]. bias: [N].
        activation: "none", "gelu", "gelu_tanh" (its approximation by tanh), "quick_gelu"
            (x * sigmoid(1.702 x)), "silu" or "relu".
        residual: [..., N], added last. scale: [N], LayerScale's gamma.
        value: weight [N, K] and bias [N] or None of the product that the activation multiplies:
            `scale * activation(input @ weight.T + bias) * (input @ value[0].T + value[1])`. On
            sm_90 one launch computes both in float32.
        precision, backend: as in `elsa_core.attention`.

    Returns:
        [..., N] in input's dtype; differentiable.

    Raises:
        TypeError: an argument of a wrong type; the message names it.
        ArgumentError: an argument does not fit; the message names it.

    Sources: split products as in Ootomo and Yokota, arXiv 2203.03341; gated linear units as in
    Shazeer, arXiv 2002.05202.
    """
    try:
        # the compiler, which would guard on the others, reads no further than its own question
        if value is None and not is_compiling() and backend == "auto":
            given = (input, weight, bias, activation, residual, scale, precision)
            found = launches.find_linear(given)
            if found is not None:  # such a call was checked before
                return found
        _check(input, weight, bias, residual, scale, value)
        _check_names(activation, precision, backend, input.dtype)
    except (AttributeError, TypeError) as error:
        _explain_types(error, locals())
        raise
    if value is not None:
        out = served_gated(input, (weight, bias), value, activation, precision, backend)
        if out is None:
            out = served(input, weight, bias, activation, precision=precision, backend=backend)
            out = out * served(input, *value, precision=precision, backend=backend)
        return epilogue(out, "none", residual, scale)
    given = (input, weight, bias, activation, residual, scale, precision)
    return _computed(given, backend)


def served(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, precision: str = "strict",
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """`linear` without its checks, for patched layers."""
    given = (input, weight, bias, activation, residual, scale, precision)
    if not is_compiling() and backend == "auto":
        found = launches.find_linear(given)
        if found is not None:
            return found
    return _computed(given, backend)


def _computed(given: tuple[Any, ...], backend: str) -> Tensor:
    input, weight, bias, activation, residual, scale, precision = given
    fused = activation != "none" or residual is not None or scale is not None
    if fused and _composes(input, weight, bias, residual, scale):
        product = _computed((input, weight, bias, "none", None, None, precision), backend)
        return epilogue(product, activation, residual, scale)
    device_type = "cuda" if input.is_cuda else input.device.type
    if (
        device_type == "cpu"
        and calls.keeps_products()
        # computes what PyTorch's does: of one dtype, not cast, and of no class that may know
        # PyTorch's operators alone (quantised weights)
        and not torch.is_autocast_enabled("cpu")
        and not any(hasattr(t, "__tensor_flatten__") for t in (input, weight, bias))
        and input.dtype == weight.dtype
        and (bias is None or bias.dtype == input.dtype)
    ):
        kept: Tensor = torch.ops.elsa.linear.default(*given)
        return kept
    serving = dispatch.SERVING.get(("linear", device_type, backend), ())
    if device_type == "cuda" and backend == "auto" and _is_left_to_pytorch(input, weight, bias):
        serving = ()
    for serve in serving:
        out: Tensor | None = serve(*given)
        if out is not None:
            if (
                backend == "auto"
                and serve is serving[0]  # one ahead of it may have declined this call alone
                and device_type == "cuda"
                and not is_compiling()
                and input.dtype == torch.float32
                and weight.dim() == 2
                and not (calls.traced() or calls.differentiates(*given))
            ):
                launches.LINEAR.admit(given, given)
            return out
    if input.dtype == torch.bfloat16 and not calls.recorded():
        input = dispatch.without_gaps(input)
    product = functional.linear(input, weight, bias)
    return epilogue(product, activation, residual, scale) if fused else product


def _is_left_to_pytorch(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this is a small eager layer, which Python overhead bounds: PyTorch computes it, but
    for float32 ones whose launch the cache can hold."""
    if calls.recorded() or input.is_nested or weight.dim() != 2:
        return False
    work = input.numel() * weight.shape[0]
    if work >= dispatch.eager_least("linear", input.dtype):
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    columns, depth = weight.shape
    most, least_rows = dispatch.eager_products(input.device, input.dtype)
    return (
        depth % 8 != 0
        or columns % 4 != 0  # no kernel takes such rows
        or work >= most
        or input.numel() < least_rows * depth
        or calls.differentiates(input, weight, bias)
        or not launches.LINEAR.works()
    )


def served_gated(
    input: Tensor, gate: Value, value: Value, activation: str, precision: str = "strict",
    backend: str = "auto",
) -> Tensor | None:  # fmt: skip
    """activation(input @ gate[0].T + gate[1]) * (input @ value[0].T + value[1]) by a kernel
    that computes all of it; None where none does."""
    serving = dispatch.SERVING.get(("gated_linear", input.device.type, backend), ())
    if not serving or _composes(input, *gate, *value):  # the value's operands like other terms
        return None
    for serve in serving:
        out: Tensor | None = serve(input, *gate, *value, activation, precision)
        if out is not None:
            return out
    return None


def explain_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none",
    residual: Tensor | None = None, scale: Tensor | None = None, value: Value | None = None,
    precision: str = "strict", backend: str = "auto",
) -> Route:  # fmt: skip
    """Say who computes products of this kind faster than PyTorch, if a backend does, and why not.

    Takes the arguments of `linear` and raises what it would raise. What is small, recorded or laid
    out otherwise may be PyTorch's all the same. With `value` the answer is that of the launch which
    computes both products, or of the product with `weight` alone where no backend has one.
    """
    try:
        _check(input, weight, bias, residual, scale, value)
        _check_names(activation, precision, backend, input.dtype)
    except (AttributeError, TypeError) as error:
        _explain_types(error, locals())
        raise
    gradient = calls.wanted(input=input, weight=weight, bias=bias, residual=residual, scale=scale)
    request = Request(
        input.device.type, input.dtype, weight.shape[-1], weight.shape[0], precision, "linear",
        gradient=gradient, ordinal=input.get_device(),
    )  # fmt: skip
    requests = [request]
    if value is not None:
        gradient += calls.wanted(value=value[0], value_bias=value[1])
        requests.append(request._replace(operator="gated_linear", gradient=gradient))
    routes = []
    for each in requests:
        serving = (each.operator, each.device_type, backend) in dispatch.SERVING
        able = backend == "auto" or (serving and dispatch.support(each, backend).ok)
        asked = backend if able else dispatch.PLAIN
        routes.append(dispatch.route(each, asked, schedule=(input, weight, bias)))
    found, *of_gated = routes
    for gated in of_gated:
        if gated.backend != dispatch.PLAIN:
            return gated
        ahead = (f"in one launch with the gate: {reason}" for reason in gated.reasons)
        return replace(found, reasons=(*ahead, *found.reasons))
    fused = activation != "none" or residual is not None or scale is not None
    if fused or found.backend == dispatch.PLAIN or precision != "strict":
        return found
    if (row := dispatch.product_by_pytorch(input, weight)) is None:
        return found
    slower = (
        f"{row.ratio[0]} to {row.ratio[1]} of PyTorch's speed in the shipped table; serves "
        "exported programs and open lengths of compiled ones"
    )
    return dispatch.route(request, dispatch.PLAIN, schedule=(input, weight, bias), because=slower)


def _composes(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    scale: Tensor | None,
) -> bool:  # fmt: skip
    """Whether what follows the product is PyTorch's: a derivative is wanted, or dtypes differ."""
    # promoted as PyTorch does
    if residual is not None and residual.dtype != input.dtype:
        return True
    if scale is not None and scale.dtype != input.dtype:
        return True
    if torch.is_grad_enabled() and calls.wanted(
        input=input, weight=weight, bias=bias, residual=residual, scale=scale
    ):
        return True
    return calls.differentiates_otherwise()


def _explain_types(error: Exception, given: dict[str, Any]) -> None:
    scale, value = given.pop("scale"), given.pop("value")  # of other operators others
    explain_types(error, given)
    pair = value if isinstance(value, (tuple, list)) else ()
    parts = zip(("value's weight", "value's bias"), pair, strict=False)
    for name, tensor in (*parts, ("scale", scale)):
        if tensor is not None:
            require_tensor(name, tensor)


def _check(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    scale: Tensor | None, value: Value | None,
) -> None:  # fmt: skip
    """Refuse shapes that do not fit; what PyTorch broadcasts beyond the contract is refused too."""
    if not input.is_floating_point():
        raise ArgumentError(f"input must be floating, not {input.dtype}")
    if weight.dim() != 2:
        raise ArgumentError(f"weight must be [N, K], not {list(weight.shape)}")
    columns, depth = weight.shape
    if input.dim() < 1 or input.shape[-1] != depth:
        raise ArgumentError(
            f"input must be [..., {depth}] for weight {[columns, depth]}, not {list(input.shape)}"
        )
    for name, vector in (("bias", bias), ("scale", scale)):
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != columns):
            raise ArgumentError(f"{name} must be [{columns}], not {list(vector.shape)}")
    if value is not None:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise ArgumentError("value must be a pair: the weight [N, K], and the bias [N] or None")
        if value[0] is None:
            raise TypeError("value's weight must be a torch.Tensor, not None")
        for name, part, sizes in (
            ("weight", value[0], weight.shape),
            ("bias", value[1], (columns,)),
        ):
            if part is not None and part.shape != sizes:
                raise ArgumentError(f"value's {name} must be {list(sizes)}, not {list(part.shape)}")
    if residual is not None and residual.shape != (*input.shape[:-1], columns):
        raise ArgumentError(
            f"residual must be {[*input.shape[:-1], columns]}, not {list(residual.shape)}"
        )


def _check_names(activation: str, precision: str, backend: str, dtype: torch.dtype) -> None:
    if activation not in ACTIVATIONS:
        raise ArgumentError(
            f"activation={activation!r} is unknown: choose one of {', '.join(ACTIVATIONS)}"
        )
    validate(precision, dtype)
    known = ("auto", *(each.name for each in dispatch.BACKENDS))
    if backend not in known:
        if not isinstance(backend, str):
            raise TypeError(f"backend must be text, not {type(backend).__name__}")
        raise ArgumentError(f"backend={backend!r} is unknown: choose one of {', '.join(known)}")


# A constant for the compiler: names and a dtype decide.
_check_names._dynamo_marked_constant = True  # type: ignore[attr-defined]
