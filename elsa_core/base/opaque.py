"""Operators of one implementation on every device, each one opaque call for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("elsa", "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    formula: Callable[..., Any] | None = None,
    context: Callable[..., None] | None = None,
) -> None:
    """Define `elsa::name` of a schema; formula and context are those of `register_autograd`."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"elsa::{name}", fake, lib=_LIBRARY)
    if formula is not None:
        torch.library.register_autograd(
            f"elsa::{name}", formula, setup_context=context, lib=_LIBRARY
        )
