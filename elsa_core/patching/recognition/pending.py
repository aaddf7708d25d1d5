"""Tensors that are not computed yet, and the mode that makes them.

Within a `Watch` a product of two tensors becomes a `Pending`: a tensor without storage that knows
the call which would compute it, and what it is as a part of attention (`scores.Scores`). A product
of such weights with values runs `elsa_core.attention`. Any other use first computes it, by the very
calls that were made; from then on the same object is an ordinary tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from elsa_core.base import calls
from elsa_core.ops.attention.api import attention
from elsa_core.patching.recognition import rules
from elsa_core.patching.recognition.axes import known_product, labels_of, product
from elsa_core.patching.recognition.scores import USED, WEIGHTS, RefusedError, Scores, attended

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_TRACERS = ("FakeTensor", "FunctionalTensor")  # what stands for a tensor in a recorded program
_OFF = (False, torch.float32)
# References to a tensor that only a list holds, when a loop over it asks: Python 3.14 lends a call
# that of the loop's variable.
_LISTED = 2 if sys.version_info >= (3, 14) else 3


class _Call(NamedTuple):
    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    grad: bool
    autocast: tuple[bool, torch.dtype]
    part: int | None = None  # of a result of several tensors

    def run(self, device: str) -> Tensor:
        """Its result, as it would have been at the time."""
        args, kwargs = _real(self.args), _real(self.kwargs)
        with ExitStack() as stack:
            if torch.is_grad_enabled() != self.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if _autocast(device) != self.autocast:
                on, dtype = self.autocast
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on))
            out = self.function(*args, **kwargs)
        return out if self.part is None else out[self.part]  # type: ignore[no-any-return]


class Pending(Tensor):
    """A tensor that is computed when something other than attention asks for it."""

    watch: Watch  # where it was made
    call: _Call  # what computes it
    scores: Scores | None  # what it is; None where it is nothing that attention is made of
    made: Tensor | None  # its values, where the object itself could not become them
    tied: bool  # whether gradients reach what it is made of
    tracked: bool  # whether gradients were recorded in every call that it is made of

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for one in _tensors((*args, *(kwargs or {}).values())):
            if type(one) is Pending:
                return one.watch.__torch_function__(func, types, args, kwargs)
        # within something of which PyTorch knows no tensors
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # C++ that asks no Python before; what autograd has to know is tied to the tensor
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return func(*_real(args), **_real(kwargs or {}))


class _Tied(torch.autograd.Function):
    """Gives a pending tensor its gradient, for C++ that asks no Python before it uses one."""

    @staticmethod
    def forward(ctx: Any, made: list[Tensor], call: _Call, *sources: Tensor) -> Tensor:
        ctx.call, ctx.sources = call, sources  # no tensor that its forward needs: not saved
        return made.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gradients(ctx, grads[0])


class _Attended(torch.autograd.Function):
    """Attention with its own gradients, and the original's where these are differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Sequence[Tensor]], Tensor], call: _Call, *sources: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.requires_grad) for t in sources]
            out = run(leaves)
        ctx.run, ctx.call, ctx.sources, ctx.leaves, ctx.out = run, call, sources, leaves, out
        ctx.versions = [t.is_inference() or t._version for t in (*leaves, out)]
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _gradients(ctx, grads[0])
        *made_of, result = (t.is_inference() or t._version for t in (*ctx.leaves, ctx.out))
        if result == ctx.versions[-1]:
            return _gradients(ctx, grads[0], ctx.out)
        # the result was written into, which these gradients read and the original's do not
        if made_of != ctx.versions[:-1]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: what an attention is made of, whose result was modified too"
            )
        with torch.enable_grad():
            return _gradients(ctx, grads[0], ctx.run(ctx.leaves))


def _gradients(ctx: Any, grad: Tensor, out: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradients of sources: of `out`, whose leaves stand for them, or else of the call."""
    again, sources = torch.is_grad_enabled(), ctx.sources if out is None else ctx.leaves
    with torch.enable_grad():
        if out is None:
            out = ctx.call.run(sources[0].device.type)
        wanted = [t for t in sources if t.requires_grad]
        found = torch.autograd.grad(
            out, wanted, grad, retain_graph=True, create_graph=again, allow_unused=True
        )
    rest = iter(found)
    return None, None, *(next(rest) if t.requires_grad else None for t in sources)


class Watch(TorchFunctionMode):
    """Recognises attention in what runs within the `with` block of it, and computes it by
    `elsa_core.attention`. `close` takes what the block returns.

    Args:
        precision, backend: as `elsa_core.attention` takes them.
        observer: its place() says where in the model a call is made now; its ran(begun) is told
            that an attention, whose first product was made at the place `begun`, ended.
        attend: what is called in the place of `elsa_core.attention`.
    """

    def __init__(
        self,
        precision: str,
        backend: str,
        observer: Any = None,
        attend: Callable[..., Any] = attention,
    ):
        self.precision, self.backend, self.observer = precision, backend, observer
        self.attend = attend
        self._run = partial(attend, precision=precision, backend=backend)
        self._alive: list[Pending] = []
        self._memory: set[int] = set()  # addresses of attention's results

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if Pending in types:
            return self._of_pending(func, args, kwargs or {})
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs or {})
        if self._alive:
            self._before_write(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def close(self, out: Any) -> Any:
        """Compute every pending tensor that outlives the block; returns what the block returned,
        as tensors whose memory is laid out as the original's."""
        self._forget()
        unmade = changed = False
        for pending in self._alive:
            unmade = compute(pending) is not pending or unmade
        self._alive = []
        if unmade:
            out = tree_map_only(Pending, compute, out)
        if not self._memory:
            return out
        tensors, form = tree_flatten(out)
        for i, one in enumerate(tensors):
            if type(one) is Tensor and not one.is_contiguous() and _address(one) in self._memory:
                tensors[i] = one.contiguous()
                changed = True
        return tree_unflatten(tensors, form) if changed else out

    def abandon(self) -> None:
        """As `close`, after an error in the block."""
        for pending in list(self._alive):
            with suppress(Exception):
                compute(pending)
        self._alive = []

    def _of_pending(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in rules.METADATA:
            tracing = func in rules.SHAPES and torch._C._get_tracing_state() is not None
            if tracing and args[0].scores is not None:
                shape = args[0].scores.layout.shape
                return shape[args[1]] if len(args) > 1 else shape
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        grad = torch.is_grad_enabled()
        for one in _tensors((*args, *kwargs.values())):
            if type(one) is not Pending:
                continue
            if one.made is not None:
                args, kwargs = _real((args, kwargs), lambda p: p if p.made is None else p.made)
            elif one.tied and not grad:  # perhaps within a function with its own backward
                return self._computed(func, args, kwargs)
        rule = rules.RULES.get(func)
        if rule is None or not args or kwargs.get("out") is not None:
            return _SPECIAL.get(func, Watch._computed)(self, func, args, kwargs)
        out = self._ruled(rule, func, args, kwargs)
        return self._computed(func, args, kwargs) if out is rules.MISSING else out

    def _computed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._before_write(func, args, kwargs)
        return func(*_real(args), **_real(kwargs))

    def _ruled(self, rule: rules.Rule, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        states = list(args)
        for i, one in enumerate(args):
            if type(one) is Pending:
                states[i] = one.scores or one
        named = kwargs
        if kwargs:
            named = {n: getattr(one, "scores", None) or one for n, one in kwargs.items()}
        known = any(type(one) is Scores for one in (*states, *named.values()))
        try:
            found = rule(states, named) if known else rules.MISSING
        except (IndexError, TypeError, ValueError):  # PyTorch has the words for it
            return rules.MISSING
        if type(found) is not Scores:
            same = found is rules.SAME and type(args[0]) is Pending
            return args[0] if same else rules.MISSING
        if func in rules.IN_PLACE:
            return self._in_place(func, args, kwargs, found)
        if func in rules.MAXIMA:
            largest = self._pend(func, args, kwargs, found, 0)
            places = self._pend(func, args, kwargs, found, 1)
            places.scores = None
            return torch.return_types.max((largest, places))
        return self._pend(func, args, kwargs, found)

    def _in_place(self, func: Any, args: Sequence[Any], kwargs: Any, found: Scores) -> Any:
        """A pending tensor that is written into becomes another one, if nothing else is made of it
        and it is no view."""
        target = args[0]
        if not isinstance(target, Pending) or found.dtype != target.scores.dtype:  # type: ignore[union-attr]
            return rules.MISSING
        self._forget()
        used = (  # another pending tensor is to be computed of this one
            one is target
            for pending in self._alive
            if pending.made is None
            for one in _tensors(pending.call.args)
        )
        if target.call.function in rules.VIEWS or any(used):
            return rules.MISSING
        before = self._pend(*target.call[:3], target.scores, target.call.part)  # type: ignore[arg-type]
        after = self._pend(func, (before, *args[1:]), kwargs, found)
        if not (before.tied or after.tied):
            # both are without storage: what they stand for is all there is of them
            target.__dict__, after.__dict__ = after.__dict__, target.__dict__
            return target
        return target if _become(target, after) else rules.MISSING

    def _pend(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        scores: Scores,
        part: int | None = None,
    ) -> Pending:
        device = scores.left.device
        shape: Sequence[int] = scores.layout.shape
        if torch._C._get_tracing_state() is not None:
            shape = [int(size) for size in shape]
        dtype = torch.int64 if part == 1 else scores.dtype
        made = Tensor._make_wrapper_subclass(Pending, shape, dtype=dtype, device=device)
        tied = tracked = grad = torch.is_grad_enabled()
        call = _Call(func, args, kwargs, grad, _autocast(device.type), part)
        if grad:
            tracked = all(one.tracked for one in args if type(one) is Pending)
            sources = scores.sources()
            tied = part != 1 and not calls.recorded() and any(t.requires_grad for t in sources)
            if tied:
                made = _Tied.apply([made], call, *sources)  # type: ignore[no-untyped-call]
        made.watch, made.call, made.scores, made.made = self, call, scores, None
        made.tied, made.tracked = tied, tracked
        self._alive.append(made)
        return made  # type: ignore[no-any-return]

    def _forget(self) -> None:
        alive = self._alive
        for i in range(len(alive) - 1, -1, -1):  # the latest hold earlier ones
            pending = alive[i]
            computed = type(pending) is not Pending or pending.made is not None
            if computed or sys.getrefcount(pending) <= _LISTED:
                del alive[i], pending

    def _before_write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Compute every pending tensor that is made of memory which a call may write into."""
        if not rules.may_write(func, args, kwargs):
            return
        self._forget()
        written = list(_tensors((*args, *kwargs.values())))
        for one in written:  # and what a pending view is of
            if isinstance(one, Pending) and one.made is None and one.call.function in rules.VIEWS:
                written.append(one.call.args[0])
        for pending in list(self._alive):
            if type(pending) is Pending and pending.made is None and _reads(pending, written):
                compute(pending)

    def _product(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        factors = _operands(func, args, kwargs)
        if factors is None:
            return self._computed(func, args, kwargs)
        left, right, labels = factors
        if type(left) is Pending or type(right) is Pending:
            out = self._weighted(left, right, labels, (func, args, kwargs))
            if out is not None:
                return out
            args = _real(args)
            left, right, labels = _operands(func, args, kwargs)
        autocast, dtype = _autocast(left.device.type)
        if not autocast or torch.float64 in (left.dtype, right.dtype):
            dtype = left.dtype
            autocast = False
        alike = left.device == right.device and (autocast or right.dtype == dtype)
        if not (alike and _is_plain(left) and _is_plain(right)):
            return func(*args, **kwargs)
        kept = type(left.shape[0]) is int and torch._C._get_tracing_state() is None
        of = known_product if kept else product
        layout = of(labels, left.shape, right.shape, kept=kept)
        if layout is None:
            return func(*args, **kwargs)
        scores = Scores(left, right, layout, dtype, dtype)
        if func in rules.BADDBMM:
            found = _with_input(scores, args[0], kwargs)
            if found is None:
                return func(*args, **kwargs)
            scores = found
        if self.observer is not None:
            scores = scores._replace(place=self.observer.place())
        self._forget()
        return self._pend(func, args, kwargs, scores)

    def _weighted(self, left: Any, right: Any, labels: Any, called: Any) -> Tensor | None:
        """The product of weights and values; None where it is none that `attention` computes."""
        if type(left) is Pending:
            weights, value = left, right
        else:
            weights, value, labels = right, left, (labels[1], labels[0], labels[2])
        scores = weights.scores
        if scores is None or scores.stage != WEIGHTS or not _is_plain(value):
            return None
        device = scores.left.device
        autocast, wide = _autocast(device.type)
        on = autocast and torch.float64 not in (scores.dtype, value.dtype)
        dtype = wide if on else value.dtype
        fits = (on or dtype == scores.dtype) and device == value.device
        if not fits or calls.differentiates_otherwise():
            return None
        sources: tuple[Tensor, ...] = ()
        if torch.is_grad_enabled():
            sources = (*scores.sources(), value)
            if not any(t.requires_grad for t in sources):
                sources = ()
            elif not weights.tracked:
                return None  # a part of it was computed without gradients

        def run(given: Sequence[Tensor]) -> Tensor:
            those, values = (scores.of(given[:-1]), given[-1]) if given else (scores, value)
            if not autocast:
                return attended(those, values, labels, dtype, self._run)
            with torch.autocast(device.type, enabled=False):
                return attended(those, values.to(dtype), labels, dtype, self._run)

        try:
            if sources and not calls.recorded():
                func, args, kwargs = called
                call = _Call(func, args, kwargs, True, (autocast, wide))
                out: Tensor = _Attended.apply(run, call, *sources)  # type: ignore[no-untyped-call]
            else:
                out = run(())
        except RefusedError:
            return None
        weights.scores = scores._replace(stage=USED)  # used again, they are computed
        if self.observer is not None:
            self.observer.ran(scores.place)
        self._memory.add(_address(out))
        return out

    def _sdpa(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args, kwargs = _real(args), _real(kwargs)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        plain = all(_is_plain(given.get(name)) for name in ("query", "key", "value"))
        if not plain or calls.differentiates_otherwise():
            return func(*args, **kwargs)
        out = self._run(*args, **kwargs)
        if self.observer is not None:
            self.observer.ran(self.observer.place())
        return out

    def _multihead(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """PyTorch's multi_head_attention_forward, watched: what it calls, and not it as one."""
        args, kwargs = _real(args), _real(kwargs)
        space = {**vars(functional), "has_torch_function": lambda tensors: False}
        run = FunctionType(func.__code__, space, func.__name__, func.__defaults__)
        run.__kwdefaults__ = func.__kwdefaults__
        with self:
            return run(*args, **kwargs)

    def _view(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A view; a result of attention's is laid out in another order than a product's."""
        tensor = args[0]
        if self._memory and not tensor.is_contiguous() and _address(tensor) in self._memory:
            return tensor.reshape(*args[1:], **kwargs)
        return func(*args, **kwargs)


_SPECIAL: dict[Any, Any] = {
    **dict.fromkeys((*rules.MATMUL, *rules.BADDBMM, *rules.EINSUM), Watch._product),
    rules.SDPA: Watch._sdpa,
    functional.multi_head_attention_forward: Watch._multihead,
    rules.VIEW: Watch._view,
}


def compute(pending: Pending) -> Tensor:
    """The values of a pending tensor: the same object, or `made` where that is in use elsewhere."""
    if type(pending) is not Pending:  # an ordinary tensor since
        return pending
    if pending.made is not None:
        return pending.made
    call = pending.call
    real = call.run(pending.device.type)
    del pending.call
    pending.scores = None
    itself = call.function not in rules.IN_PLACE and any(real is one for one in call.args)
    if not itself and type(real) is Tensor and _become(pending, real):
        real.made = pending  # type: ignore[attr-defined]  # `real` is the one without storage now
        return pending
    pending.made = real
    return real


def _become(one: Tensor, other: Tensor) -> bool:
    """Let the object `one` be the tensor `other` and the other way round; whether that is possible:
    not where C++, a tracer or a weak reference holds either."""
    if calls.recorded():
        return False
    with torch._C.DisableTorchFunctionSubclass():
        held = one._use_count() > 1 or other._use_count() > 1  # type: ignore[attr-defined]
        if held or weakref.getweakrefs(one) or weakref.getweakrefs(other):
            return False
        one.__class__, other.__class__ = other.__class__, one.__class__
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        torch._C._swap_tensor_impl(one, other)
    return True


def _with_input(scores: Scores, added: Any, kwargs: dict[str, Any]) -> Scores | None:
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    if set(kwargs) - {"alpha", "beta"} or not isinstance(alpha, int | float) or alpha <= 0:
        return None
    scores = scores.and_then("mul", float(alpha), scores.dtype)
    if beta == 0:
        return scores
    if beta != 1 or not isinstance(added, Tensor):
        return None
    found = rules.RULES[Tensor.add]((scores, added), {})
    # in the product's dtype, to which autocast turns the input
    return found._replace(dtype=scores.dtype) if isinstance(found, Scores) else None


def _operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    equation, factors = None, args
    if func in rules.EINSUM:
        equation, *factors = args if args and isinstance(args[0], str) else (None,)
        if len(factors) == 1 and isinstance(factors[0], list | tuple):
            factors = factors[0]
    elif func in rules.BADDBMM:
        factors = args[1:]
    if len(factors) != 2 or (kwargs and func not in rules.BADDBMM):
        return None
    left, right = factors
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    # of a pending one without asking its torch function
    ranks = [
        one.dim() if type(one) is not Pending or one.scores is None else len(one.scores.layout.axes)
        for one in factors
    ]
    least = min(ranks)
    parameter = torch.nn.Parameter in (type(left), type(right))
    if equation is None and (least < 2 or (least == 2 and parameter)):
        return None
    labels = labels_of(equation, *ranks)
    return None if labels is None else (left, right, labels)


def _is_plain(tensor: Any) -> bool:
    cls = type(tensor)
    if cls is not Tensor and cls is not torch.nn.Parameter and cls.__name__ not in _TRACERS:
        return False
    return tensor.dtype in _FLOATS and tensor.layout is torch.strided and not tensor.is_nested


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    if device == "meta" or not torch._C._is_any_autocast_enabled():
        return _OFF
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _address(tensor: Tensor) -> int:
    if type(tensor) is not Tensor:
        return 0
    address: int = tensor.untyped_storage()._cdata
    return address


def _reads(pending: Pending, written: Sequence[Tensor]) -> bool:
    """Whether a pending tensor, or attention of it, is made of one of these or of its memory."""
    sources = [] if pending.scores is None else pending.scores.sources()
    for one in _tensors((*pending.call.args, *pending.call.kwargs.values(), *sources)):
        if isinstance(one, Pending):
            if any(one is other for other in written) or (
                one.made is None and _reads(one, written)
            ):
                return True
        elif any(
            not isinstance(other, Pending) and torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]
            for other in written
        ):
            return True
    return False


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _real(value: Any, of: Callable[[Pending], Tensor] = compute) -> Any:
    """Arguments or results in which `of` each pending tensor stands for it: its values."""
    if type(value) is Pending:
        return of(value)
    if isinstance(value, tuple | list):
        if not any(isinstance(one, Tensor | list | tuple | dict) for one in value):
            return value
        found = [_real(one, of) for one in value]
        if type(value) in (tuple, list):
            return type(value)(found)
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)  # type: ignore[call-overload]
    if type(value) is dict:
        return {name: _real(one, of) for name, one in value.items()}
    return value
