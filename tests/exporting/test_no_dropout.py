"""A program that drops weights when it is run is no bundle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import elsa_core as elsa
from elsa_core.errors import ExportError
from elsa_core.exporting.tracing import checked_operators, operators_of


def test_a_bundle_holds_no_dropout() -> None:
    """A module that drops in eval mode too is refused by name."""

    class Drops(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return elsa.attention(x, x, x, dropout_p=0.5)

    program = torch.export.export(Drops().eval(), (torch.randn(1, 2, 9, 8),))
    names = operators_of(program)
    assert names and all(name.startswith("attention_dropout") for name in names)
    with pytest.raises(ExportError, match="drops"):
        checked_operators(names, "cpu")
