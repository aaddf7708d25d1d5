"""`varlen_attention`: exact softmax attention of sequences of different length, packed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from elsa_core import dispatch, ops
from elsa_core.base import calls, packing
from elsa_core.base.operands import autocast, require_dense
from elsa_core.dispatch import Route
from elsa_core.errors import ArgumentError
from elsa_core.ops.arguments import (
    Kind,
    default_scale,
    explain_types,
    kind_of,
    request_of,
    run,
)
from elsa_core.ops.attention.dense import attention, explain


class Packed(NamedTuple):
    """Checked operands, in the layout of the operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "strict",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention within each of the sequences whose tokens lie one after another.

    Each sequence is what `elsa_core.attention` gives of it alone. Nothing is padded, but on CUDA
    devices without Triton, and for gradients of float32 there. Differentiable once in query, key
    and value; inputs may have any strides. No length recompiles anything.

    Args:
        query: [T, Hq, D], floating; T tokens of all sequences.
        key: [Tk, Hkv, D], the query's dtype and device.
        value: [Tk, Hkv, Dv].
        cu_seqlens_q: [S + 1], int32 or int64 on the query's device: where each of the S sequences
            of queries starts, and T. Starts with 0 and does not decrease.
        cu_seqlens_k: the same of the keys and Tk; default cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: the longest sequence or more. Without them a call on a CUDA
            device reads cu_seqlens and waits for the device. With them cu_seqlens are not checked
            there: wrong ones give an error of the device or wrong results.
        is_causal: query i of a sequence sees its keys 0..i (top-left aligned, as in `attention`).
        scale: factor on the scores; default 1 / sqrt(D). A scale of 0.0 is a scale.
        enable_gqa: allow fewer key/value heads than query heads (Hq a multiple of Hkv).
        precision: see `elsa_core.precision`.
        backend: "auto" or one of `elsa_core.dispatch.names("varlen_attention")`.
        return_lse: also return the natural log of the softmax normaliser.

    Returns:
        out [T, Hq, Dv] in the query's dtype. With `return_lse` also lse [Hq, T], float32 (float64
        for float64 inputs). A query of a sequence without keys gives zeros and lse -inf.

    Raises:
        TypeError: an argument of a wrong type; the message names it.
        ArgumentError: an argument does not fit; the message names it.
        UnavailableError: the backend asked for by name cannot serve the call.

    Reference:
        ELSA (arXiv 2604.23798), Eq. 4, applied to each sequence.
    """
    if isinstance(scale, Tensor):
        raise ArgumentError(calls.NO_TENSOR_SCALE)
    try:
        given = checked(query, key, value, cu_seqlens_q, cu_seqlens_k, enable_gqa)
        told = max_seqlen_q, max_seqlen_k
        longest = longest_of(given, *told)
        q, k, v, *_ = given
        kind = kind_of(q, v, precision)
        terms = (*given, is_causal, default_scale(q) if scale is None else scale)
        if calls.exporting_onnx():
            out, lse = ops.VARLEN_ATTENTION.exported(*terms)
        elif dispatch.plain_alone(backend):
            out, lse = ops.VARLEN_ATTENTION.reference(*terms)
        elif _pads(kind, given, *terms[5:], backend, told)[0]:
            if longest is not None and q.shape[0] and k.shape[0]:
                out, lse = _by_padding(given, longest, *terms[5:], precision)
            else:  # nothing to pad; or a compiled program, which cannot ask for the longest length
                out, lse = ops.VARLEN_ATTENTION.eager(*terms, precision)
        else:
            name = dispatch.choose("varlen_attention", *kind, backend)
            out, lse = run("varlen_attention", name, (*terms, precision), (q, k, v))
        return (out, lse) if return_lse else out
    except (AttributeError, RuntimeError, TypeError) as error:
        explain_types(error, locals())
        raise


def explain_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, *, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, precision: str = "strict", backend: str = "auto",
) -> Route:  # fmt: skip
    """Say which backend, schedule and arithmetic would serve `varlen_attention`.

    Takes the arguments of `varlen_attention` and raises what it would raise.
    """
    given = checked(query, key, value, cu_seqlens_q, cu_seqlens_k, enable_gqa)
    q, k, v, *_ = given
    told = max_seqlen_q, max_seqlen_k
    longest, kind = longest_of(given, *told), kind_of(q, v, precision)
    wanted = calls.wanted(query=query, key=key, value=value)
    scale = default_scale(q) if scale is None else scale
    pads, spares = _pads(kind, given, is_causal, scale, backend, told)
    empty = longest is None or not (q.shape[0] and k.shape[0])
    request = request_of(
        "varlen_attention", given[:3], precision, _limits(given, is_causal), wanted
    )
    by = dispatch.PLAIN if pads and empty else backend
    served = dispatch.route(request, by, schedule=(q, k, given.cu_seqlens_q))
    if longest is None or empty or not pads or dispatch.plain_alone(backend):
        return served
    mask = _hides(given, longest, is_causal)
    like = [
        t.new_empty(t.shape[2], requires_grad=t.requires_grad).as_strided(
            (given.cu_seqlens_q.shape[0] - 1, t.shape[1], n, t.shape[2]), (0, 0, 0, 1)
        )
        for t, n in ((q, longest[0]), (k, longest[1]), (v, longest[1]))
    ]
    found = explain(
        like[0], like[1], like[2], mask, is_causal=is_causal and mask is None, enable_gqa=True,
        precision=precision,
    )  # fmt: skip
    reasons = tuple(reason for reason in served.reasons if not reason.startswith("gradients: "))
    if spares:
        reasons = (*reasons, f"{served.backend}: its gradients would wait for the device")
    words = f"padded to {longest[0]} queries and {longest[1]} keys; {found.schedule}"
    return replace(found, schedule=words, reasons=(*reasons, *found.reasons))


def _pads(
    kind: Kind, given: Packed, is_causal: bool, scale: float, backend: str,
    told: tuple[int | None, int | None],
) -> tuple[bool, bool]:  # fmt: skip
    """Whether `attention` of a padded batch serves a call on a GPU: where no backend has kernels of
    packed sequences, or ahead, since its gradients will. Those would ask the device for the longest
    lengths, which the caller `told` (max_seqlen_q, max_seqlen_k). And whether it is ahead."""
    if backend != "auto" or not kind[0].startswith("cuda"):
        return False, False
    plain = dispatch.choose("varlen_attention", *kind, backend) == dispatch.PLAIN
    wanted = calls.wanted(query=given.query, key=given.key, value=given.value)
    known = told[1] is not None or given.cu_seqlens_k is given.cu_seqlens_q
    ahead = told[0] is not None and bool(wanted and known)
    if ahead:
        limits = _limits(given, is_causal)
        name = dispatch.gradient_by("varlen_attention", *kind, gradient=wanted, mask=limits)
        fault = dispatch.peer_fault(name, "gradients", *given[:3], is_causal, scale)
        ahead = name == dispatch.PLAIN or fault is not None
    return plain or ahead, ahead


def _limits(given: Packed, is_causal: bool) -> str:
    if not is_causal:
        return "none"
    return "causal" if given.cu_seqlens_k is given.cu_seqlens_q else "crossed"


def _by_padding(
    given: Packed, longest: tuple[int, int], is_causal: bool, scale: float, precision: str
) -> tuple[Tensor, Tensor]:
    starts, tokens = given.cu_seqlens_q, given.query.shape[0]
    q, k, v, mask, causal = padded(given, longest, is_causal)
    out, lse = attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True, precision=precision,
        return_lse=True,
    )  # fmt: skip
    lse = packing.packed(lse.transpose(1, 2), starts, tokens).transpose(0, 1)
    return packing.packed(out.transpose(1, 2), starts, tokens), lse


def padded(
    given: Packed, longest: tuple[int, int], is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """The sequences as a batch of equal length, with a mask that hides what is padding, and whether
    the causal limit is left to `attention`."""
    starts, others = given.cu_seqlens_q, given.cu_seqlens_k
    q = packing.padded(given.query, starts, longest[0]).transpose(1, 2)
    k, v = (packing.padded(t, others, longest[1]).transpose(1, 2) for t in (given.key, given.value))
    mask = _hides(given, longest, is_causal)
    return q, k, v, mask, is_causal and mask is None


def _hides(given: Packed, longest: tuple[int, int], is_causal: bool) -> Tensor | None:
    """What hides padding, bool [S, 1, 1 or Nq, Nk]; None where the causal limit does."""
    if is_causal and given.cu_seqlens_q is given.cu_seqlens_k:
        return None  # padded keys come after every query that is there
    mask = packing.inside(given.cu_seqlens_k, longest[1])[:, None, None, :]
    return mask & mask.new_ones(longest).tril() if is_causal else mask


def checked(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    enable_gqa: bool,
) -> Packed:  # fmt: skip
    """The operands, cast where autocast is on, or what is wrong with them: TypeError,
    ArgumentError."""
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    tensors = {"query": query, "key": key, "value": value}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    require_dense(**tensors, **lengths)
    _check_shapes(query, key, value, enable_gqa)
    for name, tensor in (*tensors.items(), *lengths.items()):
        if tensor.device != query.device:
            raise ArgumentError(f"{name} is on {tensor.device}, query on {query.device}")
    for name, tensor in lengths.items():
        if tensor.dim() != 1 or tensor.shape[0] < 1:
            raise ArgumentError(
                f"{name} must be [sequences + 1], starting with 0, not {list(tensor.shape)}"
            )
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"{name} must be int32 or int64, not {tensor.dtype}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ArgumentError(
            f"cu_seqlens_q is of {cu_seqlens_q.shape[0] - 1} sequences, "
            f"cu_seqlens_k of {cu_seqlens_k.shape[0] - 1}"
        )
    query, key, value, _ = autocast(query, key, value, None)
    return Packed(query, key, value, cu_seqlens_q, cu_seqlens_k)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ArgumentError(f"{name} must be [tokens, heads, dim], not {list(tensor.shape)}")
        if tensor.dtype != query.dtype or not tensor.is_floating_point():
            raise ArgumentError(
                f"query, key and value must share one floating dtype; {name} is {tensor.dtype}"
            )
    if key.shape[2] != query.shape[2]:
        raise ArgumentError(
            f"key has head_dim {key.shape[2]}, query {query.shape[2]}: they must be equal"
        )
    if key.shape[:2] != value.shape[:2]:
        raise ArgumentError(
            f"key has {list(key.shape[:2])} tokens and heads, value {list(value.shape[:2])}"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
        raise ArgumentError(
            f"key has {kv_heads} heads, query {heads}: they must be equal, or query's a multiple "
            "of key's with enable_gqa=True"
        )


def longest_of(
    given: Packed, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[int, int] | None:
    """The longest sequences of queries and keys; None where a compiler must not ask. What is on a
    CPU is checked, and so is what has to be read: ArgumentError."""
    if max_seqlen_k is None and given.cu_seqlens_k is given.cu_seqlens_q:
        max_seqlen_k = max_seqlen_q
    queries, keys = given.query.shape[0], given.key.shape[0]
    of_queries = of_keys = _longest("q", queries, given.cu_seqlens_q, max_seqlen_q)
    same = given.cu_seqlens_k is given.cu_seqlens_q and max_seqlen_k == max_seqlen_q
    if calls.traced() or not (same and queries == keys):  # on a GPU the host waits but once
        of_keys = _longest("k", keys, given.cu_seqlens_k, max_seqlen_k)
    return None if of_queries is None or of_keys is None else (of_queries, of_keys)


def _longest(side: str, tokens: int, cu_seqlens: Tensor, most: int | None) -> int | None:
    unread = cu_seqlens.device.type == "meta" or calls.traced()
    if unread or (most is not None and cu_seqlens.device.type != "cpu"):
        return most
    starts = packing.checked_bounds(f"cu_seqlens_{side}", cu_seqlens, tokens)
    longest = max((b - a for a, b in pairwise(starts)), default=0)
    if most is not None and most < longest:
        raise ArgumentError(f"max_seqlen_{side}={most}, but a sequence has {longest} tokens")
    return longest if most is None else most
