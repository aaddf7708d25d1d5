"""What adapters of windowed blocks share: when a block computes its attention itself, and the call.

A block's adapter takes over the way from the image to the image: roll, padding, windows and mask
are index arithmetic inside `elsa_core.window.window_attention`. The attention module within the
block keeps its class, its parameters and its place in the state dict; its forward is not called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from elsa_core.window import window_attention

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches the module's own forward or backward."""
    return any(getattr(module, name) for name in _HOOKS)


def must_call(attention: Any) -> bool:
    """Whether the attention module within a block has to run itself.

    It has to where a hook waits for its call, and where attention weights are dropped in training.
    """
    return has_hooks(attention) or (attention.training and attention.attn_drop.p > 0.0)


def why_not(attention: object, expected: type[nn.Module]) -> str:
    """Why a block around another attention class than its library's stays as it is."""
    if type(attention) is expected:
        return ""
    return f"its attention is a {type(attention).__qualname__}, not a {expected.__qualname__}"


def attend_windows(site: Any, qkv: Tensor, bias: Tensor | None, **terms: Any) -> Tensor:
    """The operator as the patched site asks for it: [B, H, W, 3 * C] -> [B, H, W, C]."""
    return window_attention(
        qkv, bias, precision=site.elsa_precision, backend=site.elsa_backend, **terms
    )
