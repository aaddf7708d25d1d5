"""Attention of dense tensors on one device; all other calls of attention are made of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from elsa_core import dispatch, ops
from elsa_core.backends import philox
from elsa_core.base import calls
from elsa_core.base.operands import autocast, checked_mask, operands, require_dense
from elsa_core.dispatch import Route, launches
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.ops.arguments import (
    Kind,
    default_scale,
    kind_of,
    request_of,
    restored,
)
from elsa_core.ops.sparse import api as sparse

Answer = Tensor | tuple[Tensor, Tensor]
_profiled, _cast = torch._C._autograd._profiler_enabled, torch._C._is_any_autocast_enabled
_required = torch._C._any_requires_grad


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, precision: str = "strict", backend: str = "auto",
    return_lse: bool = False,
) -> Answer:  # fmt: skip
    """`elsa_core.attention` of dense tensors on one device, with every key."""
    answer = ordinary(
        query, key, value, attn_mask, dropout_p, is_causal, scale, precision, backend, return_lse
    )
    if answer is not None:
        return answer
    return checked(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, backend,
        return_lse,
    )  # fmt: skip


def ordinary(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, precision: str, backend: str, return_lse: bool,
) -> Answer | None:  # fmt: skip
    """Serve an ordinary call with the least host time; None for any other.

    Ordinary are plain tensors [B, H, N, D] of one dtype and device, whose heads are equal and that
    pass every check of `operands` as they are, without dropout and autocast, where no tracer, mode
    or transform is active. Where autograd is to record the call, it gives no lse.
    """
    if calls.traced() or _cast() or dropout_p != 0.0:
        return None
    auto = backend == "auto" and not return_lse
    given = (query, key, value, attn_mask, is_causal, scale, precision)
    cached = launches.ATTENTION.find
    if auto and cached is not None and not launches.is_seen(query, key, value, attn_mask):
        out = cached(*given)
        if out is not None:
            return out
    try:
        shape, others, dtype, device = query.shape, key.shape, query.dtype, query.device
        if not (
            len(shape) == 4
            and value.shape == others
            and (others == shape or (others[:2] == shape[:2] and others[3:] == shape[3:]))
            and key.dtype == dtype
            and value.dtype == dtype
            and dtype.is_floating_point
            and key.device == device
            and value.device == device
            and type(query) is Tensor
            and type(key) is Tensor
            and type(value) is Tensor
        ):
            return None
        if attn_mask is not None:
            attn_mask = checked_mask(attn_mask, query, key, is_causal)
        head_dim = shape[3]
        if scale is None:
            scale = head_dim**-0.5 if head_dim else 1.0
        choice = dispatch.chosen("attention", device, dtype, head_dim, head_dim, precision, backend)
        recorded = torch.is_grad_enabled() and _required(query, key, value, attn_mask)
        by_pytorch = device.type == "cuda" and choice.name == dispatch.PLAIN
        arguments = (query, key, value, attn_mask, is_causal, scale, precision)
        by_name = backend != "auto" and dispatch.peer_fault(
            backend, "whole", query, key, value, is_causal, scale
        )
        if by_pytorch or by_name or (recorded and return_lse):
            return None
        lse = None
        if recorded:
            out = _recorded(arguments, choice, backend)
        else:
            out, lse = _inferred(arguments, choice, given if auto else None)
        if not return_lse:
            return out
        return None if lse is None else (out, lse)
    except (AttributeError, RuntimeError):
        require_dense(query=query, key=key, value=value, attn_mask=attn_mask)
        raise


def _inferred(
    arguments: tuple[Any, ...], choice: Any, given: tuple[Any, ...] | None
) -> tuple[Tensor, Tensor | None]:
    """A call that autograd does not record. given: of the caller, where `auto` chooses and the
    output alone is wanted."""
    held = _holding(choice.rows, arguments) if choice.rows and given is not None else ()
    out = _by_row(held, arguments)
    if out is not None:
        return out, None
    found: tuple[Tensor, Tensor | None]
    if choice.direct is None or _profiled():
        found = calls.below_autograd(choice.run, *arguments)
        return found
    found = choice.direct(*arguments)
    # where a row holds, its backend declined this call alone
    if given is not None and not held and found[0].is_cuda:
        launches.ATTENTION.admit(arguments, given)
    return found


def _holding(rows: Any, arguments: tuple[Any, ...], known: Any = bool) -> list[Any]:
    query, key, value, mask, causal, scale = arguments[:6]
    if mask is not None and mask.dtype != query.dtype:
        return []
    of_mask = None if mask is None else mask.shape
    facts = dispatch.attention_facts(query.shape, key.shape, of_mask, known, causal=causal)
    return [
        row
        for row in rows
        if row.holds(facts, known)
        and not dispatch.peer_fault(row.by, "whole", query, key, value, causal, scale)
    ]


def _by_row(held: Any, arguments: tuple[Any, ...]) -> Tensor | None:
    """An inference call by the backend that was measured to be faster there; None if there is none.
    Not for exported programs, which hold for other lengths too."""
    for row in held:
        out: Tensor | None = dispatch.BY_ROW["attention", row.by](*arguments)
        if out is not None:
            return out
    return None


def _measured_faster(kind: Kind, backend: str, arguments: tuple[Any, ...]) -> Tensor | None:
    """The output of a call, as `_by_row` gives it; a compiler may be tracing it. A length that it
    left open decides nothing: the graph would be made anew for each."""
    query, key, value, attn_mask = arguments[:4]
    if calls.exporting():  # such a program holds for other lengths and GPUs
        return None
    known: Any = bool
    if is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # 1.7 s

        known = statically_known_true
    elif calls.traced():
        return None
    if calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask):
        return None
    rows = dispatch.rows_of("attention", *kind, backend)
    return _by_row(_holding(rows, arguments, known) if rows else (), arguments)


def _recorded(arguments: tuple[Any, ...], choice: Any, backend: str) -> Tensor:
    query, head_dim, whole = arguments[0], arguments[0].shape[3], ""
    if backend == "auto":
        kind = (calls.place(query), query.dtype, head_dim, head_dim, arguments[6])
        whole = _whole(kind, arguments, "attention")
    run = dispatch.RUNS["attention", whole] if whole else dispatch.recorded("attention", choice)
    out: Tensor = run(*arguments)[0]
    return out


def checked(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool, precision: str, backend: str,
    return_lse: bool,
) -> Answer:  # fmt: skip
    """A call with every argument checked and brought to the operator's layout."""
    cast = autocast(query, key, value, attn_mask)
    q, k, v, mask = operands(*cast, is_causal, enable_gqa)
    scale = default_scale(q) if scale is None else scale
    arguments = (q, k, v, mask, is_causal, scale, precision)
    found = _served(arguments, dropout_p, backend, return_lse)
    out, lse = restored((query, key, value), *found)
    if not return_lse:
        return out  # type: ignore[no-any-return]
    if lse is None:
        raise UnavailableError(f"backend={backend!r} gives no lse: use backend='auto'")
    return out, lse


def _served(
    arguments: tuple[Any, ...], dropout_p: float, backend: str, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    kind = kind_of(arguments[0], arguments[2], arguments[6])
    if calls.exporting_onnx():
        dispatch.choose("attention", *kind, backend)  # which refuses what it refuses elsewhere
        return ops.ATTENTION.exported(*arguments, with_lse=return_lse)  # type: ignore[no-any-return]
    operator, name = _server(kind, arguments, dropout_p, backend, return_lse)
    run: Any = dispatch.RUNS[operator, name]
    if operator != "attention":
        # PyTorch's own kernels draw for themselves, as they do in the original model
        own = dispatch.is_whole(operator, name)
        seed = None if own else philox.draw(arguments[0].device)
        if calls.differentiates_otherwise():
            run = ops.ATTENTION_DROPOUT.reference
        return run(*arguments, float(dropout_p), seed)  # type: ignore[no-any-return]
    if dispatch.plain_alone(backend):
        return ops.ATTENTION.reference(*arguments[:6])  # type: ignore[no-any-return]
    out = None if return_lse else _measured_faster(kind, backend, arguments)
    return run(*arguments) if out is None else (out, None)


def _server(
    kind: Kind, arguments: tuple[Any, ...], dropout_p: float, backend: str, return_lse: bool
) -> tuple[str, str]:
    """The operator and the backend that serve a call, or what is wrong with dropout_p or the
    backend. With dropout, that a gradient is wanted does not change it, because a reentrant
    checkpoint runs without gradients first and must drop the same weights again."""
    operator = "attention" if dropout_p == 0.0 else "attention_dropout"
    name = dispatch.choose("attention", *kind, backend)
    if not 0.0 <= dropout_p <= 1.0:
        raise ArgumentError(f"dropout_p={dropout_p} must be in [0, 1]")
    if dispatch.plain_alone(backend):
        return operator, dispatch.PLAIN
    if dropout_p != 0.0:
        name = dispatch.choose(operator, *kind, backend)
    else:
        fault = dispatch.peer_fault(backend, "whole", *arguments[:3], *arguments[4:6])
        if fault:
            raise UnavailableError(f"backend={backend!r} cannot serve this call: {fault}")
    exported = dropout_p == 0.0 and calls.exporting()
    if backend == "auto" and not return_lse and dropout_p < 1.0 and not exported:
        name = _whole(kind, arguments, operator) or name
    return operator, name


def _whole(kind: Kind, arguments: tuple[Any, ...], operator: str) -> str:
    """The backend of PyTorch's own kernels that takes a call of which lse is not wanted, and its
    gradients where they are wanted, as a whole; empty where there is none. A graph that is exported
    holds elsa's operators.
    """
    query, key, value, attn_mask, is_causal, scale = arguments[:6]
    gradient = calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask)
    facts: Any = {}
    if operator != "attention":
        gradient = gradient or ("query",)
    elif gradient and not calls.traced():
        boolean = attn_mask is not None and attn_mask.dtype == torch.bool
        facts = {"work": query.numel() * key.shape[2], "boolean": int(boolean)}
        plain = attn_mask is None and not is_causal
        if plain and query.is_cuda and query.shape == key.shape == value.shape:
            graph = int(torch.cuda.is_current_stream_capturing())
            facts |= {"graph": graph, "tokens": query.shape[2]}
    mode = "train" if gradient else "infer"
    name = dispatch.choose(operator, *kind, "auto", mode, gradient=gradient, **facts)
    if not dispatch.is_whole(operator, name):
        return ""
    if dispatch.peer_fault(name, "whole", query, key, value, is_causal, scale):
        return ""
    takes = dispatch.implementation(operator, name).takes
    return name if takes is None or takes(query, key, attn_mask) else ""


def explain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, precision: str = "strict", backend: str = "auto",
    sparsity: str | float | None = None,
) -> Route:  # fmt: skip
    """Say which backend, schedule and arithmetic would serve `attention` with these arguments.

    Takes the arguments of `attention` (tensors' shapes, strides, dtypes and devices matter, their
    values do not) and refuses as it does: dense tensors that do not fit, dropout_p, precision,
    backend and sparsity. Nested tensors are refused.
    """
    if sparsity is not None:
        sparsity = sparse.asked(query, key, value, attn_mask, dropout_p, sparsity)
    require_dense(query=query, key=key, value=value, attn_mask=attn_mask)
    cast = autocast(query, key, value, attn_mask)
    q, k, v, mask = operands(*cast, is_causal, enable_gqa)
    if sparsity is not None:
        route = sparse.route(q, k, v, mask, is_causal, precision, backend, sparsity)
        if route is not None:
            return route
    gradient = calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask)
    of_mask = dispatch.mask_kind(mask, is_causal)
    request = request_of("attention", (q, k, v), precision, of_mask, gradient)
    words = (q, k, v, mask, is_causal, precision)
    arguments = (q, k, v, mask, is_causal, default_scale(q) if scale is None else scale, precision)
    kind = kind_of(q, v, precision)
    operator, name = _server(kind, arguments, dropout_p, backend, return_lse=False)
    if dropout_p != 0.0:
        return dispatch.route(request._replace(operator=operator), name, schedule=words)
    served = dispatch.route(request, backend, schedule=words)
    if dispatch.plain_alone(backend):
        return served
    if backend == "auto" and dispatch.is_whole("attention", name):
        faster = "trains slower: the shipped table of measurements"
        if dispatch.choose("attention", *kind) == dispatch.PLAIN:
            faster = "serves exported graphs and calls with lse; PyTorch's own kernels are faster"
        return dispatch.route(request, name, schedule=words, because=faster)
    rows = () if gradient else dispatch.rows_of("attention", *kind, backend)
    for row in _holding(rows, arguments):
        serves = dispatch.implementation("attention", row.by).serves
        if serves is None or serves(q, k, v, mask, is_causal):
            slower = (
                f"{row.ratio[0]} to {row.ratio[1]} of its speed in the shipped table; "
                "serves exported programs, open lengths of compiled ones and calls with lse"
            )
            return dispatch.route(request, row.by, schedule=words, because=slower)
    return served
