"""The redirect: a class that calls `scaled_dot_product_attention` gets a subclass whose methods
call `elsa_core.attention` in its place. Nothing outside the subclass changes.

A method that refers to the function is rebuilt over a copy of its globals, in which the modules on
the way to the function (`F`, or `torch`, `nn` and `functional`) are copies with that one entry
replaced. Code, defaults and closure cells (`__class__`) are the original's own. The functions and
modules that such a method names are those of the time when it was patched; a class with a method
that uses any other kind of global stays as it is, since a flag may change.

The subclass is importable: `__getattr__` builds it again from its name, which spells out precision,
backend, module and class; that is how pickle finds it in a fresh process.
"""

from __future__ import annotations

import functools
import importlib
import operator
import threading
import weakref
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention

from elsa_core import dispatch
from elsa_core.backends.support import Support
from elsa_core.base import calls
from elsa_core.errors import ArgumentError
from elsa_core.ops.attention.api import attention
from elsa_core.patching.adapters import names, table, watched
from elsa_core.patching.adapters.common import other_part
from elsa_core.patching.bytecode import (
    Method,
    computes_softmax_attention,
    methods,
    sdpa_calls,
    variable_globals,
)

_PREFIX = "Redirected"
# Bound: the classes that modules have. Pickle wants the very class that a name leads to.
_CLASSES: weakref.WeakValueDictionary[tuple[Any, ...], type[nn.Module]]
_CLASSES = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def calls_sdpa(cls: type) -> Support:
    """Whether every call of `scaled_dot_product_attention` in a class can be redirected."""
    return _calls_sdpa(cls, tuple(method.function for method in methods(cls)))


@functools.lru_cache(maxsize=512)
def _calls_sdpa(cls: type, functions: tuple[FunctionType, ...]) -> Support:
    reached = [m for m in methods(cls) if sdpa_calls(m.function)]
    if not reached:
        return Support(False, "it does not call scaled_dot_product_attention")
    for method in reached:
        if not method.rebuildable:
            return Support(
                False,
                f"its call of scaled_dot_product_attention is in {method.function.__qualname__}, "
                "which is a helper, is decorated or is reached through super()",
            )
        if sdpa_calls(method.function).unresolved:
            return Support(
                False,
                f"{method.function.__qualname__} does not reach scaled_dot_product_attention "
                "through a global name",
            )
        variable = variable_globals(method.function)
        if variable:
            return Support(
                False,
                f"{method.function.__qualname__} uses the global {variable[0]}, of which a "
                "redirected copy would not see a later value",
            )
    return Support(True, "its scaled_dot_product_attention call is redirected")


def refers_to_sdpa(cls: type) -> bool:
    """Whether any function that the class's forward reaches calls the operator."""
    return any(sdpa_calls(method.function) for method in methods(cls))


def chooses_freely(cls: type[nn.Module]) -> bool:
    """Whether a class has an eager branch too, that no switch known in the table turns off."""
    reached = methods(cls)
    names = {name for method in reached for name in method.function.__code__.co_names}
    return computes_softmax_attention(reached) and not names & set(table.SWITCHES)


def support(cls: type[nn.Module], module: nn.Module) -> Support:
    """Whether this instance runs through `scaled_dot_product_attention` once redirected."""
    if isinstance(module, GraphModule):  # its class is its own, and calls itself by name
        return Support(False, "a traced graph: patch the model before it is traced")
    answer = calls_sdpa(cls)  # type: ignore[arg-type]  # a class is hashable
    if answer.ok and getattr(module, "scaled_cosine", False):  # open_clip: branches off before SDPA
        return Support(False, "scaled cosine attention")
    if answer.ok and chooses_freely(cls):
        return Support(False, "it chooses between that call and a softmax of its own")
    space = vars(module)
    other = other_part(module)
    if answer.ok and other and any(space.get(name) is False for name in table.SWITCHES):
        return Support(False, other)
    return answer


def redirected(cls: type[nn.Module], precision: str, backend: str) -> type[nn.Module]:
    """The subclass of `cls` that calls `elsa_core.attention` with this precision and backend."""
    functions = tuple(method.function for method in methods(cls))  # a class may get other ones
    key = (cls, precision, backend, functions)
    with _LOCK:
        found = _CLASSES.get(key)
        if found is None:
            found = _CLASSES[key] = _build(cls, precision, backend)
        return found


def __getattr__(name: str) -> type[nn.Module]:  # PEP 562
    fields = names.decoded(name)
    if len(fields) != 5 or fields[0] != _PREFIX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _, precision, backend, module, qualname = fields
    try:
        names.check_names(precision, backend)
    except ArgumentError as error:
        raise AttributeError(f"{name!r}: {error}") from error
    cls = operator.attrgetter(qualname)(importlib.import_module(module))
    return redirected(cls, precision, backend)


def _build(cls: type[nn.Module], precision: str, backend: str) -> type[nn.Module]:
    replaced = functools.partial(_attention, precision=precision, backend=backend)
    namespace: dict[str, Any] = {
        "__module__": __name__,
        "__qualname__": names.encoded(
            _PREFIX, precision, backend, cls.__module__, cls.__qualname__
        ),
        "__doc__": f"{cls.__qualname__} whose scaled_dot_product_attention is elsa's.",
        "elsa_base": cls,
    }
    switches: set[str] = set()
    for method in methods(cls):
        if not sdpa_calls(method.function):
            continue
        rebuilt = namespace[method.name] = _rebuilt(method, replaced)
        rebuilt.__module__ = __name__
        rebuilt.__qualname__ = f"{namespace['__qualname__']}.{method.name}"
        switches.update(set(table.SWITCHES) & set(method.function.__code__.co_names))
    if switches:
        namespace["forward"] = _switched(cls, namespace.get("forward", cls.forward), switches)
    return type(f"Elsa{cls.__name__}", (cls,), namespace)


def _switched(cls: Any, redirected: Any, switches: set[str]) -> Any:
    """The redirected forward; where a switch is off, the class's own one, which is softmax in eager
    PyTorch then, watched.
    """

    @functools.wraps(cls.forward)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if all(self.__dict__.get(switch, True) for switch in switches):
            return redirected(self, *given, **named)
        return watched.run(self, cls.forward, given, named)

    return forward


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *given: Any, **named: Any
) -> Any:
    """What is called in the place of `scaled_dot_product_attention`; that itself in small eager
    calls with a mask, of which it checks less.
    """
    if attn_mask is not None and query.is_cuda and _is_small(query, key, named):
        own = {k: v for k, v in named.items() if k not in ("precision", "backend")}
        return scaled_dot_product_attention(query, key, value, attn_mask, *given, **own)
    return attention(query, key, value, attn_mask, *given, **named)


def _is_small(query: Any, key: Any, named: dict[str, Any]) -> bool:
    """As `common.is_small`, of a call of attention."""
    if calls.traced() or named["precision"] != "strict" or named["backend"] != "auto":
        return False
    small = query.numel() * key.shape[-2] < dispatch.eager_least("attention", query.dtype)
    return small and not torch.cuda.is_current_stream_capturing()


def _rebuilt(method: Method, replaced: Any) -> FunctionType:
    """The same function over globals in which the call leads to `replaced`."""
    function = method.function
    namespace = dict(function.__globals__)
    # The compiler finds globals again by this name, and would find the original's.
    namespace.pop("__name__", None)
    for chain in sdpa_calls(function).chains:
        namespace[chain[0]] = _with_replaced(namespace[chain[0]], chain[1:], replaced)
    copy = FunctionType(
        function.__code__,
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    return copy


def _with_replaced(value: Any, path: tuple[str, ...], replaced: Any) -> Any:
    """A copy of the module `value` in which the attribute at `path` is `replaced`."""
    if not path:
        return replaced
    copy = ModuleType(value.__name__, value.__doc__)
    copy.__dict__.update(value.__dict__)
    copy.__dict__[path[0]] = _with_replaced(value.__dict__[path[0]], path[1:], replaced)
    return copy
