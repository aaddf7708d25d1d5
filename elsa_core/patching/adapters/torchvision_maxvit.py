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
from elsa_core.patching.adapters.derived import Derivation, Derives, derived
from elsa_core.patching.adapters.hooks import is_watched
from elsa_core.patching.adapters.windows import (
    Bias,
    as_table,
    attend_windows,
    is_hooked,
    is_small,
    keeps_original,
    read_bias,
    why_not,
)

# The modules that the layer's forward calls around the attention, as the library makes them.
_PARTS = {
    "partition_op": (WindowPartition,),
    "partition_swap": (SwapAxes, nn.Identity),
    "attn_layer": (nn.Sequential,),
    "departition_swap": (SwapAxes, nn.Identity),
    "departition_op": (WindowDepartition,),
}


class ElsaPartitionAttentionLayer(Derives, PartitionAttentionLayer):  # type: ignore[misc]  # untyped
    """MaxViT's layer of attention and MLP: [B, C, H, W] -> [B, C, H, W]."""

    elsa_base = PartitionAttentionLayer
    elsa_attention = "attn_layer.1"
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        other = _other_part(module)
        if other:
            return f"its {other} is a {type(getattr(module, other)).__qualname__}"
        return why_not(module.attn_layer[1], RelativePositionalMultiHeadAttention)

    def elsa_derivation(self) -> Derivation | None:
        """The relative position bias, where the parts are the library's."""
        return None if _other_part(self) else _of_bias(self)

    def forward(self, x: Tensor) -> Tensor:
        if _other_part(self) or any(is_watched(self._modules[name]) for name in _PARTS):
            own: Tensor = super().forward(x)
            return own
        norm, attn, drop = self.attn_layer
        hooked = is_hooked(attn, RelativePositionalMultiHeadAttention)
        hooked = hooked or tuple(x.shape[-2:]) != tuple(self.grid_size)
        grid = type(self.partition_swap) is SwapAxes
        rows, columns = (side // self.p for side in self.grid_size)
        window = (rows, columns) if grid else (self.p, self.p)
        if hooked or keeps_original(self, x, attn.to_qkv, attn.n_heads, window):
            out: Tensor = super().forward(x)
            return out
        x = x.permute(0, 2, 3, 1)
        bias: Bias = derived(_of_bias(self))
        out = attend_windows(
            self,
            project(self, attn.to_qkv, norm(x)),
            bias.bias,
            bias_index=bias.bias_index,
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
    small = is_small(table, attn.n_heads, attn.max_seq_len)
    return Derivation(layer, attn, _bias, (table, index), per_call=_table, keep=small)


def _bias(attn: Any) -> Bias:
    table, index = attn.relative_position_bias_table, attn.relative_position_index
    return read_bias(table, index, attn.n_heads, attn.max_seq_len)


def _table(attn: Any) -> Bias:
    table, index = attn.relative_position_bias_table, attn.relative_position_index
    return as_table(table, index, attn.max_seq_len)
