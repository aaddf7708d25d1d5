"""The subclasses that a patched module takes: written ones (one file a family), and those of any
class, whose own forward runs watched. Each names the class that it replaces in `elsa_base`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from elsa_core.backends.support import Support
from elsa_core.errors import ModelError
from elsa_core.patching.adapters import table
from elsa_core.patching.adapters.common import is_plain_linear

WATCHED = "recognised"  # how reports name the adapter of any class


def patched_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of elsa's that the module has, or that its class was derived from since. PyTorch
    derives classes of single instances (parametrizations, `fully_shard`). An `elsa_companion` is no
    site, but was swapped beside one within it."""
    return next((cls for cls in type(module).__mro__ if "elsa_base" in cls.__dict__), None)


def base_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before it was patched; its class if it is not patched."""
    patched = patched_class(module)
    base: type[nn.Module] = type(module) if patched is None else patched.__dict__["elsa_base"]
    return base


def with_base(module: nn.Module, base: type[nn.Module]) -> type[nn.Module]:
    """The module's class with `base` for elsa's class: `base` itself if none was derived since."""
    patched = patched_class(module)

    def anew(cls: Any) -> Any:
        if patched is None or cls is patched:
            return base
        if not issubclass(cls, patched):
            return cls
        namespace = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        codes = (getattr(value, "__code__", None) for value in namespace.values())
        if any(code is not None and "__class__" in code.co_freevars for code in codes):
            raise ModelError(
                f"{cls.__qualname__} was derived from elsa's {patched.__name__} and calls super(): "
                "give the module its patched class back first"
            )
        return type(cls)(cls.__name__, tuple(map(anew, cls.__bases__)), namespace)

    found: type[nn.Module] = anew(type(module))
    return found


def written(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The adapter written for exactly this class; a subclass is not taken for its base. None where
    the class no longer has its own forward: recipes put in others, which say more."""
    adapter = table.adapter_of(cls)
    for name in {"forward", getattr(adapter, "elsa_entry", "forward")}:
        function = cls.__dict__.get(name)
        place = (getattr(function, "__module__", None), getattr(function, "__qualname__", None))
        if function is not None and place != (cls.__module__, f"{cls.__qualname__}.{name}"):
            return None
    return adapter


def attention_within(module: nn.Module) -> nn.Module | None:
    """The attention module inside a block whose adapter computes it in the block's own code. Such a
    block is the site, its attention module none of its own. None for every other module, and for a
    block that its adapter does not take."""
    adapter: Any = written(base_class(module))
    name: str | None = getattr(adapter, "elsa_attention", None)
    return None if name is None or adapter.elsa_why_not(module) else module.get_submodule(name)


def computes_otherwise(name: str) -> bool:
    """Whether the table says of a class, by its qualified name, that it computes something else
    than softmax attention."""
    return name in table.ROWS and bool(table.ROWS[name].reason)


def parts(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules within a layer that its adapter computes: they are no sites of their own."""
    names = getattr(written(base_class(module)), "elsa_layers", ())
    layers = (module._modules.get(name) for name in names)
    return tuple(layer for layer in layers if layer is not None and is_plain_linear(layer))


def entry(module: nn.Module) -> str:
    """The method of a site that computes its attention: what a check calls and compares."""
    name: str = getattr(written(base_class(module)), "elsa_entry", "forward")
    return name


def support(module: nn.Module) -> Support:
    adapter = written(base_class(module))
    if adapter is None:
        return watch_support(module)
    for name in ("forward", entry(module)):
        if name in vars(module):
            return Support(False, f"its {name} was replaced on the instance")
    reason: str = getattr(adapter, "elsa_why_not", lambda module: "")(module)
    return Support(not reason, reason or "an adapter is written for this class")


def watch_support(module: nn.Module) -> Support:
    """Whether the module's own forward can run watched, or why not."""
    if "forward" in vars(module):
        return Support(False, "its forward was replaced on the instance")
    if isinstance(module, torch.jit.ScriptModule):
        return Support(False, "TorchScript: patch the model before it is scripted")
    if isinstance(module, GraphModule):
        return Support(False, "a traced graph: patch the model before it is traced")
    return Support(True, "its own forward runs, and attention in it is recognised")
