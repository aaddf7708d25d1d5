"""`entmax_attention`: attention whose weights can be exactly zero."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor

from elsa_core import dispatch, ops
from elsa_core.base import calls
from elsa_core.base.operands import operands, require_tensor
from elsa_core.dispatch import Route
from elsa_core.errors import ArgumentError
from elsa_core.ops.arguments import (
    default_scale,
    explain_types,
    explained,
    kind_of,
    prepared,
    restored,
)
from elsa_core.ops.attention.api import attention as softmax_attention
from elsa_core.ops.attention.api import explain as explain_softmax

LEAST_ALPHA, MOST_ALPHA = 1.0, 4.0


def entmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    alpha: float | Tensor = 1.5,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "strict",
    backend: str = "auto",
) -> Tensor:
    """alpha-entmax attention: `entmax(query key^T * scale + attn_mask, alpha) value`.

    A row of scores s has the weights [(alpha - 1) s_j - tau]_+^(1 / (alpha - 1)), with the
    threshold tau for which they sum to 1; scores at or below it weigh exactly 0. alpha = 1 is
    softmax, alpha = 2 is sparsemax. Inputs may have any strides. Jagged nested tensors
    [B, H, j, D] take no mask. Scores and sums are float32, or float64 for float64 inputs.
    Differentiable once in query, key, value, an additive mask and alpha. Forward-mode AD and the
    derivatives of `torch.func` hold all scores in memory.

    Args:
        query: [..., Hq, Nq, D], floating; `...` is any number of batch dims.
        key: [..., Hkv, Nk, D], the query's dtype and device.
        value: [..., Hkv, Nk, Dv].
        attn_mask: as in `elsa_core.attention`: bool (True takes part) or additive, broadcastable to
            [..., Hq, Nq, Nk].
        alpha: a number in [1, 4], or a floating tensor that broadcasts to [B, Hq, 1, 1], B the
            product of the batch dims. Entries outside [1, 4] are refused on the CPU; elsewhere, and
            in compiled programs, they make the results of their heads NaN.
        is_causal: query i sees keys 0..i (top-left aligned); excludes `attn_mask`.
        scale: factor on the scores; default 1 / sqrt(D).
        enable_gqa: allow fewer key/value heads than query heads (Hq a multiple of Hkv).
        precision: "strict", "ieee" or "lean", see `elsa_core.precision`.
        backend: "auto" or one of `elsa_core.dispatch.names("entmax_attention")`. "auto" is the C++
            kernels on a CPU and the Triton kernels on CUDA, in float32, float16 and bfloat16 up to
            the head dimensions of docs/entmax.md. Elsewhere it is plain PyTorch.

    Returns:
        out [..., Hq, Nq, Dv] in the query's dtype. A row that sees no key gives zeros.

    Raises:
        TypeError: an argument of a wrong type; the message names it.
        ArgumentError: an argument does not fit; the message names it.
        UnavailableError: the backend asked for by name cannot serve the call.

    Source: Peters, Niculae and Martins, arXiv 1905.05702, Eq. 10 and Prop. 2; the derivative by
    alpha: Correia, Niculae and Martins, arXiv 1909.00015, Prop. 1; tiles that are skipped:
    AdaSplash, arXiv 2502.12082, Sec. 3.
    """
    if isinstance(scale, Tensor):
        raise ArgumentError(calls.NO_TENSOR_SCALE)
    try:
        require_tensor("query", query)
        compute: Any = attention
        if query.is_nested:
            from elsa_core.ops.entmax.varlen import of_nested as compute  # it is made of these
        out: Tensor = compute(
            query, key, value, attn_mask, alpha=alpha, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, precision=precision, backend=backend,
        )  # fmt: skip
        return out
    except (AttributeError, RuntimeError, TypeError) as error:
        explain_types(error, locals())
        raise


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *,
    alpha: float | Tensor, is_causal: bool, scale: float | None, enable_gqa: bool, precision: str,
    backend: str,
) -> Tensor:  # fmt: skip
    """`elsa_core.entmax_attention` of dense tensors."""
    if is_softmax(alpha):
        return softmax_attention(  # type: ignore[return-value]  # no lse was asked for
            query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa,
            precision=precision, backend=backend,
        )  # fmt: skip
    q, k, v, mask = prepared(query, key, value, attn_mask, is_causal, enable_gqa)
    number, head_alpha = of_heads(alpha, q)
    name = dispatch.choose("entmax_attention", *kind_of(q, v, precision), backend)
    run = dispatch.RUNS["entmax_attention", name]
    if calls.exporting_onnx() or dispatch.plain_alone(backend):
        run = ops.ENTMAX_ATTENTION.exported
    factor = default_scale(q) if scale is None else scale
    found = run(q, k, v, mask, head_alpha, number, is_causal, factor, precision)[0]
    return restored((query, key, value), found)[0]  # type: ignore[no-any-return]


def explain_entmax_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *,
    alpha: float | Tensor = 1.5, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, precision: str = "strict", backend: str = "auto",
) -> Route:  # fmt: skip
    """Say which backend and arithmetic would serve `entmax_attention` with these arguments, and who
    its gradients; takes and raises what it does."""
    if is_softmax(alpha):
        return explain_softmax(
            query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa,
            precision=precision, backend=backend,
        )  # fmt: skip
    q, k, v, mask = operands(query, key, value, attn_mask, is_causal, enable_gqa)
    gradient = calls.wanted(
        query=query, key=key, value=value, attn_mask=attn_mask, head_alpha=of_heads(alpha, q)[1]
    )
    of_mask = dispatch.mask_kind(mask, is_causal)
    return explained("entmax_attention", (q, k, v), precision, backend, gradient, (q, k), of_mask)


def is_softmax(alpha: float | Tensor) -> bool:
    """Whether alpha is the number 1.

    Raises:
        TypeError: it is neither a number nor a tensor.
        ArgumentError: it is a number outside [1, 4].
    """
    if isinstance(alpha, Tensor):
        return False
    if not isinstance(alpha, Real):
        raise TypeError(f"alpha must be a number or a torch.Tensor, not {type(alpha).__name__}")
    if not LEAST_ALPHA <= float(alpha) <= MOST_ALPHA:  # NaN too
        raise ArgumentError(f"alpha={float(alpha)} must be in [1, 4]")
    return alpha == LEAST_ALPHA


def of_heads(alpha: float | Tensor, query: Tensor) -> tuple[float, Tensor | None]:
    """The number that `is_softmax` took, or 0 and the tensor as [B or 1, Hq or 1, 1, 1]."""
    if not isinstance(alpha, Tensor):
        return float(alpha), None
    if not alpha.dtype.is_floating_point:
        raise ArgumentError(f"alpha must be floating, not {alpha.dtype}")
    if alpha.device != query.device:
        raise ArgumentError(f"alpha is on {alpha.device}, query on {query.device}")
    shape, full = tuple(alpha.shape), (*query.shape[:2], 1, 1)
    sizes = (1,) * (4 - len(shape)) + shape
    fits = len(sizes) == 4 and all(
        size in (1, wanted) for size, wanted in zip(sizes, full, strict=True)
    )
    if not fits:
        raise ArgumentError(f"alpha of shape {list(shape)} does not broadcast to {list(full)}")
    if alpha.device.type == "cpu" and alpha.numel() and not calls.traced():
        low, high = (float(end) for end in alpha.detach().aminmax())
        if not LEAST_ALPHA <= low <= high <= MOST_ALPHA:
            raise ArgumentError(f"alpha has entries from {low} to {high}, which must lie in [1, 4]")
    return 0.0, alpha.reshape(sizes)
