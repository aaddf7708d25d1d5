"""A model run once on an example: in which modules attention happens.

A copy runs, on fake tensors where the model is large, and `patching.recognition` sees what it does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core import dispatch
from elsa_core.errors import ArgumentError
from elsa_core.patching.probe import Example, ProbeError, cast_to, run_copy
from elsa_core.patching.recognition import Watch, is_pending

__all__ = ["Attentions", "Example", "watch"]


@dataclass
class Attentions:
    """What happened in one run, by the paths of modules."""

    # How many attentions each computed; of one that began in one module and ended in another, the
    # innermost that holds both. Weights that a forward returns are computed as it ends, so that
    # such a module's attention is its caller's.
    paths: Counter[str] = field(default_factory=Counter)
    entered: set[str] = field(default_factory=set)  # whose forward ran
    returning: set[str] = field(default_factory=set)  # of these, whose weights were returned


class _Observer:
    def __init__(self) -> None:
        self.found = Attentions()
        self._stack: list[str] = []

    def observe(self, model: nn.Module) -> None:
        for path, module in model.named_modules():

            def enter(module: nn.Module, args: Any, path: str = path) -> None:
                self._stack.append(path)
                self.found.entered.add(path)

            def leave(module: nn.Module, args: Any, out: Any, path: str = path) -> None:
                self._stack.pop()
                if self.found.paths[path] and is_pending(out):
                    self.found.returning.add(path)
                    count = self.found.paths.pop(path)
                    if self._stack:
                        self.found.paths[self._stack[-1]] += count

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)

    def place(self) -> tuple[str, ...]:
        """The modules whose forwards run now, outermost first."""
        return tuple(self._stack)

    def ran(self, begun: tuple[str, ...], query: Tensor, key: Tensor) -> None:
        """Count an attention for the innermost module that saw all of it."""
        both = [a for a, b in zip(begun, self._stack, strict=False) if a == b]
        self.found.paths[both[-1] if both else ""] += 1


def watch(model: nn.Module, example: Example) -> Attentions:
    """Run a copy of the model once on the example, in eval mode and without gradients.

    Raises:
        TypeError: the example is none.
        ArgumentError: the model does not run on it.
    """

    def run(model: nn.Module, args: Any, kwargs: Any) -> Attentions:
        observer = _Observer()
        observer.observe(model)
        watching = Watch("strict", dispatch.PLAIN, observer)
        with torch.no_grad(), watching:
            out = model(*args, **kwargs)
        watching.close(out)
        return observer.found

    try:
        return run_copy(model, lambda like: cast_to(like, example), run)
    except ProbeError as error:
        raise ArgumentError(
            f"example: {type(model).__name__} does not run on it: {error}"
        ) from error
