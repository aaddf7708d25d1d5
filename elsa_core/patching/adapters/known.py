"""What is known about attention classes by name: their kind, and why some stay as they are.

A class that is missing here is still found, by its code (`elsa_core.patching.sites`). An entry with
a reason is never rewritten: it computes something else than softmax(Q K^T * s + b) V.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Known:
    """One class: its kind, and, where it can never be rewritten, the reason."""

    kind: str
    reason: str = ""


_TALKING = Known(
    "talking-heads", "mixes heads around the softmax, so that no head is softmax(QK^T)V alone"
)
_CHANNEL = Known("channel", "attends over channels: its scores are channels x channels")
_GLOBAL, _WINDOW, _CROSS = Known("global"), Known("window"), Known("cross")
_POOLING, _CLASS = Known("pooling"), Known("class")

CLASSES = MappingProxyType(
    {
        "torch.nn.modules.activation.MultiheadAttention": _GLOBAL,
        # timm: layers
        "timm.layers.attention.Attention": _GLOBAL,
        "timm.layers.attention.AttentionRope": _GLOBAL,
        "timm.layers.attention2d.Attention2d": _GLOBAL,
        "timm.layers.attention2d.MultiQueryAttention2d": _GLOBAL,
        "timm.layers.attention2d.MultiQueryAttentionV2": _GLOBAL,
        "timm.layers.attention_pool.AttentionPoolLatent": _POOLING,
        "timm.layers.attention_pool.AttentionPoolPrr": _POOLING,
        "timm.layers.attention_pool2d.AttentionPool2d": _POOLING,
        "timm.layers.attention_pool2d.RotAttentionPool2d": _POOLING,
        "timm.layers.bottleneck_attn.BottleneckAttn": _GLOBAL,
        "timm.layers.diff_attention.DiffAttention": _GLOBAL,
        "timm.layers.halo_attn.HaloAttn": _WINDOW,
        "timm.layers.lambda_layer.LambdaLayer": Known(
            "linear", "a lambda layer: softmax over keys alone, then K^T V"
        ),
        "timm.layers.non_local_attn.NonLocalAttn": _GLOBAL,
        "timm.layers.other_pool.SimPool1d": _POOLING,
        "timm.layers.other_pool.SimPool2d": _POOLING,
        # timm: models
        "timm.models.beit.Attention": _GLOBAL,
        "timm.models.cait.ClassAttn": _CLASS,
        "timm.models.cait.TalkingHeadAttn": _TALKING,
        "timm.models.coat.FactorAttnConvRelPosEnc": Known(
            "linear", "factorised attention: softmax over keys alone, then K^T V"
        ),
        "timm.models.convit.GPSA": Known(
            "gated-positional", "blends two softmaxes by a gate, one of them of positions alone"
        ),
        "timm.models.convit.MHSA": _GLOBAL,
        "timm.models.cpubone.ConvAttention": _GLOBAL,
        "timm.models.crossvit.CrossAttention": _CROSS,
        "timm.models.csatv2.SpatialTransformerBlock": Known(
            "other", "its products run across the images of the batch, not across tokens"
        ),
        "timm.models.davit.ChannelAttention": _CHANNEL,
        "timm.models.davit.ChannelAttentionV2": _CHANNEL,
        "timm.models.davit.WindowAttention": _WINDOW,
        "timm.models.edgenext.CrossCovarianceAttn": _CHANNEL,
        "timm.models.efficientformer.Attention": _GLOBAL,
        "timm.models.efficientformer_v2.Attention2d": _TALKING,
        "timm.models.efficientformer_v2.Attention2dDownsample": _TALKING,
        "timm.models.efficientvim.HSMSSD": Known(
            "linear",
            "a state-space mixer: its softmax is over time steps, not over query-key scores",
        ),
        "timm.models.efficientvit_mit.LiteMLA": Known(
            "linear", "ReLU linear attention: there is no softmax"
        ),
        "timm.models.efficientvit_msra.CascadedGroupAttention": _WINDOW,
        "timm.models.eva.EvaAttention": _GLOBAL,
        "timm.models.fastvit.Attention": _GLOBAL,
        "timm.models.gcvit.WindowAttentionGlobal": _WINDOW,
        "timm.models.gemma4_vit.Gemma4Attention": _GLOBAL,
        "timm.models.hiera.MaskUnitAttention": _GLOBAL,
        "timm.models.hieradet_sam2.MultiScaleAttention": _GLOBAL,
        "timm.models.iformer.SHMA": _GLOBAL,
        "timm.models.levit.Attention": _GLOBAL,
        "timm.models.levit.AttentionDownsample": _GLOBAL,
        "timm.models.lowformer.ConvAttention": _GLOBAL,
        "timm.models.maxxvit.Attention2d": _GLOBAL,
        "timm.models.maxxvit.AttentionCl": _WINDOW,
        "timm.models.metaformer.Attention": _GLOBAL,
        "timm.models.mobilevit.LinearSelfAttention": Known(
            "linear", "separable attention: one score a token, no query-key products"
        ),
        "timm.models.mvitv2.MultiScaleAttention": _GLOBAL,
        "timm.models.mvitv2.MultiScaleAttentionPoolFirst": _GLOBAL,
        "timm.models.nest.Attention": _WINDOW,
        "timm.models.nextvit.EfficientAttention": _GLOBAL,
        "timm.models.pvt_v2.Attention": _GLOBAL,
        "timm.models.shvit.SHSA": _GLOBAL,
        "timm.models.swiftformer.EfficientAdditiveAttention": Known(
            "linear", "additive attention: one score a token, no query-key products"
        ),
        "timm.models.swin_transformer.WindowAttention": _WINDOW,
        "timm.models.swin_transformer_v2.WindowAttention": _WINDOW,
        "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": _WINDOW,
        "timm.models.tiny_vit.Attention": _WINDOW,
        "timm.models.tnt.Attention": _GLOBAL,
        "timm.models.twins.GlobalSubSampleAttn": _GLOBAL,
        "timm.models.twins.LocallyGroupedAttn": _WINDOW,
        "timm.models.visformer.Attention": _GLOBAL,
        "timm.models.vision_transformer.DiffParallelScalingBlock": _GLOBAL,
        "timm.models.vision_transformer.ParallelScalingBlock": _GLOBAL,
        "timm.models.vision_transformer_relpos.RelPosAttention": _GLOBAL,
        "timm.models.vision_transformer_sam.Attention": _GLOBAL,
        "timm.models.volo.Attention": _GLOBAL,
        "timm.models.volo.ClassAttention": _CLASS,
        "timm.models.volo.OutlookAttention": Known(
            "outlook", "its weights come from a linear layer, not from query-key products"
        ),
        "timm.models.xcit.XCA": _CHANNEL,
        # open_clip
        "open_clip.modified_resnet.AttentionPool2d": _POOLING,
        "open_clip.transformer.Attention": _GLOBAL,
        # torchvision
        "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": _WINDOW,
        "torchvision.models.swin_transformer.ShiftedWindowAttention": _WINDOW,
        "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": _WINDOW,
        "torchvision.models.video.mvit.MultiscaleAttention": _GLOBAL,
        "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d": _WINDOW,
    }
)

# Found by their code, but no attention between tokens.
NOT_ATTENTION = frozenset({"timm.layers.global_context.GlobalContext"})
