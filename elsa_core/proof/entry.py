"""The method of a site that a check calls and hooks: `forward`, or the one that an adapter names.

A block that computes its attention itself (Swin) is judged on that method alone, since the residual
and the MLP around it would hide small errors and a norm before it would undo the hard cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Called with (module, args, kwargs, output); what it returns replaces the output, None keeps it.
Hook = Callable[[nn.Module, Any, dict[str, Any], Any], Any]


def call(module: nn.Module, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the site alone, hooks included."""
    run = module if entry == "forward" else getattr(module, entry)
    return run(*args, **kwargs)


@contextmanager
def watched(module: nn.Module, entry: str, hook: Hook) -> Iterator[None]:
    """Call `hook` after every run of the site, for the length of a `with` block."""
    if entry == "forward":
        handle = module.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        return
    before = vars(module).get(entry)

    def run(*args: Any, **kwargs: Any) -> Any:
        inner = getattr(type(module), entry).__get__(module) if before is None else before
        output = inner(*args, **kwargs)
        changed = hook(module, args, kwargs, output)
        return output if changed is None else changed

    # An instance attribute goes before the method of whichever class the module has at the time.
    vars(module)[entry] = run
    try:
        yield
    finally:
        if before is None:
            del vars(module)[entry]
        else:
            vars(module)[entry] = before
