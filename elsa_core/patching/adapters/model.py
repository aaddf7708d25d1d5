"""The module that was given to `patch`: it asks once for all sites within it, see `host.py`.

Its class becomes one of the same name whose call, and whose methods that users call in its place,
remember of which kinds every site that asked kept its original: the next call of such a kind runs
whole within `all_original`, and further ones with the sites' original methods (`direct.py`). Of
kinds of which some or all sites did not, calls without gradients have the original methods of those
that did, and the others run elsa's operators unasked (`host.is_settled`). That is right for any
call, since the original forward is, and the operators; only speed and memory, which are those of
one, may not be what the other's would be. So what is told apart are shapes, strides, dtypes and
modes, and nothing of the model. A call that is not eager and on a GPU is as it was, and so is one
that a CUDA graph records, but for biases that are gathered at once (`kept.py`): there sites are
asked as in the first call, which loaded their kernels.

Around all of it, a model patched with `offload` keeps what a backward needs in host memory
(`elsa_core.offload.activations`).

Libraries know models by name (transformers saves it, and looks it up), so name and module are those
of the class that it stands for. Pickle and deepcopy build it from that class.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from elsa_core import calls, routing
from elsa_core.patching.adapters.direct import Direct, direct, withdraw
from elsa_core.patching.adapters.host import (
    all_original,
    asking_sites,
    is_captured,
    noted,
    observed,
)
from elsa_core.patching.adapters.kept import keepers_of

_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]]
_CLASSES = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
# Kinds of calls by model. Bound: models alive, times `_MOST`.
_SETTLED: weakref.WeakKeyDictionary[nn.Module, dict[Any, Direct | bool]]
_SETTLED = weakref.WeakKeyDictionary()
_MOST = 64
_UNKNOWN: Any = object()
_CAPTURED: Any = object()  # the kind of all calls that a CUDA graph records
# Methods of timm's and open_clip's models that are called in the place of the model.
_ENTRIES = ("encode_image", "encode_text", "forward_features", "forward_intermediates")


class _Current(threading.local):
    model: nn.Module | None = None  # which asks for its sites now


_CURRENT = _Current()


def may_ask(module: nn.Module) -> bool:
    """Whether the class of a module can be swapped: it is made by Python alone, neither calls nor
    pickles its instances in a way of its own, and nothing of it depends on having no subclass.
    """
    cls: Any = type(module)
    own = ("__call__", "__reduce__", "__reduce_ex__")
    usual: Any = nn.Module
    if type(cls) is not type or any(getattr(cls, n) is not getattr(usual, n) for n in own):
        return False
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    hears = any("__init_subclass__" in c.__dict__ for c in bases if c is not Generic)
    sharded = any(c.__name__ == "FSDPModule" for c in bases)  # which reads its third base
    return not (hears or sharded or any(map(_names_its_type, _functions(bases))))


def _functions(classes: tuple[type, ...]) -> Iterator[FunctionType]:
    for cls in classes:
        yield from (value for value in vars(cls).values() if isinstance(value, FunctionType))


def _names_its_type(function: FunctionType) -> bool:
    """Whether a method says `super(type(self), self)`, which ends in no subclass."""
    if not {"super", "type"} <= set(function.__code__.co_names):
        return False
    read = [step.argval for step in dis.get_instructions(function) if "LOAD" in step.opname]
    return ("super", "type") in itertools.pairwise(read)


def asking(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class that asks for its sites."""
    with _LOCK:
        found = _CLASSES.get(base)
        if found is None:
            namespace = {
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__doc__": base.__doc__,
                "__reduce_ex__": _reduce,
                "elsa_base": base,
                "elsa_companion": True,
                "elsa_any_scope": True,
                "elsa_asks": True,
            }
            for name in ("__call__", *_ENTRIES):
                method = inspect.getattr_static(base, name, None)
                if isinstance(method, FunctionType):
                    namespace[name] = _entry(base, name, method)
            found = _CLASSES[base] = type(base.__name__, (base,), namespace)
        return found


def is_asking(module: nn.Module) -> bool:
    """Whether a module's class, or the one that it was derived from, asks for its sites."""
    return hasattr(type(module), "elsa_asks")


def _entry(base: type[nn.Module], name: str, written: FunctionType) -> Callable[..., Any]:
    """A method of a model's class that asks for the sites."""
    # tracers and profilers put another one in its place, for a time
    owner: type[nn.Module] = nn.Module if name == "__call__" else base

    @functools.wraps(written)
    def entered(self: Any, *given: Any, **named: Any) -> Any:
        offload = noted(self, "elsa_offload")
        if offload is not None and torch.is_grad_enabled() and not calls.is_exporting():
            from elsa_core.offload.activations import SavedOnHost, require_eager

            require_eager()
            with SavedOnHost(self):
                return asked(self, *given, **named)
        return asked(self, *given, **named)

    def asked(self: Any, *given: Any, **named: Any) -> Any:
        method = getattr(owner, name)
        if is_compiling() or _CURRENT.model is self:
            return method(self, *given, **named)
        kind = _kind_of(self, given, named)
        if kind is None:
            return method(self, *given, **named)
        before, _CURRENT.model = _CURRENT.model, self
        try:
            if kind is _CAPTURED:
                return _captured(self, method, given, named)
            return _asked(self, (name, kind), method, given, named)
        finally:
            _CURRENT.model = before

    return entered


def _asked(
    model: nn.Module, kind: Any, method: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    settled = _SETTLED.get(model, {})
    own = settled.get(kind, _UNKNOWN)
    if isinstance(own, Direct):
        call: Any = all_original if own.whole else _calling
        return call(own, method, model, *given, **named)
    if own is not _UNKNOWN:  # whether all sites kept their originals
        call = all_original if own else _calling
        out, (kept, rows, others) = asking_sites(call, method, model, *given, **named)
        settled[kind] = direct(model, kept, rows, others, whole=own)
        return out
    out, original = observed(method, model, *given, **named)
    # with gradients what a checkpoint runs again must be what ran before
    if original or (original is None and not torch.is_grad_enabled()):
        if len(settled) >= _MOST:
            _SETTLED.pop(model, None)  # another thread may have
        _SETTLED.setdefault(model, {})[kind] = bool(original)
        keepers = None if torch.is_grad_enabled() else keepers_of(model)
        if keepers is not None:
            keepers.plan()
    return out


def _captured(model: nn.Module, method: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A call that a CUDA graph records."""
    keepers = None if torch.is_grad_enabled() else keepers_of(model)
    if keepers is None:
        return method(model, *given, **named)
    before = keepers.begin(captured=True)
    try:
        return method(model, *given, **named)
    finally:
        keepers.end(before)


def _calling(method: Any, *given: Any, **named: Any) -> Any:
    return method(*given, **named)


def _kind_of(model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What tells calls apart; None of one that asks site by site."""
    tensors: list[Tensor] = []
    try:
        terms = tuple(_term(value, tensors) for value in (*given, *named.values()))
        hash(terms)
    except (TypeError, RecursionError):
        return None
    if not any(x.is_cuda for x in tensors) or calls.traced():
        return None
    if is_captured():
        return _CAPTURED
    cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    grad = torch.is_grad_enabled()
    # a step that warms up for a CUDA graph is another kind: see `graph_steps.serve`
    apart = grad and any(calls.is_own_stream(x.device) for x in tensors if x.is_cuda)
    modes = model.training, grad, apart, cast
    return terms, tuple(named), modes, routing.switched(), calls.forgotten()


def _term(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided:  # of some layouts neither can be asked
            raise TypeError
        tensors.append(value)
        return type(value), value.shape, value.stride(), value.dtype, value.device
    if value is None or type(value) in (bool, int, float, str):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return tuple(_term(each, tensors) for each in value)
    if isinstance(value, dict):
        return tuple((name, _term(each, tensors)) for name, each in value.items())
    raise TypeError


def _reduce(self: Any, protocol: Any) -> Any:
    """As of the class that this one stands for, which is found by its name."""
    withdraw(self)
    made: Any = object.__reduce_ex__(self, max(protocol, 2))  # older ones know no __newobj__
    if made[0] is not copyreg.__newobj__ or made[1][0] is not type(self):  # type: ignore[attr-defined]
        return made
    patched: Any = next(cls for cls in type(self).__mro__ if "elsa_asks" in cls.__dict__)
    if type(self) is not patched:  # a class was derived since, which is found as it is
        return made
    return (_new, (self.elsa_base, *made[1][1:]), *made[2:])


def _new(base: Any, *given: Any) -> Any:
    cls: Any = asking(base)
    return cls.__new__(cls, *given)
