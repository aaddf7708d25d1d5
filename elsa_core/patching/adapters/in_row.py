"""Blocks that hand terms to their parts and, in small eager calls on a GPU, run as functions in a
row (`flat.py`): in half precision too, where attention alone is patched.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from elsa_core.patching.adapters import flat
from elsa_core.patching.adapters.host import (
    all_original,
    in_row,
    is_host_bound,
    is_settled,
    is_within_original,
)
from elsa_core.patching.adapters.residual import Adds


class AddsInRow(Adds):
    """What such blocks inherit.

    `elsa_read` is a reader as those of `flat.py`, `elsa_read_any` one of blocks whose layers need
    not be patched to be elsa's; what they make of a block takes the arguments of the block's
    forward. `elsa_work` estimates an attention.
    """

    elsa_any_scope = True
    # where no layer within is patched "attention", or "auto" where that was not asked for
    elsa_scope: str = "model"
    elsa_base: Any
    elsa_read: Any
    elsa_read_any: Any

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Any:
        if is_within_original(self):
            return self.elsa_original(x, *given, **named)
        if self.elsa_scope == "model":
            return super().forward(x, *given, **named)

        def own() -> Any:
            return self.elsa_base.forward(self, x, *given, **named)

        # torch.fx calls with what is no tensor; no compiler may read a length
        if not isinstance(x, Tensor) or not x.is_cuda or is_compiling() or is_settled(self):
            return own()
        if is_host_bound(self, "attention", x, self.elsa_work(x), own):
            return all_original(self.elsa_original, x, *given, **named)
        return own()

    def elsa_work(self, x: Tensor) -> int:
        """Multiply-adds of query key^T."""
        raise NotImplementedError

    def elsa_original(self, x: Tensor, *given: Any, **named: Any) -> Any:
        """The block's own forward, in calls that are not compiled."""
        free = self.elsa_scope == "auto"
        run = flat.run_of(self, self.elsa_read_any if free else self.elsa_read)
        if run is not None:
            in_row(self)
            try:
                return run(x, *given, **named)
            except KeyError:  # a weight is a parameter no longer
                pass
        return self.elsa_base.forward(self, x, *given, **named)
