"""alpha-entmax attention on a GPU: one launch forward; lists of tiles and two launches backward,
and one more where sequences are packed and alpha has a gradient.

The workspace is a number for each tile of 64 queries and 64 keys. Packed sequences are found by the
programs themselves: the host reads no length, grids are sized by tokens and sequences, and the
workspace by the longest lengths that the call names. Nothing is added by atomics: equal arguments
give equal bits. The gradient of an additive mask is not computed here.

Source: AdaSplash, arXiv 2502.12082 (passes over tiles, tiles that are skipped).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.shared import layout
from elsa_core.backends.triton.shared.device import capability_of, triton_version
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS

TILE = 64
STEPS = 60
MODES = {"strict": 1, "lean": 1, "ieee": 2}
# the largest head dimensions whose four operands of 64 rows fit in the 99 KiB of sm_120
LARGEST_WIDE, LARGEST_HALF = 64, 128
_FOLDED = 2.0**-100  # scales between this and its inverse are a part of the slope
_SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))  # a program has 99 KiB of shared memory there
CHUNK, TOKENS = 128, 1024  # tiles that a list reads at once, and numbers that a sum does


class Tuning(NamedTuple):
    """How the forward runs.

    rows, keys: of a block, multiples of 64. groups: of keys, of each of which the two largest
    scores of a row are kept; keys, or a half or a quarter of it. stages: loads in flight in the
    pass for maxima, in steps and in the output. count, close, within: at alpha = 1.5, see
    `entmax_forward.forward`; a step of the size `close` leaves an error of the order of its cube
    (count) or between that and its square.
    """

    rows: int
    keys: int
    warps: int
    groups: int
    stages: tuple[int, int, int]
    count: bool
    close: float
    within: float


FORWARD = {
    "half": Tuning(64, 128, 4, 64, (3, 3, 2), False, 2.0**-6, 2.0**-13),
    "wide half": Tuning(64, 64, 4, 32, (2, 2, 2), False, 2.0**-6, 2.0**-13),
    "float32": Tuning(64, 64, 4, 64, (1, 1, 1), True, 2.0**-11, 2.0**-18),
}
GRADIENTS = {"half": (4, 3), "wide half": (8, 1), "float32": (4, 1)}  # warps and stages


class Packing(NamedTuple):
    """How many packed sequences there are, and the most queries and keys of one."""

    sequences: int
    longest_q: int
    longest_k: int


@dataclass(frozen=True)
class Options:
    """What a plan depends on beside the tensors' layouts.

    alpha: 0 where heads have their own. needs: of query, key, value, mask and alpha; none for the
    forward.
    """

    alpha: float
    is_causal: bool
    scale: float
    precision: str
    needs: tuple[bool, ...] = ()
    packing: Packing | None = None


def support(request: Request) -> Support:
    """Whether the kernels serve such calls; whether a GPU is there is asked elsewhere."""
    if request.precision not in MODES:
        return Support(False, f"entmax has no Triton kernel for precision={request.precision!r}")
    dim, single = max(request.head_dim, request.value_dim), request.dtype == torch.float32
    largest = LARGEST_WIDE if single else LARGEST_HALF
    if dim > largest:
        kind = str(request.dtype).removeprefix("torch.")
        return Support(False, f"head dimension {dim} is above {largest}, entmax's for {kind}")
    if single and MODES[request.precision] == 1 and torch.version.hip:
        return Support(False, "AMD's GPUs have no products of three TF32 ones: ask for 'ieee'")
    # gradients take 112 KiB, where others compile them to 96, and a program has 99
    small = single and dim > 32 and capability_of(request.device) in _SMALL
    if small and triton_version() == (3, 8):
        more = "takes more shared memory than this GPU has, as Triton 3.8 compiles it"
        return Support(False, f"head dimension {dim} in float32 {more}")
    return Support(True)


def entmax_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    head_alpha: Tensor | None, *terms: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The CUDA kernel of `elsa::entmax_attention`; arguments and results are the operator's.

    query, key and value are float32, float16 or bfloat16, of any strides.
    """
    batch, heads, queries, _ = query.shape
    out = query.new_empty((batch, queries, heads, value.shape[3])).transpose(1, 2)
    rows = query.new_empty((3, batch, heads, queries), dtype=torch.float32)
    sizes = (batch, heads, -(-queries // TILE), -(-key.shape[2] // TILE))
    tiles = query.new_zeros(sizes, dtype=torch.uint8)
    operands = {"q": query, "k": key, "v": value, "o": out}
    _forward(operands, attn_mask, head_alpha, rows, tiles, Options(*terms))
    return out, rows, tiles


def entmax_varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    head_alpha: Tensor | None, longest_q: int, longest_k: int, *terms: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The CUDA kernel of `elsa::entmax_varlen_attention`; arguments and results are the operator's.

    Cumulative lengths that leave the tokens are cut to them, and keys beyond `longest_k` are not
    seen; rows that no sequence has are not written.
    """
    tokens, heads, _ = query.shape
    packing = Packing(cu_seqlens_q.shape[0] - 1, longest_q, longest_k)
    out = query.new_empty((tokens, heads, value.shape[2]))
    rows = query.new_empty((3, heads, tokens), dtype=torch.float32)
    sizes = (heads, tokens // TILE + packing.sequences, -(-longest_k // TILE))
    tiles = query.new_zeros(sizes, dtype=torch.uint8)
    options = Options(*terms, packing=packing)
    packed = zip("qkvo", (query, key, value, out), strict=True)
    operands = {name: t.transpose(0, 1)[None] for name, t in packed}  # [1, H, T, D]
    bounds = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    _forward(operands, None, head_alpha, rows, tiles, options, *bounds)
    return out, rows, tiles


def _forward(
    operands: dict[str, Tensor], mask: Tensor | None, head_alpha: Tensor | None, rows: Tensor,
    tiles: Tensor, options: Options, *bounds: Tensor,
) -> None:  # fmt: skip
    """Write `o`, rows and tiles. bounds: cumulative lengths of packed sequences."""
    q, k, v, out = operands.values()
    sequences = options.packing is None or options.packing.sequences
    if not (out.numel() and k.shape[2] and sequences and tiles.numel()):
        out.zero_()
        rows.fill_(-math.inf)
        return
    launches = _planned(operands, mask, head_alpha, options, bounds)
    lists = torch.empty_like(tiles, dtype=torch.int32)
    of_heads = q if head_alpha is None else head_alpha
    with layout.on_device(q):
        pointer = layout.mask_pointer(mask, q)
        launches["forward"](q, k, v, pointer, of_heads, out, rows, tiles, lists, *bounds)


def entmax_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    head_alpha: Tensor | None, out: Tensor, rows: Tensor, tiles: Tensor, *terms: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of query, key, value and head_alpha; that of a mask comes back empty.

    Arguments and results are those of `elsa::entmax_attention_backward`.
    """
    operands = {"q": query, "k": key, "v": value, "g": grad_out, "o": out}
    options = Options(*terms[:-1], needs=tuple(map(bool, terms[-1])))
    *grads, of_alpha = _backward(operands, attn_mask, head_alpha, rows, tiles, options)
    return *grads, query.new_empty(0), of_alpha


def entmax_varlen_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, head_alpha: Tensor | None, out: Tensor, rows: Tensor, tiles: Tensor,
    longest_q: int, longest_k: int, *terms: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of query, key, value and head_alpha.

    Arguments and results are those of `elsa::entmax_varlen_attention_backward`; gradients of tokens
    that no sequence has are not written.
    """
    *wants, wants_alpha = map(bool, terms[-1])
    packing = Packing(cu_seqlens_q.shape[0] - 1, longest_q, longest_k)
    # of a mask there is no gradient
    options = Options(*terms[:-1], needs=(*wants, False, wants_alpha), packing=packing)
    packed = zip("qkvgo", (query, key, value, grad_out, out), strict=True)
    operands = {name: t.transpose(0, 1)[None] for name, t in packed}  # [1, H, T, D]
    bounds = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    *grads, of_alpha = _backward(operands, None, head_alpha, rows, tiles, options, *bounds)
    return *(g.transpose(1, 2)[0] if g.dim() == 4 else g for g in grads), of_alpha


def _backward(
    operands: dict[str, Tensor], mask: Tensor | None, head_alpha: Tensor | None, rows: Tensor,
    tiles: Tensor, options: Options, *bounds: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of `q`, `k` and `v`, [0] where none is wanted, and of head_alpha."""
    q, k, v, g, out = operands.values()
    packing, wants_alpha = options.packing, options.needs[4] and head_alpha is not None
    grads = [
        torch.empty_like(t) if wanted else t.new_empty(0)
        for t, wanted in zip((q, k, v), options.needs[:3], strict=True)
    ]
    grad_alpha = q.new_empty(0)
    if head_alpha is not None and wants_alpha:
        grad_alpha = torch.zeros_like(head_alpha, memory_format=torch.contiguous_format)
    sequences = packing is None or (packing.sequences and packing.longest_q)
    if not (g.numel() and k.shape[2] and sequences and tiles.numel()):
        return *(grad.zero_() for grad in grads), grad_alpha
    if not (any(options.needs[:3]) or options.needs[4]):
        return *grads, grad_alpha
    dq, dk, dv = (t if w.dim() == 1 else w for w, t in zip(grads, (q, k, v), strict=True))
    operands = operands | {"dq": dq, "dk": dk, "dv": dv}
    launches = _planned(operands, mask, head_alpha, options, bounds)
    by_row = torch.empty_like(rows[0]) if options.needs[4] else q
    q_tiles, k_tiles = tiles.shape[-2:]
    heads = tiles.numel() // (q_tiles * k_tiles)
    columns, per_column = k_tiles, q_tiles
    if packing is not None:
        columns = k.shape[2] // TILE + packing.sequences
        per_column = -(-packing.longest_q // TILE)
    with layout.on_device(q):
        pointer, of_heads = layout.mask_pointer(mask, q), q if head_alpha is None else head_alpha
        delta = rows.new_empty((4, *rows.shape[1:]))
        # as many lists as blocks of one tile would have
        by_rows = q.new_empty((heads * q_tiles, 1 + k_tiles), dtype=torch.int32)
        by_columns, norms = by_rows, rows  # where nothing reads them
        if "by_columns" in launches:
            by_columns = q.new_empty((heads * columns, 1 + per_column), dtype=torch.int32)
            norms = rows.new_empty((heads, columns))
            launches["by_columns"](tiles, by_columns, v, norms, *bounds)
        launches["by_rows"](tiles, by_rows, v, norms)
        launches["query"](
            q, k, v, g, out, pointer, of_heads, rows, by_rows, norms, delta, dq, by_row, *bounds
        )
        if "key" in launches:
            launches["key"](q, k, v, g, pointer, of_heads, rows, by_columns, delta, dk, dv, *bounds)
        if head_alpha is None or not wants_alpha:
            return *grads, grad_alpha
        if packing is None:
            sums = by_row.sum(-1)
        else:
            sums = rows.new_empty((packing.sequences, rows.shape[1]))
            launches["alpha"](by_row, sums, bounds[0])
        summed = sums[..., None, None].sum_to_size(head_alpha.shape).to(head_alpha.dtype)
        return *grads, summed


def _planned(
    operands: dict[str, Tensor], mask: Tensor | None, head_alpha: Tensor | None, options: Options,
    bounds: tuple[Tensor, ...],
) -> dict[str, Launch]:  # fmt: skip
    if head_alpha is not None:
        options = replace(options, alpha=0.0)
    layouts = tuple(layout.key_of(t) for t in (mask, head_alpha, *bounds, *operands.values()))
    key = ("entmax", operands["q"].get_device(), options, layouts)
    found: dict[str, Launch] = PLANS.get(key, plan_call, operands, mask, head_alpha, options)
    return found


def plan_call(
    operands: dict[str, Tensor], mask: Tensor | None, head_alpha: Tensor | None, options: Options
) -> dict[str, Launch]:
    """The launches of a call by name; everything here depends on layouts, never on data.

    operands: [B, H, N, D], B = 1 of packed sequences; q, k, v and o, with g (grad_out), dq, dk and
    dv for gradients.
    """
    from elsa_core.backends.triton.attention import entmax_forward, entmax_gradients

    tail, packing = _tail(operands, mask, head_alpha, options), options.packing
    queries, keys = tail["n_q"], tail["n_k"]
    heads = operands["q"].shape[0] * tail["heads"]
    kind = "wide half" if max(tail["D0"], tail["V0"]) > 64 else "half"
    if tail["MODE"]:
        kind = "float32"

    def blocks(length: int, block: int = TILE) -> int:
        """Of a head; a packed sequence has one more than its tokens fill at most."""
        return -(-length // block) if packing is None else length // block + packing.sequences

    if not options.needs:
        tuning, halves = FORWARD[kind], options.alpha == 1.5
        top, step, out = tuning.stages
        tail |= {
            "BM": tuning.rows, "BN": tuning.keys, "GROUPS": tuning.groups, "TOP_STAGES": top,
            "STEP_STAGES": step, "OUT_STAGES": out, "STEPS": STEPS,
            "COUNT": halves and tuning.count, "CLOSE": tuning.close if halves else 0.0,
            "WITHIN": tuning.within,
        }  # fmt: skip
        grid = (heads * blocks(queries, tuning.rows),)
        return {"forward": _launch(entmax_forward.forward, grid, tail, tuning.warps)}
    warps, tail["STAGES"] = GRADIENTS[kind]
    rows, columns = blocks(queries), blocks(keys)
    width = -(-(keys if packing is None else packing.longest_k) // TILE)
    own = {"NORMS": False, "length": width, "others": rows, "own_step": width, "step": 1}
    launches = {
        "by_rows": _launch(entmax_gradients.list_tiles, (heads * rows,), tail | own, 4),
        "query": _launch(entmax_gradients.query_gradient, (heads * rows,), tail, warps),
    }
    if packing is not None:
        tail["longest"] = packing.longest_q
    of_keys = options.needs[1] or options.needs[2]
    if of_keys or tail["RANGE"]:
        by_columns = (
            entmax_gradients.list_tiles if packing is None else entmax_gradients.list_columns
        )
        own = {"NORMS": tail["RANGE"], "length": rows, "others": columns, "own_step": 1}
        own |= {"step": columns, "width": width}
        launches["by_columns"] = _launch(by_columns, (heads * columns,), tail | own, 4)
    if of_keys:
        grid = (heads // tail["group"] * columns,)
        launches["key"] = _launch(entmax_gradients.key_gradient, grid, tail, warps)
    if packing is not None and options.needs[4]:
        grid = (heads * packing.sequences,)
        summed = tail | {"CHUNK": TOKENS}
        launches["alpha"] = _launch(entmax_gradients.sum_of_sequences, grid, summed, 4)
    return launches


def _launch(kernel: Any, grid: tuple[int, ...], tail: dict[str, Any], warps: int) -> Launch:
    return Launch(kernel, grid, tail, {"num_warps": warps, "num_stages": 1})


def _tail(
    operands: dict[str, Tensor], mask: Tensor | None, head_alpha: Tensor | None, options: Options
) -> dict[str, Any]:
    read = {name: operands[name] for name in "qkvg" if name in operands}
    tail = layout.read_terms(read, mask, options.is_causal)
    dtype = operands["q"].dtype
    powers = {1.5: 2, 2.0: 1}
    alpha_b, alpha_h = (0, 0)
    if head_alpha is not None:
        alpha_b, alpha_h = (
            0 if size == 1 else stride
            for size, stride in zip(head_alpha.shape[:2], head_alpha.stride()[:2], strict=True)
        )
    tail |= {
        "scale": float(options.scale), "alpha": float(options.alpha),
        "log_keys": math.log(tail["n_k"]), "alpha_b": alpha_b, "alpha_h": alpha_h,
        "MODE": MODES[options.precision] if dtype == torch.float32 else 0,
        "POWER": 0 if head_alpha is not None else powers.get(options.alpha, 0),
        "OF_HEADS": head_alpha is not None, "BM": TILE, "BN": TILE,
        "FOLD": tail["MASK"] < 2 and _FOLDED < options.scale < 1 / _FOLDED,
    }  # fmt: skip
    for name in operands.keys() - read.keys():
        tail |= layout.strides(name, operands[name], 1)
    if options.packing is None:
        tail |= {"StartsQ": None, "StartsK": None, "longest": 0, "steps": 0, "PACKED": False}
    else:
        sequences, _, longest = options.packing
        tail |= {"batch": sequences, "longest": longest}
        tail |= {"steps": sequences.bit_length(), "PACKED": True}
    if options.needs:
        names = ("WANT_Q", "WANT_K", "WANT_V", "WANT_MASK", "WANT_ALPHA")
        tail |= dict(zip(names, options.needs, strict=True))
        tail["RANGE"] = dtype == torch.float16 and tail["POWER"] == 2
        tail["CHUNK"] = CHUNK
    return tail
