"""The adapter table: what is known of attention classes by name, one row a class.

A class without an adapter runs its own forward, watched (`elsa_core.patching.adapters.watched`). So
does one that is missing here, where its code or a run on an example shows attention. A row with a
reason is never rewritten: the class computes something else than softmax(Q K^T * s + b) V.

Adapters of other packages are registered with `register_adapter`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from elsa_core.errors import ArgumentError
from elsa_core.patching.adapters import transformers_rows

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


@dataclass(frozen=True)
class Row:
    """One class.

    Attributes:
        name: its qualified name; in a library's rows without the library.
        kind: one of KINDS or LAYERS, or BLOCK, NONE or COMPANION.
        adapter: where its adapter is, "module.Class" in this package, imported when a model brings
            the class; "" where none is written.
        reason: why the class is never rewritten; "" otherwise.
    """

    name: str
    kind: str
    adapter: str = ""
    reason: str = ""


_TALKING = "mixes heads around the softmax, so that no head is softmax(QK^T)V alone"
_CHANNEL = "attends over channels: its scores are channels x channels"

_TORCH = (
    Row("nn.modules.linear.Linear", LAYER, "torch_layers.ElsaLinear"),
    Row("nn.modules.conv.Conv2d", PATCHES, "torch_layers.ElsaPatchConv2d"),
    Row("nn.modules.container.Sequential", MLP, "torch_layers.ElsaSequential"),
    Row(
        "nn.modules.transformer.TransformerEncoderLayer",
        COMPANION,
        "torch_layers.ElsaTransformerEncoderLayer",
    ),
    Row(
        "nn.modules.activation.MultiheadAttention", GLOBAL, "torch_multihead.ElsaMultiheadAttention"
    ),
)

_TIMM = (
    Row("layers.attention.Attention", GLOBAL, "timm_attention.ElsaAttention"),
    Row("layers.attention.AttentionRope", GLOBAL, "timm_attention.ElsaAttentionRope"),
    Row("layers.attention2d.Attention2d", GLOBAL),
    Row("layers.attention2d.MultiQueryAttention2d", GLOBAL),
    Row("layers.attention2d.MultiQueryAttentionV2", GLOBAL),
    Row("layers.attention_pool.AttentionPoolLatent", POOLING),
    Row("layers.attention_pool.AttentionPoolPrr", POOLING),
    Row("layers.attention_pool2d.AttentionPool2d", POOLING),
    Row("layers.attention_pool2d.RotAttentionPool2d", POOLING),
    Row("layers.bottleneck_attn.BottleneckAttn", GLOBAL),
    Row("layers.diff_attention.DiffAttention", GLOBAL),
    Row("layers.global_context.GlobalContext", NONE),
    Row("layers.halo_attn.HaloAttn", WINDOW),
    Row(
        "layers.lambda_layer.LambdaLayer",
        "linear",
        reason="a lambda layer: softmax over keys alone, then K^T V",
    ),
    Row("layers.mlp.GluMlp", MLP, "timm_mlp.ElsaGluMlp"),
    Row("layers.mlp.Mlp", MLP, "timm_mlp.ElsaMlp"),
    Row("layers.mlp.SwiGLU", MLP, "timm_mlp.ElsaSwiGLU"),
    Row("layers.non_local_attn.NonLocalAttn", GLOBAL),
    Row("layers.other_pool.SimPool1d", POOLING),
    Row("layers.other_pool.SimPool2d", POOLING),
    Row("models.beit.Attention", GLOBAL),
    Row("models.cait.ClassAttn", CLASS),
    Row("models.cait.TalkingHeadAttn", "talking-heads", reason=_TALKING),
    Row(
        "models.coat.FactorAttnConvRelPosEnc",
        "linear",
        reason="factorised attention: softmax over keys alone, then K^T V",
    ),
    Row(
        "models.convit.GPSA",
        "gated-positional",
        reason="blends two softmaxes by a gate, one of them of positions alone",
    ),
    Row("models.convit.MHSA", GLOBAL),
    Row("models.cpubone.ConvAttention", GLOBAL),
    Row("models.crossvit.CrossAttention", CROSS),
    Row(
        "models.csatv2.SpatialTransformerBlock",
        "other",
        reason="its products run across the images of the batch, not across tokens",
    ),
    Row("models.davit.ChannelAttention", "channel", reason=_CHANNEL),
    Row("models.davit.ChannelAttentionV2", "channel", reason=_CHANNEL),
    Row("models.davit.SpatialBlock", BLOCK, "timm_windows.ElsaSpatialBlock"),
    Row("models.davit.WindowAttention", WINDOW),
    Row("models.edgenext.CrossCovarianceAttn", "channel", reason=_CHANNEL),
    Row("models.efficientformer.Attention", GLOBAL),
    Row("models.efficientformer_v2.Attention2d", "talking-heads", reason=_TALKING),
    Row("models.efficientformer_v2.Attention2dDownsample", "talking-heads", reason=_TALKING),
    Row(
        "models.efficientvim.HSMSSD",
        "linear",
        reason="a state-space mixer: its softmax is over time steps, not over query-key scores",
    ),
    Row(
        "models.efficientvit_mit.LiteMLA",
        "linear",
        reason="ReLU linear attention: there is no softmax",
    ),
    Row("models.efficientvit_msra.CascadedGroupAttention", WINDOW),
    Row("models.eva.EvaAttention", GLOBAL, "timm_eva.ElsaEvaAttention"),
    Row("models.fastvit.Attention", GLOBAL),
    Row("models.gcvit.WindowAttentionGlobal", WINDOW),
    Row("models.gemma4_vit.Gemma4Attention", GLOBAL),
    Row("models.hiera.MaskUnitAttention", GLOBAL),
    Row("models.hieradet_sam2.MultiScaleAttention", GLOBAL),
    Row("models.iformer.SHMA", GLOBAL),
    Row("models.levit.Attention", GLOBAL),
    Row("models.levit.AttentionDownsample", GLOBAL),
    Row("models.lowformer.ConvAttention", GLOBAL),
    Row("models.maxxvit.Attention2d", GLOBAL),
    Row("models.maxxvit.AttentionCl", WINDOW),
    Row("models.maxxvit.PartitionAttentionCl", BLOCK, "timm_maxxvit.ElsaPartitionAttentionCl"),
    Row("models.metaformer.Attention", GLOBAL),
    Row(
        "models.mobilevit.LinearSelfAttention",
        "linear",
        reason="separable attention: one score a token, no query-key products",
    ),
    Row("models.mvitv2.MultiScaleAttention", GLOBAL, "timm_mvitv2.ElsaMultiScaleAttention"),
    Row("models.mvitv2.MultiScaleAttentionPoolFirst", GLOBAL),
    Row("models.naflexvit.NaFlexVit", COMPANION, "timm_naflex.ElsaNaFlexVit"),
    Row("models.nest.Attention", WINDOW),
    Row("models.nextvit.EfficientAttention", GLOBAL),
    Row("models.pvt_v2.Attention", GLOBAL),
    Row("models.shvit.SHSA", GLOBAL),
    Row(
        "models.swiftformer.EfficientAdditiveAttention",
        "linear",
        reason="additive attention: one score a token, no query-key products",
    ),
    Row(
        "models.swin_transformer.SwinTransformerBlock", BLOCK, "timm_swin.ElsaSwinTransformerBlock"
    ),
    Row("models.swin_transformer.WindowAttention", WINDOW),
    Row(
        "models.swin_transformer_v2.SwinTransformerV2Block",
        BLOCK,
        "timm_swin.ElsaSwinTransformerV2Block",
    ),
    Row("models.swin_transformer_v2.WindowAttention", WINDOW),
    Row(
        "models.swin_transformer_v2_cr.SwinTransformerV2CrBlock",
        BLOCK,
        "timm_swin.ElsaSwinTransformerV2CrBlock",
    ),
    Row("models.swin_transformer_v2_cr.WindowMultiHeadAttention", WINDOW),
    Row("models.tiny_vit.Attention", WINDOW),
    Row("models.tiny_vit.TinyVitBlock", BLOCK, "timm_windows.ElsaTinyVitBlock"),
    Row("models.tnt.Attention", GLOBAL),
    Row("models.twins.GlobalSubSampleAttn", GLOBAL),
    Row("models.twins.LocallyGroupedAttn", WINDOW, "timm_windows.ElsaLocallyGroupedAttn"),
    Row("models.visformer.Attention", GLOBAL),
    Row("models.vision_transformer.Block", COMPANION, "timm_blocks.ElsaBlock"),
    Row("models.vision_transformer.DiffParallelScalingBlock", GLOBAL),
    Row("models.vision_transformer.ParallelScalingBlock", GLOBAL),
    Row("models.vision_transformer_relpos.RelPosAttention", GLOBAL),
    Row("models.vision_transformer_sam.Attention", GLOBAL, "timm_sam.ElsaSamAttention"),
    Row("models.volo.Attention", GLOBAL),
    Row("models.volo.ClassAttention", CLASS),
    Row(
        "models.volo.OutlookAttention",
        "outlook",
        reason="its weights come from a linear layer, not from query-key products",
    ),
    Row("models.xcit.XCA", "channel", reason=_CHANNEL),
)

_OPEN_CLIP = (
    Row("modified_resnet.AttentionPool2d", POOLING),
    Row("transformer.Attention", GLOBAL),
)

_TORCHVISION = (
    Row(
        "models.maxvit.PartitionAttentionLayer",
        BLOCK,
        "torchvision_maxvit.ElsaPartitionAttentionLayer",
    ),
    Row("models.maxvit.RelativePositionalMultiHeadAttention", WINDOW),
    Row(
        "models.swin_transformer.ShiftedWindowAttention",
        WINDOW,
        "torchvision_swin.ElsaShiftedWindowAttention",
    ),
    Row(
        "models.swin_transformer.ShiftedWindowAttentionV2",
        WINDOW,
        "torchvision_swin.ElsaShiftedWindowAttentionV2",
    ),
    Row("models.vision_transformer.MLPBlock", MLP, "torchvision_mlp.ElsaMLPBlock"),
    Row("models.video.mvit.MultiscaleAttention", GLOBAL),
    Row("models.video.swin_transformer.ShiftedWindowAttention3d", WINDOW),
    Row("ops.misc.MLP", MLP, "torchvision_mlp.ElsaMLP"),
)

_TRANSFORMERS = tuple(Row(*row) for row in transformers_rows.ROWS)

# A library is imported only by the adapters of its classes.
LIBRARIES = {
    "torch": _TORCH,
    "timm": _TIMM,
    "open_clip": _OPEN_CLIP,
    "torchvision": _TORCHVISION,
    "transformers": _TRANSFORMERS,
}
# Attributes of timm's modules that choose between fused attention and eager softmax.
SWITCHES = ("fused_attn", "use_fsdpa")

ROWS = MappingProxyType(
    {
        f"{library}.{row.name}": replace(row, name=f"{library}.{row.name}")
        for library, rows in LIBRARIES.items()
        for row in rows
    }
)

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
    reason = _why_no_adapter(adapter)
    if reason:
        raise ArgumentError(f"adapter={getattr(adapter, '__qualname__', adapter)!r} {reason}")
    base = adapter.__dict__["elsa_base"]
    _REGISTERED[base] = (Row(qualified(base), kind, qualified(adapter)), adapter)
    return adapter


def _why_no_adapter(adapter: object) -> str:
    if not (isinstance(adapter, type) and issubclass(adapter, nn.Module)):
        return "is no subclass of torch.nn.Module"
    base: Any = adapter.__dict__.get("elsa_base")
    if not (isinstance(base, type) and issubclass(adapter, base) and base is not adapter):
        return "does not name the class that it replaces, one of its bases, in elsa_base"
    own = adapter.__dict__
    faults = {
        f"replaces {base.__qualname__}, which is an adapter itself": "elsa_base" in base.__dict__,
        "has a constructor, which is never called": "__init__" in own,
        "has no forward of its own": not {"forward", getattr(adapter, "elsa_entry", "")} & {*own},
        "is defined within a function, where pickle does not find it": "<locals>"
        in adapter.__qualname__,
    }
    return next((words for words, present in faults.items() if present), "")


def row_of(cls: type) -> Row | None:
    """What is known of exactly this class."""
    registered = _REGISTERED.get(cls)
    return ROWS.get(qualified(cls)) if registered is None else registered[0]


def adapter_of(cls: type) -> type[nn.Module] | None:
    """The adapter written for exactly this class, imported here; None for none."""
    registered = _REGISTERED.get(cls)
    if registered is not None:
        return registered[1]
    row = ROWS.get(qualified(cls))
    if row is None or not row.adapter:
        return None
    module, _, name = row.adapter.rpartition(".")
    found = importlib.import_module(f"{__package__}.{module}")
    adapter: type[nn.Module] = getattr(found, name)
    return adapter if adapter.__dict__["elsa_base"] is cls else None


def qualified(cls: type) -> str:
    """Module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
