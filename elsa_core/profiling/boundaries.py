"""Where a site's attention begins and ends in a call of the module that is the site.

Most sites are attention modules: all of the call is attention, projections included. Where an
adapter takes over a block's way to its attention (Swin), the site is the block, whose MLP and norms
are not attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from elsa_core.patching import attention_within, entry


def around(module: nn.Module, enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """Have `enter` and `leave` called around the attention in every call of a site.

    A block with a method of its own for attention is watched there. In any other block the calls of
    its children that have weights and do not hold the attention are left out: `leave` comes
    before, `enter` after each of them.
    """
    inner = attention_within(module)
    name = entry(module)
    if inner is not None and name != "forward":
        method = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            enter()
            out = method(*args, **kwargs)
            leave()
            return out

        setattr(module, name, called)
        return
    # A child may be a site of its own: whoever is inside leaves before another one enters.
    module.register_forward_pre_hook(lambda *_: enter())
    for child in () if inner is None else _others(module, inner):
        child.register_forward_pre_hook(lambda *_: leave(), prepend=True)
        child.register_forward_hook(lambda *_: enter())
    module.register_forward_hook(lambda *_: leave(), prepend=True)


def _others(module: nn.Module, inner: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with weights inside `module` that neither are nor hold `inner`."""
    for child in module.children():
        if child is inner:
            continue
        if any(each is inner for each in child.modules()):
            yield from _others(child, inner)
        elif next(child.parameters(), None) is not None:
            yield child
