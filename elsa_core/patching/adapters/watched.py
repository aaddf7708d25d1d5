"""A subclass whose forward runs the original's, watched: attention in it is recognised as it
happens, and computed by `elsa_core.attention` (`elsa_core.patching.recognition`). A compiler sees
calls of `scaled_dot_product_attention` only.

The subclass is importable: `__getattr__` builds it again from its name, which holds module and
class in hexadecimal; that is how pickle finds it in a fresh process.
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
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from elsa_core.base import calls
from elsa_core.ops.attention.api import attention
from elsa_core.patching.adapters.common import attend
from elsa_core.patching.recognition import Watch

_PREFIX = "Watched_"
_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]]
_CLASSES = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
# Elements of the largest input of an eager call on a GPU from which on a site is watched: the host
# takes longer for a watched forward, which smaller calls wait for.
_LARGE: Final = 1 << 22


def watched(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `cls` whose forward is watched."""
    base: Any = cls
    with _LOCK:
        found = _CLASSES.get(cls)
        if found is not None:
            return found

        @functools.wraps(base.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(self, base.forward, args, kwargs)

        namespace = {
            "__module__": __name__,
            "__qualname__": _PREFIX + f"{cls.__module__}:{cls.__qualname__}".encode().hex(),
            "__doc__": f"{cls.__qualname__} whose forward is watched.",
            "elsa_base": cls,
            "forward": forward,
        }
        made = _CLASSES[cls] = type(f"Elsa{cls.__name__}", (cls,), namespace)
        return made


def __getattr__(name: str) -> type[nn.Module]:  # PEP 562
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, cls = bytes.fromhex(name.removeprefix(_PREFIX)).decode().partition(":")
    return watched(operator.attrgetter(cls)(importlib.import_module(module)))


def run(site: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """forward(site, ...), watched where that pays and recognises anything."""
    if torch.compiler.is_dynamo_compiling():
        with _Traced(site):
            return forward(site, *args, **kwargs)
    if not _serves(site, args, kwargs):
        return forward(site, *args, **kwargs)
    names = site.elsa_precision, site.elsa_backend
    own: Any = attention
    if "elsa_sparsity" in site.__dict__ or "elsa_offload" in site.__dict__:
        own = functools.partial(_attend, site)
    around: Any = _get_current_function_mode()
    if type(around) is Watch and (around.precision, around.backend, around.attend) == (*names, own):
        return forward(site, *args, **kwargs)
    watch = Watch(*names, attend=own)
    try:
        with watch:
            out = forward(site, *args, **kwargs)
    except BaseException:
        watch.abandon()
        raise
    return watch.close(out)


def _attend(site: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> Any:
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    terms = dict(zip(names, given, strict=False)) | named
    del terms["precision"], terms["backend"]  # `attend` reads them of the site
    return attend(site, query, key, value, terms.pop("attn_mask", None), **terms)


class _Traced(TorchFunctionMode):
    """What a compiler traces in the place of `Watch`."""

    def __init__(self, site: Any):
        super().__init__()
        self.precision, self.backend = site.elsa_precision, site.elsa_backend

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return attention(*args, **kwargs, precision=self.precision, backend=self.backend)
        if func is Tensor.unflatten or func is Tensor.split:  # torch 2.10 cannot trace the function
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*args, **kwargs)


def _serves(site: Any, args: Any, kwargs: Any) -> bool:
    given = args[0] if args else None
    if not isinstance(given, Tensor) or given.is_cuda:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if not tensors:
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(one, torch.fx.Proxy) for one in leaves):
                return False
            tensors = [one for one in leaves if isinstance(one, Tensor)] or [*site.parameters()]
        named = (site.elsa_precision, site.elsa_backend) != ("strict", "auto")
        if tensors and tensors[0].is_cuda and not named and not calls.traced():
            # a list, which takes no frame of its own from Python 3.12 on
            large = [tensor for tensor in tensors if tensor.numel() >= _LARGE]
            if not large and not calls.capturing():
                return False
    return not calls.transformed()
