"""`elsa::window_attention_backward` on the GPU: few launches, planned once for each layout.

Rows of dqkv and partial sums by `window_gradients`; for float32 the windows that a split does not
hold, by the same kernel with float32 FMA; the sums by `add_partials`, and a table's by
`add_to_table`. Beside the gradients it allocates the partial sums: those of as many programs as
run at once, whatever the number of windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS
from elsa_core.backends.triton.window import planner, tiling
from elsa_core.backends.triton.window.planner import Given
from elsa_core.backends.triton.window.tiling import BackwardPlan, WindowShape

LARGEST_DIM = 64
# partial sums that a program adds at once, and entries of a row
AT_ONCE, SUM_BLOCK = 16, 64
TABLE_BLOCK = 512


def support(request: Request) -> Support:
    """Whether the gradients of such calls were measured to be worth it, as far as lengths do not
    decide."""
    if request.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return Support(False, f"dtype {request.dtype} has no kernel of the gradients")
    if request.head_dim > LARGEST_DIM:
        return Support(False, f"its gradients take head dimensions up to {LARGEST_DIM}")
    if request.tokens > tiling.WHOLE:
        return Support(False, f"its gradients take windows of up to {tiling.WHOLE} tokens")
    if request.device_type != "cuda" or not torch.cuda.is_available():
        return Support(False, "no CUDA device: PyTorch finds no GPU")
    if not tiling.load_table(device.table_of(torch.cuda.current_device())).gradients:
        return Support(False, "its gradients were not measured to be faster on this GPU")
    return Support(True)


class Wants(NamedTuple):
    """Which gradients are computed: those wanted of terms that there are."""

    qkv: bool
    bias: bool
    pad: bool
    logit: bool


@dataclass
class Call:
    """A planned call: its launches, and the elements of its workspace."""

    gradients: Launch
    again: Launch | None
    sums: Launch | None
    table: Launch | None
    partial: int
    flags: int


def window_attention_backward(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    bias_index: Tensor | None,
    pad_qkv: Tensor | None,
    logit_scale: Tensor | None,
    num_heads: int,
    window_size: Sequence[int],
    shift_size: Sequence[int],
    scale: float,
    mask_value: float,
    layout: str,
    grid: bool,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Gradients of attention within windows, the CUDA kernel of `elsa::window_attention_backward`.

    Args:
        grad_out: [B, D, H, W, C] in qkv's dtype, any strides.
        qkv: [B, D, H, W, 3C], float32, float16 or bfloat16, the last dim dense; head_dim up to 64.
            The rest as in `planner.window_attention`.
        needs: which of qkv, bias, pad_qkv and logit_scale get a gradient.

    Returns:
        Gradients in the dtypes of their inputs, dense, empty where not needed; None for windows of
        more than 64 tokens and larger head dimensions. Scores, weights and sums are float32.
        Equal bits for equal arguments on one GPU.

    Source: FlashAttention (arXiv 2205.14135), Algorithm 4, for a window that is one tile.
    """
    tokens, head_dim = math.prod(window_size), qkv.shape[-1] // (3 * num_heads)
    if tokens > tiling.WHOLE or head_dim > LARGEST_DIM or qkv.stride(-1) != 1:
        return None
    terms = (qkv, bias, pad_qkv, logit_scale)
    grads = [
        t.new_empty(t.shape) if t is not None and needed else qkv.new_empty(0)
        for t, needed in zip(terms, needs, strict=True)
    ]
    given = Given(
        qkv, bias, bias_index, pad_qkv, logit_scale, num_heads, window_size, shift_size, scale,
        mask_value, layout, grid, precision,
    )  # fmt: skip
    padded = planner.padding(given, planner.counts_of(given)) == 2
    wants = Wants(*(n and t is not None for n, t in zip(needs, terms, strict=True)))
    if wants.pad:  # nothing comes back to the query of a padded token
        grads[2].zero_()
    if not qkv.numel():
        return grads[0], grads[1].zero_(), grads[2], grads[3].zero_()
    wants = wants._replace(pad=wants.pad and padded)
    if any(wants):
        with torch.cuda.device(qkv.device) if _elsewhere(qkv) else _HERE:
            _run(given, grad_out.contiguous(), grads, wants)
    return grads[0], grads[1], grads[2], grads[3]


class _Here:
    """No change of the device."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_HERE = _Here()


def _elsewhere(qkv: Tensor) -> bool:
    return qkv.is_cuda and qkv.get_device() != torch.cuda.current_device()


def _run(given: Given, grad_out: Tensor, grads: list[Tensor], wants: Wants) -> None:
    """The call's launches, on the current device."""
    qkv, index = given.qkv, given.bias_index
    pad = given.pad_qkv
    if pad is not None and (pad.dtype != qkv.dtype or pad.stride(0) != 1):
        given = given._replace(pad_qkv=pad.to(qkv.dtype).contiguous())
    sums = grads[1]
    if index is not None:
        assert given.bias is not None
        table = given.bias
        given = given._replace(bias=planner.gathered(table, index), bias_index=None)
        if wants.bias:
            sums = qkv.new_empty(given.bias.shape, dtype=torch.float32)
    call = planned(given, grad_out, wants, grads, index)
    execute(call, given, grad_out, [grads[0], sums, grads[2], grads[3]], wants)
    if call.table is not None:
        call.table(sums, index, grads[1])


def execute(call: Call, given: Given, grad_out: Tensor, ends: list[Tensor], wants: Wants) -> None:
    """Allocate the workspace and launch; `ends` are what is written, [heads, T, T] of a bias."""
    qkv, *terms = planner.pointers(given)
    partial = qkv.new_empty(call.partial, dtype=torch.float32)
    flags = qkv.new_empty(call.flags, dtype=torch.int32)
    written = ends[0] if wants.qkv else qkv
    arguments = (qkv, grad_out, *terms, written, partial, flags)
    call.gradients(*arguments)
    if call.again is not None:
        call.again(*arguments)
    if call.sums is not None:
        of_sums = zip(ends[1:], wants[1:], strict=True)
        call.sums(partial, *(end if wanted else partial for end, wanted in of_sums))


def planned(
    given: Given, grad_out: Tensor, wants: Wants, grads: list[Tensor], index: Tensor | None
) -> Call:
    """The launches of a call, cached by layout. A bias is dense here."""
    table = None
    if index is not None and wants.bias:
        table = (index.shape, index.stride(), grads[1].shape, grads[1].dtype, index.data_ptr() % 16)
    written = tuple((g.dtype, g.data_ptr() % 16) for g in grads)
    key = (
        *planner.layout_key("window backward", given), grad_out.data_ptr() % 16, wants, table,
        written,
    )  # fmt: skip
    return PLANS.get(key, plan_call, given, wants, None if table is None else (grads[1], index))


def tile_plan(given: Given) -> BackwardPlan:
    """Tiles and programs of a call, from the table of its GPU."""
    index = device.index_of(given.qkv.device)
    _, multiprocessors = device.device_table(index)
    table = tiling.load_table(device.table_of(index))
    mode = device.mode_of(given.qkv.dtype, given.precision)
    return tiling.plan_backward(planner.shape_of(given), mode, table, multiprocessors)


def plan_call(
    given: Given, wants: Wants, table: tuple[Tensor, Tensor] | None, p: BackwardPlan | None = None
) -> Call:
    """The launches of a call, by its own plan or a given one; they depend on layouts, not on data.

    table: the gradient of a table, and its index.
    """
    from elsa_core.backends.triton.window.backward_tile import window_gradients

    p = p or tile_plan(given)
    shape = planner.shape_of(given)
    size, dim, heads = shape.tokens**2, shape.head_dim, shape.heads
    row = size * wants.bias + 2 * dim * wants.pad + wants.logit
    programs = p.groups * heads
    terms = {
        **planner.common_terms(given), "grad_scale": float(given.scale), "count": p.count,
        "MODE": device.MODES[p.tile.mode], "AGAIN": False, "DP": p.padded_dim, "BM": p.block,
        "WANT_QKV": wants.qkv, "WANT_BIAS": wants.bias, "WANT_PAD": wants.pad,
        "WANT_LOGIT": wants.logit, "ROW": row, "STAGES": p.tile.stages,
        "RELOAD": p.tile.reload,
    }  # fmt: skip
    gradients = _launch(window_gradients, programs, terms, p.tile)
    again = None
    if p.exact is not None:
        exact = {
            "MODE": device.MODES["exact"],
            "AGAIN": True,
            "STAGES": p.exact.stages,
            "RELOAD": p.exact.reload,
        }
        again = _launch(window_gradients, programs, terms | exact, p.exact)
    return Call(
        gradients, again, _plan_sums(given, wants, p, row), _plan_table(table, shape),
        partial=max(1, programs * row),
        flags=programs + shape.windows * heads if p.exact is not None else 1,
    )  # fmt: skip


def _launch(kernel: Any, programs: int, terms: dict[str, Any], tile: tiling.WindowTile) -> Launch:
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers:
        options["maxnreg"] = tile.registers
    known = {name: terms[name] for name in kernel.arg_names if name in terms}
    return Launch(kernel, (programs,), known, options)


def _plan_sums(given: Given, wants: Wants, p: BackwardPlan, row: int) -> Launch | None:
    from elsa_core.backends.triton.window.backward_sums import add_partials

    if not row:
        return None
    shape = planner.shape_of(given)
    first = given.layout == "head"
    tail = {
        "groups": p.groups, "heads": shape.heads,
        "pad_h": shape.head_dim * (3 if first else 1),
        "pad_part": shape.head_dim * (1 if first else shape.heads),
        "SIZE": shape.tokens**2, "D": shape.head_dim, "ROW": row, "WANT_BIAS": wants.bias,
        "WANT_PAD": wants.pad, "WANT_LOGIT": wants.logit, "AT_ONCE": AT_ONCE, "BLOCK": SUM_BLOCK,
    }  # fmt: skip
    return Launch(add_partials, (-(-row // SUM_BLOCK), shape.heads), tail, {"num_warps": 4})


def _plan_table(table: tuple[Tensor, Tensor] | None, shape: WindowShape) -> Launch | None:
    from elsa_core.backends.triton.window.backward_sums import add_to_table

    if table is None:
        return None
    (rows, heads), index = table[0].shape, table[1]
    block = min(8, tiling.padded(heads, 1))
    tail = {
        "size": shape.tokens**2, "rows": rows, "heads": heads, "tokens": shape.tokens,
        **dict(zip(("index_q", "index_k"), index.stride(), strict=True)),
        "HEADS": block, "BLOCK": TABLE_BLOCK,
    }  # fmt: skip
    return Launch(add_to_table, (rows, -(-heads // block)), tail, {"num_warps": 4})
