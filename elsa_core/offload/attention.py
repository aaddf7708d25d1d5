"""`attention` with keys and values, or all operands, in host memory; its operator and gradients.

A compiler meets one opaque call, `elsa::offloaded_attention`: streams and events stay inside.
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from elsa_core import dispatch
from elsa_core import precision as precisions
from elsa_core.base import calls, operands
from elsa_core.distributed.operators import define_attention
from elsa_core.errors import ArgumentError
from elsa_core.monoid import state_dtype
from elsa_core.offload import passes
from elsa_core.ops.arguments import default_scale, restored


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str = "strict",
    backend: str = "auto",
    return_lse: bool = False,
    device: torch.device | str | None = None,
    block: int | None = None,
    query_block: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`elsa_core.attention` of keys and values in host memory, for sequences that do not fit.

    Blocks of keys and values stream through two buffers of the device; the copy of a block runs
    under the fold of the one before. Partial results are merged in float32 (float64 for float64
    inputs) in the order of the keys: equal calls give equal bits. Pinned tensors are copied as they
    are; the host first moves others into pinned memory. Blocks that `is_causal` hides are not
    copied. Differentiable once in query, key and value, by `backward()`. Under autocast the host
    casts all of key and value: a second copy, which is not pinned. `elsa_core.offload.report()`
    says afterwards what was copied and how much of it was hidden.

    Args:
        query: [..., Hq, Nq, D] on the device, or on the host: then it streams in blocks too, and
            every block of queries meets all keys.
        key, value, scale, enable_gqa, precision, backend, return_lse: as in `elsa_core.attention`;
            key and value on the host.
        attn_mask: as in `elsa_core.attention`, on the host (copied block by block) or the device,
            without a gradient. Rows are hidden by False or -inf: an additive mask that gives all
            keys of a row a large number (|lse| above 2**19 in float32, 2**48 in float64) is
            refused, because merged blocks would lose how many keys they have.
        is_causal: query i sees keys 0..i; excludes `attn_mask`.
        device: where to compute; default: the query's, or, for a query on the host, the current
            CUDA device if there is one.
        block, query_block: tokens of a block of keys and of one of queries; default: by the free
            memory and the cost of a copy. Blocks decide the rounding: name them where equal bits
            are wanted on machines of different memory.

    Returns:
        As `elsa_core.attention`, on the query's device.

    Raises:
        TypeError, ArgumentError: an argument does not fit; the message names it.
        UnavailableError: the backend asked for by name cannot serve the call.

    Reference:
        ELSA (arXiv 2604.23798), Eq. 4.
    """
    for name, given in (("query", query), ("key", key), ("value", value)):
        operands.require_tensor(name, given)
    if isinstance(scale, Tensor):
        raise ArgumentError(calls.NO_TENSOR_SCALE)
    if scale is not None:
        operands.require_number("scale", scale)
    if calls.differentiates_otherwise():
        raise ArgumentError(
            "offload='host' has no forward-mode AD and no derivatives of torch.func: use backward()"
        )
    if calls.is_exporting():
        raise ArgumentError("offload='host' cannot be exported: leave offload out of the program")
    operands.require_dense(query=query, key=key, value=value, attn_mask=attn_mask)
    place = _device(query, key, value, attn_mask, device)
    if torch.is_autocast_enabled(place.type):
        with torch.autocast(query.device.type, torch.get_autocast_dtype(place.type)):
            query, key, value, attn_mask = operands.autocast(query, key, value, attn_mask)
    if calls.wanted(attn_mask=attn_mask):
        raise ArgumentError(
            "attn_mask requires a gradient, which streamed calls do not compute: detach it"
        )
    blocks = _tokens("block", block), _tokens("query_block", query_block)
    q, k, v, mask = operands.operands(
        query, key, value, attn_mask, is_causal, enable_gqa, one_device=False
    )
    precisions.validate(precision, q.dtype)
    scale = default_scale(q) if scale is None else float(scale)
    kind = (str(place), q.dtype, index(q.shape[-1]), index(v.shape[-1]), precision)
    dispatch.choose("attention", *kind, backend)
    out, lse = torch.ops.elsa.offloaded_attention(
        q, k, v, mask, is_causal, scale, precision, backend, str(place), *blocks
    )
    out, lse = restored((query, key, value), out, lse)
    return (out, lse) if return_lse else out


def requested(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool, precision: str, backend: str,
    return_lse: bool, offload: str | None, block: int | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`elsa_core.attention` with `offload` or `offload_block`, which is `block` here."""
    if offload != "host":
        given = "offload_block without offload" if offload is None else f"offload={offload!r}"
        raise ArgumentError(f"{given}: offload must be 'host'")
    if dropout_p != 0.0:
        raise ArgumentError("offload='host' takes no dropout_p")
    block = _tokens("offload_block", block) or None
    return attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        precision=precision, backend=backend, return_lse=return_lse, block=block,
    )  # fmt: skip


def _tokens(name: str, given: object) -> int:
    if given is None:
        return 0
    try:
        count = index(given)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {given!r}") from None
    if count < 1:
        raise ArgumentError(f"{name}={count} must be 1 or more")
    return count


def _device(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    asked: torch.device | str | None,
) -> torch.device:  # fmt: skip
    """Where a call computes: all tensors are there or, where they may be, on the host."""
    for name, given in (("key", key), ("value", value)):
        if given.device.type != "cpu":
            raise ArgumentError(
                f"offload='host' reads keys and values from host memory: {name} is on "
                f"{given.device}; move it there, or leave offload out"
            )
    device = query.device if asked is None else torch.device(asked)
    if asked is None and device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda")
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"offload='host' computes on CUDA devices and CPUs, not on {device}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for name, tensor in (("query", query), ("attn_mask", attn_mask)):
        if tensor is not None and tensor.device.type != "cpu" and tensor.device != device:
            raise ArgumentError(f"{name} is on {tensor.device}, but {device} computes")
    return device


def _call(*arguments: Any) -> passes.Call:
    call = passes.Call(*arguments)
    if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "offload='host' cannot be captured in a CUDA graph: the host takes part"
        )
    return call._replace(device=torch.device(call.device))


define_attention(
    "offloaded_attention",
    "bool is_causal, float scale, str precision, str backend, str device, int block, "
    "int query_block",
    _call, passes.forward, passes.backward,
    lambda query, *_: (query.new_empty(query.shape[:3], dtype=state_dtype(query.dtype)),),
    results="out lse",
    refusal="attention with offload='host' is differentiable once",
)  # fmt: skip
