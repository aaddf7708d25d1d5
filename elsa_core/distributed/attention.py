"""`attention` and `explain` over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core import dispatch
from elsa_core import precision as precisions
from elsa_core.base import calls, operands
from elsa_core.distributed import agreement, groups, operators
from elsa_core.distributed.plan import METHODS, Plan
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.ops.arguments import default_scale, kind_of


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    group: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    method: str = "auto",
    enable_gqa: bool = False,
    lengths: Sequence[int] | None = None,
    precision: str = "strict",
    backend: str = "auto",
) -> Tensor:
    """`elsa_core.attention` of a sequence whose tokens are sharded over ranks.

    The whole sequence is that of rank 0, then that of rank 1, and so on; shards may differ in
    length and may be empty. Every rank of the group makes the call. Sums have one order, whatever
    message comes first: equal calls give equal bits. Differentiable once, under
    `torch.compile(fullgraph=True)` too.

    Before the first byte of data the ranks compare dtype, sizes, mask, method and version in one
    small message, and learn each other's lengths: at every call, or with `lengths` once for each
    kind of call.

    Args:
        query: [B, Hq, n, D] of this rank, floating.
        key, value: [B, Hkv, m, D] and [B, Hkv, m, Dv] of this rank; m may differ from n.
        attn_mask: [B or 1, Hq or 1, n or 1, M or 1], M the keys of all ranks: the rank's own rows
            and all columns. bool (True takes part) or additive. Its gradient is of this rank's rows
            alone: where ranks share a mask, sum it over them.
        group: a process group, a one-dimensional DeviceMesh or None for all ranks.
        is_causal: query i of the whole sequence sees keys 0..i; excludes `attn_mask`.
        scale: factor on the scores; default 1 / sqrt(D).
        method: "ring": keys and values go round, the next shard under way while one is folded.
            "gather": every rank gets all keys and values. "heads": tokens are exchanged for heads
            (DeepSpeed-Ulysses), whose numbers the ranks must divide. "auto": the least time in a
            simple model of cost, see `explain`.
        enable_gqa: allow fewer key/value heads than query heads.
        lengths: the tokens of every rank, in their order, where queries and keys have the same. All
            ranks must give the same, and from then on make the same calls: they are not compared.
        precision, backend: as in `elsa_core.attention`.

    Returns:
        out [B, Hq, n, Dv] of this rank's queries, in the query's dtype; zeros in a row that sees no
        key.

    Raises:
        ArgumentError: an argument does not fit, or ranks differ in theirs; on all ranks alike,
            but for what changes after a first call with `lengths`.
        TypeError: an argument is of another type.
        UnavailableError: there is no process group, or a rank has ended or hangs: what the group
            raises after its timeout.

    Reference:
        ELSA (arXiv 2604.23798), Eq. 4; ring: arXiv 2310.01889; heads: arXiv 2309.14509.
    """
    arguments = _arguments(
        query, key, value, attn_mask, group=group, is_causal=is_causal, scale=scale, method=method,
        enable_gqa=enable_gqa, lengths=lengths, precision=precision, backend=backend,
    )  # fmt: skip
    out: Tensor = torch.ops.elsa.distributed_attention(*arguments)[0]
    return out


def explain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Plan:
    """Say how `attention` would be served, and what it would move. Every rank makes this call.

    Takes and raises what `attention` does; sends the small message alone.
    """
    return operators.agreed_call(*_arguments(query, key, value, attn_mask, **options)).plan


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *, group: Any = None,
    is_causal: bool = False, scale: float | None = None, method: str = "auto",
    enable_gqa: bool = False, lengths: Sequence[int] | None = None, precision: str = "strict",
    backend: str = "auto",
) -> tuple[Any, ...]:  # fmt: skip
    """What the operator takes; a rank whose arguments are wrong tells the others."""
    name = groups.name_of(group)
    try:
        for kind, given, choices in (
            ("method", method, METHODS), ("backend", backend, dispatch.names()),
        ):  # fmt: skip
            if given not in choices:
                some = ", ".join(choices)
                raise ArgumentError(f"{kind}={given!r} is unknown: choose one of {some}")
        tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
        operands.require_dense(**tensors)
        query, key, value, attn_mask = operands.autocast(query, key, value, attn_mask)
        for argument, tensor in tensors.items():
            if tensor is not None and tensor.dim() != 4:
                raise ArgumentError(
                    f"{argument} must be of rank 4 ([B, H, N, D]), not {tensor.dim()}"
                )
        if attn_mask is not None:
            operands.require_mask(attn_mask, query, is_causal)
        precisions.validate(precision, query.dtype)
        query, key, value, _ = operands.operands(query, key, value, None, False, enable_gqa)
        scale = default_scale(query) if scale is None else float(scale)
        dispatch.choose("attention", *kind_of(query, value, precision), backend)
        if not all(hasattr(each, "__index__") for each in lengths or ()):
            raise TypeError(f"lengths must be whole numbers, not {lengths!r}")
    except (ArgumentError, TypeError, ValueError, UnavailableError) as error:
        devices = [t.device for t in (query, key, value) if isinstance(t, Tensor)]
        if devices and not calls.traced():
            wrong = {"error": str(error)[: agreement.LONGEST]}
            agreement.compare(groups.by_name(name), wrong, devices[0])
        raise
    wanted = calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask)
    gradients = " ".join(wanted)
    terms = (is_causal, scale, precision, backend, method, gradients, [*(lengths or ())])
    return query, key, value, attn_mask, *terms, name
