"""alpha-entmax attention of packed sequences on a GPU: the kernels of `entmax`, in the same few
launches whatever the number of sequences, and one more for the gradient of alpha.

A program finds its sequence itself, and nothing is read by the host: grids are sized by the numbers
of tokens and of sequences. The workspace is sized by the longest length that the call names: with
the tiles [Hq, T / 64 + S, longest_k / 64] five bytes of each in the forward, and backward four of
each and of [Hq, Tk / 64 + S, longest_q / 64].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elsa_core.backends.triton.attention import entmax
from elsa_core.backends.triton.attention.entmax import TILE, Options
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS

CHUNK = 1024  # of a sum over tokens


@dataclass(frozen=True)
class Packing:
    """How many sequences there are, and the most queries and keys of one."""

    sequences: int
    longest_q: int
    longest_k: int


@dataclass
class Call(entmax.Call):
    """The launches of a call; alpha: sums the rows' parts of its gradient over a sequence."""

    alpha: Launch | None = None


def entmax_varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_alpha: Tensor | None,
    longest_q: int,
    longest_k: int,
    alpha: float,
    is_causal: bool,
    scale: float,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The CUDA kernel of `elsa::entmax_varlen_attention`; arguments and results are the operator's.

    Cumulative lengths that leave the tokens are cut to them, and keys beyond `longest_k` are not
    seen; rows that no sequence has are not written.
    """
    tokens, heads, _ = query.shape
    sequences = cu_seqlens_q.shape[0] - 1
    out = query.new_empty((tokens, heads, value.shape[2]))
    rows = query.new_empty((3, heads, tokens), dtype=torch.float32)
    sizes = (heads, tokens // TILE + sequences, entmax._tiles(longest_k))
    tiles = query.new_zeros(sizes, dtype=torch.uint8)
    if not (out.numel() and key.shape[0] and sequences and tiles.numel()):
        return out.zero_(), rows.fill_(-math.inf), tiles
    options = Options(0.0 if head_alpha is not None else alpha, is_causal, scale, precision)
    packing = Packing(sequences, longest_q, longest_k)
    starts, others = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    operands = _of_one_batch(q=query, k=key, v=value, o=out)
    call = _planned(operands, (starts, others), head_alpha, options, packing)
    lists = query.new_empty(sizes, dtype=torch.int32)
    of_heads = query if head_alpha is None else head_alpha
    assert call.forward is not None
    with entmax._device(query):
        call.forward(
            query, key, value, query, of_heads, out, rows, tiles, lists, starts, others
        )  # fmt: skip
    return out, rows, tiles


def entmax_varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_alpha: Tensor | None,
    out: Tensor,
    rows: Tensor,
    tiles: Tensor,
    longest_q: int,
    longest_k: int,
    alpha: float,
    is_causal: bool,
    scale: float,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and head_alpha.

    Arguments and results are those of `elsa::entmax_varlen_attention_backward`; gradients of tokens
    that no sequence has are not written.
    """
    wants = tuple(bool(x) for x in needs)
    grads = [
        torch.empty_like(t) if wanted else t.new_empty(0)
        for t, wanted in zip((query, key, value), wants[:3], strict=True)
    ]
    grad_alpha = query.new_empty(0)
    if wants[3] and head_alpha is not None:
        grad_alpha = torch.zeros_like(head_alpha, memory_format=torch.contiguous_format)
    sequences = cu_seqlens_q.shape[0] - 1
    if not (grad_out.numel() and key.shape[0] and sequences and tiles.numel() and longest_q):
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_(), grad_alpha
    if not any(wants):
        return grads[0], grads[1], grads[2], grad_alpha
    # as the kernels of dense calls have them: of a mask there is no gradient
    dense = (*wants[:3], False, wants[3])
    options = Options(0.0 if head_alpha is not None else alpha, is_causal, scale, precision, dense)
    packing = Packing(sequences, longest_q, longest_k)
    bounds = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    written = [g if g.dim() == 3 else t for g, t in zip(grads, (query, key, value), strict=True)]
    operands = _of_one_batch(
        q=query, k=key, v=value, g=grad_out, o=out, dq=written[0], dk=written[1], dv=written[2]
    )
    call = _planned(operands, bounds, head_alpha, options, packing)
    by_row = torch.empty_like(rows[0]) if wants[3] else query
    with entmax._device(query):
        _execute(call, operands, bounds, head_alpha, rows, tiles, by_row, packing)
        if wants[3] and head_alpha is not None:
            sums = rows.new_empty((packing.sequences, rows.shape[1]))
            assert call.alpha is not None
            call.alpha(by_row, sums, bounds[0])
            of_heads = sums[..., None, None].sum_to_size(head_alpha.shape)
            grad_alpha = of_heads.to(head_alpha.dtype)
    return grads[0], grads[1], grads[2], grad_alpha


def _of_one_batch(**packed: Tensor) -> dict[str, Tensor]:
    """[T, H, D] as [1, H, T, D]."""
    return {name: t.transpose(0, 1)[None] for name, t in packed.items()}


def _execute(
    call: Call, operands: dict[str, Tensor], bounds: tuple[Tensor, Tensor],
    head_alpha: Tensor | None, rows: Tensor, tiles: Tensor, by_row: Tensor, packing: Packing,
) -> None:  # fmt: skip
    q, k, v, g = (operands[name] for name in "qkvg")
    heads, q_tiles, k_tiles = tiles.shape
    of_heads = q if head_alpha is None else head_alpha
    delta = rows.new_empty((4, *rows.shape[1:]))
    by_rows = q.new_empty((heads * q_tiles, 1 + k_tiles), dtype=torch.int32)
    by_columns, norms = by_rows, rows  # where nothing reads them
    if call.by_columns is not None:
        columns = heads * (k.shape[2] // TILE + packing.sequences)
        sizes = (columns, 1 + entmax._tiles(packing.longest_q))
        by_columns, norms = q.new_empty(sizes, dtype=torch.int32), rows.new_empty(columns)
        call.by_columns(tiles, by_columns, v, norms, *bounds)
    assert call.by_rows is not None and call.query is not None
    call.by_rows(tiles, by_rows, v, norms)
    call.query(
        q, k, v, g, operands["o"], q, of_heads, rows, by_rows, norms, delta, operands["dq"],
        by_row, *bounds,
    )  # fmt: skip
    if call.key is not None:
        of_keys = operands["dk"], operands["dv"]
        call.key(q, k, v, g, q, of_heads, rows, by_columns, delta, *of_keys, *bounds)


def _planned(
    operands: dict[str, Tensor], bounds: tuple[Tensor, Tensor], head_alpha: Tensor | None,
    options: Options, packing: Packing,
) -> Call:  # fmt: skip
    """The plan of a call, cached by layout."""
    key = (
        "entmax_varlen", operands["q"].get_device(), options, packing, entmax._layout(head_alpha),
        *(entmax._layout(t) for t in (*bounds, *operands.values())),
    )  # fmt: skip
    return PLANS.get(key, plan_call, operands, head_alpha, options, packing)


def plan_call(
    operands: dict[str, Tensor], head_alpha: Tensor | None, options: Options, packing: Packing
) -> Call:
    """The launches of a call; everything here depends on layouts, never on data.

    operands: [1, H, T, D] each; q, k, v and o, with g (grad_out), dq, dk and dv for gradients.
    """
    from elsa_core.backends.triton.attention import entmax_forward, entmax_gradients

    launch, sequences = entmax._launch, packing.sequences
    tail = entmax._tail(operands, None, head_alpha, options)
    tail |= {
        "PACKED": True, "batch": sequences, "steps": sequences.bit_length(),
        "longest": packing.longest_k, "width": entmax._tiles(packing.longest_k),
    }  # fmt: skip
    del tail["StartsQ"], tail["StartsK"]  # they are pointers of the call
    heads, queries, keys = tail["heads"], tail["n_q"], tail["n_k"]
    kind = entmax._kind(tail)
    if not options.needs:
        tuning = entmax.FORWARD[kind]
        grid = (heads * (queries // tuning.rows + sequences),)
        chosen = tail | entmax._forward_tail(tuning, options)
        return Call(
            forward=launch(entmax_forward.forward, grid, chosen, tuning.warps, tuning.registers)
        )
    of_query, of_key = entmax.GRADIENTS[kind]
    rows, columns = (n // TILE + sequences for n in (queries, keys))
    # a block of several rows of tiles would not begin where a sequence does: all have one
    own = tail | {"SPAN": 1, "NORMS": False, "length": tail["width"], "others": rows}
    own |= {"own_step": tail["width"], "step": 1}
    by_rows = launch(entmax_gradients.list_tiles, (heads * rows,), own, 4)
    chosen = tail | {"BM": TILE, "STAGES": of_query.stages}
    call = Call(by_rows=by_rows)
    call.query = launch(
        entmax_gradients.query_gradient, (heads * rows,), chosen, of_query.warps,
        of_query.registers,
    )  # fmt: skip
    tail["longest"] = packing.longest_q
    of_keys = options.needs[1] or options.needs[2]
    if of_keys or tail["RANGE"]:
        chosen = tail | {"NORMS": tail["RANGE"]}
        call.by_columns = launch(entmax_gradients.list_columns, (heads * columns,), chosen, 4)
    if of_keys:
        chosen = tail | {"BN": TILE, "STAGES": of_key.stages}
        grid = (operands["k"].shape[1] * columns,)
        call.key = launch(
            entmax_gradients.key_gradient, grid, chosen, of_key.warps, of_key.registers
        )
    if options.needs[4]:
        chosen = tail | {"CHUNK": CHUNK}
        call.alpha = launch(entmax_gradients.sum_of_sequences, (heads * sequences,), chosen, 4)
    return call
