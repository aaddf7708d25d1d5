"""A subclass whose forward runs the original's, watched: attention in it is recognised as it
happens, and computed by `elsa_core.attention` (`elsa_core.patching.recognition`).

The subclass is importable: `__getattr__` builds it again from its name, which spells out module and
class; that is how pickle finds it in a fresh process.
"""

from __future__ import annotations

import functools
import importlib
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import tree_leaves

from elsa_core.base import calls
from elsa_core.patching.adapters.names import decoded, encoded
from elsa_core.patching.recognition import Watch

_PREFIX = "Watched"
_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]]
_CLASSES = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
# Elements of the largest input of an eager call on a GPU from which on a site is watched: the host
# takes longer for a watched forward, which smaller calls wait for.
_LARGE: Final = 1 << 22


def watched(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `cls` whose forward is watched."""
    with _LOCK:
        found = _CLASSES.get(cls)
        if found is None:
            found = _CLASSES[cls] = _build(cls)
        return found


def __getattr__(name: str) -> type[nn.Module]:  # PEP 562
    fields = decoded(name)
    if len(fields) != 3 or fields[0] != _PREFIX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = operator.attrgetter(fields[2])(importlib.import_module(fields[1]))
    return watched(cls)


def _build(cls: Any) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, cls.forward, args, kwargs)

    namespace = {
        "__module__": __name__,
        "__qualname__": encoded(_PREFIX, cls.__module__, cls.__qualname__),
        "__doc__": f"{cls.__qualname__} whose forward is watched.",
        "elsa_base": cls,
        "forward": forward,
    }
    return type(f"Elsa{cls.__name__}", (cls,), namespace)


def run(site: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """forward(site, ...), watched where that pays and recognises anything."""
    if torch.compiler.is_dynamo_compiling() or not _serves(site, args, kwargs):
        return forward(site, *args, **kwargs)
    around: Any = _get_current_function_mode()
    names = site.elsa_precision, site.elsa_backend
    if type(around) is Watch and (around.precision, around.backend) == names:
        return forward(site, *args, **kwargs)
    watch = Watch(*names)
    try:
        with watch:
            out = forward(site, *args, **kwargs)
    except BaseException:
        watch.abandon()
        raise
    return watch.close(out)


def _serves(site: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call is watched: not within a transform of `torch.func`, not by a tracer of
    symbols, and not where it is a small eager call on a GPU."""
    if calls.differentiates_otherwise() or calls.transformed():
        return False
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    if not tensors:
        given = tree_leaves((args, kwargs))
        if any(isinstance(one, torch.fx.Proxy) for one in given):
            return False
        tensors = [one for one in (*given, *site.parameters()) if isinstance(one, Tensor)]
    if not tensors or not tensors[0].is_cuda:
        return True
    if torch.cuda.is_current_stream_capturing() or calls.recorded():
        return True
    return max(tensor.numel() for tensor in tensors) >= _LARGE
