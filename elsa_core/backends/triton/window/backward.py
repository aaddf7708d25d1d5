"""`elsa::window_attention_backward` on the GPU: few launches, planned once for each layout.

Beside the gradients it allocates the partial sums of as many programs as run at once, whatever the
number of windows, and for float32 a word of each window and head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.layout import key_of, on_device
from elsa_core.backends.triton.shared.plans import PLANS
from elsa_core.backends.triton.window import planner, tiling
from elsa_core.backends.triton.window.tiling import WindowShape
from elsa_core.backends.window_call import WindowCall

LARGEST_DIM = 64
# partial sums that a program adds at once, and entries of a row
AT_ONCE, SUM_BLOCK = 16, 64
TABLE_BLOCK = 512


class Wants(NamedTuple):
    """Which gradients are computed: those wanted of terms that there are."""

    qkv: bool
    bias: bool
    pad: bool
    logit: bool


class Call(NamedTuple):
    """A planned call: its launches with the names of what they read and write, and the elements and
    dtype of what it allocates beside the gradients."""

    steps: tuple[tuple[Launch, tuple[str, ...]], ...]
    workspace: dict[str, tuple[int, torch.dtype]]


def support(request: Request) -> Support:
    """Whether the gradients of such calls were measured to be worth it, as far as lengths do not
    decide."""
    if request.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return Support(False, f"dtype {request.dtype} has no kernel of the gradients")
    if request.head_dim > LARGEST_DIM:
        return Support(False, f"its gradients take head dimensions up to {LARGEST_DIM}")
    if request.device_type != "cuda" or not torch.cuda.is_available():
        return Support(False, "no CUDA device: PyTorch finds no GPU")
    index = request.ordinal if request.ordinal >= 0 else torch.cuda.current_device()
    most = tiling.load_table(device.table_of(index)).gradients
    if not most:
        return Support(False, "its gradients were not measured to be faster on this GPU")
    if request.tokens > most:
        return Support(False, f"its gradients take windows of up to {most} tokens")
    return Support(True)


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
    if math.prod(given.window_size) > tiling.WHOLE:
        return None
    if any(s > n for s, n in zip(given.shift_size, qkv.shape[1:4], strict=True)):
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
    padded = any(n % w for n, w in zip(qkv.shape[1:4], given.window_size, strict=True))
    wants = wants._replace(pad=wants.pad and padded)
    if not any(wants):
        return grads[0], grads[1], grads[2], grads[3]
    index, pad = given.bias_index, given.pad_qkv
    with on_device(qkv):
        if pad is not None and (pad.dtype != qkv.dtype or pad.stride(0) != 1):
            given = given._replace(pad_qkv=pad.to(qkv.dtype).contiguous())
        if index is not None:
            assert given.bias is not None
            given = given._replace(bias=planner.gathered(given.bias, index), bias_index=None)
        grad_out = grad_out.contiguous()
        table = (grads[1], index) if index is not None and wants.bias else None
        key = (
            *planner.layout_key("window backward", given), grad_out.data_ptr() % 16, wants,
            *map(key_of, (*grads, *(table or ()))),
        )  # fmt: skip
        call: Call = PLANS.get(key, plan_call, given, wants, table)
        tensors = {
            name: qkv.new_empty(size, dtype=dtype) for name, (size, dtype) in call.workspace.items()
        }
        tensors |= {
            name: qkv if t is None else t
            for name, t in zip(("qkv", "bias", "pad", "logit"), given.differentiable, strict=True)
        }
        tensors |= zip(("dqkv", "dbias", "dpad", "dlogit"), grads, strict=True)
        tensors |= {"grad": grad_out, "none": qkv, "index": qkv if index is None else index}
        for launch, names in call.steps:
            launch(*(tensors[name] for name in names))
    return grads[0], grads[1], grads[2], grads[3]


def plan_call(given: WindowCall, wants: Wants, table: tuple[Tensor, Tensor] | None = None) -> Call:
    """The launches of a call: all windows, with a guard again those that it turned away; then the
    sums of their programs, and a table's part of these.

    given: with a dense bias. table: the gradient of a table, and its index.
    """
    from elsa_core.backends.triton.window.backward_kernels import window_gradients

    shape, *others = planner.tile_terms(given)
    p = tiling.plan_backward(shape, *others)
    row = shape.tokens**2 * wants.bias + 2 * shape.head_dim * wants.pad + wants.logit
    programs = p.groups * shape.heads
    terms: dict[str, Any] = {
        **planner.common_terms(given, shape), "grad_scale": float(given.scale), "count": p.count,
        "DP": p.padded_dim, "BM": p.block, "ROW": row,
        **{f"WANT_{name.upper()}": wanted for name, wanted in wants._asdict().items()},
    }  # fmt: skip
    names = ("qkv", "grad", "bias", "pad", "logit", "dqkv" if wants.qkv else "none", "partial",
             "flags")  # fmt: skip
    steps = []
    for tile in (p.tile, p.exact):
        if tile is None:
            continue
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if tile.registers:
            options["maxnreg"] = tile.registers
        own = terms | {
            "MODE": device.MODES[tile.mode], "AGAIN": tile is p.exact, "STAGES": tile.stages,
        }  # fmt: skip
        steps.append((Launch(window_gradients, (programs,), own, options), names))
    flags = 1 if p.exact is None else programs + shape.windows * shape.heads
    sizes = {"partial": (max(1, programs * row), torch.float32), "flags": (flags, torch.int32)}
    if row:
        # what sums are written to: a table's are made dense first
        ends = ("dbias" if table is None else "dense", "dpad", "dlogit")
        ends = (end if wanted else "partial" for end, wanted in zip(ends, wants[1:], strict=True))
        launch = _sums(shape, wants, p.groups, row, given.layout == "head")
        steps.append((launch, ("partial", *ends)))
    if table is not None:
        steps.append((_table(table, shape), ("dense", "index", "dbias")))
        sizes["dense"] = (shape.heads * shape.tokens**2, torch.float32)
    return Call(tuple(steps), sizes)


def _sums(shape: WindowShape, wants: Wants, groups: int, row: int, head_first: bool) -> Launch:
    from elsa_core.backends.triton.window.backward_kernels import add_partials

    dim = shape.head_dim
    tail = {
        "groups": groups, "heads": shape.heads, "pad_h": dim * (3 if head_first else 1),
        "pad_part": dim * (1 if head_first else shape.heads), "SIZE": shape.tokens**2, "D": dim,
        "ROW": row, "WANT_BIAS": wants.bias, "WANT_PAD": wants.pad, "WANT_LOGIT": wants.logit,
        "AT_ONCE": AT_ONCE, "BLOCK": SUM_BLOCK,
    }  # fmt: skip
    return Launch(add_partials, (-(-row // SUM_BLOCK), shape.heads), tail, {"num_warps": 4})


def _table(table: tuple[Tensor, Tensor], shape: WindowShape) -> Launch:
    from elsa_core.backends.triton.window.backward_kernels import add_to_table

    (rows, heads), index = table[0].shape, table[1]
    block = min(8, tiling.padded(heads, 1))
    tail = {
        "size": shape.tokens**2, "rows": rows, "heads": heads, "tokens": shape.tokens,
        **dict(zip(("index_q", "index_k"), index.stride(), strict=True)),
        "HEADS": block, "BLOCK": TABLE_BLOCK,
    }  # fmt: skip
    return Launch(add_to_table, (rows, -(-heads // block)), tail, {"num_warps": 4})
