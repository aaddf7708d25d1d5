"""What the scope "model" patches beside attention: linear layers, MLPs and patch embeddings.

A linear layer is a site wherever it stands, but within an MLP that is one. Layers that only look
like linear ones (quantised, parametrised, with a low-rank addition) stay, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from elsa_core import dispatch
from elsa_core.backends.support import Support
from elsa_core.errors import ArgumentError
from elsa_core.patching import adapters
from elsa_core.patching.adapters import table

AUTO, ATTENTION, MODEL = "auto", "attention", "model"
SCOPES = (AUTO, ATTENTION, MODEL)

# The output projection of nn.MultiheadAttention, which that module computes.
_NO_LAYER = "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"


def scope_of(model: nn.Module, scope: str) -> str:
    """ "attention" or "model": the scope asked for, or for "auto" what the shipped measurements say
    of the device and dtype of the model's weights.

    Raises:
        ArgumentError: no such scope.
    """
    if scope not in SCOPES:
        raise ArgumentError(f"scope={scope!r} is unknown: choose one of {', '.join(SCOPES)}")
    if scope != AUTO:
        return scope
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    return ATTENTION if weight is None else dispatch.scope(weight.device, weight.dtype)


def patched_scope(model: nn.Module) -> str:
    """The scope that a patched model has: "model" where a layer or a companion of layers, which no
    other scope has, is patched."""
    of_layers = any(
        is_layer(module)
        or (getattr(cls, "elsa_companion", False) and not getattr(module, "elsa_any_scope", False))
        for module in model.modules()
        if (cls := adapters.patched_class(module)) is not None
    )
    return MODEL if of_layers else ATTENTION


def is_layer(module: nn.Module) -> bool:
    """Whether a module that is a site is a layer, and no attention."""
    cls = adapters.base_class(module)
    row = table.row_of(cls)
    return issubclass(cls, nn.Linear) if row is None else row.kind in table.LAYERS


def support(module: nn.Module) -> Support | None:
    """Whether a layer can be patched, and how or why not; None where it is no site at all. A
    sequence or an MLP that its adapter does not take is none: its layers are. So is an ordinary
    convolution."""
    cls = adapters.base_class(module)
    row = table.row_of(cls)
    if row is not None and row.kind in table.LAYERS:
        answer = adapters.support(module)
        if row.kind != table.LAYER and not answer.ok:
            return None
        return answer
    if table.qualified(cls) == _NO_LAYER:
        return None
    if not isinstance(module, nn.Linear):  # what looks like one, and holds no other that is one
        sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
        alike = all(type(size) is int for size in sizes) and hasattr(module, "weight")
        if not alike or any(isinstance(part, nn.Linear) for part in module.modules()):
            return None
    name = cls.__qualname__
    return Support(False, f"is no plain nn.Linear but a {name}, which may compute something else")


def companions(model: nn.Module, selected: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose classes are swapped beside those of `selected`: the linear layers within
    MLPs, the blocks around selected layers, and in any scope models that say what is padding
    (`elsa_any_scope`)."""
    chosen = set(selected)
    for module in selected:
        yield from adapters.parts(module)
    whole = any(is_layer(module) for module in selected)
    for module in model.modules():
        adapter: Any = adapters.written(adapters.base_class(module))
        if not getattr(adapter, "elsa_companion", False) or not adapters.support(module).ok:
            continue
        wanted = whole or getattr(adapter, "elsa_any_scope", False)
        if wanted and chosen.intersection(module.modules()):
            yield module
