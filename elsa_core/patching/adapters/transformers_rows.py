"""transformers' classes that adapters are written for, as rows of `table`: name, kind, adapter."""

from __future__ import annotations

from typing import Final

_PACKED: Final = {
    "qwen2_5_vl": "Qwen2_5_VLVisionAttention",
    "qwen2_vl": "VisionAttention",
    "qwen3_vl": "Qwen3VLVisionAttention",
    "qwen3_vl_moe": "Qwen3VLMoeVisionAttention",
}
_SIGLIP2: Final = {"Siglip2Attention": "global", "Siglip2Encoder": "companion"}

ROWS: Final = (
    *(
        (f"models.{model}.modeling_{model}.{cls}", "global", f"transformers_packed.Elsa{cls}")
        for model, cls in _PACKED.items()
    ),
    *(
        (f"models.siglip2.modeling_siglip2.{cls}", kind, f"transformers_siglip2.Elsa{cls}")
        for cls, kind in _SIGLIP2.items()
    ),
)
