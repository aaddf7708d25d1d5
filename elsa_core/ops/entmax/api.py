"""`entmax_attention`: attention whose weights can be exactly zero."""

from __future__ import annotations

from torch import Tensor

from elsa_core.base import calls
from elsa_core.base.operands import require_tensor
from elsa_core.errors import ArgumentError
from elsa_core.ops.arguments import explain_types
from elsa_core.ops.entmax import dense
from elsa_core.ops.entmax.dense import explain_entmax_attention
from elsa_core.ops.entmax.varlen import of_nested

__all__ = ["entmax_attention", "explain_entmax_attention"]


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
        compute = of_nested if query.is_nested else dense.attention
        return compute(
            query, key, value, attn_mask, alpha=alpha, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, precision=precision, backend=backend,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError) as error:
        explain_types(error, locals())
        raise
