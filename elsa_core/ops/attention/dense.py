"""Attention of dense tensors on one device; all other calls of attention are made of these."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from elsa_core import dispatch, ops
from elsa_core.backends.support import Request
from elsa_core.base import calls
from elsa_core.base.operands import autocast, checked_mask, leading_dims, operands, require_dense
from elsa_core.dispatch import Chosen, Layout, Route, launches, measured
from elsa_core.errors import UnavailableError
from elsa_core.ops.attention import dropping
from elsa_core.ops.sparse import api as sparse

Answer = Tensor | tuple[Tensor, Tensor]
_profiled, _cast = torch._C._autograd._profiler_enabled, torch._C._is_any_autocast_enabled


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
) -> Answer:
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    precision: str,
    backend: str,
    return_lse: bool,
) -> Answer | None:
    """Serve an ordinary call with the least host time; None for any other.

    Ordinary are plain tensors [B, H, N, D] of one dtype and device, whose heads are equal and that
    pass every check of `operands` as they are, without dropout and autocast, where no tracer, mode
    or transform is active. Where autograd is to record the call, it gives no lse.

    Raises:
        TypeError: query, key, value or attn_mask is no tensor.
        ArgumentError, UnavailableError: as `elsa_core.attention`.
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
        recorded = calls.differentiates(query, key, value, attn_mask)
        by_pytorch = device.type == "cuda" and choice.name == dispatch.PLAIN
        by_name = backend != "auto" and dispatch.peer_fault(
            backend, Layout(query, key, value, is_causal, scale), "whole"
        )
        if by_pytorch or (recorded and return_lse) or by_name:
            return None
        arguments = (query, key, value, attn_mask, is_causal, scale, precision)
        if recorded:
            return _recorded(arguments, choice, backend)
        result = _inferred(choice, arguments, given if auto else None)
        return _with_lse(*result, backend) if return_lse else result[0]
    except (AttributeError, RuntimeError):
        require_dense(query=query, key=key, value=value, attn_mask=attn_mask)
        raise


def _inferred(
    choice: Chosen, arguments: tuple[Any, ...], given: tuple[Any, ...] | None
) -> tuple[Tensor, Tensor | None]:
    """A call that autograd does not record. given: of the caller, where `auto` chooses and the
    output alone is wanted.
    """
    if given is not None:
        out = _by_row(choice, *arguments)
        if out is not None:
            return out, None
    found: tuple[Tensor, Tensor | None]
    if choice.direct is None or _profiled():
        found = calls.below_autograd(choice.run, *arguments)
        return found
    found = choice.direct(*arguments)
    # where a row holds, its backend declined this call alone
    if given is not None and found[0].is_cuda and not _has_row(choice, *arguments[:5]):
        launches.ATTENTION.admit(arguments, given)
    return found


def _has_row(
    choice: Chosen, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> bool:
    masked = None if mask is None else mask.shape
    shapes = query.shape, key.shape, masked
    return any(row.holds(*shapes, causal=causal) for row, _ in choice.rows)


def _by_row(
    choice: Chosen, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> Tensor | None:
    """An inference call by the backend that was measured to be faster there; None if there is none.

    Not for exported programs, which hold for other lengths too.
    """
    if mask is not None and mask.dtype != query.dtype:
        return None
    masked = None if mask is None else mask.shape
    for row, serve in choice.rows:
        if row.holds(query.shape, key.shape, masked, causal=rest[0]):
            layout = Layout(query, key, value, rest[0], rest[1])
            if dispatch.peer_fault(row.backend, layout, "whole"):
                continue
            out: Tensor | None = serve(query, key, value, mask, *rest)
            if out is not None:
                return out
    return None


def _measured_faster(
    kind: tuple[str, torch.dtype, int, int, str], backend: str, arguments: tuple[Any, ...]
) -> Tensor | None:
    """The output of a call, as `_by_row` gives it; a compiler may be tracing it."""
    query, key, value, attn_mask = arguments[:4]
    if calls.exporting():  # such a program holds for other lengths and GPUs
        return None
    if is_compiling():
        if calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask):
            return None
        return _compiled_by_row(kind, backend, arguments)
    if calls.traced() or calls.differentiates(query, key, value, attn_mask):
        return None
    choice = dispatch.chosen("attention", query.device, *kind[1:], backend)
    return _by_row(choice, *arguments)


def _compiled_by_row(
    kind: tuple[str, torch.dtype, int, int, str], backend: str, arguments: tuple[Any, ...]
) -> Tensor | None:
    """As `_by_row`, for a graph that `torch.compile` makes for the lengths of this call alone.

    A length that it left open decides nothing: the graph would be made anew for each.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # 1.7 s, not eager's

    query, key, value, mask, causal, scale = arguments[:6]
    if mask is not None and mask.dtype != query.dtype:
        return None
    masked = None if mask is None else mask.shape
    for row in dispatch.rows_of("attention", *kind, backend):
        if row.holds(query.shape, key.shape, masked, statically_known_true, causal=causal):
            if dispatch.peer_fault(row.backend, Layout(query, key, value, causal, scale), "whole"):
                continue
            out: Tensor | None = dispatch.BY_ROW["attention", row.backend](*arguments)
            if out is not None:
                return out
    return None


def _recorded(arguments: tuple[Any, ...], choice: Chosen, backend: str) -> Tensor | None:
    """An ordinary call that autograd records; None where it is made of PyTorch's operations."""
    query, key, value, attn_mask = arguments[:4]
    if dispatch.plain_alone(backend):
        return None
    head_dim = query.shape[3]
    kind = (calls.place(query), query.dtype, head_dim, head_dim, arguments[6])
    whole = _whole(query, key, value, attn_mask, kind, backend, False, *arguments[4:6])
    run = dispatch.RUNS["attention", whole or choice.name]
    # a profile looks for the operator's name
    if not whole and run is ops.ATTENTION.overload and not _profiled():
        run = dispatch.recorded("attention", choice.name) or run
    out: Tensor = run(*arguments)[0]
    return out


def checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    precision: str,
    backend: str,
    return_lse: bool,
) -> Answer:
    """A call with every argument checked and brought to the operator's layout."""
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    q, k, v, mask = operands(query, key, value, attn_mask, is_causal, enable_gqa)
    scale = _default_scale(q) if scale is None else scale
    out, lse = _served(
        q, k, v, mask, is_causal, scale, precision, dropout_p=dropout_p, backend=backend,
        return_lse=return_lse,
    )  # fmt: skip
    if not query.dim() == key.dim() == value.dim() == 4:
        leading = leading_dims(query, key, value)
        out = out.reshape(*leading, *out.shape[2:])
        lse = None if lse is None else lse.reshape(*leading, *lse.shape[2:])
    return _with_lse(out, lse, backend) if return_lse else out


def _served(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    precision: str,
    *,
    dropout_p: float,
    backend: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """A call in the operator's layout, by who serves it; lse is None where it was not asked for."""
    kind = (calls.place(q), q.dtype, index(q.shape[-1]), index(v.shape[-1]), precision)
    name = dispatch.choose("attention", *kind, backend)
    answer: tuple[Tensor, Tensor | None]
    if calls.exporting_onnx():
        exported = ops.ATTENTION.exported
        answer = exported(q, k, v, mask, is_causal, scale, precision, with_lse=return_lse)
    elif dropout_p != 0.0:
        terms = (q, k, v, mask, is_causal, scale, precision)
        answer = dropping.dropped(
            *terms, dropout_p=dropout_p, backend=backend, return_lse=return_lse
        )
    elif dispatch.plain_alone(backend):
        answer = ops.ATTENTION.reference(q, k, v, mask, is_causal, scale)
    else:
        name = _whole(q, k, v, mask, kind, backend, return_lse, is_causal, scale) or name
        _refuse_faulty(backend, Layout(q, k, v, is_causal, scale))
        arguments = (q, k, v, mask, is_causal, scale, precision)
        faster = None if return_lse else _measured_faster(kind, backend, arguments)
        run = dispatch.RUNS["attention", name]
        answer = run(*arguments) if faster is None else (faster, None)
    return answer


def _default_scale(query: Tensor) -> float:
    return query.shape[-1] ** -0.5 if query.shape[-1] else 1.0


def _refuse_faulty(backend: str, layout: Layout) -> None:
    """Raise where the backend asked for by name would compute a call wrong."""
    fault = dispatch.peer_fault(backend, layout, "whole")
    if fault:
        raise UnavailableError(f"backend={backend!r} cannot serve this call: {fault}")


def _with_lse(out: Tensor, lse: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    if lse is None:
        raise UnavailableError(f"backend={backend!r} gives no lse: use backend='auto'")
    return out, lse


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    kind: tuple[str, torch.dtype, int, int, str],
    backend: str,
    return_lse: bool,
    is_causal: bool,
    scale: float,
) -> str:
    """The backend of PyTorch's own kernels that takes this call, and its gradients where they are
    wanted, as a whole; empty where there is none. A graph that is exported holds elsa's operators.
    """
    if backend != "auto" or return_lse or calls.exporting():
        return ""
    gradient = calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask)
    work = None if calls.traced() else query.numel() * key.shape[2]
    plain = attn_mask is None and not is_causal
    if work is not None and gradient and plain and query.is_cuda and _leads(query, key, value):
        work = None
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    name = dispatch.choose("attention", *kind, mode="infer", gradient=gradient)
    if gradient:
        trained = dispatch.choose(
            "attention", *kind, mode="train", gradient=gradient, work=work, masked=boolean
        )
        name = trained if dispatch.is_whole("attention", trained) else name
    layout = Layout(query, key, value, is_causal, scale)
    if not dispatch.is_whole("attention", name) or dispatch.peer_fault(name, layout, "whole"):
        return ""
    takes = dispatch.implementation("attention", name).takes
    return name if takes is None or takes(query, key, attn_mask) else ""


def _leads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a CUDA graph, which saves the host's time, records a small training call that the
    table gives to this package's kernels there.
    """
    return torch.cuda.is_current_stream_capturing() and measured.leads_in_graphs(query, key, value)


def explain(
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
    sparsity: str | float | None = None,
) -> Route:
    """Say which backend, schedule and arithmetic would serve `attention` with these arguments.

    Takes the arguments of `attention` (tensors' shapes, strides, dtypes and devices matter, their
    values do not) and refuses as it does: dense tensors that do not fit, dropout_p, precision,
    backend and sparsity. Nested tensors are refused. Where the published results show a loss near
    this call, a reason says so.
    """
    from elsa_core.dispatch.losses import losing_case

    if sparsity is not None:
        sparse.asked(query, key, value, attn_mask, dropout_p, sparsity)
    q, k, v, mask = operands(query, key, value, attn_mask, is_causal, enable_gqa)
    if sparsity is not None:
        route = sparse.route(q, k, v, mask, is_causal, precision, backend, sparsity)
        if route is not None:
            return route
    dense = all(t.stride(-1) == 1 for t in (q, k, v))
    gradient = calls.wanted(query=query, key=key, value=value, attn_mask=attn_mask)
    request = Request(
        q.device.type, q.dtype, q.shape[-1], v.shape[-1], precision, "attention",
        dispatch.mask_kind(mask, is_causal), "dense" if dense else "strided", gradient,
        ordinal=q.get_device(),
    )  # fmt: skip
    arguments = (q, k, v, mask, is_causal, precision)
    scale = _default_scale(q) if scale is None else scale
    layout = Layout(q, k, v, is_causal, scale)
    _refuse_faulty(backend, layout)
    if dropout_p != 0.0:
        name = dropping.backend_of(layout, mask, precision, dropout_p, backend, return_lse=False)
        request = request._replace(operator="attention_dropout")
        return dispatch.route(request, name, schedule=arguments)
    alone = dispatch.plain_alone(backend)
    if alone:
        return dispatch.route(
            request, dispatch.PLAIN, schedule=arguments, because=f"has no {alone}"
        )
    kind = (calls.place(q), q.dtype, q.shape[-1], v.shape[-1], precision)
    given = (q, k, v, mask, kind, backend, False, is_causal, scale)
    whole = _whole(*given)
    if whole:
        faster = "trains slower: the shipped table of measurements"
        if dispatch.choose("attention", *kind) == dispatch.PLAIN:
            faster = "serves exported graphs and calls with lse; PyTorch's own kernels are faster"
        return dispatch.route(request, whole, schedule=arguments, because=faster)
    found = dispatch.route(request, backend, schedule=arguments)
    if not gradient and (mask is None or mask.dtype == q.dtype):
        of_mask = None if mask is None else mask.shape
        for row, _ in dispatch.chosen("attention", q.device, *kind[1:], backend).rows:
            serves = dispatch.implementation("attention", row.backend).serves
            held = row.holds(q.shape, k.shape, of_mask, causal=is_causal)
            held = held and not dispatch.peer_fault(row.backend, layout, "whole")
            if held and (serves is None or serves(q, k, v, mask, is_causal)):
                slower = (
                    f"{row.ratio[0]} to {row.ratio[1]} of its speed in the shipped table; "
                    "serves exported programs, open lengths of compiled ones and calls with lse"
                )
                return dispatch.route(request, row.backend, schedule=arguments, because=slower)
    if found.backend != dispatch.PLAIN:
        masked = mask is not None or is_causal
        shape = (q.shape[0], q.shape[1], q.shape[2], q.shape[3])
        lost = losing_case(q.device.type, shape, k.shape[2], q.dtype, masked, precision)
        found = replace(found, reasons=(*found.reasons, lost)) if lost else found
    return found
