"""The operator `elsa::window_attention` and its gradients `elsa::window_attention_backward`.

Layouts: qkv [B, D, H, W, 3 * C], last dim dense; the terms as in `ops.window.api`. The result is
[B, D, H, W, C], dense. Nothing is saved for the gradients: the scores of a window are computed
again, tile by tile. `needs` says which gradients are wanted, of qkv, bias, pad_qkv and logit_scale:
the others are not computed and come back as an empty tensor [0]. Gradients are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elsa_core.backends import eager_window
from elsa_core.backends.window_call import SCHEMA
from elsa_core.ops.attention import portable
from elsa_core.ops.formulas import differentiable, second

_SCHEMA = f"({SCHEMA}) -> Tensor"
_TERMS = ("qkv", "bias", "pad_qkv", "logit_scale")


def _again(grad_out: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients by those of the reference, all its windows' weights alive."""
    tensors, (*terms, needs) = arguments[:5], arguments[5:]
    found = second(
        lambda *given: (eager_window.attention(*given, *terms),), tensors, (),
        (*needs[:2], False, *needs[2:]), (grad_out,),
    )  # fmt: skip
    grads = []
    for i, needed in zip((0, 1, 3, 4), needs, strict=True):
        grad = found[i]
        if grad is None:
            grad = torch.zeros_like(tensors[i]) if needed else grad_out.new_empty(0)
        grads.append(grad)
    return grads


WINDOW_ATTENTION, _FORMULAS = differentiable(
    "window_attention", _SCHEMA, _TERMS, eager_window.attention,
    lambda qkv, *_: qkv.new_empty((*qkv.shape[:-1], qkv.shape[-1] // 3)), eager_window.backward,
    saved=(), like=0, again=_again, portable=portable.window_attention, kind="window",
    onnx="elsa_core.exporting.onnx_window:EXPORT", bench="elsa_core.profiling.bench.peers:WINDOW",
)  # fmt: skip
Eager = _FORMULAS.recorded()
