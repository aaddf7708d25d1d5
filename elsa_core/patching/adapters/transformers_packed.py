"""transformers' vision towers of packed images (Qwen-VL): attention in one call.

Read against transformers 5.23. The tokens of all images lie one after another there, and
`cu_seqlens` says where each image, frame or window starts. transformers hands it to FlashAttention,
and calls every other attention once for each of them. Here one call takes them all.

The adapters are made when they are asked for: each imports the model that it is for.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from elsa_core import dispatch
from elsa_core.base import calls
from elsa_core.ops.varlen.api import varlen_attention
from elsa_core.patching.adapters import padding

# Classes of one and the same forward.
_BASES = {
    "ElsaVisionAttention": "qwen2_vl.modeling_qwen2_vl.VisionAttention",
    "ElsaQwen2_5_VLVisionAttention": "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention",
    "ElsaQwen3VLVisionAttention": "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionAttention",
    "ElsaQwen3VLMoeVisionAttention": "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionAttention",
}
_ARGUMENTS = (
    "self", "hidden_states", "cu_seqlens", "position_embeddings", "max_seqlen", "kwargs",
)  # fmt: skip


class PackedAttention(nn.Module):
    """Attention within each of the sequences packed in [T, C] -> [T, C], any floating dtype.

    On a CPU and on GPUs with kernels of packed sequences. Elsewhere it keeps transformers' forward,
    unless a backend was named. So do gradients whose packed backward is plain PyTorch (on a CPU, of
    other dtypes than float32) or pads (on a GPU, of float32).
    """

    elsa_base: Any
    elsa_precision: str
    elsa_backend: str
    qkv: Any
    proj: Any
    num_heads: int
    scaling: float
    attention_dropout: float

    @staticmethod
    def elsa_why_not(module: Any) -> str:
        forward = getattr(type(module), "elsa_base", type(module)).forward
        if tuple(inspect.signature(forward).parameters) == _ARGUMENTS:
            return ""
        return f"this transformers' {type(module).__name__} takes other arguments"

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: Any = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if not _packs(self, hidden_states) or position_embeddings is None:
            whole: Tensor = self.elsa_base.forward(
                self, hidden_states, cu_seqlens, position_embeddings, max_seqlen, **kwargs
            )
            return whole
        qkv = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(1)  # [T, H, D]
        rotate = vars(sys.modules[self.elsa_base.__module__])["apply_rotary_pos_emb_vision"]
        q, k = rotate(q, k, *position_embeddings)
        out: Any = varlen_attention(
            q, k, v, cu_seqlens, max_seqlen_q=max_seqlen, scale=self.scaling,
            precision=self.elsa_precision, backend=self.elsa_backend,
        )  # fmt: skip
        return self.proj(out.flatten(1))


def _packs(site: Any, x: Tensor) -> bool:
    """Whether one call of packed sequences serves the site."""
    if site.elsa_backend not in dispatch.names("varlen_attention"):
        return False
    if site.training and site.attention_dropout:
        return False
    trained = calls.wanted(x=x, weight=site.qkv.weight)
    if x.device.type == "cpu" or site.elsa_backend != "auto":
        return not trained or x.dtype == torch.float32
    if trained and x.dtype == torch.float32:
        return False
    head_dim = site.qkv.weight.shape[1] // site.num_heads
    return padding.has_kernel(x, head_dim, site.elsa_precision, "auto")


def __getattr__(name: str) -> Any:
    if name not in _BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, cls = f"transformers.models.{_BASES[name]}".rpartition(".")
    base = getattr(importlib.import_module(module), cls)
    forward = PackedAttention.forward
    space = {"elsa_base": base, "forward": forward, "__module__": __name__}
    return globals().setdefault(name, type(name, (PackedAttention, base), space))
