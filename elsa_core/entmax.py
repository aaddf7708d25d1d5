"""`entmax_attention`: attention whose weights can be exactly zero."""

from __future__ import annotations

from numbers import Real
from operator import index

import torch
from torch import Tensor

from elsa_core import calls, operators, routing
from elsa_core.attention import attention, explain
from elsa_core.backends.support import Request
from elsa_core.errors import ArgumentError
from elsa_core.operands import autocast, explain_types, leading_dims, operands, require_tensor
from elsa_core.routing import Route

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
    softmax (`elsa_core.attention` serves it), alpha = 2 is sparsemax. Inputs may have any strides.
    Scores and sums are float32, or float64 for float64 inputs. Differentiable once in query, key,
    value, an additive mask and alpha; saved for the gradients are three numbers a row and a byte a
    tile of 64 queries and 64 keys. Forward-mode AD and the derivatives of `torch.func` hold all
    scores in memory.

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
        backend: "auto" or one of `elsa_core.routing.names("entmax_attention")`. "auto" is the C++
            kernels on a CPU (float32, float16, bfloat16) and plain PyTorch, some rows at a time,
            elsewhere; the Triton kernels serve `backend="triton"` alone: they were not measured on
            a GPU yet.

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
        if not isinstance(alpha, Tensor) and _number(alpha) == LEAST_ALPHA:
            softmax = attention(
                query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa,
                precision=precision, backend=backend,
            )  # fmt: skip
            assert isinstance(softmax, Tensor)  # no lse was asked for
            return softmax
        require_tensor("query", query)
        if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
            query, key, value, attn_mask = autocast(query, key, value, attn_mask)
        q, k, v, mask = operands(query, key, value, attn_mask, is_causal, enable_gqa)
        if scale is None:
            scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
        number, head_alpha = _alpha(alpha, q)
        kind = (q.device.type, q.dtype, index(q.shape[-1]), index(v.shape[-1]), precision)
        name = routing.name_of("entmax_attention", *kind, backend)
        run = routing.RUNS["entmax_attention", name]
        if calls.exporting_onnx() or routing.plain_alone(backend):
            run = operators.ENTMAX_ATTENTION.exported
        out: Tensor = run(q, k, v, mask, head_alpha, number, is_causal, scale, precision)[0]
        if not query.dim() == key.dim() == value.dim() == 4:
            out = out.reshape(*leading_dims(query, key, value), *out.shape[2:])
        return out
    except (AttributeError, RuntimeError, TypeError) as error:
        explain_types(
            error,
            tensors={"query": query, "key": key, "value": value},
            terms={"attn_mask": attn_mask},
            scale=scale,
            flags={"is_causal": is_causal, "enable_gqa": enable_gqa},
            names={"precision": precision, "backend": backend},
        )
        raise


def explain_entmax_attention(
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
) -> Route:
    """Say which backend and arithmetic would serve `entmax_attention` with these arguments, and who
    its gradients; takes and raises what it does."""
    if not isinstance(alpha, Tensor) and _number(alpha) == LEAST_ALPHA:
        return explain(
            query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa,
            precision=precision, backend=backend,
        )  # fmt: skip
    q, k, v, mask = operands(query, key, value, attn_mask, is_causal, enable_gqa)
    _, head_alpha = _alpha(alpha, q)
    dense = all(t.stride(-1) == 1 for t in (q, k, v))
    gradient = calls.wanted(
        query=query, key=key, value=value, attn_mask=attn_mask, head_alpha=head_alpha
    )
    request = Request(
        q.device.type, q.dtype, q.shape[-1], v.shape[-1], precision, "entmax_attention",
        routing.mask_kind(mask, is_causal), "dense" if dense else "strided", gradient,
    )  # fmt: skip
    alone = routing.plain_alone(backend)
    if alone:
        return routing.route(request, routing.PLAIN, schedule=(q, k), because=f"has no {alone}")
    return routing.route(request, backend, schedule=(q, k))


def _number(alpha: object) -> float:
    if not isinstance(alpha, Real):
        raise TypeError(f"alpha must be a number or a torch.Tensor, not {type(alpha).__name__}")
    number = float(alpha)
    if not LEAST_ALPHA <= number <= MOST_ALPHA:  # NaN too
        raise ArgumentError(f"alpha={number} must be in [1, 4]")
    return number


def _alpha(alpha: float | Tensor, query: Tensor) -> tuple[float, Tensor | None]:
    """The number, or 0 and the tensor as [B or 1, Hq or 1, 1, 1]."""
    if not isinstance(alpha, Tensor):
        return _number(alpha), None
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
    if alpha.device.type == "cpu" and alpha.numel() and not calls.watched():
        low, high = (float(end) for end in alpha.detach().aminmax())
        if not LEAST_ALPHA <= low <= high <= MOST_ALPHA:
            raise ArgumentError(f"alpha has entries from {low} to {high}, which must lie in [1, 4]")
    return 0.0, alpha.reshape(sizes)
