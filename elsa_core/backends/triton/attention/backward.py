"""Gradients of `elsa::attention` on a GPU: plans cached by layout, few launches, no float atomics.

Half precision: terms of the rows, those of rows whose lse is large, dQ (which refines delta), dK
with dV. float32: terms of the rows and split operands, dQ with dK and dV, then with three TF32
products the heads that a split does not hold. The gradient of an additive mask is one launch more.
Nothing is saved beyond out and lse; the workspace is linear in the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.triton.attention.backward_tiling import Tile, serves, tile_for, tiles_name
from elsa_core.backends.triton.attention.schedules import FRESH_KEYS
from elsa_core.backends.triton.shared import layout
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS

# rows of a tile of `backward_prepare`
UNIT = 128
# programs that share out the heads that a split does not hold
FALLBACK_PROGRAMS = 264
PREPARE_WARPS = 4
MODES = {"half": 0, "split": 1, "tf32": 2}
PRECISIONS = {"strict": "split", "turbo": "split", "lean": "tf32"}
# heads and terms that a launch takes (`backward_kernels.one_program`)
PLAIN, GUARDED, SAFE = 0, 1, 2
Needs = tuple[bool, bool, bool, bool]


@dataclass
class Call:
    """A planned call: its launches and the sizes of its workspace, in elements."""

    prepare: Launch
    normalise: Launch
    rows: int
    guards: int  # and factors
    # of the halves of query, grad_out, key and value; empty unless split
    halves: tuple[int, ...] = ()
    sides: list[Launch] = field(default_factory=list)
    fallback: Launch | None = None
    mask: Launch | None = None


@dataclass(frozen=True)
class Options:
    """What a plan depends on beside the tensors' layouts."""

    is_causal: bool
    scale: float
    mode: str
    needs: Needs
    refine: bool
    tiles: str


def _scales(scale: float, split: bool) -> dict[str, float]:
    """Factors of scores (base 2) and sums. split: queries carry the significand, as forward's."""
    if not split:
        return {"scale": scale * layout.LOG2E, "scale_q": scale, "scale_k": scale}
    parts = layout.score_scale(scale, "split")
    power = 2.0 ** parts["scale_exp"]
    return {
        "significand": parts["scale"] * parts["flip"], "scale": power, "scale_q": scale,
        "scale_k": power / layout.LOG2E,
    }  # fmt: skip


def _tail(operands: dict[str, Tensor], mask: Tensor | None, options: Options) -> dict[str, Any]:
    read = {name: operands[name] for name in "qkvgo"}
    least = 16 if options.mode == "half" else 32
    tail = layout.read_terms(read, mask, options.is_causal, least)
    tail |= {
        **_scales(options.scale, False),
        "MODE": MODES[options.mode], "SPLIT": options.mode == "split",
        "FRESH": options.mode != "half" or max(tail["n_q"], tail["n_k"]) > FRESH_KEYS,
        "UNIT_OUT": all(operands[name].stride(3) == 1 for name in ("dq", "dk", "dv")),
        "UNIT_K": mask is not None and mask.stride(3) == 1 and mask.shape[3] != 1,
    }  # fmt: skip
    for name in ("dq", "dk", "dv"):
        tail |= layout.strides(name, operands[name], 1)
    return tail | dict(zip(("l_b", "l_h", "l_n"), operands["l"].stride(), strict=True))


def _side_launch(
    tail: dict[str, Any], tile: Tile, wants: tuple[bool, bool, bool], where: int, refine: bool,
    loop: bool = False,
) -> Launch:  # fmt: skip
    from elsa_core.backends.triton.attention.backward_kernels import gradients

    blocks = (tile.block_m, tile.block_n)
    of_queries = (tile.query_m, tile.query_n) if tile.query_m else blocks
    key_programs = query_programs = 0
    if wants[1] or wants[2]:
        heads = tail["heads"] // tail["group"]
        key_programs = tail["batch"] * heads * -(-tail["n_k"] // blocks[1])
    if wants[0]:
        query_programs = tail["batch"] * tail["heads"] * -(-tail["n_q"] // of_queries[0])
    programs = key_programs + query_programs
    own = tail | {
        "key_programs": key_programs, "programs": programs, "WHERE": where, "LOOP": loop,
        "REFINE": refine, "WANT_Q": wants[0], "WANT_K": wants[1], "WANT_V": wants[2],
        "KEY_M": blocks[0], "KEY_N": blocks[1], "QUERY_M": of_queries[0],
        "QUERY_N": of_queries[1], "STAGES": tile.stages,
    }  # fmt: skip
    grid = (min(programs, FALLBACK_PROGRAMS) if loop else programs,)
    return Launch(gradients, grid, own, {"num_warps": tile.warps, "num_stages": tile.stages})


def _sides(tail: dict[str, Any], options: Options, dim: int) -> list[Launch]:
    """dQ, dK and dV: one launch where the table has blocks for both, else two."""
    where = PLAIN if options.mode == "split" else SAFE
    wants = (options.needs[0] or options.refine, *options.needs[1:3])
    key = tile_for(options.tiles, options.mode, "key", dim, tail["n_k"])
    query = tile_for(options.tiles, options.mode, "query", dim, tail["n_k"])
    if key.query_m and not options.refine:
        return [_side_launch(tail, key, wants, where, False)] if any(wants) else []
    launches = []
    # the queries' side first: where it refines delta, the keys' side reads it
    if wants[0]:
        only = (True, False, False)
        launches.append(_side_launch(tail, query, only, where, options.refine))
    if wants[1] or wants[2]:
        launches.append(_side_launch(tail, key, (False, *wants[1:]), where, False))
    return launches


def _mask_launch(tail: dict[str, Any], mask: Tensor, options: Options, dim: int) -> Launch:
    from elsa_core.backends.triton.attention.backward_kernels import mask_gradient

    mode = "tf32" if options.mode == "split" else options.mode
    tile = tile_for(options.tiles, mode, "mask", dim, tail["n_k"])
    m_b, m_h, m_q, m_k = mask.shape
    own = tail | {
        "MODE": MODES[mode], "m_b": m_b, "m_h": m_h,
        "q_blocks": -(-tail["n_q"] // tile.block_m), "k_blocks": -(-tail["n_k"] // tile.block_n),
        "ALL_Q": m_q == 1 and tail["n_q"] > 1, "ALL_K": m_k == 1 and tail["n_k"] > 1,
        "BM": tile.block_m, "BN": tile.block_n, "STAGES": tile.stages,
    }  # fmt: skip
    programs = m_b * m_h
    programs *= 1 if own["ALL_Q"] else own["q_blocks"]
    programs *= 1 if own["ALL_K"] else own["k_blocks"]
    settings = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Launch(mask_gradient, (programs,), own, settings)


def plan_call(operands: dict[str, Tensor], mask: Tensor | None, options: Options) -> Call:
    """The launches of a call; everything here depends on layouts, never on data.

    operands: q, k, v, g (grad_out), o (out), l (grad_lse), dq, dk, dv, lse.
    """
    from elsa_core.backends.triton.attention.backward_prepare import normalise, prepare

    tail = _tail(operands, mask, options)
    b, h, n_q, _ = operands["q"].shape
    h_kv, n_k = operands["k"].shape[1:3]
    q_tiles, k_tiles = b * h * -(-n_q // UNIT), b * h_kv * -(-n_k // UNIT)
    split = options.mode == "split"
    raw_mode = "tf32" if split else options.mode
    dim = max(tail["D0"], tail["V0"])
    scaled = tail | (_scales(options.scale, True) if split else {"significand": 1.0})
    # scores of rows that need their sum again, and of the heads that a split does not hold
    raw = tail | {"MODE": MODES["tf32"] if split else tail["MODE"]}
    tile = tile_for(options.tiles, raw_mode, "normalise", dim, n_k)
    again = raw | {"BM": tile.block_m, "BX": tile.block_n}
    grid = (max(q_tiles, k_tiles), 4) if split else (q_tiles, 1)
    call = Call(
        prepare=Launch(prepare, grid, scaled, {"num_warps": PREPARE_WARPS, "num_stages": 1}),
        normalise=Launch(
            normalise, (min(q_tiles, FALLBACK_PROGRAMS),), again,
            {"num_warps": tile.warps, "num_stages": 1},
        ),
        rows=3 * q_tiles * UNIT, guards=2 * (q_tiles + k_tiles),
        sides=_sides(scaled, options, dim),
    )  # fmt: skip
    if split:
        d0, v0 = 2 * UNIT * tail["D0"], 2 * UNIT * tail["V0"]
        call.halves = (q_tiles * d0, q_tiles * v0, k_tiles * d0, k_tiles * v0)
        if any(options.needs[:3]):
            key = tile_for(options.tiles, "tf32", "key", dim, n_k)
            call.fallback = _side_launch(raw, key, options.needs[:3], GUARDED, False, loop=True)
    if options.needs[3] and mask is not None:
        call.mask = _mask_launch(tail, mask, options, dim)
    return call


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    precision: str, needs: Needs,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of softmax attention, weights computed again from lse (FlashAttention, 2205.14135).

    Args:
        grad_out: [B, Hq, Nq, Dv] in the query's dtype. grad_lse: [B, Hq, Nq] float32, or [0] where
            nothing depends on lse.
        query, key, value: [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, Dv]; float32, float16 or
            bfloat16, D and Dv up to 256. All of these in any strides.
        attn_mask: boolean or additive, 4-D with dims full or 1.
        out, lse: what the forward returned for them.
        precision: strict and turbo take three float16 products for float32, lean three TF32
            products without split operands in the workspace; ieee is not served.
        needs: which of query, key, value and mask get a gradient.

    Returns:
        Gradients of query, key, value (strides as `empty_like` gives them) and mask (contiguous);
        empty where not needed. Equal bits for equal arguments.
    """
    if not grad_lse.numel():
        grad_lse = lse.new_zeros(()).expand(lse.shape)
    # nothing else than an additive mask has a gradient
    needs = (*needs[:3], needs[3] and attn_mask is not None and attn_mask.dtype != torch.bool)
    mode = "half" if query.dtype != torch.float32 else PRECISIONS[precision]
    # a row of nearly one weight cancels in dP - delta: delta from a rounded out is not enough
    refine = mode == "half" and any(needs)
    grads = [
        torch.empty_like(t) if needed else t.new_empty(0)
        for t, needed in zip((query, key, value), needs[:3], strict=True)
    ]
    grad_mask = query.new_empty(0)
    if needs[3]:
        assert attn_mask is not None
        grad_mask = torch.empty_like(attn_mask, memory_format=torch.contiguous_format)
    if not (query.numel() and key.numel() and value.numel()):
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_(), grad_mask.zero_()
    options = Options(is_causal, scale, mode, needs, refine, tiles_name(query.device))
    written = [g if g.dim() == 4 else t for g, t in zip(grads, (query, key, value), strict=True)]
    if refine and not needs[0]:
        written[0] = torch.empty_like(query)
    operands = dict(
        zip("qkvgol", (query, key, value, grad_out, out, grad_lse), strict=True),
        dq=written[0], dk=written[1], dv=written[2], lse=lse.contiguous(),
    )  # fmt: skip
    layouts = tuple(layout.key_of(t) for t in (attn_mask, *operands.values()))
    cached = ("backward", query.get_device(), options, layouts)
    call = PLANS.get(cached, plan_call, operands, attn_mask, options)
    m = layout.mask_pointer(attn_mask, query)
    with layout.on_device(query):
        rows = query.new_empty(call.rows, dtype=torch.float32)
        guards = query.new_empty(call.guards, dtype=torch.int32)
        factors = query.new_empty(call.guards, dtype=torch.float32)
        halves, of_g = query, grad_out
        of_q, of_k, of_v = query, key, value
        if call.halves:
            halves = query.new_empty(sum(call.halves), dtype=torch.float16)
            of_q, of_g, of_k, of_v = halves.split(call.halves)
        outputs = out, operands["lse"], grad_lse
        call.prepare(query, key, value, grad_out, *outputs, rows, guards, factors, halves)
        again = query, key, m, operands["lse"], rows, guards
        if call.fallback is None:
            call.normalise(*again)
        terms = m, grad_lse, rows, guards, factors, *written
        for side in call.sides:
            side(of_q, of_k, of_v, of_g, *terms)
        if call.fallback is not None:
            call.normalise(*again)
            call.fallback(query, key, value, grad_out, *terms)
        if call.mask is not None:
            call.mask(query, key, value, grad_out, m, rows, grad_mask)
    return grads[0], grads[1], grads[2], grad_mask


def measured_backward(*arguments: Any) -> tuple[Tensor, ...] | None:
    """`attention_backward` of calls of which it was measured to be faster than PyTorch's kernels;
    None of others."""
    operands, is_causal = arguments[2:6], arguments[8]
    return attention_backward(*arguments) if serves(*operands, is_causal) else None
