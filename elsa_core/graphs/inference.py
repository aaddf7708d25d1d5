"""A call for inference as one CUDA graph."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core.base.messages import first_line
from elsa_core.graphs import capture
from elsa_core.graphs.checks import (
    OTHER_LEAF,
    Given,
    Guards,
    RefusedError,
    as_it_was,
    check_state,
    flat_results,
    watched,
    without_cache,
)

WARM_UPS: Final = 2  # besides the one that is watched and the one of the capture


class Inference:
    """A captured call: its arguments' memory, its replay, its results, the model as it was."""

    backward = False

    def __init__(self, model: nn.Module, given: Given, device: torch.device, pool: Any) -> None:
        self.given, self.replays = given.copied(), 0
        self._device, self._targets = device, self.given.tensors()
        args, kwargs = given.arguments(self.given.leaves)
        result: list[Any] = [None]

        def run() -> None:
            result[0] = model(*args, **kwargs)

        with as_it_was(model, device), without_cache(device):
            for _ in range(WARM_UPS):
                run()
            self.guards = Guards(model)  # before other runs: they show what a forward changes
            reads = watched(run, device)
            check_state(self.guards, self._targets)
            try:
                (self.replay,) = capture.BACKEND.captured([run], pool, device)
            except RuntimeError as error:
                raise RefusedError(f"a graph cannot hold it: {first_line(error)}") from error
        # also what only the capture changes: its memory is the graph's
        check_state(self.guards, self._targets)
        outer = (*self._targets, *self.guards.tensors)
        if reads.outside(outer):
            raise RefusedError("it reads a tensor that is no attribute of its modules")
        self._results, self._tree = flat_results(result[0], device)
        if any(isinstance(each, Tensor) and each.requires_grad for each in self._results):
            raise RefusedError(OTHER_LEAF)

    def answer(self, given: Given, copy_outputs: bool) -> tuple[bool, Any]:
        """Whether the model is what it was, and the result."""
        if not self.guards.alive():
            return False, None
        result = self.run(given, copy_outputs)
        return self.guards.hold(), result  # asked while the GPU is at work

    def run(self, given: Given, copy_outputs: bool) -> Any:
        """The results for other arguments of the same kind."""
        self.replays += 1
        capture.BACKEND.order(self._device)
        for target, leaf in zip(self._targets, given.tensors(), strict=True):
            target.copy_(leaf)
        self.replay()
        found = self._results
        if copy_outputs:
            found = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in found]
        return pytree.tree_unflatten(list(found), self._tree)
