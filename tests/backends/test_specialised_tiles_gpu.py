"""Every warp-specialised tile of sm_90 is exact, whatever the table would choose: by twice the
error of PyTorch's kernel, with the same bits in every call."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from elsa_core.backends.triton.attention import planner, tiling
from elsa_core.backends.triton.shared import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not device.specializes(torch.device("cuda", 0)),
        reason="needs a GPU of sm_90 and a Triton whose Gluon is known",
    ),
]
BAND = 2.5e-7


def tile(block_m: int, block_n: int, warps: int, stages: int, registers: int, dim: int,
         few: bool = False) -> tiling.Tile:  # fmt: skip
    return tiling.Tile(
        "split", dim, None, None, block_m, block_n, warps, stages, not few, 256, registers, True,
        True,
    )  # fmt: skip


# Keys in a loop, the operands split ahead; and all keys on chip.
LONG = [tile(64, 64, 4, 2, 128, 64), tile(128, 64, 4, 3, 0, 64), tile(128, 64, 4, 2, 0, 128),
        tile(128, 128, 4, 2, 0, 64)]  # fmt: skip
FEW = [tile(64, 64, 4, 1, 0, 64, True), tile(128, 64, 8, 1, 0, 64, True),
       tile(256, 64, 16, 1, 0, 64, True), tile(64, 64, 4, 1, 0, 32, True),
       tile(256, 64, 16, 1, 0, 32, True)]  # fmt: skip
IDS = {id(t): f"{t.block_m}x{t.block_n}, {t.warps} warps, {t.dim}" for t in (*LONG, *FEW)}


def attention(own: tiling.Tile, q: Tensor, k: Tensor, v: Tensor, parts: int = 1,
              **given: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """On one tile, with the keys in so many parts."""
    keys, chunk = k.shape[2], 256
    if own.ahead:
        tiles = -(-keys // own.block_n)
        chunk = -(-tiles // parts) * own.block_n
    plan = tiling.Plan(own, max(1, -(-keys // chunk)), chunk)
    scale = given.get("scale", q.shape[3] ** -0.5)
    call = planner.plan_call(q, k, v, None, given.get("causal", False), scale, "strict", tiles=plan)
    torch.full((1 << 24,), math.nan, device="cuda")  # what is allocated next
    return planner.execute(call, q, k, v, None)


def agree(own: tiling.Tile, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> None:
    out, lse = attention(own, q, k, v, **given)
    options = {"is_causal": given.get("causal", False), "scale": given.get("scale")}
    groups = q.shape[1] // k.shape[1]
    wide = [q, *(t.repeat_interleave(groups, 1) for t in (k, v))]
    exact = F.scaled_dot_product_attention(*(t.double() for t in wide), **options)
    peer = F.scaled_dot_product_attention(*(t.contiguous() for t in wide), **options)
    error, of_peer = (float((t - exact).norm() / exact.norm()) for t in (out, peer))
    assert out.isfinite().all() and lse.isfinite().all()
    assert error <= 2 * of_peer + BAND, f"{error:.2e} against {of_peer:.2e}"
    again = attention(own, q, k, v, **given)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def tensors(b: int, h: int, hk: int, n: int, m: int, d: int, dv: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(n + m)
    sizes = ((b, h, n, d), (b, hk, m, d), (b, hk, m, dv or d))
    return [torch.randn(s, device="cuda", generator=generator) for s in sizes]


@pytest.mark.parametrize("own", [*LONG, *FEW], ids=lambda t: IDS[id(t)])
def test_lengths_and_forms(own: tiling.Tile) -> None:
    """Odd lengths, grouped heads, cross attention, padded head dimensions, scales, strides."""
    lengths = (2, 63, 64, 65, 129, 197, 577, 1025) if own.ahead else (2, 17, 64, 81, 129, 197, 208)
    for n, causal in product(lengths, (False, True)):
        agree(own, *tensors(2, 3, 3, n, n, own.dim), causal=causal)
    agree(own, *tensors(2, 6, 2, 200, 200, own.dim))
    agree(own, *tensors(1, 4, 4, 900, 70, own.dim))
    agree(own, *tensors(1, 2, 2, 200, 200, own.dim - 4))
    agree(own, *tensors(1, 2, 2, 200, 200, own.dim, own.dim // 2))
    for scale in (0.0, -0.3, 1.0, 1e-30):
        agree(own, *tensors(1, 2, 2, 200, 200, own.dim), scale=scale)
    rows = torch.randn(2, 200, 3, 4, own.dim, device="cuda").permute(2, 0, 3, 1, 4)
    agree(own, *rows.unbind(0))


@pytest.mark.parametrize("own", LONG, ids=lambda t: IDS[id(t)])
def test_parts_of_the_keys_are_merged(own: tiling.Tile) -> None:
    for parts, causal in product((2, 3, 5), (False, True)):
        agree(own, *tensors(1, 2, 2, 700, 700, own.dim), parts=parts, causal=causal)


@pytest.mark.parametrize("own", [*LONG, *FEW], ids=lambda t: IDS[id(t)])
def test_what_a_split_does_not_hold_is_folded_again(own: tiling.Tile) -> None:
    """Rows far apart in size: float16 halves cannot hold both."""
    n = 300 if own.ahead else 200
    for row, operand, causal in product((0, 64, n - 1), range(3), (False, True)):
        given = tensors(2, 2, 2, n, n, own.dim)
        given[operand][1, 1, row] *= 1e-12
        agree(own, *given, causal=causal)


@pytest.mark.parametrize("own", [*LONG, *FEW], ids=lambda t: IDS[id(t)])
def test_nan_stays_in_its_row(own: tiling.Tile) -> None:
    q, k, v = tensors(1, 2, 2, 200, 200, own.dim)
    for bad in (math.nan, math.inf):
        broken = q.clone()
        broken[0, 0, 70, 3] = bad
        out = attention(own, broken, k, v)[0]
        good = torch.arange(200, device="cuda") != 70
        assert not out[0, 0, 70].isfinite().any()
        assert out[0, 0, good].isfinite().all() and out[0, 1].isfinite().all()


@pytest.mark.parametrize("own", [*LONG, *FEW], ids=lambda t: IDS[id(t)])
def test_repeats_are_equal_bit_by_bit(own: tiling.Tile) -> None:
    """A race between the warpgroups would show as a difference."""
    n = 1025 if own.ahead else 197
    given = tensors(8, 12, 12, n, n, own.dim)
    first = attention(own, *given)
    for _ in range(50):
        assert all(map(torch.equal, first, attention(own, *given)))
