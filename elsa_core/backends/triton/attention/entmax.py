"""alpha-entmax attention on a GPU: one launch forward; lists of tiles and two launches backward.

The workspace is a number for each tile of 64 queries and 64 keys. Nothing is added by atomics:
equal arguments give equal bits. The gradient of an additive mask is not computed here.

Source: AdaSplash, arXiv 2502.12082 (passes over tiles, tiles that are skipped).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elsa_core.backends.support import Request, Support
from elsa_core.backends.triton.shared import layout
from elsa_core.backends.triton.shared.device import capability_of, described, triton_version
from elsa_core.backends.triton.shared.launch import Launch
from elsa_core.backends.triton.shared.plans import PLANS

TILE = 64
STEPS = 60
MODES = {"strict": 1, "lean": 1, "ieee": 2}
# the largest head dimensions whose four operands of 64 rows fit in the 99 KiB of sm_120
LARGEST_WIDE, LARGEST_HALF = 64, 128
_FOLDED = 2.0**-100  # scales between this and its inverse are a part of the slope
_SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))  # a program has 99 KiB of shared memory there
CHUNK = 128


@dataclass(frozen=True)
class Tuning:
    """How the forward runs.

    rows, keys: of a block, multiples of 64. groups: of keys, of each of which the two largest
    scores of a row are kept; keys, or a half or a quarter of it. registers: of a thread at most, 0:
    as the compiler likes. stages: loads in flight in the pass for maxima, in steps and in the
    output. count, close, within: at alpha = 1.5, see `entmax_forward.forward`; a step of the size
    `close` leaves an error of the order of its cube (count) or between that and its square.
    """

    rows: int
    keys: int
    warps: int
    groups: int
    stages: tuple[int, int, int]
    count: bool
    close: float
    within: float
    registers: int = 0


FORWARD = {
    "half": Tuning(64, 128, 4, 64, (3, 3, 2), False, 2.0**-6, 2.0**-13),
    "wide half": Tuning(64, 64, 4, 32, (2, 2, 2), False, 2.0**-6, 2.0**-13),
    "float32": Tuning(64, 64, 4, 64, (1, 1, 1), True, 2.0**-11, 2.0**-18),
}


@dataclass(frozen=True)
class Gradient:
    """How a kernel of the gradients runs: queries or keys of a block, a multiple of 64."""

    block: int
    warps: int
    stages: int
    registers: int = 0


# of the query, and of key and value
GRADIENTS = {
    "half": (Gradient(64, 4, 3), Gradient(64, 4, 3)),
    "wide half": (Gradient(64, 8, 1), Gradient(64, 8, 1)),
    "float32": (Gradient(64, 4, 1), Gradient(64, 4, 1)),
}


@dataclass(frozen=True)
class Options:
    """What a plan depends on beside the tensors' layouts. alpha: 0 where heads have their own."""

    alpha: float
    is_causal: bool
    scale: float
    precision: str
    needs: tuple[bool, ...] = ()


# what the kernels take where sequences are not packed
_NOT_PACKED = {"StartsQ": None, "StartsK": None, "longest": 0, "steps": 0, "PACKED": False}


@dataclass
class Call:
    """The launches of a call."""

    forward: Launch | None = None
    by_rows: Launch | None = None
    by_columns: Launch | None = None
    query: Launch | None = None
    key: Launch | None = None


def support(request: Request) -> Support:
    """Whether the kernels serve such calls; whether a GPU is there is asked elsewhere."""
    if request.precision not in MODES:
        return Support(False, f"entmax has no Triton kernel for precision={request.precision!r}")
    dim = max(request.head_dim, request.value_dim)
    largest = LARGEST_WIDE if request.dtype == torch.float32 else LARGEST_HALF
    if dim > largest:
        kind = str(request.dtype).removeprefix("torch.")
        return Support(False, f"head dimension {dim} is above {largest}, entmax's for {kind}")
    if request.dtype == torch.float32 and MODES[request.precision] == 1 and torch.version.hip:
        return Support(False, "AMD's GPUs have no products of three TF32 ones: ask for 'ieee'")
    if request.dtype == torch.float32 and dim > 32 and _takes_more(request.device):
        more = "takes more shared memory than this GPU has, as Triton 3.8 compiles it"
        return Support(False, f"head dimension {dim} in float32 {more}")
    return Support(True)


def _takes_more(gpu: torch.device) -> bool:
    """Whether gradients take 112 KiB, where others compile them to 96, and a program has 99."""
    there = described() is not None or torch.cuda.is_available()
    return there and capability_of(gpu) in _SMALL and triton_version() == (3, 8)


def schedule(*arguments: Any) -> str:
    """How a call is cut, in words."""
    return "blocks of 64 queries; blocks of keys that can hold no weight are read once"


def entmax_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    head_alpha: Tensor | None,
    alpha: float,
    is_causal: bool,
    scale: float,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The CUDA kernel of `elsa::entmax_attention`; arguments and results are the operator's.

    query, key and value are float32, float16 or bfloat16, of any strides.
    """
    batch, heads, queries, _ = query.shape
    keys, value_dim = value.shape[2:]
    out = query.new_empty((batch, queries, heads, value_dim)).transpose(1, 2)
    rows = query.new_empty((3, batch, heads, queries), dtype=torch.float32)
    grid = (batch, heads, _tiles(queries), _tiles(keys))
    tiles = query.new_zeros(grid, dtype=torch.uint8)
    if not (out.numel() and keys):
        return out.zero_(), rows.fill_(-math.inf), tiles
    options = Options(0.0 if head_alpha is not None else alpha, is_causal, scale, precision)
    operands = {"q": query, "k": key, "v": value, "o": out}
    call = _planned(operands, attn_mask, head_alpha, options)
    lists = query.new_empty(grid, dtype=torch.int32)
    of_heads = query if head_alpha is None else head_alpha
    assert call.forward is not None
    with _device(query):
        mask = _mask(attn_mask, query)
        call.forward(query, key, value, mask, of_heads, out, rows, tiles, lists)
    return out, rows, tiles


def entmax_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    head_alpha: Tensor | None,
    out: Tensor,
    rows: Tensor,
    tiles: Tensor,
    alpha: float,
    is_causal: bool,
    scale: float,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and head_alpha; that of a mask comes back empty.

    Arguments and results are those of `elsa::entmax_attention_backward`.
    """
    wants = tuple(bool(x) for x in needs)
    grads = [
        torch.empty_like(t) if wanted else t.new_empty(0)
        for t, wanted in zip((query, key, value), wants[:3], strict=True)
    ]
    none = query.new_empty(0)
    grad_alpha = none
    if wants[4] and head_alpha is not None:
        grad_alpha = torch.zeros_like(head_alpha, memory_format=torch.contiguous_format)
    if not (grad_out.numel() and key.shape[2]):  # without channels of queries all keys weigh alike
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_(), none, grad_alpha
    if not (any(wants[:3]) or wants[4]):
        return grads[0], grads[1], grads[2], none, grad_alpha
    options = Options(0.0 if head_alpha is not None else alpha, is_causal, scale, precision, wants)
    written = [g if g.dim() == 4 else t for g, t in zip(grads, (query, key, value), strict=True)]
    operands = {
        "q": query, "k": key, "v": value, "g": grad_out, "o": out,
        "dq": written[0], "dk": written[1], "dv": written[2],
    }  # fmt: skip
    call = _planned(operands, attn_mask, head_alpha, options)
    by_row = torch.empty_like(rows[0]) if wants[4] else query
    with _device(query):
        _execute(call, operands, attn_mask, head_alpha, rows, tiles, by_row)
    if wants[4] and head_alpha is not None:
        of_heads = by_row.sum(-1)[..., None, None]
        grad_alpha = of_heads.sum_to_size(head_alpha.shape).to(head_alpha.dtype)
    return grads[0], grads[1], grads[2], none, grad_alpha


def _execute(
    call: Call, operands: dict[str, Tensor], attn_mask: Tensor | None, head_alpha: Tensor | None,
    rows: Tensor, tiles: Tensor, by_row: Tensor,
) -> None:  # fmt: skip
    q, k, v, g = (operands[name] for name in "qkvg")
    batch, heads, q_tiles, k_tiles = tiles.shape
    mask, of_heads = _mask(attn_mask, q), q if head_alpha is None else head_alpha
    delta = rows.new_empty((4, *rows.shape[1:]))
    # as many lists as blocks of one tile would have
    by_rows = q.new_empty((batch * heads * q_tiles, 1 + k_tiles), dtype=torch.int32)
    by_columns, norms = by_rows, rows  # where nothing reads them
    if call.by_columns is not None:
        by_columns = q.new_empty((batch * heads * k_tiles, 1 + q_tiles), dtype=torch.int32)
        norms = rows.new_empty((batch * heads, k_tiles))
        call.by_columns(tiles, by_columns, v, norms)
    assert call.by_rows is not None and call.query is not None
    call.by_rows(tiles, by_rows, v, norms)
    call.query(
        q, k, v, g, operands["o"], mask, of_heads, rows, by_rows, norms, delta, operands["dq"],
        by_row,
    )  # fmt: skip
    if call.key is not None:
        of_keys = operands["dk"], operands["dv"]
        call.key(q, k, v, g, mask, of_heads, rows, by_columns, delta, *of_keys)


def _tiles(length: int) -> int:
    return -(-length // TILE)


def _mask(attn_mask: Tensor | None, query: Tensor) -> Tensor:
    if attn_mask is None:
        return query
    return attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask


def _device(query: Tensor) -> Any:
    return torch.cuda.device(query.device if query.is_cuda else -1)


def _layout(t: Tensor | None) -> tuple[Any, ...] | None:
    return None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16)


def _planned(
    operands: dict[str, Tensor], mask: Tensor | None, head_alpha: Tensor | None, options: Options
) -> Call:
    """The plan of a call, cached by layout."""
    key = (
        "entmax", operands["q"].get_device(), options, _layout(mask), _layout(head_alpha),
        *(_layout(t) for t in operands.values()),
    )  # fmt: skip
    return PLANS.get(key, plan_call, operands, mask, head_alpha, options)


def plan_call(
    operands: dict[str, Tensor], mask: Tensor | None, head_alpha: Tensor | None, options: Options
) -> Call:
    """The launches of a call; everything here depends on layouts, never on data.

    operands: q, k, v and o, with g (grad_out), dq, dk and dv for gradients.
    """
    from elsa_core.backends.triton.attention import entmax_forward, entmax_gradients

    tail = _tail(operands, mask, head_alpha, options)
    batch, heads, queries, _ = operands["q"].shape
    kind = _kind(tail)
    if not options.needs:
        tuning = FORWARD[kind]
        grid = (batch * heads * -(-queries // tuning.rows),)
        chosen = tail | _forward_tail(tuning, options)
        return Call(
            forward=_launch(entmax_forward.forward, grid, chosen, tuning.warps, tuning.registers)
        )
    of_query, of_key = GRADIENTS[kind]
    q_tiles, k_tiles = _tiles(queries), _tiles(tail["n_k"])
    rows = batch * heads * -(-queries // of_query.block)
    columns = batch * heads * -(-tail["n_k"] // of_key.block)
    own = tail | {"SPAN": of_query.block // TILE, "NORMS": False}
    own |= {"length": k_tiles, "others": q_tiles, "own_step": k_tiles, "step": 1}
    by_rows = _launch(entmax_gradients.list_tiles, (rows,), own, 4)
    chosen = tail | {"BM": of_query.block, "STAGES": of_query.stages}
    query = _launch(
        entmax_gradients.query_gradient, (rows,), chosen, of_query.warps, of_query.registers
    )
    call = Call(by_rows=by_rows, query=query)
    of_keys = options.needs[1] or options.needs[2]
    if of_keys or tail["RANGE"]:
        own = tail | {"SPAN": of_key.block // TILE, "NORMS": tail["RANGE"]}
        own |= {"length": q_tiles, "others": k_tiles, "own_step": 1, "step": k_tiles}
        call.by_columns = _launch(entmax_gradients.list_tiles, (columns,), own, 4)
    if of_keys:
        grid = (columns // heads * operands["k"].shape[1],)
        chosen = tail | {"BN": of_key.block, "STAGES": of_key.stages}
        call.key = _launch(
            entmax_gradients.key_gradient, grid, chosen, of_key.warps, of_key.registers
        )
    return call


def _kind(tail: dict[str, Any]) -> str:
    """The row of `FORWARD` and `GRADIENTS`."""
    if tail["MODE"]:
        return "float32"
    return "wide half" if max(tail["D0"], tail["V0"]) > 64 else "half"


def _forward_tail(tuning: Tuning, options: Options) -> dict[str, Any]:
    """What the forward takes beside the arguments that the launches share."""
    top, step, out = tuning.stages
    halves = options.alpha == 1.5
    return {
        "BM": tuning.rows, "BN": tuning.keys, "GROUPS": tuning.groups, "TOP_STAGES": top,
        "STEP_STAGES": step, "OUT_STAGES": out, "STEPS": STEPS, "COUNT": halves and tuning.count,
        "CLOSE": tuning.close if halves else 0.0, "WITHIN": tuning.within,
    }  # fmt: skip


def _launch(
    kernel: Any, grid: tuple[int, ...], tail: dict[str, Any], warps: int, registers: int = 0
) -> Launch:
    settings = {"num_warps": warps, "num_stages": 1}
    if registers:
        settings["maxnreg"] = registers
    return Launch(kernel, grid, {n: tail[n] for n in kernel.arg_names if n in tail}, settings)


def _tail(
    operands: dict[str, Tensor], mask: Tensor | None, head_alpha: Tensor | None, options: Options
) -> dict[str, Any]:
    """The arguments that the launches share, by name."""
    q, k, v = (operands[name] for name in "qkv")
    read = tuple(operands[name] for name in "qkvg" if name in operands)
    step, unit_d = layout.row_unit(read)
    half = q.dtype != torch.float32
    powers = {1.5: 2, 2.0: 1}
    alpha_b, alpha_h = (0, 0)
    if head_alpha is not None:
        alpha_b, alpha_h = (
            0 if size == 1 else stride
            for size, stride in zip(head_alpha.shape[:2], head_alpha.stride()[:2], strict=True)
        )
    tail: dict[str, Any] = {
        "heads": q.shape[1], "group": q.shape[1] // k.shape[1], "batch": q.shape[0],
        "n_q": q.shape[2], "n_k": k.shape[2], "scale": float(options.scale),
        "alpha": float(options.alpha), "log_keys": math.log(k.shape[2]),
        "alpha_b": alpha_b, "alpha_h": alpha_h, **layout.mask_strides(mask), **_NOT_PACKED,
        "MODE": 0 if half else MODES[options.precision],
        "POWER": 0 if head_alpha is not None else powers.get(options.alpha, 0),
        "OF_HEADS": head_alpha is not None, "MASK": layout.mask_kind(mask),
        "FOLD": layout.mask_kind(mask) < 2 and _FOLDED < options.scale < 1 / _FOLDED,
        "CAUSAL": options.is_causal, "BM": TILE, "BN": TILE, "STEP": step, "UNIT_D": unit_d,
        "D": q.shape[3], "D0": layout.padded(q.shape[3]),
        "DV": v.shape[3], "V0": layout.padded(v.shape[3]),
    }  # fmt: skip
    for name, t in operands.items():
        tail |= layout.strides(name, t, step if name in "qkvg" else 1)
    if options.needs:
        wants = dict(
            zip(("WANT_Q", "WANT_K", "WANT_V", "", "WANT_ALPHA"), options.needs, strict=True)
        )
        tail |= {name: wanted for name, wanted in wants.items() if name}
        tail["RANGE"] = q.dtype == torch.float16 and tail["POWER"] == 2
        tail["CHUNK"] = CHUNK
    return tail
