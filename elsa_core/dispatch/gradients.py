"""Gradients of this package's forwards: the operators' kernels, and eager calls in fewer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elsa_core import ops
from elsa_core.backends import cuda, eager, eager_entmax, native_backward
from elsa_core.backends.support import Request
from elsa_core.base import packing
from elsa_core.dispatch import measured
from elsa_core.dispatch.chooser import implementation, mask_kind
from elsa_core.dispatch.faults import peer_fault
from elsa_core.ops import flops
from elsa_core.ops.attention import record as attention_operator
from elsa_core.ops.factory import implement
from elsa_core.ops.window import record as window_operator

Named = Mapping[str, Any]
_profiled = torch._C._autograd._profiler_enabled


def _by_the_table(record: ops.Operator) -> Callable[..., Any]:
    """`elsa::<name>_backward`: the first backend of the table that serves a call, else plain
    PyTorch."""
    assert record.backward is not None
    plain = record.backward.reference

    def backward(*arguments: Any) -> Any:
        request, named = _request_of(record, arguments)
        asked = measured.gradients(record.name, request.device_type, request.dtype)
        grads = _by_backends(request, asked, arguments, named)
        if grads is not None:
            entmax = record is ops.ENTMAX_ATTENTION
            return _with_mask(grads, arguments) if entmax else grads
        if record is ops.VARLEN_ATTENTION and request.device_type == "cuda":
            return padded_backward(*arguments)
        return plain(*arguments)

    return backward


def _request_of(record: ops.Operator, arguments: tuple[Any, ...]) -> tuple[Request, Named]:
    """What a call of `elsa::<name>_backward` asks for, and its arguments by their names."""
    assert record.backward is not None
    named = dict(zip(record.backward.names, arguments, strict=True))
    first, tokens, layout, mask = named.get("query"), 0, "dense", "none"
    if first is None:
        first = named["qkv"]
        head_dim = value_dim = first.shape[-1] // (3 * named["num_heads"])
        tokens = math.prod(named["window_size"])
    else:
        head_dim, value_dim = first.shape[-1], named["value"].shape[-1]
    if "attn_mask" in named:
        mask = mask_kind(named["attn_mask"], named["is_causal"])
    if record.name.startswith("attention"):
        dense = all(named[each].stride(-1) == 1 for each in ("query", "key", "value"))
        layout = "dense" if dense else "strided"
    wanted = zip(record.terms, named["needs"], strict=True)
    request = Request(
        first.device.type, first.dtype, head_dim, value_dim, named["precision"], record.name,
        mask, layout, tuple(name for name, needed in wanted if needed), tokens,
        first.get_device(),
    )  # fmt: skip
    return request, named


def _by_backends(
    request: Request, names: Iterable[str], arguments: tuple[Any, ...], named: Named
) -> Any:
    terms = ("query", "key", "value", "is_causal", "scale")
    for name in names:
        offered = implementation(request.operator, name)
        if offered.backward is None or not (offered.gradient and offered.gradient(request).ok):
            continue
        if "query" in named and peer_fault(name, "gradients", *(named[n] for n in terms)):
            continue
        autocast = torch.is_autocast_enabled(request.device_type)
        without = torch.autocast(request.device_type, enabled=False) if autocast else nullcontext()
        with without:
            grads = offered.backward(*arguments)
        if grads is not None:
            return grads
    return None


def shard_backward(*arguments: Any) -> Any:
    """As `elsa::attention_backward`, for keys and values that are a shard of those that the rows
    see.

    `out` and `lse` are of the whole rows, so that a kernel serves only where it reads both as they
    are: P = exp(score - lse), delta = rowsum(grad_out * out). In float32 the CPU kernels do, whose
    scores are rounded as in the forward, and the Triton ones where no lse is large; PyTorch's do.
    For others plain PyTorch. Where an lse `loses_digits`, give all in float64, an lse of float64
    scores among it: here scores are rounded otherwise than those that it was summed of, and the
    weights of a row would not sum to one.
    """
    request, named = _request_of(ops.ATTENTION, arguments)
    query, grads = named["query"], None
    asked = measured.gradients("attention", query.device.type, query.dtype)
    if asked and query.numel() and named["value"].numel():
        request = request._replace(layout="dense")
        single = query.dtype == torch.float32
        if single and "native" in asked:
            support = implementation("attention", "native").gradient
            if support is not None and support(request).ok:
                grads = native_backward.attention_backward(*arguments, is_shard=True)
        if grads is None:
            read = ("triton", "sdpa") if single else ("sdpa",)
            grads = _by_backends(request, [n for n in asked if n in read], arguments, named)
    return eager.backward(*arguments, is_shard=True) if grads is None else grads


def padded_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float, precision: str, needs: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """`elsa::varlen_attention_backward` by the gradients of `attention` of a padded batch.

    The longest lengths are read by the host, which waits for the device. Gradients are laid out as
    their operands.
    """
    operands = query, key, value
    if not query.shape[0] or not key.shape[0]:
        return tuple(
            torch.zeros_like(t) if needed else t.new_empty(0)
            for t, needed in zip(operands, needs, strict=True)
        )
    bounds = (cu_seqlens_q, cu_seqlens_k)
    queries, keys = (max(1, int(b.diff().amax())) if b.shape[0] > 1 else 1 for b in bounds)

    def rows(t: Tensor, which: int = 0) -> Tensor:  # [T, H, D] as [S, H, N, D]
        return packing.padded(t, bounds[which], (queries, keys)[which]).transpose(1, 2)

    mask = packing.inside(cu_seqlens_k, keys)[:, None, None, :]
    if is_causal:
        mask = mask & mask.new_ones(queries, keys).tril()
    of_lse = rows(lse.t()[..., None]).squeeze(-1)
    slope = rows(grad_lse.t()[..., None]).squeeze(-1) if grad_lse.numel() else grad_lse
    grads = torch.ops.elsa.attention_backward.default(
        rows(grad_out), slope, rows(query), rows(key, 1), rows(value, 1), mask, rows(out), of_lse,
        False, scale, precision, [*needs, False],
    )[:3]  # fmt: skip
    places = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
    return tuple(
        torch.empty_like(t).copy_(packing.packed(g.transpose(1, 2), b, t.shape[0]))
        if needed else t.new_empty(0)
        for t, g, b, needed in zip(operands, grads, places, needs, strict=True)
    )  # fmt: skip


def _with_mask(grads: Sequence[Tensor], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Entmax's gradients, with that of an additive mask by plain PyTorch: no kernel of a GPU
    computes it."""
    *terms, needs = arguments
    attn_mask = terms[4]
    if not needs[3] or attn_mask is None or attn_mask.dtype == torch.bool or grads[3].numel():
        return tuple(grads)
    of_mask = [False, False, False, True, False]
    return *grads[:3], eager_entmax.backward(*(*terms, of_mask))[3], grads[4]


def recorded(operator: str, choice: Any) -> Callable[..., Any]:
    """What runs an eager call whose gradient autograd records, by the backend that was chosen.

    Where that has a kernel `direct` behind `elsa::<operator>`, the same kernels and formulas in
    fewer steps: the Python layers of `torch.library.register_autograd`, in both directions, take
    the host more time than all else of a call. Only for calls that none of `calls.traced` sees.
    """
    run: Callable[..., Any] = choice.run
    # a profile looks for the operator's name
    if choice.direct is None or run is not ops.RECORDS[operator].overload or _profiled():
        return run
    function, backward = _EAGER[operator]
    return partial(function.apply, choice.direct, backward)


_BACKWARD = {
    record.name: _by_the_table(record)
    for record in (
        ops.ATTENTION, ops.ATTENTION_DROPOUT, ops.VARLEN_ATTENTION, ops.WINDOW_ATTENTION,
        ops.ENTMAX_ATTENTION, ops.ENTMAX_VARLEN_ATTENTION,
    )
}  # fmt: skip
for _name, _kernel in _BACKWARD.items():
    implement(f"{_name}_backward", _kernel, "CompositeExplicitAutograd")
_OF_EAGER_CALLS = {"attention": attention_operator.Eager, "window_attention": window_operator.Eager}
# The plans of these are dropped where backends come or go (`chooser.register`).
cuda.offer({f"{name}_backward": _BACKWARD[name] for name in _OF_EAGER_CALLS})
# The function of autograd that records an eager call, and what computes its gradients.
_EAGER = {
    name: (
        function,
        cuda.direct(getattr(torch.ops.elsa, f"{name}_backward").default, _BACKWARD[name]),
    )
    for name, function in _OF_EAGER_CALLS.items()
}
flops.offer()  # of all operators, which are defined now
