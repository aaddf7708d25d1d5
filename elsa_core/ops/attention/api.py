"""`attention`: exact softmax attention behind the signature of PyTorch's own operator.

Calls with operands on the host, sparsity or nested tensors are brought to calls of dense tensors on
one device, which `elsa_core.ops.attention.dense` serves.
"""

from __future__ import annotations

from torch import Tensor

from elsa_core.base import calls
from elsa_core.base.operands import require_tensor
from elsa_core.errors import ArgumentError
from elsa_core.ops.arguments import explain_types
from elsa_core.ops.attention import dense, nested
from elsa_core.ops.attention.dense import explain
from elsa_core.ops.sparse import api as sparse

__all__ = ["attention", "explain"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: str = "strict",
    backend: str = "auto",
    return_lse: bool = False,
    sparsity: str | float | None = None,
    offload: str | None = None,
    offload_block: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention: `softmax(query key^T * scale + attn_mask) value`.

    The signature, layout and meaning of `torch.nn.functional.scaled_dot_product_attention`. Inputs
    may have any strides and are never made contiguous. Jagged nested tensors [B, H, j, D] take
    neither mask nor dropout. Scores, softmax and sums are float32, or float64 for float64 inputs.
    Differentiable once in query, key, value and an additive mask; forward-mode AD and the
    derivatives of `torch.func` are served by the eager backend.

    Args:
        query: [..., Hq, Nq, D], floating; `...` is any number of batch dims.
        key: [..., Hkv, Nk, D], the query's dtype and device.
        value: [..., Hkv, Nk, Dv]; Dv may differ from D, Nk from Nq.
        attn_mask: broadcastable to [..., Hq, Nq, Nk] and never expanded in memory. bool (True takes
            part) or additive, float32 or the query's dtype.
        dropout_p: probability in [0, 1] of dropping an attention weight; the others are divided by
            1 - dropout_p. It follows the default generator of the tensors' device
            (`torch.manual_seed`), in the same way on every backend but "sdpa", which "auto" takes
            on a GPU. lse is that without dropout.
        is_causal: query i sees keys 0..i (top-left aligned); excludes `attn_mask`.
        scale: factor on the scores; default 1 / sqrt(D). A scale of 0.0 is a scale.
        enable_gqa: allow fewer key/value heads than query heads (Hq a multiple of Hkv).
        precision: "strict", "ieee", "turbo" or "lean", see `elsa_core.precision`.
        backend: "auto" or one of `elsa_core.dispatch.names()`. "auto" takes PyTorch's own kernels
            where they were measured to be the faster exact ones (see `explain`).
        return_lse: also return the natural log of the softmax normaliser.
        sparsity: None, "exact", or a number in (0, 1). Tiles of keys are left out whose weights,
            relative to the row's maximum so far, are all at most this number; the error is what
            `elsa_core.sparsity_report` and `elsa check` show. "exact": finite outputs change by
            less than the dtype's rounding. With "auto" only the CPU leaves out tiles. Excludes
            dropout_p; a number excludes gradients.
        offload: "host" where key and value, or query too, stay in host memory and stream through
            the device in blocks. See `elsa_core.offload.attention`.
        offload_block: keys of such a block; default: by the free memory.

    Returns:
        out [..., Hq, Nq, Dv] in the query's dtype. From kernels of this package its memory is
        [..., Nq, Hq, Dv], so that `out.transpose(-3, -2).flatten(-2)` is a view. With `return_lse`
        also lse [..., Hq, Nq], float32 (float64 for float64 inputs). A row that sees no key gives
        zeros and lse -inf.

    Raises:
        TypeError: an argument of a wrong type; the message names it.
        ArgumentError: an argument does not fit; the message names it.
        UnavailableError: the backend asked for by name cannot serve the call.

    Reference:
        ELSA (arXiv 2604.23798), Eq. 4 and Theorem 1.
    """
    if isinstance(scale, Tensor):
        raise ArgumentError(calls.NO_TENSOR_SCALE)
    try:
        if offload is not None or offload_block is not None:
            if sparsity is not None:
                raise ArgumentError("sparsity and offload exclude each other")
            from elsa_core.offload import requested

            return requested(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                precision, backend, return_lse, offload, offload_block,
            )  # fmt: skip
        if sparsity is not None:
            given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            found = sparse.serve(*given, precision, backend, sparsity)
            if found is not None:
                return found[:2] if return_lse else found[0]
        answer = dense.ordinary(
            query, key, value, attn_mask, dropout_p, is_causal, scale, precision, backend,
            return_lse,
        )  # fmt: skip
        if answer is not None:
            return answer
        require_tensor("query", query)
        served = nested.attention if query.is_nested else dense.checked
        return served(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision,
            backend, return_lse,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError) as error:
        explain_types(error, locals())
        raise
