"""Copies of a model's modules over the very same weights."""

from __future__ import annotations

import copy

from torch import nn

from elsa_core.errors import ArgumentError


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the model's modules over the very same parameters and buffers.

    Raises:
        ArgumentError: the model cannot be copied.
    """
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"this model cannot be copied, so nothing can stand beside it ({error})"
        ) from error
