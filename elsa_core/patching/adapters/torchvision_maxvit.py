"""torchvision's MaxViT partition layers, windows and grids, on `elsa_core.window_attention`.

Read against torchvision 0.20 to 0.30. Its scores are scaled by the width of all heads together.
Between the two permutations of the layer everything acts on single tokens, so that the order of
tokens does not matter and the image is never cut.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models.maxvit import (
    PartitionAttentionLayer,
    RelativePositionalMultiHeadAttention,
    SwapAxes,
    WindowDepartition,
    WindowPartition,
)

from elsa_core.patching.adapters.common import project
from elsa_core.patching.adapters.derived import Derivation, derived
from elsa_core.patching.adapters.hooks import is_watched
from elsa_core.patching.adapters.windows import (
    WindowBlock,
    attend_windows,
    keeps_original,
    must_call,
    table_bias,
)

# The modules that the layer's forward calls around the attention, as the library makes them.
_PARTS = {
    "partition_op": (WindowPartition,),
    "partition_swap": (SwapAxes, nn.Identity),
    "attn_layer": (nn.Sequential,),
    "departition_swap": (SwapAxes, nn.Identity),
    "departition_op": (WindowDepartition,),
}


class ElsaPartitionAttentionLayer(WindowBlock, PartitionAttentionLayer):  # type: ignore[misc]  # untyped
    """MaxViT's layer of attention and MLP: [B, C, H, W] -> [B, C, H, W]."""

    elsa_base = PartitionAttentionLayer
    elsa_attention = "attn_layer.1"
    elsa_expects = RelativePositionalMultiHeadAttention

    @classmethod
    def elsa_why_not(cls, module: Any) -> str:
        other = _other_part(module)
        if other:
            return f"its {other} is a {type(getattr(module, other)).__qualname__}"
        return super().elsa_why_not(module)

    def elsa_derivation(self) -> Derivation | None:
        return None if _other_part(self) else _of_bias(self)

    def forward(self, x: Tensor) -> Any:
        if _other_part(self) or is_watched(*map(self._modules.get, _PARTS)):
            return super().forward(x)
        norm, attn, drop = self.attn_layer
        hooked = must_call(attn, RelativePositionalMultiHeadAttention)
        hooked = hooked or tuple(x.shape[-2:]) != tuple(self.grid_size)
        grid = type(self.partition_swap) is SwapAxes
        rows, columns = (side // self.p for side in self.grid_size)
        window = (rows, columns) if grid else (self.p, self.p)
        if hooked or keeps_original(self, x, attn.to_qkv, attn.n_heads, window):
            return super().forward(x)
        x = x.permute(0, 2, 3, 1)
        out = attend_windows(
            self,
            project(self, attn.to_qkv, norm(x)),
            derived(_of_bias(self)),
            num_heads=attn.n_heads,
            window_size=window,
            scale=attn.scale_factor,
            grid=grid,
        )
        x = x + self.stochastic_dropout(drop(project(self, attn.merge, out)))
        x = x + self.stochastic_dropout(self.mlp_layer(x))
        return x.permute(0, 3, 1, 2)


def _other_part(layer: Any) -> str:
    """The name of a part that is not as the library makes it; empty where there is none."""
    parts = layer._modules
    for name, made in _PARTS.items():
        part = parts[name]
        if type(part) not in made or (type(part) is SwapAxes and (part.a, part.b) != (-2, -3)):
            return name
    one_way = type(parts["partition_swap"]) is type(parts["departition_swap"])
    return "" if one_way else "departition_swap"


def _of_bias(layer: Any) -> Derivation:
    attn = layer.attn_layer[1]
    table, index = attn.relative_position_bias_table, attn.relative_position_index
    return table_bias(layer, attn, table, index, attn.n_heads, attn.max_seq_len)
