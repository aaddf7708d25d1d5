"""The adapter table: what is known of attention classes by name.

A class without an adapter runs its own forward, watched. So does one that is missing here, where
its code or a run on an example shows attention. A row with a reason is never rewritten.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

from elsa_core.errors import ArgumentError

GLOBAL, WINDOW, CROSS, POOLING, CLASS = "global", "window", "cross", "pooling", "class"
# A block whose adapter computes the attention within it: the kind is that attention's own.
BLOCK = "block"
# Found by its code, but no attention between tokens.
NONE = "none"
# No attention: what the scope "model" adds. A companion is no site: it hands terms to the sites
# within it.
LAYER, MLP, PATCHES, COMPANION = "linear-layer", "mlp", "patch-embedding", "companion"
LAYERS = (LAYER, MLP, PATCHES)
KINDS = (
    GLOBAL, WINDOW, CROSS, POOLING, CLASS, "linear", "channel", "talking-heads",
    "gated-positional", "outlook", "other",
)  # fmt: skip


class Row(NamedTuple):
    """One class."""

    kind: str  # one of KINDS or LAYERS, or BLOCK, NONE or COMPANION
    adapter: str = ""  # where its adapter is
    reason: str = ""  # why the class is never rewritten


# Adapters, by the class that each replaces: its kind, and where the adapter is, "module.Class" in
# this package, imported when a model brings the class.
ADAPTERS = {
    "torch.nn.modules.linear.Linear": (LAYER, "torch_layers.ElsaLinear"),
    "torch.nn.modules.conv.Conv2d": (PATCHES, "torch_layers.ElsaPatchConv2d"),
    "torch.nn.modules.activation.MultiheadAttention": (
        GLOBAL, "torch_multihead.ElsaMultiheadAttention",
    ),
    "timm.layers.attention.Attention": (GLOBAL, "timm_attention.ElsaAttention"),
    "timm.layers.attention.AttentionRope": (GLOBAL, "timm_attention.ElsaAttentionRope"),
    "timm.layers.mlp.GluMlp": (MLP, "timm_blocks.ElsaGluMlp"),
    "timm.layers.mlp.Mlp": (MLP, "timm_blocks.ElsaMlp"),
    "timm.layers.mlp.SwiGLU": (MLP, "timm_blocks.ElsaSwiGLU"),
    "timm.models.davit.SpatialBlock": (BLOCK, "timm_windows.ElsaSpatialBlock"),
    "timm.models.eva.EvaAttention": (GLOBAL, "timm_attention.ElsaEvaAttention"),
    "timm.models.maxxvit.PartitionAttentionCl": (BLOCK, "timm_windows.ElsaPartitionAttentionCl"),
    "timm.models.mvitv2.MultiScaleAttention": (GLOBAL, "timm_decomposed.ElsaMultiScaleAttention"),
    "timm.models.naflexvit.NaFlexVit": (COMPANION, "timm_naflex.ElsaNaFlexVit"),
    "timm.models.swin_transformer.SwinTransformerBlock": (
        BLOCK, "timm_swin.ElsaSwinTransformerBlock",
    ),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": (
        BLOCK, "timm_swin.ElsaSwinTransformerV2Block",
    ),
    "timm.models.swin_transformer_v2_cr.SwinTransformerV2CrBlock": (
        BLOCK, "timm_swin.ElsaSwinTransformerV2CrBlock",
    ),
    "timm.models.tiny_vit.TinyVitBlock": (BLOCK, "timm_windows.ElsaTinyVitBlock"),
    "timm.models.twins.LocallyGroupedAttn": (WINDOW, "timm_windows.ElsaLocallyGroupedAttn"),
    "timm.models.vision_transformer.Block": (COMPANION, "timm_blocks.ElsaBlock"),
    "timm.models.vision_transformer_sam.Attention": (GLOBAL, "timm_decomposed.ElsaSamAttention"),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": (
        WINDOW, "torchvision_swin.ElsaShiftedWindowAttention",
    ),
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": (
        WINDOW, "torchvision_swin.ElsaShiftedWindowAttentionV2",
    ),
    "transformers.models.siglip2.modeling_siglip2.Siglip2Attention": (
        GLOBAL, "transformers_siglip2.ElsaSiglip2Attention",
    ),
    "transformers.models.siglip2.modeling_siglip2.Siglip2Encoder": (
        COMPANION, "transformers_siglip2.ElsaSiglip2Encoder",
    ),
}  # fmt: skip
# Classes that run their own forward, watched, by kind.
_WATCHED = {
    GLOBAL: """
        timm.layers.attention2d.Attention2d timm.layers.attention2d.MultiQueryAttention2d
        timm.layers.attention2d.MultiQueryAttentionV2 timm.layers.bottleneck_attn.BottleneckAttn
        timm.layers.diff_attention.DiffAttention timm.layers.non_local_attn.NonLocalAttn
        timm.models.beit.Attention timm.models.convit.MHSA timm.models.cpubone.ConvAttention
        timm.models.efficientformer.Attention timm.models.fastvit.Attention
        timm.models.gemma4_vit.Gemma4Attention timm.models.hiera.MaskUnitAttention
        timm.models.hieradet_sam2.MultiScaleAttention timm.models.iformer.SHMA
        timm.models.levit.Attention timm.models.levit.AttentionDownsample
        timm.models.lowformer.ConvAttention timm.models.maxxvit.Attention2d
        timm.models.metaformer.Attention timm.models.mvitv2.MultiScaleAttentionPoolFirst
        timm.models.nextvit.EfficientAttention timm.models.pvt_v2.Attention
        timm.models.shvit.SHSA timm.models.tnt.Attention timm.models.twins.GlobalSubSampleAttn
        timm.models.visformer.Attention timm.models.vision_transformer.DiffParallelScalingBlock
        timm.models.vision_transformer.ParallelScalingBlock
        timm.models.vision_transformer_relpos.RelPosAttention timm.models.volo.Attention
        open_clip.transformer.Attention torchvision.models.video.mvit.MultiscaleAttention
    """,
    POOLING: """
        timm.layers.attention_pool.AttentionPoolLatent
        timm.layers.attention_pool.AttentionPoolPrr timm.layers.attention_pool2d.AttentionPool2d
        timm.layers.attention_pool2d.RotAttentionPool2d timm.layers.other_pool.SimPool1d
        timm.layers.other_pool.SimPool2d open_clip.modified_resnet.AttentionPool2d
    """,
    NONE: """
        timm.layers.global_context.GlobalContext
    """,
    WINDOW: """
        timm.layers.halo_attn.HaloAttn timm.models.davit.WindowAttention
        timm.models.efficientvit_msra.CascadedGroupAttention
        timm.models.gcvit.WindowAttentionGlobal timm.models.maxxvit.AttentionCl
        timm.models.nest.Attention timm.models.swin_transformer.WindowAttention
        timm.models.swin_transformer_v2.WindowAttention
        timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention
        timm.models.tiny_vit.Attention
        torchvision.models.maxvit.RelativePositionalMultiHeadAttention
        torchvision.models.video.swin_transformer.ShiftedWindowAttention3d
    """,
    CLASS: """
        timm.models.cait.ClassAttn timm.models.volo.ClassAttention
    """,
    CROSS: """
        timm.models.crossvit.CrossAttention
    """,
}
_TALKING = "mixes heads around the softmax, so that no head is softmax(QK^T)V alone"
_CHANNEL = "attends over channels: its scores are channels x channels"
# Classes that are never rewritten: they compute something else than softmax(Q K^T * s + b) V.
_NEVER = {
    "timm.layers.lambda_layer.LambdaLayer": (
        "linear", "a lambda layer: softmax over keys alone, then K^T V",
    ),
    "timm.models.cait.TalkingHeadAttn": ("talking-heads", _TALKING),
    "timm.models.coat.FactorAttnConvRelPosEnc": (
        "linear", "factorised attention: softmax over keys alone, then K^T V",
    ),
    "timm.models.convit.GPSA": (
        "gated-positional", "blends two softmaxes by a gate, one of them of positions alone",
    ),
    "timm.models.csatv2.SpatialTransformerBlock": (
        "other", "its products run across the images of the batch, not across tokens",
    ),
    "timm.models.davit.ChannelAttention": ("channel", _CHANNEL),
    "timm.models.davit.ChannelAttentionV2": ("channel", _CHANNEL),
    "timm.models.edgenext.CrossCovarianceAttn": ("channel", _CHANNEL),
    "timm.models.efficientformer_v2.Attention2d": ("talking-heads", _TALKING),
    "timm.models.efficientformer_v2.Attention2dDownsample": ("talking-heads", _TALKING),
    "timm.models.efficientvim.HSMSSD": (
        "linear", "a state-space mixer: its softmax is over time steps, not over query-key scores",
    ),
    "timm.models.efficientvit_mit.LiteMLA": (
        "linear", "ReLU linear attention: there is no softmax",
    ),
    "timm.models.mobilevit.LinearSelfAttention": (
        "linear", "separable attention: one score a token, no query-key products",
    ),
    "timm.models.swiftformer.EfficientAdditiveAttention": (
        "linear", "additive attention: one score a token, no query-key products",
    ),
    "timm.models.volo.OutlookAttention": (
        "outlook", "its weights come from a linear layer, not from query-key products",
    ),
    "timm.models.xcit.XCA": ("channel", _CHANNEL),
}  # fmt: skip
# Attributes of timm's modules that choose between fused attention and eager softmax.
SWITCHES = ("fused_attn", "use_fsdpa")

# By the qualified name of the class.
ROWS: Mapping[str, Row] = {
    **{name: Row(kind) for kind, names in _WATCHED.items() for name in names.split()},
    **{name: Row(kind, reason=reason) for name, (kind, reason) in _NEVER.items()},
    **{name: Row(*row) for name, row in ADAPTERS.items()},
}

_Adapter = TypeVar("_Adapter", bound=type[nn.Module])

# By the class that an adapter replaces; one a class, for the life of the process.
_REGISTERED: dict[type, tuple[Row, type[nn.Module]]] = {}


def register_adapter(adapter: _Adapter, *, kind: str = GLOBAL) -> _Adapter:
    """Let `inspect`, `patch` and `check` take an attention class of your own.

        @elsa.register_adapter
        class ElsaMyAttention(MyAttention):
            elsa_base = MyAttention
            def forward(self, x):
                q, k, v = self.split(self.qkv(x))  # [B, H, N, D] each
                out = elsa.attention(q, k, v, precision=self.elsa_precision,
                                     backend=self.elsa_backend)
                return self.proj(out.transpose(1, 2).flatten(2))

    Register where the adapter is defined, so that every process that imports it does. A patched
    module has the strings `elsa_precision` and `elsa_backend`, to be handed to the operator. A
    class registered again replaces what is known of it, also where that came with elsa.

    Args:
        adapter: a subclass of `elsa_base`, the class that it replaces, at the top level of its
            module; without constructor and parameters of its own. A static method
            `elsa_why_not(module)` may say why an instance stays as it is, "" if it does not.
        kind: "global", "window", "cross", "pooling" or "class".

    Returns:
        The adapter, so that this serves as a decorator too.

    Raises:
        ArgumentError: the adapter or the kind is none.
    """
    if kind not in KINDS:
        raise ArgumentError(f"kind={kind!r} is unknown: choose one of {', '.join(KINDS)}")
    of_modules = isinstance(adapter, type) and issubclass(adapter, nn.Module)
    own = adapter.__dict__ if of_modules else {}
    base: Any = own.get("elsa_base")
    named = isinstance(base, type) and issubclass(adapter, base) and base is not adapter
    base_name = getattr(base, "__qualname__", "")
    entries = {"forward", getattr(adapter, "elsa_entry", "")}
    name = getattr(adapter, "__qualname__", adapter)
    faults = {
        "is no subclass of torch.nn.Module": not of_modules,
        "does not name the class that it replaces, one of its bases, in elsa_base": not named,
        f"replaces {base_name}, which is an adapter itself": named and "elsa_base" in vars(base),
        "has a constructor, which is never called": "__init__" in own,
        "has no forward of its own": not entries & {*own},
        "is defined within a function, where pickle does not find it": "<locals>" in str(name),
    }
    for words, present in faults.items():
        if present:
            raise ArgumentError(f"adapter={name!r} {words}")
    _REGISTERED[base] = (Row(kind, qualified(adapter)), adapter)
    return adapter


def row_of(cls: type) -> Row | None:
    """What is known of exactly this class."""
    return _REGISTERED[cls][0] if cls in _REGISTERED else ROWS.get(qualified(cls))


def adapter_of(cls: type) -> type[nn.Module] | None:
    """The adapter written for exactly this class, imported here; None for none."""
    if cls in _REGISTERED:
        return _REGISTERED[cls][1]
    module, _, name = ROWS.get(qualified(cls), Row("")).adapter.rpartition(".")
    if not name:
        return None
    found = importlib.import_module(f"{__package__}.{module}")
    adapter: type[nn.Module] = getattr(found, name)
    return adapter if adapter.__dict__["elsa_base"] is cls else None


def qualified(cls: type) -> str:
    """Module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
