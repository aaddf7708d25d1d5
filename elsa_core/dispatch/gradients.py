"""Gradients of this package's forwards: the operators' kernels, and eager calls in fewer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elsa_core import ops
from elsa_core.backends import cuda, eager, native_backward
from elsa_core.backends.support import Request
from elsa_core.base import packing
from elsa_core.dispatch import measured
from elsa_core.dispatch.chooser import DIRECT, gradient_name, implementation, mask_kind
from elsa_core.dispatch.faults import Layout, peer_fault
from elsa_core.dispatch.table import PLAIN
from elsa_core.ops import flops
from elsa_core.ops.attention import record as attention_operator
from elsa_core.ops.factory import implement
from elsa_core.ops.window import record as window_operator


def attention_backward(*arguments: Any) -> Any:
    """`elsa::attention_backward` on every device: the first backend of the table that serves it."""
    return _of_attention(ops.ATTENTION, arguments)


def attention_dropout_backward(*arguments: Any) -> Any:
    """`elsa::attention_dropout_backward` on every device: as `attention_backward`."""
    return _of_attention(ops.ATTENTION_DROPOUT, arguments)


def _of_attention(record: ops.Operator, arguments: tuple[Any, ...]) -> Any:
    query, key, value, attn_mask = arguments[2:6]
    is_causal, precision, needs = arguments[8], arguments[10], arguments[-1]
    wanted = zip(record.terms, needs, strict=True)
    dense = all(t.stride(-1) == 1 for t in (query, key, value))
    request = Request(
        query.device.type, query.dtype, query.shape[-1], value.shape[-1], precision, record.name,
        mask_kind(attn_mask, is_causal), "dense" if dense else "strided",
        tuple(name for name, needed in wanted if needed), ordinal=query.get_device(),
    )  # fmt: skip
    grads = _by_the_table(request, arguments, _layout_of(arguments))
    return record.recomputed(*arguments) if grads is None else grads


def _layout_of(arguments: tuple[Any, ...]) -> Layout:
    """Of the arguments of `elsa::attention_backward`."""
    return Layout(*arguments[2:5], *arguments[8:10])


def _by_the_table(
    request: Request, arguments: tuple[Any, ...], layout: Layout | None = None
) -> Any:
    """The gradients by the first backend of the table that serves the call, or None."""
    names = measured.gradients(request.operator, request.device_type, request.dtype)
    return _by_backends(request, names, arguments, layout)


def _by_backends(
    request: Request, names: Iterable[str], arguments: tuple[Any, ...], layout: Layout | None
) -> Any:
    for name in names:
        offered = implementation(request.operator, name)
        if offered.backward is None or not (offered.gradient and offered.gradient(request).ok):
            continue
        if layout is not None and peer_fault(name, layout, "gradients"):
            continue
        with _without_autocast(request.device_type):
            grads = offered.backward(*arguments)
        if grads is not None:
            return grads
    return None


def shard_backward(*arguments: Any) -> Any:
    """As `attention_backward`, for keys and values that are a shard of those that the rows see.

    `out` and `lse` are of the whole rows, so that a kernel serves only where it reads both as they
    are: P = exp(score - lse), delta = rowsum(grad_out * out). In float32 the CPU kernels do, whose
    scores are rounded as in the forward, and the Triton ones where no lse is large; PyTorch's do.
    For others plain PyTorch. Where an lse `loses_digits`, give
    all in float64, an lse of float64 scores among it: here scores are rounded otherwise than those
    that it was summed of, and the weights of a row would not sum to one.
    """
    query, value, attn_mask = arguments[2], arguments[4], arguments[5]
    is_causal, _, precision, needs = arguments[8:]
    asked = measured.gradients("attention", query.device.type, query.dtype)
    if not asked or not (query.numel() and value.numel()):
        return eager.backward(*arguments, is_shard=True)
    wanted = zip(ops.ATTENTION.terms, needs, strict=True)
    request = Request(
        query.device.type, query.dtype, query.shape[-1], value.shape[-1], precision, "attention",
        mask_kind(attn_mask, is_causal), "dense", tuple(name for name, needed in wanted if needed),
        ordinal=query.get_device(),
    )  # fmt: skip
    single = query.dtype == torch.float32
    if single and "native" in asked:
        support = implementation("attention", "native").gradient
        if support is not None and support(request).ok:
            grads = native_backward.attention_backward(*arguments, is_shard=True)
            if grads is not None:
                return grads
    read = ("triton", "sdpa") if single else ("sdpa",)
    names = [name for name in asked if name in read]
    grads = _by_backends(request, names, arguments, _layout_of(arguments))
    return eager.backward(*arguments, is_shard=True) if grads is None else grads


def window_attention_backward(*arguments: Any) -> Any:
    """`elsa::window_attention_backward` on every device: as `attention_backward`."""
    qkv, num_heads, precision, needs = arguments[1], arguments[6], arguments[13], arguments[14]
    head_dim = qkv.shape[-1] // (3 * num_heads)
    wanted = zip(ops.WINDOW_ATTENTION.terms, needs, strict=True)
    request = Request(
        qkv.device.type, qkv.dtype, head_dim, head_dim, precision, "window_attention",
        gradient=tuple(name for name, needed in wanted if needed), tokens=math.prod(arguments[7]),
        ordinal=qkv.get_device(),
    )  # fmt: skip
    grads = _by_the_table(request, arguments)
    return ops.WINDOW_ATTENTION.recomputed(*arguments) if grads is None else grads


def varlen_attention_backward(*arguments: Any) -> Any:
    """`elsa::varlen_attention_backward` on every device: as `attention_backward`."""
    query, value, precision, needs = arguments[2], arguments[4], arguments[11], arguments[12]
    wanted = zip(ops.VARLEN_ATTENTION.terms, needs, strict=True)
    request = Request(
        query.device.type, query.dtype, query.shape[-1], value.shape[-1], precision,
        "varlen_attention", gradient=tuple(name for name, needed in wanted if needed),
        ordinal=query.get_device(),
    )  # fmt: skip
    grads = _by_the_table(request, arguments, Layout(*arguments[2:5], *arguments[9:11]))
    if grads is not None:
        return grads
    otherwise = padded_backward if query.is_cuda else ops.VARLEN_ATTENTION.recomputed
    return otherwise(*arguments)


def padded_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """`elsa::varlen_attention_backward` by the gradients of `attention` of a padded batch.

    The longest lengths are read by the host, which waits for the device.
    """
    if not query.shape[0] or not key.shape[0]:
        return _wanted(
            (query, key, value), tuple(map(torch.zeros_like, (query, key, value))), needs
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
    )  # fmt: skip
    counts = (query.shape[0], key.shape[0], key.shape[0])
    places = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
    packed = [
        packing.packed(g.transpose(1, 2), b, n) if needed else g
        for g, b, n, needed in zip(grads, places, counts, needs, strict=False)
    ]
    return _wanted((query, key, value), packed, needs)


def _wanted(
    operands: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that were wanted, laid out as their operands."""
    first, second, third = (
        torch.empty_like(t).copy_(g) if needed else t.new_empty(0)
        for t, g, needed in zip(operands, grads, needs, strict=True)
    )
    return first, second, third


def entmax_backward_cpu(*arguments: Any) -> Any:
    """`elsa::entmax_attention_backward` on the CPU: as `attention_backward`."""
    query, value, precision, needs = arguments[1], arguments[3], arguments[12], arguments[13]
    record = ops.ENTMAX_ATTENTION
    wanted = zip(record.terms, needs, strict=True)
    request = Request(
        query.device.type, query.dtype, query.shape[-1], value.shape[-1], precision, record.name,
        mask_kind(arguments[4], arguments[10]), "dense",
        tuple(name for name, needed in wanted if needed),
        ordinal=query.get_device(),
    )  # fmt: skip
    grads = _by_the_table(request, arguments)
    return record.recomputed(*arguments) if grads is None else _with_mask(grads, arguments)


def entmax_backward_cuda(*arguments: Any) -> Any:
    """`elsa::entmax_attention_backward` on CUDA: Triton's kernels; of a mask plain PyTorch."""
    from elsa_core.backends.triton.attention.entmax import entmax_backward

    with _without_autocast("cuda"):
        grads = entmax_backward(*arguments)
    return _with_mask(grads, arguments)


def entmax_varlen_backward_cuda(*arguments: Any) -> Any:
    """`elsa::entmax_varlen_attention_backward` on CUDA: Triton's kernels."""
    from elsa_core.backends.triton.attention.entmax import entmax_varlen_backward

    with _without_autocast("cuda"):
        return entmax_varlen_backward(*arguments)


def _with_mask(grads: Sequence[Tensor], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Entmax's gradients, with that of an additive mask by plain PyTorch: no kernel computes it."""
    *terms, needs = arguments
    attn_mask = terms[4]
    if not needs[3] or attn_mask is None or attn_mask.dtype == torch.bool or grads[3].numel():
        return tuple(grads)
    of_mask = [False, False, False, True, False]
    return *grads[:3], ops.ENTMAX_ATTENTION.recomputed(*terms, of_mask)[3], grads[4]


def recomputes(
    operator: str,
    place: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    precision: str,
    gradient: tuple[str, ...],
    mask: str,
) -> bool:
    """Whether no backend has a kernel of the gradients of such calls on a device, "cuda:1" say: a
    constant for the compiler, as `chooser.choose`."""
    device = torch.device(place)
    request = Request(
        device.type, dtype, head_dim, value_dim, precision, operator, mask, gradient=gradient,
        ordinal=-1 if device.index is None else device.index,
    )  # fmt: skip
    return gradient_name(request)[0] == PLAIN


recomputes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def recorded(operator: str, backend: str) -> Callable[..., Any] | None:
    """`elsa::<operator>` of a backend, for eager calls whose gradient autograd records.

    The same kernels and formulas in fewer steps: the Python layers of
    `torch.library.register_autograd`, in both directions, take the host more time than all else of
    a call. None where a backend has no kernel to be called directly. Only for calls that none of
    `calls.traced` sees.
    """
    kernel = DIRECT.get((operator, backend))
    if kernel is None:
        return None
    function, backward = _EAGER[operator]
    return partial(function.apply, kernel, backward)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


implement("attention_backward", attention_backward, "CompositeExplicitAutograd")
implement("varlen_attention_backward", varlen_attention_backward, "CompositeExplicitAutograd")
implement("attention_dropout_backward", attention_dropout_backward, "CompositeExplicitAutograd")
implement("window_attention_backward", window_attention_backward, "CompositeExplicitAutograd")
implement("entmax_attention_backward", entmax_backward_cpu, "CPU")
implement("entmax_attention_backward", entmax_backward_cuda, "CUDA")
implement("entmax_varlen_attention_backward", entmax_varlen_backward_cuda, "CUDA")
# The plans of these are dropped where backends come or go (`chooser.register`).
cuda.offer(
    {
        "attention_backward": attention_backward,
        "window_attention_backward": window_attention_backward,
    }
)
# The function of autograd that records an eager call, and what computes its gradients.
_EAGER: dict[str, tuple[Any, Callable[..., Any]]] = {
    "attention": (
        attention_operator.Eager,
        cuda.direct(torch.ops.elsa.attention_backward.default, attention_backward),
    ),
    "window_attention": (
        window_operator.Eager,
        cuda.direct(torch.ops.elsa.window_attention_backward.default, window_attention_backward),
    ),
}
flops.offer()  # of all operators, which are defined now
