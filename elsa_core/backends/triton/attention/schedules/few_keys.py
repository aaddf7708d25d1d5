"""The two schedules of few keys on sm_90: one launch with all keys on chip, by one warpgroup for 64
queries or by two.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from elsa_core.backends.triton.attention import tiling
from elsa_core.backends.triton.attention.schedules.record import (
    Call,
    Parts,
    Problem,
    Schedule,
    known,
)
from elsa_core.backends.triton.shared import device, layout
from elsa_core.backends.triton.shared.launch import Launch

# registers of a thread that queries, keys and values may take while `one_launch.py` splits them
SPLIT_REGISTERS = 160


def _serves_one(problem: Problem) -> bool:
    return problem.tile.one_launch and not problem.tile.two_warpgroups


def _serves_two(problem: Problem) -> bool:
    return problem.tile.two_warpgroups


def _tail(problem: Problem) -> dict[str, Any]:
    """The arguments that both kernels take."""
    q, k, v, shape = problem.query, problem.key, problem.value, problem.shape
    factors = layout.score_scale(problem.scale, "split")
    unit, _ = layout.row_unit((q, k, v))
    return {
        "heads": shape.heads, "group": shape.heads // shape.key_heads, "n_q": shape.queries,
        "n_k": shape.keys, "shift": (shape.keys - 1).bit_length(),
        "scale_exp": factors["scale_exp"], "scale": factors["scale"] * factors["flip"],
        **layout.strides("q", q, unit), **layout.strides("k", k, unit),
        **layout.strides("v", v, unit),
        "CAUSAL": problem.causal, "UNIT": unit, "BM": problem.tile.block_m,
        "D": shape.head_dim, "D0": tiling.blocks(shape.head_dim)[0],
        "DV": shape.value_dim, "V0": tiling.blocks(shape.value_dim)[0],
    }  # fmt: skip


def _parts(problem: Problem, kernel: Any, tail: dict[str, Any]) -> Parts:
    shape, tile = problem.shape, problem.tile
    programs = shape.batch * shape.heads * -(-shape.queries // tile.block_m)
    fold = Launch(kernel, (programs,), known(kernel, tail), {"num_warps": tile.warps})
    return Parts({"fold": fold})


def _plan_one(problem: Problem) -> Parts:
    from elsa_core.backends.triton.attention.one_launch import forward

    t, tail = problem.tile, _tail(problem)
    d0, v0 = tail["D0"], tail["V0"]
    # at least eight channels of a row for every lane
    keys = max(t.block_n, 1 << (problem.shape.keys - 1).bit_length(), t.warps * 256 // min(d0, v0))
    held = keys * (d0 + v0) + t.block_m * d0
    tail |= {
        "BN": t.block_n, "KEYS": keys, "TURNS": t.warps > 4 and device.takes_turns(),
        "TOGETHER": held <= SPLIT_REGISTERS * 32 * t.warps,
    }  # fmt: skip
    return _parts(problem, forward, tail)


def _plan_two(problem: Problem) -> Parts:
    from elsa_core.backends.triton.attention.two_warpgroups import forward

    keys = next(n for n in tiling.TWO_WARPGROUPS_KEYS if problem.shape.keys <= n)
    return _parts(problem, forward, {**_tail(problem), "KEYS": keys})


def _run(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = call.results(q)
    call.launches["fold"](q, k, v, out, lse)
    return out, lse


def _words(problem: Problem) -> str:
    text = f"one program per {problem.tile.block_m} queries, with all keys on chip"
    if problem.tile.two_warpgroups:
        text += ", two warpgroups each"
    if problem.mode == "single":
        text += "; strict's products, faster here in their one launch"
    return text


ONE_LAUNCH = Schedule("one_launch", _serves_one, _plan_one, _run, _words)
TWO_WARPGROUPS = Schedule("two_warpgroups", _serves_two, _plan_two, _run, _words)
