"""`entmax_attention`: attention whose weights can be exactly zero; `entmax_varlen_attention` of
sequences of different length, packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nested import nested_tensor_from_jagged

from elsa_core import dispatch, ops
from elsa_core.base import calls, packing
from elsa_core.base.operands import autocast, leading_dims, operands, require_dense, require_tensor
from elsa_core.dispatch import Route
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.ops.arguments import (
    default_scale,
    explain_types,
    kind_of,
    request_of,
    restored,
)
from elsa_core.ops.attention import nested
from elsa_core.ops.attention.api import attention as softmax_attention
from elsa_core.ops.attention.api import explain as explain_softmax
from elsa_core.ops.varlen import api as varlen
from elsa_core.ops.varlen.api import Packed, varlen_attention

LEAST_ALPHA, MOST_ALPHA = 1.0, 4.0
_OPERATOR = "entmax_varlen_attention"
# Tiles of all heads from which a call reads the longest lengths that it was not given: they take
# 1 GiB in the forward, where those of its sequences may be few.
_MANY_TILES = (1 << 30) // 5


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
        terms: dict[str, Any] = {
            "alpha": alpha, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa,
            "precision": precision, "backend": backend,
        }  # fmt: skip
        if not query.is_nested:
            return attention(query, key, value, attn_mask, **terms)
        packed, offsets = nested.packed(query, key, value, attn_mask), query.offsets()  # type: ignore[attr-defined]
        out = entmax_varlen_attention(*packed, **terms).transpose(0, 1)
        return nested_tensor_from_jagged(out, offsets, jagged_dim=2)
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
    cast = autocast(query, key, value, attn_mask)
    q, k, v, mask = operands(*cast, is_causal, enable_gqa)
    leading = leading_dims(query, key, value)
    number, head_alpha = of_heads(alpha, query.device, q.shape[:2], leading)
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
    require_dense(query=query, key=key, value=value, attn_mask=attn_mask)
    cast = autocast(query, key, value, attn_mask)
    q, k, v, mask = operands(*cast, is_causal, enable_gqa)
    leading = leading_dims(query, key, value)
    _, head_alpha = of_heads(alpha, query.device, q.shape[:2], leading)
    gradient = calls.wanted(
        query=query, key=key, value=value, attn_mask=attn_mask, head_alpha=head_alpha
    )
    of_mask = dispatch.mask_kind(mask, is_causal)
    request = request_of("entmax_attention", (q, k, v), precision, of_mask, gradient)
    return dispatch.route(request, backend, schedule=(q, k))


def is_softmax(alpha: float | Tensor) -> bool:
    """Whether alpha is the number 1; TypeError and ArgumentError: it is no number or tensor, or a
    number outside [1, 4]."""
    if isinstance(alpha, Tensor):
        return False
    if not isinstance(alpha, Real):
        raise TypeError(f"alpha must be a number or a torch.Tensor, not {type(alpha).__name__}")
    if not LEAST_ALPHA <= float(alpha) <= MOST_ALPHA:  # NaN too
        raise ArgumentError(f"alpha={float(alpha)} must be in [1, 4]")
    return alpha == LEAST_ALPHA


def of_heads(
    alpha: float | Tensor, device: torch.device, sizes: Sequence[int], leading: Sequence[int]
) -> tuple[float, Tensor | None]:
    """The number that `is_softmax` took, or 0 and the tensor as [B or 1, Hq or 1, 1, 1]. sizes: B
    (a packed call's sequences) and Hq of the query as the operator gets it. leading: batch dims and
    heads of the call, which may have been merged in another way. device: the query's."""
    if not isinstance(alpha, Tensor):
        return float(alpha), None
    if not alpha.dtype.is_floating_point:
        raise ArgumentError(f"alpha must be floating, not {alpha.dtype}")
    if alpha.device != device:
        raise ArgumentError(f"alpha is on {alpha.device}, query on {device}")
    shape = (1,) * (4 - alpha.dim()) + tuple(alpha.shape)
    served = (*sizes, 1, 1)
    given = (math.prod(leading[:-1]), leading[-1] if leading else 1, 1, 1)
    fits = [
        len(shape) == 4 and all(n in (1, most) for n, most in zip(shape, full, strict=True))
        for full in (served, given)
    ]
    if not any(fits):
        raise ArgumentError(
            f"alpha of shape {list(alpha.shape)} does not broadcast to {list(given)}"
        )
    if alpha.device.type == "cpu" and alpha.numel() and not calls.traced():
        low, high = (float(end) for end in alpha.detach().aminmax())
        if not LEAST_ALPHA <= low <= high <= MOST_ALPHA:
            raise ArgumentError(f"alpha has entries from {low} to {high}, which must lie in [1, 4]")
    alpha = alpha.reshape(shape)
    return 0.0, alpha if fits[0] else alpha.expand(given).reshape(served)


def entmax_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    alpha: float | Tensor = 1.5,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "strict",
    backend: str = "auto",
) -> Tensor:
    """alpha-entmax attention within each of the sequences whose tokens lie one after another.

    Each sequence is what `elsa_core.entmax_attention` gives of it alone. The Triton kernels on
    CUDA serve all of them in one launch; the host reads no length. The workspace is five bytes for
    each head and tile of 64 x 64, of (T / 64 + S) x max_seqlen_k / 64 tiles. The numbers of all
    tokens stand for longest lengths that are not given; above 1 GiB an eager call reads them
    instead, and waits for the device.

    Other backends serve one sequence after another: on a GPU the host waits once for the lengths.
    Compiled programs and CUDA graphs under capture pad to `max_seqlen_q` and `max_seqlen_k`, which
    they have to be given. `explain_entmax_varlen_attention` says which of the two it is.
    Differentiable once in query, key, value and alpha; inputs may have any strides.

    Args:
        query: [T, Hq, D], floating; T tokens of all sequences.
        key: [Tk, Hkv, D], the query's dtype and device.
        value: [Tk, Hkv, Dv].
        cu_seqlens_q: [S + 1], int32 or int64 on the query's device: where each of the S sequences
            of queries starts, and T. A sequence may be empty.
        cu_seqlens_k: the same of the keys and Tk; default cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: the longest sequence or more; on a CPU they are checked. The
            Triton kernels check neither these nor cu_seqlens: wrong ones give wrong results, which
            may differ from call to call where sequences overlap. Of tokens that no sequence has,
            before cu_seqlens[0] or from cu_seqlens[S] on, output and gradients are not written.
        alpha: a number in [1, 4], or a floating tensor that broadcasts to [S, Hq, 1, 1]. alpha = 1
            is softmax, which `elsa_core.varlen_attention` serves.
        is_causal: query i of a sequence sees its keys 0..i (top-left aligned).
        scale: factor on the scores; default 1 / sqrt(D).
        enable_gqa: allow fewer key/value heads than query heads (Hq a multiple of Hkv).
        precision, backend: as in `elsa_core.entmax_attention`.

    Returns:
        out [T, Hq, Dv] in the query's dtype. A query of a sequence without keys gives zeros.

    Raises:
        TypeError: an argument of a wrong type; the message names it.
        ArgumentError: an argument does not fit; the message names it.
        UnavailableError: the backend asked for by name cannot serve the call.

    Source: as of `elsa_core.entmax_attention`, applied to each sequence.
    """
    if isinstance(scale, Tensor):
        raise ArgumentError(calls.NO_TENSOR_SCALE)
    terms: dict[str, Any] = {
        "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "precision": precision,
        "backend": backend,
    }  # fmt: skip
    told = max_seqlen_q, max_seqlen_k
    try:
        if is_softmax(alpha):
            return varlen_attention(  # type: ignore[return-value]  # no lse was asked for
                query, key, value, cu_seqlens_q, cu_seqlens_k, *told, **terms
            )
        given = varlen.checked(query, key, value, cu_seqlens_q, cu_seqlens_k, enable_gqa)
        # not len(): it makes a symbolic number of sequences a constant
        sizes = given.cu_seqlens_q.shape[0] - 1, query.shape[1]
        number, head_alpha = of_heads(alpha, query.device, sizes, sizes)
        own = number if head_alpha is None else head_alpha
        if query.device.type == "meta":
            return query.new_empty((*query.shape[:2], value.shape[2]))
        name = _served_by(*kind_of(given.query, given.value, precision), backend)
        if name and not (calls.exporting_onnx() or dispatch.plain_alone(backend)):
            run, bounds = dispatch.RUNS[_OPERATOR, name], _bounded(given, *told)
        elif torch.compiler.is_compiling() or (
            query.is_cuda and torch.cuda.is_current_stream_capturing()
        ):  # which cannot read the lengths
            return _by_padding(given, told, own, terms)
        else:
            varlen.longest_of(given, *told)
            if given.cu_seqlens_q.shape[0] > 1:
                return _by_sequence(given, own, terms)
            run, bounds = ops.ENTMAX_VARLEN_ATTENTION.eager, (0, 0)  # no sequence
        factor = default_scale(given.query) if scale is None else scale
        found: Tensor = run(*given, head_alpha, *bounds, number, is_causal, factor, precision)[0]
        return found
    except (AttributeError, RuntimeError, TypeError) as error:
        explain_types(error, locals())
        raise


def explain_entmax_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, *, alpha: float | Tensor = 1.5, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, precision: str = "strict",
    backend: str = "auto",
) -> Route:  # fmt: skip
    """Say which backend and arithmetic would serve `entmax_varlen_attention` with these arguments,
    and who its gradients; takes and raises what it does."""
    terms: dict[str, Any] = {
        "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "precision": precision,
        "backend": backend,
    }  # fmt: skip
    if is_softmax(alpha):
        return varlen.explain_varlen_attention(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **terms
        )
    given = varlen.checked(query, key, value, cu_seqlens_q, cu_seqlens_k, enable_gqa)
    sizes = given.cu_seqlens_q.shape[0] - 1, query.shape[1]
    number, head_alpha = of_heads(alpha, query.device, sizes, sizes)
    q, k, v, *_ = given
    if _served_by(*kind_of(q, v, precision), backend) and not dispatch.plain_alone(backend):
        gradient = calls.wanted(query=q, key=k, value=v, head_alpha=head_alpha)
        mask = dispatch.mask_kind(None, is_causal)
        request = request_of(_OPERATOR, (q, k, v), precision, mask, gradient)
        found = dispatch.route(request, backend, schedule=(q, k))
        return replace(found, schedule=f"all sequences in one launch; {found.schedule}")
    varlen.longest_of(given, max_seqlen_q, max_seqlen_k)
    alone = number if head_alpha is None else head_alpha[:1]
    batch = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, T, D]
    found = explain_entmax_attention(*batch, alpha=alone, **terms)
    return replace(found, schedule=f"one sequence after another; {found.schedule}")


def _served_by(
    place: str, dtype: torch.dtype, head_dim: int, value_dim: int, precision: str, backend: str
) -> str:
    """The backend whose kernels take all sequences at once; empty where each is a call of its own.

    A constant for the compiler, as `dispatch.choose`.
    """
    if not place.startswith("cuda"):
        return ""
    try:
        name = dispatch.choose(_OPERATOR, place, dtype, head_dim, value_dim, precision, backend)
    except (ArgumentError, UnavailableError):
        return ""  # it may have the operator of one sequence; that says what is wrong
    return "" if name == dispatch.PLAIN else name


_served_by._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _bounded(given: Packed, max_seqlen_q: int | None, max_seqlen_k: int | None) -> tuple[int, int]:
    """The longest lengths; those of all tokens stand for what is not given, but where the workspace
    would be large and the lengths may be read."""
    if max_seqlen_k is None and given.cu_seqlens_k is given.cu_seqlens_q:
        max_seqlen_k = max_seqlen_q
    missing = max_seqlen_q is None or max_seqlen_k is None
    if missing and not (calls.traced() or torch.cuda.is_current_stream_capturing()):
        (tokens, heads, _), sequences = given.query.shape, len(given[3]) - 1
        tiles = heads * (tokens // 64 + sequences) * (given.key.shape[0] // 64)
        if sequences > 1 and tiles > _MANY_TILES:
            both = torch.stack([t.long().diff().amax() for t in given[3:]]).tolist()
            max_seqlen_q = max(0, both[0]) if max_seqlen_q is None else max_seqlen_q
            max_seqlen_k = max(0, both[1]) if max_seqlen_k is None else max_seqlen_k
    # a symbolic length of a compiled program stays one: the compiler's min is symbolic itself, and
    # takes no `sym_min` of numbers (torch 2.11)
    least: Any = min if is_dynamo_compiling() else torch.sym_min
    bounds: list[Any] = [given.query.shape[0], given.key.shape[0]]
    for i, (side, told) in enumerate((("q", max_seqlen_q), ("k", max_seqlen_k))):
        if told is None:
            continue
        longest: Any = told
        if not isinstance(longest, int | torch.SymInt):
            try:
                longest = index(told)
            except TypeError:
                kind = type(told).__name__
                raise TypeError(f"max_seqlen_{side} must be an integer, not {kind}") from None
        if not torch.compiler.is_compiling() and longest < 0:
            raise ArgumentError(f"max_seqlen_{side}={longest} must not be negative")
        bounds[i] = least(longest, bounds[i])
    return bounds[0], bounds[1]


def _by_sequence(given: Packed, alpha: float | Tensor, terms: dict[str, Any]) -> Tensor:
    starts = packing.checked_bounds("cu_seqlens_q", given.cu_seqlens_q, given.query.shape[0])
    others = packing.checked_bounds("cu_seqlens_k", given.cu_seqlens_k, given.key.shape[0])
    queries, keys = ([b - a for a, b in pairwise(ends)] for ends in (starts, others))
    outputs = []
    # one split, whose gradient is one concatenation
    parts = zip(
        given.query.split(queries), given.key.split(keys), given.value.split(keys), strict=True
    )
    for i, part in enumerate(parts):
        own = alpha[i : i + 1] if isinstance(alpha, Tensor) and alpha.shape[0] > 1 else alpha
        q, k, v = (t.transpose(0, 1)[None] for t in part)  # [1, H, n, D]
        out = attention(q, k, v, alpha=own, **terms)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _by_padding(
    given: Packed, told: tuple[int | None, int | None], alpha: float | Tensor, terms: dict[str, Any]
) -> Tensor:
    most_q, most_k = told
    if most_k is None and given.cu_seqlens_k is given.cu_seqlens_q:
        most_k = most_q
    if most_q is None or most_k is None:
        raise ArgumentError(
            "entmax_varlen_attention needs max_seqlen_q and max_seqlen_k where it is compiled or "
            "captured: it cannot read cu_seqlens there"
        )
    q, k, v, mask, causal = varlen.padded(given, (most_q, most_k), terms["is_causal"])
    out = attention(q, k, v, mask, alpha=alpha, **terms | {"is_causal": causal})
    return packing.packed(out.transpose(1, 2), given.cu_seqlens_q, given.query.shape[0])
