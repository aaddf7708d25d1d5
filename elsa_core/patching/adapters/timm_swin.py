"""timm's Swin block on `elsa_core.window_attention`.

Read against timm 1.0.20 to 1.0.31. Window, shift and table are read at each call, so that
`set_input_size`, `always_partition` and a dynamic image size work on a patched model. The block's
`attn_mask` stays a buffer and is not read: the operator knows the regions by their coordinates.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import Tensor, nn

from elsa_core import calls, routing
from elsa_core.patching.adapters import flat, rows
from elsa_core.patching.adapters.common import norm_of, project, scale_of
from elsa_core.patching.adapters.derived import DERIVED, Derivation, Derives, derived
from elsa_core.patching.adapters.handing import waiting
from elsa_core.patching.adapters.host import (
    is_captured,
    is_host_bound,
    is_shown,
    is_unasked,
    is_within_original,
)
from elsa_core.patching.adapters.residual import added, added_by
from elsa_core.patching.adapters.windows import (
    Bias,
    as_table,
    attend_windows,
    is_small,
    keeps_original,
    must_call,
    of_padding,
    read_bias,
    why_not,
)
from elsa_core.short_calls import small_way
from elsa_core.window import window_attention

_TABLE, _INDEX = "relative_position_bias_table", "relative_position_index"


class ElsaSwinTransformerBlock(Derives, SwinTransformerBlock):  # type: ignore[misc]  # timm is untyped
    """Swin's block, whose attention reads the projection of the whole image as it lies."""

    elsa_base = SwinTransformerBlock
    elsa_attention = "attn"
    elsa_entry = "_attn"
    elsa_precision: str
    elsa_backend: str

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        """Why this instance stays as it is; empty if it does not."""
        return why_not(module.attn, WindowAttention)

    def elsa_derivation(self) -> Derivation:
        """The relative position bias."""
        attn = self.attn
        table, index = attn.relative_position_bias_table, attn.relative_position_index
        small = is_small(table, attn.num_heads, math.prod(attn.window_size))
        return Derivation(self, attn, _bias, (table, index), per_call=_table, keep=small)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and not self.training and "_attn" not in vars(self):
            work = 4 * x.numel() * x.shape[-1]
            bound = "linear" if x.dtype == torch.float32 else "attention"
            if is_within_original(self) or is_host_bound(
                self, bound, x, work, lambda: self._elsa_forward(x)
            ):
                out = flat.served(self, _row, x)
                if out is not None:
                    return out
        row = rows.row_of(self, _elsa_row, x) if self._elsa_has_row(x) else None
        return self._elsa_forward(x) if row is None else row

    def _elsa_has_row(self, x: Tensor) -> bool:
        """Whether a call need not go through `_attn`: by a caller's own, or by the original's."""
        attn: Any = self.attn
        if "_attn" in vars(self) or calls.traced() or type(attn) is not WindowAttention:
            return False
        return not keeps_original(self, x, attn.qkv, attn.num_heads, self.window_size)

    def _elsa_forward(self, x: Tensor) -> Tensor:
        norm = self.norm1
        # a caller may have put an entry of its own in the place of `_attn`
        within = norm_of(norm, x) is not None and "_attn" not in vars(self)
        normed = x if within else norm(x)
        x = added_by(
            lambda: self._elsa_attn(x, norm) if within else self._attn(normed),
            x, self.attn, None, self.drop_path1,
        )  # fmt: skip
        tokens = x.flatten(1, 2)
        out = added(tokens, self.norm2, self.mlp, None, self.drop_path2)
        return out.reshape(x.shape)

    def _attn(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> [B, H, W, C]."""
        kind = self._elsa_kind(x)
        if kind is not None and calls.was_seen(kind):
            run = flat.run_of(self.attn, _windows)
            try:
                if run is not None:
                    return run(x, self)  # type: ignore[no-any-return]
            except KeyError:  # a weight is a parameter no longer
                pass
        return self._elsa_attn(x, None, kind)

    def _elsa_kind(self, x: Tensor) -> Any:
        """What tells calls apart of which the modules are read once: eager ones on a GPU that keep
        PyTorch's linear layers, since they wait for the host. None of any other call.
        """
        if calls.traced() or not x.is_cuda or self.training or torch.is_grad_enabled():
            return None
        attn: Any = self._modules["attn"]
        if type(attn) is not WindowAttention or is_shown(attn) or not is_unasked(self.__dict__):
            return None
        if torch._C._is_any_autocast_enabled() or waiting() or is_captured():
            return None
        shape, dtype = x.shape, x.dtype
        columns = getattr(attn._modules.get("qkv"), "out_features", 3 * shape[-1])
        if x.numel() * columns >= routing.eager_least("linear", dtype):
            return None
        return "windows", shape, dtype, x.device, columns, attn.num_heads, routing.switched()

    def _elsa_attn(self, x: Tensor, norm: Any, kind: Any = None) -> Tensor:
        """_attn(norm(x)). kind: of such a call, which elsa's kernel serves unless this one is the
        original's."""
        attn = self.attn
        called = must_call(attn, WindowAttention)
        if called or keeps_original(self, x, attn.qkv, attn.num_heads, self.window_size):
            out: Tensor = super()._attn(x if norm is None else norm(x))
            return out
        if kind is not None:
            calls.first_of_kind(kind)
        bias: Bias = derived(self.elsa_derivation())
        return attend_block(
            self,
            project(self, attn.qkv, x, norm=norm),
            bias.bias,
            bias_index=bias.bias_index,
            scale=scale_of(attn),
            pad_qkv=of_padding(attn.qkv, x, self.window_size),
        )


def _bias(attn: Any) -> Bias:
    table, index = attn.relative_position_bias_table, attn.relative_position_index
    return read_bias(table, index, attn.num_heads, math.prod(attn.window_size))


def _table(attn: Any) -> Bias:
    table, index = attn.relative_position_bias_table, attn.relative_position_index
    return as_table(table, index, math.prod(attn.window_size))


def _row(module: Any, drops: flat.Drops) -> flat.Run | None:
    """The block as functions in a row, its layers PyTorch's."""
    first, second = flat.norm(module.norm1), flat.norm(module.norm2)
    attend, change = _windows(module.attn, drops), flat.of_mlp(module.mlp, drops)
    if not all(flat.idles(part, drops) for part in (module.drop_path1, module.drop_path2)):
        return None
    if first is None or second is None or attend is None or change is None:
        return None
    owner = weakref.ref(module)  # what holds the module itself would keep it for ever

    def run(x: Tensor) -> Tensor:
        way = small_way(x)
        x = attend(first(x), owner(), way, x)
        tokens = x.flatten(1, 2)
        return change(second(tokens), way, tokens).reshape(x.shape)

    return run


def _windows(attn: Any, drops: flat.Drops) -> flat.Run | None:
    """What computes a block's attention of normalised tokens, its layers PyTorch's."""
    qkv, proj = flat.linear(attn.qkv), flat.linear(attn.proj)
    idle = flat.idles(attn.attn_drop, drops) and flat.idles(attn.proj_drop, drops)
    if qkv is None or proj is None or not idle or why_not(attn, WindowAttention):
        return None
    if isinstance(attn.attn_drop, nn.Dropout):  # fused, it drops in the attention's own mode
        drops.append((vars(attn), vars(attn.attn_drop), "p"))
    inner, layer = vars(attn), vars(attn.qkv)

    def run(
        x: Tensor, block: Any, way: flat.Way | None = flat.UNASKED, residual: Tensor | None = None
    ) -> Tensor:
        way = small_way(x) if way is flat.UNASKED else way
        space = vars(block)
        if DERIVED.keeps(block):
            bias: Bias = derived(block.elsa_derivation())
        else:
            if _TABLE in inner or _INDEX in inner:  # attributes that Python finds before these
                raise KeyError(_TABLE)
            table, index = inner["_parameters"][_TABLE], inner["_buffers"][_INDEX]
            bias = as_table(table, index, math.prod(inner["window_size"]))
        windows = window_attention(
            qkv(x, way), bias.bias, num_heads=inner["num_heads"], window_size=space["window_size"],
            shift_size=space["shift_size"], bias_index=bias.bias_index,
            scale=None if inner["fused_attn"] else inner["scale"],
            pad_qkv=layer["_parameters"]["bias"],
            precision=space["elsa_precision"], backend=space["elsa_backend"],
        )  # fmt: skip
        return proj(windows, way, residual)

    return run


def _elsa_row(module: Any, drops: flat.Drops) -> flat.Run | None:
    """The block by elsa's operators as functions in a row, where every layer is patched."""
    attn, first, second = module.attn, flat.norm(module.norm1), flat.norm(module.norm2)
    qkv, proj, change = rows.linear(attn.qkv), rows.linear(attn.proj), rows.mlp(module.mlp, drops)
    paths = rows.path(module.drop_path1), rows.path(module.drop_path2)
    plain = not why_not(attn, WindowAttention) and flat.drops_weights(attn, drops)
    if not plain or not flat.idles(attn.proj_drop, drops) or None in paths:
        return None
    if None in (first, second, qkv, proj, change):
        return None
    path1, path2 = paths
    owner = weakref.ref(module)

    def attention(normed: Tensor, residual: Tensor | None, gamma: Tensor | None) -> Tensor:
        block: Any = owner()
        inner = block.attn
        bias: Bias = derived(block.elsa_derivation())
        windows = attend_windows(
            block, qkv(normed), bias.bias, num_heads=inner.num_heads,  # type: ignore[misc]
            window_size=block.window_size, shift_size=block.shift_size, scale=scale_of(inner),
            bias_index=bias.bias_index, pad_qkv=inner.qkv.bias,
        )  # fmt: skip
        return proj(windows, "none", residual, gamma)  # type: ignore[misc]

    def run(x: Tensor) -> Tensor:
        x = rows.added(attention, first(x), x, None, path1())  # type: ignore[misc]
        tokens = x.flatten(1, 2)
        out = rows.added(change, second(tokens), tokens, None, path2())  # type: ignore[arg-type, misc]
        return out.reshape(x.shape)

    return run


def attend_block(block: Any, qkv: Tensor, bias: Tensor | None, **terms: Any) -> Tensor:
    """What a Swin block, of either version, makes of a projection [B, H, W, 3 * C]: [B, H, W, C].

    Window, shift and heads are the block's and its attention's own, as is the last projection.
    """
    attn = block.attn
    out = attend_windows(
        block,
        qkv,
        bias,
        num_heads=attn.num_heads,
        window_size=block.window_size,
        shift_size=block.shift_size,
        **terms,
    )
    joined: Tensor = attn.proj_drop(project(block, attn.proj, out))
    return joined
