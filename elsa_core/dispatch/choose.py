"""The choice of a backend for a call, and the order of those asked for gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core import ops
from elsa_core import precision as precisions
from elsa_core.backends import cuda
from elsa_core.backends.support import Backend, Implementation, Request, Support
from elsa_core.base import calls
from elsa_core.base.switches import SWITCHES, switched
from elsa_core.dispatch import measured
from elsa_core.dispatch.measured import Row
from elsa_core.dispatch.table import BACKENDS, PLAIN, SHIPPED, reference
from elsa_core.errors import ArgumentError, UnavailableError


class Chosen(NamedTuple):
    """What serves calls of one kind: a name, what to call, and the rows that may overrule it."""

    name: str
    run: Callable[..., Any] | None
    direct: Callable[..., Any] | None
    rows: tuple[tuple[Row, Callable[..., Any]], ...]


# What compilers and every call read. RUNS: what to call, by operator and backend; DIRECT: the
# kernel behind it, BY_ROW: what a row calls, see `Implementation`. SERVING: what may compute a
# projection faster than PyTorch (or gives None), by operator, device and what `backend=` asks for.
RUNS: dict[tuple[str, str], Callable[..., Any]] = {}
DIRECT: dict[tuple[str, str], Callable[..., Any]] = {}
BY_ROW: dict[tuple[str, str], Callable[..., Any]] = {}
SERVING: dict[tuple[str, str, str], tuple[Callable[..., Any], ...]] = {}

_REGISTRATIONS = itertools.count(1)


def register(backend: Backend, *, ahead_of: str = PLAIN) -> None:
    """Let a backend of another package serve calls: `auto` asks it before the one named.

    Raises:
        ArgumentError: a backend of its name is there, or none of the name `ahead_of`.
    """
    known = [each.name for each in BACKENDS]
    if backend.name in ("auto", *known):
        raise ArgumentError(f"a backend {backend.name!r} is registered already")
    if ahead_of not in known:
        raise ArgumentError(f"ahead_of={ahead_of!r} is unknown: choose one of {', '.join(known)}")
    BACKENDS.insert(known.index(ahead_of), backend)
    _forget()


def unregister(name: str) -> None:
    """Take a backend out again."""
    BACKENDS[:] = [each for each in BACKENDS if each.name != name]
    _forget()


def names(operator: str = "attention") -> tuple[str, ...]:
    """What `backend=` takes for an operator: "auto" and the backends that have it; plain PyTorch
    has each that has a record.
    """
    every = {PLAIN} if any(record.name == operator for record in ops.records()) else set()
    runs = {b.name for b in BACKENDS if getattr(b.operators.get(operator), "run", None)} | every
    return ("auto", *(each.name for each in BACKENDS if each.name in runs))


def implementation(operator: str, name: str) -> Implementation:
    """What a backend has of an operator; plain PyTorch has every one that is registered.

    Raises:
        TypeError: `name` is no text.
        ArgumentError: no such backend.
        UnavailableError: it has no such operator.
    """
    for backend in BACKENDS:
        if backend.name == name and operator in backend.operators:
            return backend.operators[operator]
    if name == PLAIN:
        return reference(ops.record(operator))
    choices = ", ".join(names(operator))
    if any(backend.name == name for backend in BACKENDS):
        raise UnavailableError(f"backend={name!r} has no {operator}: choose one of {choices}")
    if not isinstance(name, str):
        raise TypeError(f"backend must be text, not {type(name).__name__}")
    raise ArgumentError(f"backend={name!r} is unknown: choose one of {choices}")


def support(request: Request, name: str) -> Support:
    """Ask one backend by name whether it can serve a request, and why not."""
    home = next((each.device for each in BACKENDS if each.name == name), None)
    if home is not None and request.device_type != home:
        return Support(False, f"serves {home} tensors, these are on {request.device_type}")
    return implementation(request.operator, name).support(request)


def select(request: Request, backend: str = "auto") -> tuple[str, tuple[str, ...]]:
    """The backend that serves `request`, with the reasons why those asked before it cannot, and
    what it has to say itself.

    Raises:
        ArgumentError: no such backend.
        UnavailableError: the backend asked for by name cannot serve the request.
    """
    precisions.validate(request.precision, request.dtype)
    if backend != "auto":
        implementation(request.operator, backend)
        answer = support(request, backend)
        if not answer.ok:
            raise UnavailableError(f"backend={backend!r} cannot serve this call: {answer.reason}")
        return backend, (f"{backend}: {answer.reason}",) if answer.reason else ()
    reasons: list[str] = []
    for each in BACKENDS:
        offered = each.operators.get(request.operator)
        if each.device not in (None, request.device_type) or offered is None or offered.whole:
            continue
        if offered.asked and request.precision not in offered.unasked:
            reasons.append(f"{each.name}: was not measured for such calls; ask for it by name")
            continue
        answer = offered.support(request)
        if answer.reason:
            reasons.append(f"{each.name}: {answer.reason}")
        if answer.ok:
            return each.name, tuple(reasons)
    if not any(request.operator in each.operators for each in BACKENDS):
        return PLAIN, ()  # a record with a reference alone
    raise UnavailableError("no backend can serve this call: " + "; ".join(reasons))


@functools.lru_cache(maxsize=1024)
def chosen(
    operator: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    precision: str,
    backend: str,
) -> Chosen:
    """Who serves calls of one kind, whatever their lengths.

    Raises:
        ArgumentError, UnavailableError: as `select`.
    """
    request = Request(
        device.type, dtype, head_dim, value_dim, precision, operator, ordinal=_ordinal(device)
    )
    name = select(request, backend)[0]
    found = implementation(operator, name)
    rows: tuple[tuple[Row, Callable[..., Any]], ...] = ()
    if backend == "auto" and head_dim == value_dim and name in SHIPPED:
        rows = tuple(
            (row, BY_ROW[operator, row.backend])
            for row in measured.rows(operator, device, dtype, precision)
            if row.head_dim == head_dim and support(request, row.backend).ok
        )
    return Chosen(name, found.run, None if found.whole else found.direct, rows)


def name_of(
    operator: str,
    place: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    precision: str,
    backend: str,
) -> str:
    """The name of `chosen` for a device, "cuda:1" say: a constant for the compiler, since asking a
    backend may build or load a library, which cannot be traced."""
    device = torch.device(place)
    return chosen(operator, device, dtype, head_dim, value_dim, precision, backend).name


def rows_of(operator: str, place: str, *kind: Any) -> tuple[Row, ...]:
    """The rows of `chosen`; a constant for the compiler, as `name_of`, whose arguments it takes."""
    return tuple(row for row, _ in chosen(operator, torch.device(place), *kind).rows)


def state_run(
    query: Tensor, value: Tensor, attn_mask: Tensor | None, precision: str, backend: str
) -> Callable[..., Any] | None:
    """What gives attention whose results are merged with those of other keys, its lse in float64;
    None where the operator's own results serve. Eager calls.

    Raises:
        ArgumentError, UnavailableError: as `select`.
    """
    if query.dtype != torch.float32:  # of half precision the output is rounded far more than lse
        return None
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32):
        return None
    widths = query.shape[-1], value.shape[-1]
    kind = calls.place(query), query.dtype, *widths, precision, backend
    return implementation("attention", name_of("attention", *kind)).state


def training_name(
    operator: str,
    place: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    precision: str,
    gradient: tuple[str, ...],
    work: int | None = None,
    masked: bool = False,
) -> str:
    """The backend that takes whole calls of which a gradient is wanted; empty where `chosen` does.

    `work`: multiply-adds of query key^T in an eager call, whose time may be the host's; None where
    a compiler or a graph saves the host's time. `masked`: it has a boolean `attn_mask`.

    A constant for the compiler, as `name_of`.
    """
    row = measured.training(operator, place.partition(":")[0], dtype)
    small = row is not None and work is not None and work < row.small_below
    kind = (operator, place, dtype, head_dim, value_dim, precision)
    return _training_name(switched(), *kind, gradient, small, masked)


@functools.lru_cache(maxsize=1024)  # every layer of a training step asks
def _training_name(
    _: Hashable,
    operator: str,
    place: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    precision: str,
    gradient: tuple[str, ...],
    small: bool,
    masked: bool,
) -> str:
    """`training_name` of a call that is small or not, for the switches of this moment."""
    device = torch.device(place)
    request = Request(
        device.type, dtype, head_dim, value_dim, precision, operator, gradient=gradient,
        ordinal=_ordinal(device),
    )  # fmt: skip
    if gradient == ("attn_mask",):
        return ""  # PyTorch's memory-efficient kernel then keeps no lse, and its backward fails
    row = measured.training(operator, device.type, dtype)
    name = row.whole if row else ""
    if row and not name and small:
        name = row.small if row.small_masked or not masked else ""
    if row and not name and row.otherwise and gradient_name(request)[0] == PLAIN:
        name = row.otherwise
    if not name or not support(request, name).ok:
        return ""
    kind = (place, dtype, head_dim, value_dim, precision)
    return name if name_of(operator, *kind, "auto") in SHIPPED else ""


def whole_name(
    operator: str,
    place: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    precision: str,
) -> str:
    """The backend that takes calls as a whole on a GPU of which `chosen` has plain PyTorch alone:
    without Triton, before sm_80, or of channels without kernels; empty where there is none, and for
    float64, of which PyTorch has no kernel that leaves the scores on chip.

    A constant for the compiler, as `name_of`.
    """
    kind = (dtype, head_dim, value_dim, precision)
    device = torch.device(place)
    if device.type != "cuda" or dtype.itemsize > 4:
        return ""
    if name_of(operator, place, *kind, "auto") != PLAIN:
        return ""
    request = Request(device.type, *kind, operator, ordinal=_ordinal(device))
    for each in BACKENDS:
        offered = each.operators.get(operator)
        if offered is not None and offered.whole and offered.support(request).ok:
            return each.name
    return ""


def _ordinal(device: torch.device) -> int:
    return -1 if device.index is None else device.index


def trains_original(
    operator: str,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    precision: str,
    gradient: tuple[str, ...],
    tokens: int,
) -> bool:
    """Whether a patched site leaves calls that want gradients to the module it came from: where the
    shipped table says so and no backend has a kernel of these gradients.

    A constant for the compiler, as `name_of`.
    """
    foreign = (each for each in BACKENDS if each.name not in SHIPPED and operator in each.operators)
    others = any(each.device == device_type for each in foreign)
    if others or device_type not in measured.originals(operator):
        return False
    request = Request(
        device_type, dtype, head_dim, head_dim, precision, operator, gradient=gradient,
        tokens=tokens,
    )  # fmt: skip
    return gradient_name(request)[0] == PLAIN


# The mark of `torch.compiler.assume_constant_result`, set without importing the compiler.
for _constant in (name_of, rows_of, training_name, whole_name, trains_original):
    _constant._dynamo_marked_constant = True  # type: ignore[union-attr]


def kernels_of(operator: str, device_type: str) -> str:
    """The backend whose kernels `elsa::<operator>` has on a device."""
    for backend in BACKENDS:
        if backend.device == device_type and operator in backend.operators:
            return backend.name
    return PLAIN


def plain_alone(backend: str) -> str:
    """What of a call plain PyTorch alone can do, in words; empty where an operator serves.

    Raises:
        UnavailableError: another backend was asked for by name.
    """
    if not calls.differentiates_otherwise():
        return ""
    what = "forward-mode AD or torch.func derivatives"
    if backend not in ("auto", PLAIN):
        raise UnavailableError(
            f"backend={backend!r} has no {what}: use backend='auto' or {PLAIN!r}"
        )
    return what


def gradient_name(request: Request) -> tuple[str, tuple[str, ...]]:
    """Who computes the gradients of calls like this, and why not those asked before."""
    reasons: list[str] = []
    row = measured.training(request.operator, request.device_type, request.dtype)
    for name in row.backward if row else (PLAIN,):
        asked = implementation(request.operator, name).gradient
        answer = asked(request) if asked else Support(False, "has no kernel of the gradients")
        if answer.ok:
            return name, tuple(reasons)
        reasons.append(f"gradients: {name}: {answer.reason}")
    return PLAIN, tuple(reasons)


def mask_kind(attn_mask: Tensor | None, is_causal: bool) -> str:
    """The word of `Request.mask`."""
    if attn_mask is None:
        return "causal" if is_causal else "none"
    return "bool" if attn_mask.dtype == torch.bool else "additive"


measured.ON_CHANGE.append(cuda.forget)  # what held before


def _forget() -> None:
    """Build what compilers read, and drop what was chosen."""
    chosen.cache_clear()
    _training_name.cache_clear()
    cuda.forget()
    tables: tuple[dict[Any, Any], ...] = (RUNS, DIRECT, BY_ROW, SERVING)
    for table in tables:
        table.clear()
    for record in ops.records():
        RUNS[record.name, PLAIN] = record.eager
    homes = {each.name: each.device for each in BACKENDS}
    for each in BACKENDS:
        for operator, offered in each.operators.items():
            if offered.run is not None:
                RUNS[operator, each.name] = offered.run
            if offered.direct is not None:
                DIRECT[operator, each.name] = offered.direct
            by_row = offered.by_row or (offered.direct if offered.whole else None)
            if by_row is not None:
                BY_ROW[operator, each.name] = by_row
            known = ops.of(f"elsa::{operator}")
            projection = known is not None and known.kind == "linear"
            if not projection or offered.direct is None or each.device is None:
                continue
            for name in ("auto", *(n for n, home in homes.items() if home == each.device)):
                key = (operator, each.device, name)
                SERVING[key] = (*SERVING.get(key, ()), offered.direct)
    # last: a graph captured before this line is not found behind it
    SWITCHES["registered"] = next(_REGISTRATIONS)


_forget()
