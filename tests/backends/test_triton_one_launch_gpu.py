"""The one-launch kernels for few keys on a real GPU, whatever the table says, by twice the peer's
error.
"""

from __future__ import annotations

import dataclasses

import pytest
import test_triton_gpu as plain
import torch

pytest.importorskip("triton")

from elsa_core.backends.triton.attention import planner, tiling
from elsa_core.backends.triton.shared import device
from elsa_core.backends.triton.shared.plans import PlanCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not device.specializes(torch.device("cuda", 0)),
        reason="needs a GPU of sm_90 and a Triton whose Gluon is known",
    ),
]


TILES = [(64, 64, 4), (64, 64, 8), (128, 64, 8), (256, 64, 16), (64, 32, 4), (256, 32, 16)]


@pytest.fixture(params=TILES, ids=str)
def tile(request, monkeypatch):
    """One tile serves every call of the test that it takes: (block_m, the largest head dimension,
    warps). What two warpgroups do not share goes to one.
    """
    block_m, dim, warps = request.param
    base = tiling.Tile("split", dim, None, None, block_m, 64, 4, 1, False, 256, 0, True, True)
    tiles = [dataclasses.replace(base, warps=w) for w in (warps, block_m // 16)]

    def plan(shape, mode, table, *, specialized, **more):
        assert specialized and mode == "split" and shape.keys <= tiling.ONE_LAUNCH_KEYS
        if not tiles[0].two_warpgroups or tiles[0].serves(mode, dim, shape):
            return tiling.Plan(tiles[0], 1, 256)
        return tiling.Plan(tiles[1], 1, 256)

    monkeypatch.setattr(tiling, "plan", plan)
    monkeypatch.setattr(planner, "PLANS", PlanCache(100))
    return block_m, dim, warps


def tensors(b, h, hk, n, m, d, dv=None, seed=0):
    return plain.tensors(b, h, hk, n, m, d, dv or d, torch.float32, seed)


@pytest.mark.parametrize("n", [2, 17, 63, 64, 65, 80, 81, 128, 129, 145, 192, 197, 208, 209, 256])
def test_lengths(tile, n):
    for causal in (False, True):
        plain.agree(*tensors(2, 3, 3, n, n, tile[1]), causal=causal)


def test_forms(tile):
    """Grouped heads, cross attention, padded and unequal head dimensions, scales, strides."""
    dim = tile[1]
    plain.agree(*tensors(2, 6, 2, 200, 200, dim))
    plain.agree(*tensors(1, 4, 4, 70, 250, dim))
    plain.agree(*tensors(1, 4, 4, 900, 70, dim))
    plain.agree(*tensors(1, 4, 4, 257, 1, dim))
    plain.agree(*tensors(1, 2, 2, 200, 200, dim - 4))
    if dim == 64:
        plain.agree(*tensors(1, 2, 2, 200, 200, 64, 32))
        plain.agree(*tensors(1, 2, 2, 200, 200, 32, 64))
    for scale in (0.0, -0.3, 1.0, 1e-30):
        plain.agree(*tensors(1, 2, 2, 200, 200, dim), scale=scale)
    packed = torch.randn(2, 200, 3, 4, dim, device="cuda").permute(2, 0, 3, 1, 4)
    plain.agree(*packed.unbind(0))


@pytest.mark.parametrize("row", [0, 15, 63, 64, 150, 196])
@pytest.mark.parametrize("operand", range(3))
@pytest.mark.parametrize("factor", [1e-12, 1e12, 1e30])
def test_what_fails_the_guard_is_folded_again(tile, row, operand, factor):
    """Rows far apart in size: float16 halves cannot hold both."""
    for causal in (False, True):
        given = [t.clone() for t in tensors(2, 2, 2, 197, 197, tile[1])]
        given[operand][1, 1, row] *= factor
        plain.agree(*given, causal=causal)


@pytest.mark.parametrize("operand", range(3))
@pytest.mark.parametrize("power", range(8, 30, 3))
def test_channels_far_apart(tile, operand, power):
    """A channel that outweighs the others, before the guard and beyond it."""
    given = [t.clone() for t in tensors(2, 2, 2, 197, 197, tile[1])]
    given[operand][..., 5] *= 2.0**power
    plain.agree(*given)


def test_zeros_and_sizes(tile):
    q, k, v = tensors(2, 2, 2, 130, 130, tile[1])
    for factor in (0.0, 1e-38, 1e-42):
        plain.agree(q * factor, k, v)
        plain.agree(q, k * factor, v)
    for factor in (1e-30, 1e30):
        plain.agree(q, k, v * factor)
    assert (plain.attention(q, k, v * 0)[0] == 0).all()


def test_nan_and_infinity_stay_in_their_rows(tile):
    plain.stays_in_its_rows(*tensors(1, 2, 2, 200, 200, tile[1]))


def test_repeats_are_equal_bit_by_bit(tile):
    """A race between the warpgroups would show as a difference."""
    plain.repeats(*tensors(16, 12, 12, 197, 197, tile[1]), times=100)


def test_in_a_graph(tile):
    plain.replays(*tensors(2, 4, 4, 197, 197, tile[1]))


@pytest.mark.parametrize("precision", ["strict", "lean", "turbo"])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_table_serves_it(batch, precision):
    """The shipped table hands short calls to it, and `explain` says so."""
    import elsa_core

    q, k, v = tensors(batch, 12, 12, 197, 197, 64)
    schedule = str(elsa_core.explain(q, k, v, precision=precision))
    assert "all keys on chip" in schedule
    assert ("two warpgroups" in schedule) is (batch == 1)
    assert ("strict's products" in schedule) is (precision == "turbo")
    plain.agree(q, k, v, precision=precision)
