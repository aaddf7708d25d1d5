"""torchvision's MLPs on `elsa_core.linear`: each linear layer with the activation behind it.

Read against torchvision 0.29.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models.vision_transformer import MLPBlock
from torchvision.ops.misc import MLP

from elsa_core.patching.adapters.torch_layers import chained, linear_parts, why_no_chain


class ElsaMLP(MLP):  # type: ignore[misc]  # torchvision is untyped
    """The MLP of a Swin block: [..., C] -> [..., C], any floating dtype."""

    elsa_base = MLP
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_no_chain(module)

    @staticmethod
    def elsa_parts(module: Any) -> tuple[nn.Module, ...]:
        """The linear layers that it computes."""
        return linear_parts(module)

    def forward(self, input: Tensor) -> Tensor:
        return chained(self, input)


class ElsaMLPBlock(MLPBlock):  # type: ignore[misc]  # torchvision is untyped
    """The MLP of a ViT block: [..., C] -> [..., C], any floating dtype."""

    elsa_base = MLPBlock
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_no_chain(module)

    @staticmethod
    def elsa_parts(module: Any) -> tuple[nn.Module, ...]:
        """The linear layers that it computes."""
        return linear_parts(module)

    def forward(self, input: Tensor) -> Tensor:
        return chained(self, input)
