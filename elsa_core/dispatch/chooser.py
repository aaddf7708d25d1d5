"""The choice of a backend for a call, the order of those asked for gradients, and both in words."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core import ops
from elsa_core import precision as precisions
from elsa_core.backends import cuda
from elsa_core.backends.support import Backend, Implementation, Request, Support
from elsa_core.base import calls
from elsa_core.base.limits import HALF_KEYS_MAX
from elsa_core.base.switches import SWITCHES, switched
from elsa_core.dispatch import measured
from elsa_core.dispatch.measured import Row
from elsa_core.dispatch.table import BACKENDS, PLAIN, SHIPPED, reference
from elsa_core.errors import ArgumentError, UnavailableError


class Chosen(NamedTuple):
    """What serves calls of one kind: a name, what to call, and the rows that may overrule it."""

    name: str
    run: Any
    direct: Callable[..., Any] | None
    rows: tuple[Row, ...]


# What compilers and every call read. RUNS: what to call, by operator and backend; BY_ROW: what a
# row calls, see `Implementation`. SERVING: what may compute a projection faster than PyTorch (or
# gives None), by operator, device and what `backend=` asks for.
RUNS: dict[tuple[str, str], Callable[..., Any]] = {}
BY_ROW: dict[tuple[str, str], Callable[..., Any]] = {}
SERVING: dict[tuple[str, str, str], tuple[Callable[..., Any], ...]] = {}

# Where a backend of every device is asked for projections.
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_REGISTRATIONS, _JOINING = itertools.count(1), threading.Lock()


def register(backend: Backend, *, ahead_of: str = PLAIN) -> None:
    """Let a backend of another package serve calls: `auto` asks it before the one named.

    Raises:
        ArgumentError: a backend of its name is there, or none of the name `ahead_of`.
    """
    with _JOINING:
        known = [each.name for each in BACKENDS]
        if backend.name in ("auto", *known):
            raise ArgumentError(f"a backend {backend.name!r} is registered already")
        if ahead_of not in known:
            choices = ", ".join(known)
            raise ArgumentError(f"ahead_of={ahead_of!r} is unknown: choose one of {choices}")
        place = known.index(ahead_of)
        _use([*BACKENDS[:place], backend, *BACKENDS[place:]])


def unregister(name: str) -> None:
    """Take a backend out again."""
    with _JOINING:
        _use([each for each in BACKENDS if each.name != name])


def names(operator: str = "attention") -> tuple[str, ...]:
    """What `backend=` takes for an operator: "auto" and the backends that have it; plain PyTorch
    has each that has a record.
    """
    runs = {b.name for b in BACKENDS if getattr(b.operators.get(operator), "run", None)}
    if operator in ops.RECORDS:
        runs.add(PLAIN)
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
        return reference(ops.RECORDS[operator])
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
    operator: str, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int,
    precision: str, backend: str,
) -> Chosen:  # fmt: skip
    """Who serves calls of one kind, whatever their lengths."""
    request = _request(operator, device, dtype, head_dim, value_dim, precision)
    name = select(request, backend)[0]
    found = implementation(operator, name)
    rows: tuple[Row, ...] = ()
    if backend == "auto" and head_dim == value_dim and name in SHIPPED:
        rows = tuple(
            row
            for row in measured.rows(operator, "infer", device, dtype, precision, head_dim)
            if support(request, row.by).ok
        )
    return Chosen(name, found.run, None if found.whole else found.direct, rows)


def choose(
    operator: str, place: str, dtype: torch.dtype, head_dim: int, value_dim: int, precision: str,
    backend: str = "auto", mode: str = "traced", *, gradient: tuple[str, ...] = (),
    **facts: int | None,
) -> str:  # fmt: skip
    """Who serves calls of one kind, by name: the first row of the table that holds, else the first
    backend that can.

    A constant for the compiler, since asking a backend may build or load a library.

    Args:
        place: a device, "cuda:1" say. backend: as the caller asks for it.
        mode: "traced": whose kernel the operator is, in every program. "infer": as that, and
            PyTorch's own kernels where plain PyTorch is left on a GPU (without Triton, before
            sm_80, channels without kernels). "train": as "infer", or who takes forward and
            gradients as a whole. "site": "original" where a patched module trains by its own
            forward, else empty.
        gradient: the arguments that a gradient is wanted of.
        facts: what rows of training read. work: multiply-adds of query key^T in an eager call,
            whose time may be the host's; none where a compiler saves the host's time. boolean:
            whether it has a boolean `attn_mask`. graph, tokens: of a call of equal shapes
            without a mask in a CUDA graph. Of a site, tokens: of a window.
    """
    device = torch.device(place)
    kind = (operator, device, dtype, head_dim, value_dim, precision)
    if mode == "site":
        # the table speaks of what is shipped: not where another backend may have the gradients
        offers = (each for each in BACKENDS if operator in each.operators)
        homes = [each.device for each in offers if each.name not in SHIPPED]
        guests = None in homes or device.type in homes
        if guests or not measured.originals(operator, device.type):
            return ""
        request = _request(*kind, gradient, facts.get("tokens") or 0)
        return measured.ORIGINAL if gradient_name(request)[0] == PLAIN else ""
    name = chosen(*kind, backend).name
    # of a mask's gradient alone PyTorch's memory-efficient kernel keeps no lse, and fails
    if mode == "traced" or backend != "auto" or gradient == ("attn_mask",):
        return name
    if mode == "train" and name in SHIPPED:
        for row, taken in _trained(switched(), *kind, gradient):
            if row.holds({**facts, "head_dim": head_dim}):
                name = taken or name
                break
    if name == PLAIN and device.type == "cuda" and dtype.itemsize <= 4:
        request = _request(*kind, gradient)
        for each in BACKENDS:
            offered = each.operators.get(operator)
            if offered is not None and offered.whole and offered.support(request).ok:
                return each.name
    return name


def _request(
    operator: str, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int,
    precision: str, gradient: tuple[str, ...] = (), tokens: int = 0,
) -> Request:  # fmt: skip
    return Request(
        device.type, dtype, head_dim, value_dim, precision, operator, gradient=gradient,
        tokens=tokens, ordinal=-1 if device.index is None else device.index,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)  # every layer of a training step asks
def _trained(
    _: Hashable, operator: str, device: torch.device, dtype: torch.dtype, *rest: Any
) -> tuple[tuple[Row, str], ...]:
    """The rows of training, for the switches of this moment, and who takes the calls of each;
    empty: no other than otherwise."""
    request = _request(operator, device, dtype, *rest)
    return tuple(
        (row, row.by if support(request, row.by).ok else "")
        for row in measured.rows(operator, "train", device, dtype)
        if not row.without_gradients or gradient_name(request)[0] == PLAIN
    )


def rows_of(operator: str, place: str, *kind: Any) -> tuple[Row, ...]:
    """The rows of `chosen`; takes the arguments of `choose`, and is a constant as it is."""
    return chosen(operator, torch.device(place), *kind).rows


def state_run(
    query: Tensor, value: Tensor, attn_mask: Tensor | None, precision: str, backend: str
) -> Callable[..., Any] | None:
    """What gives attention whose results are merged with those of other keys, its lse in float64;
    None where the operator's own results serve. Eager calls.
    """
    # of half precision the output is rounded far more than lse
    masked = attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32)
    if query.dtype != torch.float32 or masked:
        return None
    widths = query.shape[-1], value.shape[-1]
    kind = calls.place(query), query.dtype, *widths, precision, backend
    return implementation("attention", choose("attention", *kind)).state


def is_whole(operator: str, name: str) -> bool:
    """Whether a backend takes calls of an operator as a whole, forward and gradients.

    A constant for the compiler, as `choose`.
    """
    return implementation(operator, name).whole


def kernels_of(operator: str, device_type: str) -> str:
    """The backend whose kernels `elsa::<operator>` has on a device: none of another package."""
    own = (each for each in BACKENDS if each.name in SHIPPED and each.device == device_type)
    return next((each.name for each in own if operator in each.operators), PLAIN)


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
    asked_first = measured.gradients(request.operator, request.device_type, request.dtype)
    for name in asked_first or (PLAIN,):
        asked = implementation(request.operator, name).gradient
        answer = asked(request) if asked else Support(False, "has no kernel of the gradients")
        if answer.ok:
            return name, tuple(reasons)
        reasons.append(f"gradients: {name}: {answer.reason}")
    return PLAIN, tuple(reasons)


def gradient_by(operator: str, place: str, *kind: Any, gradient: tuple[str, ...], mask: str) -> str:
    """Whose kernel computes the gradients of such calls, PLAIN where no backend has one; takes the
    arguments of `choose`, and is a constant as it is."""
    request = _request(operator, torch.device(place), *kind)
    return gradient_name(request._replace(gradient=gradient, mask=mask))[0]


def mask_kind(attn_mask: Tensor | None, is_causal: bool) -> str:
    """The word of `Request.mask`."""
    if attn_mask is None:
        return "causal" if is_causal else "none"
    return "bool" if attn_mask.dtype == torch.bool else "additive"


# The mark of `torch.compiler.assume_constant_result`, set without importing the compiler.
for _constant in (choose, rows_of, is_whole, gradient_by):
    _constant._dynamo_marked_constant = True  # type: ignore[union-attr]


@dataclass(frozen=True)
class Route:
    """How a call would be served, and why.

    Attributes:
        backend: one of `names()` but "auto".
        schedule: how keys and queries are cut, in words.
        precision: the precision asked for.
        arithmetic: what that precision means on this backend.
        reasons: one line for each backend that was asked first and could not serve the call, and
            for anything the caller should know (a measured table, a gradient path, dropout).
    """

    backend: str
    schedule: str
    precision: str
    arithmetic: str
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"reasons": list(self.reasons)}


def route(
    request: Request, backend: str = "auto", *, schedule: tuple[Any, ...] = (), because: str = ""
) -> Route:
    """How calls like `request` are served, gradients included; lengths are not looked at.

    Args:
        request: what the call is.
        backend: as the caller asks for it.
        schedule: what the backends' `schedule` takes, to have it in words.
        because: why the backend that `auto` takes for such calls does not serve this one; without
            it what plain PyTorch alone can do is said.
    """
    alone = "" if because else plain_alone(backend)
    if alone:
        backend, because = PLAIN, f"has no {alone}"
    name, reasons = select(request, backend)
    found = implementation(request.operator, name)
    if because:
        first, reasons = select(request)
        reasons = (*reasons, f"{first}: {because}") if first != name else reasons
    if request.gradient:
        reasons = (*reasons, *_of_gradients(request, found))
    words = found.schedule if schedule else ""
    words = words if isinstance(words, str) else words(*schedule)
    return Route(name, words, request.precision, found.arithmetic(request), reasons)


def _of_gradients(request: Request, found: Implementation) -> tuple[str, ...]:
    record, by = ops.RECORDS[request.operator], "recomputed in plain PyTorch"
    reasons: tuple[str, ...] = ()
    if found.whole:
        by = "PyTorch's own kernels, forward and backward"
    elif found.gradient is not None and not (record.twin and found.run is record.eager):
        name, reasons = gradient_name(request)
        attention = request.operator == "attention"
        if name != PLAIN:
            by = f"by {name}" + (" from our output and lse" if attention else "")
            if name == "native" and attention and request.dtype.itemsize == 2:
                by += f" up to {HALF_KEYS_MAX} keys, beyond by PyTorch's kernels or plain PyTorch"
            if name == "triton" and request.operator == "entmax_attention":
                by += "; of an additive mask plain PyTorch"
        elif attention:
            by = "recomputed block by block in plain PyTorch from the lse"
        elif request.operator == "varlen_attention" and request.device_type == "cuda":
            by = "those of attention of a padded batch"
    return (*reasons, f"gradients: {by}")


def _use(backends: list[Backend]) -> None:
    """Make these the backends; calls of other threads go on meanwhile."""
    runs: dict[Any, Any] = {(name, PLAIN): each.eager for name, each in ops.RECORDS.items()}
    by_row, serving = dict[Any, Any](), dict[Any, Any]()
    homes = {each.name: each.device for each in backends}
    for each in backends:
        for operator, offered in each.operators.items():
            if offered.run is not None:
                runs[operator, each.name] = offered.run
            direct = offered.by_row or (offered.direct if offered.whole else None)
            if direct is not None:
                by_row[operator, each.name] = direct
            known = ops.BY_SCHEMA.get(f"elsa::{operator}")
            projection = known is not None and known.kind == "linear"
            if not projection or offered.direct is None:
                continue
            for place in (each.device,) if each.device else _DEVICES:
                neighbours = {name for name, home in homes.items() if home == place}
                for name in {"auto", each.name} | neighbours:
                    key = (operator, place, name)
                    serving[key] = (*serving.get(key, ()), offered.direct)
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]]
    tables = [(RUNS, runs), (BY_ROW, by_row), (SERVING, serving)]
    for table, made in tables:
        table.update(made)
    BACKENDS[:] = backends  # after what they run, and before what is no longer theirs goes
    chosen.cache_clear()
    cuda.forget()
    for table, made in tables:
        for key in table.keys() - made.keys():
            del table[key]
    # last: a graph captured before this line is not found behind it
    SWITCHES["registered"] = next(_REGISTRATIONS)


_use(list(BACKENDS))
