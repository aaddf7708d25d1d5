"""timm's other blocks, whose residuals and LayerScale go into the last product of what they add.

Read against timm 1.0.20 to 1.0.31. Blocks that normalise after the last product (Swin-V2, EVA's
post-norm) have no residual there to add, and stay as they are.
"""

from __future__ import annotations

from typing import Any

from timm.models.beit import Block as BeitBlock
from timm.models.cait import LayerScaleBlock, LayerScaleBlockClassAttn
from timm.models.eva import EvaBlock
from timm.models.hiera import HieraBlock, MaskUnitAttention
from timm.models.mvitv2 import MultiScaleAttention, MultiScaleBlock
from timm.models.vision_transformer_relpos import RelPosBlock
from timm.models.xcit import XCABlock
from torch import Tensor, cat, is_grad_enabled

from elsa_core.patching.adapters import flat_eva, flat_hiera, flat_mvitv2
from elsa_core.patching.adapters.in_row import AddsInRow
from elsa_core.patching.adapters.residual import Adds, added, handed_to, normalised
from elsa_core.patching.adapters.timm_mvitv2 import pooled_work


class ElsaBeitBlock(Adds, BeitBlock):  # type: ignore[misc]  # timm is untyped
    """BEiT's block: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = BeitBlock

    def elsa_forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        terms = {"shared_rel_pos_bias": shared_rel_pos_bias}
        x = added(x, self.norm1, self.attn, self.gamma_1, self.drop_path1, terms)
        return added(x, self.norm2, self.mlp, self.gamma_2, self.drop_path2)


class ElsaEvaBlock(AddsInRow, EvaBlock):  # type: ignore[misc]
    """EVA's block (EVA-02, DINOv3): [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = EvaBlock
    elsa_read = staticmethod(flat_eva.block)
    elsa_read_any = staticmethod(flat_eva.any_block)

    def elsa_work(self, x: Tensor) -> int:
        return x.numel() * x.shape[-2]

    def elsa_original(
        self, x: Tensor, rope: Tensor | None = None, *given: Any, **named: Any
    ) -> Any:
        # a mask, and whether attention is causal, which older versions do not have
        terms = (*given, *named.values())
        # a row saves the same tensors for a backward in another order, which checkpoints compare
        if is_grad_enabled() or any(term is not None and term is not False for term in terms):
            return EvaBlock.forward(self, x, rope, *given, **named)
        return super().elsa_original(x, rope)

    def elsa_forward(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
        terms = dict(zip(("rope", "attn_mask", "is_causal"), given, strict=False)) | named
        x = added(x, self.norm1, self.attn, self.gamma_1, self.drop_path1, terms)
        return added(x, self.norm2, self.mlp, self.gamma_2, self.drop_path2)


class ElsaLayerScaleBlock(Adds, LayerScaleBlock):  # type: ignore[misc]
    """CaiT's block: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = LayerScaleBlock

    def elsa_forward(self, x: Tensor) -> Tensor:
        x = added(x, self.norm1, self.attn, self.gamma_1, self.drop_path)
        return added(x, self.norm2, self.mlp, self.gamma_2, self.drop_path)


class ElsaLayerScaleBlockClassAttn(Adds, LayerScaleBlockClassAttn):  # type: ignore[misc]
    """CaiT's last blocks, of the class token: [B, N, C], [B, 1, C] -> [B, 1, C]."""

    elsa_base = LayerScaleBlockClassAttn

    def elsa_forward(self, x: Tensor, x_cls: Tensor) -> Tensor:
        tokens = self.norm1(cat((x_cls, x), dim=1))
        x_cls = added(x_cls, tokens, self.attn, self.gamma_1, self.drop_path)
        return added(x_cls, self.norm2, self.mlp, self.gamma_2, self.drop_path)


class ElsaXCABlock(Adds, XCABlock):  # type: ignore[misc]
    """XCiT's block, of tokens that are an image of H x W: [B, N, C] -> [B, N, C]."""

    elsa_base = XCABlock

    def elsa_forward(self, x: Tensor, H: int, W: int) -> Tensor:  # noqa: N803 (timm's names)
        # one for all three in older versions
        first, second, third = (
            getattr(self, f"drop_path{i}", None) or self.drop_path for i in (1, 2, 3)
        )
        x = added(x, self.norm1, self.attn, self.gamma1, first)
        x = x + third(self.gamma3 * self.local_mp(self.norm3(x), H, W))
        return added(x, self.norm2, self.mlp, self.gamma2, second)


class ElsaHieraBlock(AddsInRow, HieraBlock):  # type: ignore[misc]
    """Hiera's block, of which some pool tokens and widen channels: [B, N, C] -> [B, N', C']."""

    elsa_base = HieraBlock
    elsa_read = staticmethod(flat_hiera.block)
    elsa_read_any = staticmethod(flat_hiera.any_block)

    def elsa_work(self, x: Tensor) -> int:
        attn: Any = self.attn
        keys = x.shape[1]
        if not isinstance(attn, MaskUnitAttention):
            return x.numel() * keys
        if attn.use_mask_unit_attn:
            keys = min(attn.q_stride * attn.window_size, keys)
        work: int = x.shape[0] * x.shape[1] // attn.q_stride * keys * attn.dim_out
        return work

    def elsa_forward(self, x: Tensor) -> Tensor:
        normed: Any = self.norm1
        if self.do_expand:
            normed = normed(x)
            kept = x if self.proj is None else self.proj(normed)
            pooled = kept.view(kept.shape[0], self.attn.q_stride, -1, kept.shape[-1])
            x = pooled.amax(dim=1)
            x = x if self.proj is not None else cat((x, pooled.mean(dim=1)), dim=-1)
        x = added(x, normed, self.attn, self.ls1, self.drop_path1)
        return added(x, self.norm2, self.mlp, self.ls2, self.drop_path2)


class ElsaMultiScaleBlock(AddsInRow, MultiScaleBlock):  # type: ignore[misc]
    """MViTv2's block, with the size of its image of tokens: [B, N, C] -> [B, N', C']."""

    elsa_base = MultiScaleBlock
    elsa_read = staticmethod(flat_mvitv2.block)
    elsa_read_any = staticmethod(flat_mvitv2.any_block)

    def elsa_work(self, x: Tensor) -> int:
        attn = self.attn
        whole = x.numel() * x.shape[1]
        return pooled_work(attn, x) if isinstance(attn, MultiScaleAttention) else whole

    def elsa_forward(self, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
        normed, short, attend = None, x, self.attn
        if self.shortcut_proj_attn is not None:
            normed = self.norm1(x)
            short = self.shortcut_proj_attn(normed)
        short = self._shortcut_pool(short, feat_size)
        with handed_to(attend, short, None, self.drop_path1) as handed:
            if normed is None:
                x, size = normalised(attend, self.norm1, x, lambda y: attend(y, feat_size))
            else:
                x, size = attend(normed, feat_size)
        x = x if handed.taken else short + self.drop_path1(x)
        if self.shortcut_proj_mlp is None:
            return added(x, self.norm2, self.mlp, None, self.drop_path2), size
        normed = self.norm2(x)
        short = self.shortcut_proj_mlp(normed)
        return added(short, normed, self.mlp, None, self.drop_path2), size


class ElsaRelPosBlock(Adds, RelPosBlock):  # type: ignore[misc]
    """A ViT block with relative positions: [B, N, C] -> [B, N, C], any floating dtype."""

    elsa_base = RelPosBlock

    def elsa_forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        terms = {"shared_rel_pos": shared_rel_pos}
        x = added(x, self.norm1, self.attn, self.ls1, self.drop_path1, terms)
        return added(x, self.norm2, self.mlp, self.ls2, self.drop_path2)
