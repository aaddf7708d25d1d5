"""`elsa::window_attention_backward` on the GPU: few launches, planned once for each layout.

Beside the gradients it allocates the partial sums of as many programs as run at once, whatever the
number of windows, and for float32 a word of each window and head.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.plans import PLANS
from elsa_core.backends.triton.window import planner, tiling
from elsa_core.backends.triton.window.backward_plan import Call, Wants, plan_call
from elsa_core.backends.window_call import WindowCall

LARGEST_DIM = 64


def support(request: Request) -> Support:
    """Whether the gradients of such calls were measured to be worth it, as far as lengths do not
    decide."""
    if request.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return Support(False, f"dtype {request.dtype} has no kernel of the gradients")
    if request.head_dim > LARGEST_DIM:
        return Support(False, f"its gradients take head dimensions up to {LARGEST_DIM}")
    if request.device_type != "cuda" or not torch.cuda.is_available():
        return Support(False, "no CUDA device: PyTorch finds no GPU")
    most = measured_tokens(torch.cuda.current_device())
    if not most:
        return Support(False, "its gradients were not measured to be faster on this GPU")
    if request.tokens > most:
        return Support(False, f"its gradients take windows of up to {most} tokens")
    return Support(True)


@lru_cache(maxsize=64)
def measured_tokens(index: int) -> int:
    """`WindowTable.gradients` of a device."""
    return tiling.load_table(device.table_of(index)).gradients


def window_attention_backward(
    grad_out: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Gradients of attention within windows, the CUDA kernel of `elsa::window_attention_backward`.

    Args:
        grad_out: [B, D, H, W, C] in qkv's dtype, any strides.
        qkv: [B, D, H, W, 3C], float32, float16 or bfloat16, the last dim dense; head_dim up to 64.
            The rest as in `planner.window_attention`.
        needs: which of qkv, bias, pad_qkv and logit_scale get a gradient.

    Returns:
        Gradients in the dtypes of their inputs, dense, empty where not needed; None for larger head
        dimensions and windows of more than 64 tokens. Scores, weights and sums are float32. Equal
        bits for equal arguments on one GPU.

    Source: FlashAttention (arXiv 2205.14135), Algorithm 4, within windows (arXiv 2604.23798).
    """
    given, needs = WindowCall(*arguments[:-1]), arguments[-1]
    qkv, terms = given.qkv, given.differentiable
    if qkv.shape[-1] // (3 * given.num_heads) > LARGEST_DIM or qkv.stride(-1) != 1:
        return None
    if planner.rolls_over(given) or math.prod(given.window_size) > tiling.WHOLE:
        return None
    grads = [
        t.new_empty(t.shape) if t is not None and needed else qkv.new_empty(0)
        for t, needed in zip(terms, needs, strict=True)
    ]
    wants = Wants(*(n and t is not None for n, t in zip(needs, terms, strict=True)))
    if wants.pad:  # nothing comes back to the query of a padded token
        grads[2].zero_()
    if not qkv.numel():
        return grads[0], grads[1].zero_(), grads[2], grads[3].zero_()
    padded = planner.padding(given, planner.counts_of(given)) == 2
    wants = wants._replace(pad=wants.pad and padded)
    if not any(wants):
        return grads[0], grads[1], grads[2], grads[3]
    index, pad = given.bias_index, given.pad_qkv
    with device.on_device_of(qkv):
        if pad is not None and (pad.dtype != qkv.dtype or pad.stride(0) != 1):
            given = given._replace(pad_qkv=pad.to(qkv.dtype).contiguous())
        if index is not None:
            assert given.bias is not None
            given = given._replace(bias=planner.gathered(given.bias, index), bias_index=None)
        grad_out = grad_out.contiguous()
        call = planned(given, grad_out, wants, grads, index)
        execute(call, given, grad_out, grads, index)
    return grads[0], grads[1], grads[2], grads[3]


def execute(
    call: Call, given: WindowCall, grad_out: Tensor, grads: list[Tensor],
    index: Tensor | None = None,
) -> None:  # fmt: skip
    """Allocate the workspace and launch. given: with a dense bias; index: of the bias's table."""
    qkv = given.qkv
    tensors = {
        name: qkv.new_empty(size, dtype=dtype) for name, (size, dtype) in call.workspace.items()
    }
    tensors |= zip(("qkv", "bias", "pad", "logit"), planner.pointers(given), strict=True)
    tensors |= {"grad": grad_out, "none": qkv, "index": qkv if index is None else index}
    tensors |= zip(("dqkv", "dbias", "dpad", "dlogit"), grads, strict=True)
    for launch, names in call.steps:
        launch(*(tensors[name] for name in names))


def planned(
    given: WindowCall, grad_out: Tensor, wants: Wants, grads: list[Tensor], index: Tensor | None
) -> Call:
    """The launches of a call, cached by layout. A bias is dense here."""
    table = (grads[1], index) if index is not None and wants.bias else None
    key = (
        *planner.layout_key("window backward", given), grad_out.data_ptr() % 16, wants,
        None if table is None else (index.shape, index.stride(), index.data_ptr() % 16),
        *((g.shape, g.dtype, g.data_ptr() % 16) for g in grads),
    )  # fmt: skip
    return PLANS.get(key, plan_call, given, wants, table)
