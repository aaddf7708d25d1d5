"""The class of a model patched with `offload`: what a backward of its calls needs is kept in host
memory. Libraries know models by name, so name and module are those of the class that it stands for;
pickle and deepcopy build it from that class.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic

import torch
from torch import nn

from elsa_core.base import calls
from elsa_core.patching.adapters.hooks import noted

_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]]
_CLASSES = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
# Methods of timm's and open_clip's models that are called in the place of the model.
_ENTRIES = ("__call__", "encode_image", "encode_text", "forward_features", "forward_intermediates")


def may_offload(module: nn.Module) -> bool:
    """Whether the class of a module can be swapped: it is made by Python alone, neither calls nor
    pickles its instances in a way of its own, and nothing of it depends on having no subclass."""
    cls: Any = type(module)
    own = ("__call__", "__reduce__", "__reduce_ex__")
    usual: Any = nn.Module
    if type(cls) is not type or any(getattr(cls, n) is not getattr(usual, n) for n in own):
        return False
    bases = [c for c in cls.__mro__[: cls.__mro__.index(nn.Module)] if c is not Generic]
    return not any(c.__name__ == "FSDPModule" or "__init_subclass__" in vars(c) for c in bases)


def offloaded(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class that keeps what backwards need in host memory."""
    with _LOCK:
        found = _CLASSES.get(base)
        if found is None:
            names = ("__module__", "__qualname__", "__doc__")
            namespace = {name: getattr(base, name) for name in names} | dict.fromkeys(
                ("elsa_companion", "elsa_any_scope", "elsa_offloads"), True
            )
            namespace |= {"__reduce_ex__": _reduce, "elsa_base": base}
            for name in _ENTRIES:
                method = inspect.getattr_static(base, name, None)
                if isinstance(method, FunctionType):
                    namespace[name] = _entry(base, name, method)
            found = _CLASSES[base] = type(base.__name__, (base,), namespace)
        return found


def _entry(base: type[nn.Module], name: str, written: FunctionType) -> Callable[..., Any]:
    # tracers and profilers put another `__call__` in its place, for a time
    owner: type[nn.Module] = nn.Module if name == "__call__" else base

    @functools.wraps(written)
    def entered(self: Any, *given: Any, **named: Any) -> Any:
        method = getattr(owner, name)
        idle = noted(self, "elsa_offload") is None or not torch.is_grad_enabled()
        if idle or calls.is_exporting():
            return method(self, *given, **named)
        from elsa_core.offload.activations import SavedOnHost, require_eager

        require_eager()
        with SavedOnHost(self):
            return method(self, *given, **named)

    return entered


def _reduce(self: Any, protocol: Any) -> Any:
    made: Any = object.__reduce_ex__(self, max(protocol, 2))  # older ones know no __newobj__
    if made[0] is not copyreg.__newobj__ or made[1][0] is not type(self):  # type: ignore[attr-defined]
        return made
    patched: Any = next(cls for cls in type(self).__mro__ if "elsa_offloads" in cls.__dict__)
    if type(self) is not patched:  # a class was derived since, which is found as it is
        return made
    return (_new, (self.elsa_base, *made[1][1:]), *made[2:])


def _new(base: Any, *given: Any) -> Any:
    cls: Any = offloaded(base)
    return cls.__new__(cls, *given)
