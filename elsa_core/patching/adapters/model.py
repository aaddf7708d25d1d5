"""The module that was given to `patch`: it asks once for all sites within it, see `host.py`.

Its class becomes one of the same name whose call, and whose methods that users call in its place,
remember of which kinds every site that asked kept its original: the next call of such a kind runs
whole within `all_original`. That is right for any call, since the original forward is; only its
speed may not be. So what is told apart are shapes, dtypes and modes, and nothing of the model. A
call that is not eager and on a GPU is as it was, and so is one that a CUDA graph records: there
sites are asked as in the first call, which loaded their kernels.

Libraries know models by name (transformers saves it, and looks it up), so name and module are those
of the class that it stands for. Pickle and deepcopy build it from that class.
"""

from __future__ import annotations

import copyreg
import functools
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from elsa_core import calls, routing
from elsa_core.patching.adapters.host import all_original, is_captured, observed

_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]]
_CLASSES = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
# Kinds of calls by model. Bound: models alive, times `_MOST`.
_SETTLED: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()
_MOST = 64
# Methods of timm's and open_clip's models that are called in the place of the model.
_ENTRIES = ("encode_image", "encode_text", "forward_features", "forward_intermediates")


class _Current(threading.local):
    model: nn.Module | None = None  # which asks for its sites now


_CURRENT = _Current()


def may_ask(module: nn.Module) -> bool:
    """Whether the class of a module can be swapped: it is made by Python alone, and neither calls
    nor pickles its instances in a way of its own.
    """
    cls: Any = type(module)
    own = ("__call__", "__reduce__", "__reduce_ex__")
    usual: Any = nn.Module
    return type(cls) is type and all(getattr(cls, n) is getattr(usual, n) for n in own)


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
                method = getattr(base, name, None)
                if isinstance(method, FunctionType):
                    namespace[name] = _entry(name, method)
            found = _CLASSES[base] = type(base.__name__, (base,), namespace)
        return found


def _entry(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model's class that asks for the sites."""

    @functools.wraps(method)
    def entered(self: Any, *given: Any, **named: Any) -> Any:
        if is_compiling() or _CURRENT.model is self:
            return method(self, *given, **named)
        kind = _kind_of(self, given, named)
        if kind is None:
            return method(self, *given, **named)
        before, _CURRENT.model = _CURRENT.model, self
        try:
            return _asked(self, (name, kind), method, given, named)
        finally:
            _CURRENT.model = before

    return entered


def _asked(
    model: nn.Module, kind: Any, method: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    settled = _SETTLED.get(model, ())
    if kind in settled:
        return all_original(method, model, *given, **named)
    out, original = observed(method, model, *given, **named)
    if original:
        if len(settled) >= _MOST:
            _SETTLED.pop(model, None)  # another thread may have
        _SETTLED.setdefault(model, set()).add(kind)
    return out


def _kind_of(model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What tells calls apart; None of one that asks site by site."""
    tensors: list[Tensor] = []
    try:
        terms = tuple(_term(value, tensors) for value in (*given, *named.values()))
    except TypeError:
        return None
    if not any(x.is_cuda for x in tensors) or calls.watched() or is_captured():
        return None
    cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    modes = model.training, torch.is_grad_enabled(), cast
    return terms, tuple(named), modes, routing.switched(), calls.forgotten()


def _term(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return type(value), value.shape, value.dtype, value.device
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_term(each, tensors) for each in value)
    if isinstance(value, dict):
        return tuple((name, _term(each, tensors)) for name, each in value.items())
    raise TypeError


def _reduce(self: Any, protocol: Any) -> Any:
    """As of the class that this one stands for, which is found by its name."""
    made: Any = object.__reduce_ex__(self, protocol)
    if made[0] is not copyreg.__newobj__ or made[1][0] is not type(self):  # type: ignore[attr-defined]
        return made
    patched: Any = next(cls for cls in type(self).__mro__ if "elsa_asks" in cls.__dict__)
    if type(self) is not patched:  # a class was derived since, which is found as it is
        return made
    return (_new, (self.elsa_base, *made[1][1:]), *made[2:])


def _new(base: Any, *given: Any) -> Any:
    cls: Any = asking(base)
    return cls.__new__(cls, *given)
