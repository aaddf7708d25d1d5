"""torchvision's MLPs on `elsa_core.linear`: each linear layer with the activation behind it.

Read against torchvision 0.29.
"""

from __future__ import annotations

from torchvision.models.vision_transformer import MLPBlock
from torchvision.ops.misc import MLP

from elsa_core.patching.adapters.torch_layers import Chain


class ElsaMLP(Chain, MLP):  # type: ignore[misc]  # torchvision is untyped
    """The MLP of a Swin block: [..., C] -> [..., C], any floating dtype."""

    elsa_base = MLP


class ElsaMLPBlock(Chain, MLPBlock):  # type: ignore[misc]  # torchvision is untyped
    """The MLP of a ViT block: [..., C] -> [..., C], any floating dtype."""

    elsa_base = MLPBlock
