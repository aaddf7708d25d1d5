"""timm's MLPs on `elsa_core.linear`, the first layer with its activation in one call, and its ViT
block, whose residuals and LayerScale go into the last product of what they add.

Gated MLPs have both products and the gate in one call where a kernel takes them. The block is no
site: its class is swapped beside the sites within it, where linear layers are patched too. Read
against timm 1.0.20 to 1.0.31.
"""

from __future__ import annotations

from typing import Any

from timm.layers.drop import DropPath
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from timm.models.vision_transformer import Block, LayerScale
from torch import Tensor, nn

from elsa_core.base import calls
from elsa_core.ops.linear.api import served_gated
from elsa_core.patching.adapters.common import (
    activation_of,
    is_plain_linear,
    is_small,
    passed,
    project,
    why_no_weight,
)
from elsa_core.patching.adapters.hooks import is_watched
from elsa_core.patching.adapters.timm_attention import ElsaAttention

_RATES = {nn.Dropout: "p", DropPath: "drop_prob"}
_Module: Any = nn.Module  # untyped, as timm's classes are that stand beside it


class _Mlp(_Module):  # type: ignore[misc]
    """What the adapters share; `elsa_layers` names the linear layers, the last one last."""

    elsa_layers: tuple[str, ...] = ("fc1", "fc2")

    @classmethod
    def elsa_why_not(cls, module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        for layer in (getattr(module, name) for name in cls.elsa_layers):
            if not is_plain_linear(layer):
                return f"holds a {type(layer).__qualname__}"
            reason = why_no_weight(layer)
            if reason:
                return reason
        known = activation_of(module.act)
        return "" if known else f"its activation is a {type(module.act).__qualname__}"

    def _elsa_first(self, layer: nn.Module, x: Tensor) -> Any:
        activation = "" if is_watched(self.act) else activation_of(self.act)
        if not activation:
            return self.act(project(self, layer, x))
        return project(self, layer, x, activation=activation)

    def _elsa_last(
        self, x: Tensor, residual: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        x = passed(self.norm, passed(self.drop1, x))
        return passed(self.drop2, project(self, self.fc2, x, residual=residual, scale=scale))


class ElsaMlp(_Mlp, Mlp):  # type: ignore[misc]  # timm is untyped
    """The MLP of a ViT block: [..., C] -> [..., C], any floating dtype."""

    elsa_base = Mlp

    def forward(self, x: Tensor) -> Tensor:
        return self._elsa_last(self._elsa_first(self.fc1, x))


class _GatedMlp(_Mlp):
    def forward(self: Any, x: Tensor) -> Any:
        # hidden channels are about four times as many
        if is_small(self, x, 4 * x.numel() * x.shape[-1], "linear"):
            return super().forward(x)
        hidden = self._elsa_gated(x)
        if hidden is not None:
            return self._elsa_last(hidden)
        if "fc1_g" in self.elsa_layers:
            hidden = self._elsa_first(self.fc1_g, x) * project(self, self.fc1_x, x)
        else:  # gate and value are halves of one layer
            first, second = project(self, self.fc1, x).chunk(2, dim=-1)
            hidden = first * self.act(second) if self.gate_last else self.act(first) * second
        return self._elsa_last(hidden)

    def _elsa_gated(self: Any, x: Tensor) -> Tensor | None:
        """The gated hidden channels of x, in one call; None where no kernel takes it, or something
        watches what is between."""
        layers = [getattr(self, name) for name in self.elsa_layers[:-1]]
        if not activation_of(self.act) or is_watched(self.act, *layers):
            return None
        if not all(map(is_plain_linear, layers)):
            return None
        pair = [(layer.weight, layer.bias) for layer in layers]
        if len(pair) == 1:  # gate and value are halves of one layer
            halves = [(None, None) if t is None else t.chunk(2) for t in pair[0]]
            pair = [*zip(*halves, strict=True)]
            pair = pair[::-1] if self.gate_last else pair
        gate, value = pair
        names = activation_of(self.act), self.elsa_precision, self.elsa_backend
        return served_gated(x, gate, value, *names)


class ElsaSwiGLU(_GatedMlp, SwiGLU):  # type: ignore[misc]  # timm is untyped
    """An MLP with a gate, of two first layers: [..., C] -> [..., C], any floating dtype."""

    elsa_base = SwiGLU
    elsa_layers = ("fc1_g", "fc1_x", "fc2")


class ElsaGluMlp(_GatedMlp, GluMlp):  # type: ignore[misc]
    """An MLP whose first layer computes gate and value: [..., C] -> [..., C], any floating dtype.
    Of linear layers; one of convolutions stays as it is."""

    elsa_base = GluMlp


class ElsaBlock(Block):  # type: ignore[misc]  # timm is untyped
    """A ViT block: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = Block
    elsa_companion = True

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Any:
        attn, mlp = self.attn, self.mlp
        if not _folds(self, x) or attn.elsa_runs_original(x, (*given, None)[0]):
            return super().forward(x, *given, **named)
        scale1, scale2 = getattr(self.ls1, "gamma", None), getattr(self.ls2, "gamma", None)
        x = attn.elsa_added(self.norm1(x), x, scale1, *given, **named)
        return mlp._elsa_last(mlp._elsa_first(mlp.fc1, self.norm2(x)), x, scale2)


def _folds(block: Any, x: Tensor) -> bool:
    """Whether nothing but elsa's own classes computes what the block adds: no other module stands
    in the place of a part, nothing watches it, and nothing is dropped after the last product."""
    attn, mlp = block.attn, block.mlp
    if type(attn) is not ElsaAttention or type(mlp) is not ElsaMlp or not isinstance(x, Tensor):
        return False
    # a recorded program on a CPU holds PyTorch's own products, but for ONNX, which has a node
    if not x.is_cuda and calls.recorded() and not calls.keeps_products():
        return False
    drops = (attn.proj_drop, mlp.drop2, block.drop_path1, block.drop_path2)
    for drop in drops:
        cls = type(drop)
        if cls not in (nn.Identity, nn.Dropout, DropPath):
            return False
        if drop.training and cls is not nn.Identity and getattr(drop, _RATES[cls]):
            return False
    scales = (block.ls1, block.ls2)
    if any(type(scale) not in (nn.Identity, LayerScale) for scale in scales):
        return False
    return not is_watched(attn, mlp, *drops, *scales)
