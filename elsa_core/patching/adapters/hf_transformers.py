"""ELSA behind the attention interface of Hugging Face transformers.

    from elsa_core.patching.adapters.hf_transformers import register

    register()
    model = AutoModel.from_pretrained(name, attn_implementation="elsa")

Read against transformers 5.23. `patch` is not involved: transformers itself calls what is
registered, and makes the masks that its "sdpa" takes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.ops.attention.api import attention
from elsa_core.patching.adapters.common import check_names
from elsa_core.patching.recognition import Watch

# Arguments that change the scores in ways that the operator does not know.
_UNKNOWN_TERMS = ("softcap", "s_aux", "head_mask", "cache")
# Implementations that compute attention as the operator does, of masks that it takes.
NAMES = {"sdpa"}


def register(name: str = "elsa", *, precision: str = "strict", backend: str = "auto") -> None:
    """Make `attn_implementation=name` run on `elsa_core.attention`.

    Registering a name again replaces it.

    Raises:
        UnavailableError: transformers is not installed, or has no attention interface.
        ArgumentError: precision or backend is unknown.
    """
    check_names(precision, backend)
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    except ImportError as error:
        raise UnavailableError(
            f"a recent transformers is needed: pip install transformers ({error})"
        ) from None
    forward = functools.partial(attention_forward, precision=precision, backend=backend)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    NAMES.add(name)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    *,
    precision: str = "strict",
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: [B, H, N, D] -> [B, N, H, D] and no weights.

    Masks are as transformers' "sdpa" takes them, [B or 1, H or 1, Nq, >= Nk]; position_bias (T5) is
    added to the scores, [1 or B, H, Nq, Nk]. Where `is_causal` is None `module.is_causal` counts.
    `output_attentions=True` is warned about once, as by transformers' "sdpa".

    Raises:
        ArgumentError: a term that the operator does not know (softcap, sinks, a paged cache).
    """
    unknown = [name for name in _UNKNOWN_TERMS if kwargs.get(name) is not None]
    if unknown:
        raise ArgumentError(
            f"{type(module).__name__} needs {', '.join(unknown)}, which elsa's attention does "
            "not have: use attn_implementation='eager'"
        )
    if kwargs.get("output_attentions"):
        from transformers.utils import logging

        logging.get_logger("transformers.integrations.elsa").warning_once(
            "elsa's attention does not support `output_attentions=True`. Please set your attention "
            "to `eager` if you want any of these features."
        )
    around: Any = _get_current_function_mode()
    if type(around) is Watch and around.observer is not None:
        around.observer.ran(around.observer.place())
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[-2]]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if position_bias is not None:
        if causal:
            attention_mask = position_bias.new_ones(position_bias.shape[-2:]).tril().bool()
        if attention_mask is None:
            attention_mask = position_bias
        elif attention_mask.dtype == torch.bool:
            attention_mask = position_bias.masked_fill(~attention_mask, float("-inf"))
        else:
            attention_mask = position_bias + attention_mask
        causal = False
    out: Any = attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal,
        scale=scaling, enable_gqa=True, precision=precision, backend=backend,
    )  # fmt: skip
    return out.transpose(1, 2), None
