"""The warp-specialised kernel on a real GPU, whatever the table says, by twice the peer's error."""

from __future__ import annotations

import math
from itertools import product

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
# block_m, block_n, stages, registers, the largest head dimension
TILES = [(64, 64, 2, 128, 64), (128, 64, 3, 0, 64), (128, 64, 2, 0, 128), (128, 128, 2, 0, 64)]


@pytest.fixture(params=TILES, ids=lambda t: f"{t[0]}x{t[1]}x{t[2]}-{t[4]}")
def tile(request, monkeypatch):
    """One specialised tile serves every call of the test; the calls that it did serve."""
    block_m, block_n, stages, registers, dim = request.param
    only = tiling.Tile(
        "split", dim, None, None, block_m, block_n, 4, stages, True, 256, registers, True, True
    )
    parts = []

    def plan(shape, mode, table, *, specialized, **more):
        assert specialized and mode == "split"
        count = parts[0] if parts else 1
        tiles = -(-shape.keys // block_n)
        chunk = -(-tiles // count) * block_n
        return tiling.Plan(only, -(-shape.keys // chunk), chunk)

    monkeypatch.setattr(tiling, "plan", plan)
    monkeypatch.setattr(planner, "PLANS", PlanCache(100))
    return dim, parts


def tensors(b, h, hk, n, m, d, dv=None, seed=0):
    return plain.tensors(b, h, hk, n, m, d, dv or d, torch.float32, seed)


@pytest.mark.parametrize("n", [2, 63, 64, 65, 129, 197, 577, 1025])
def test_lengths(tile, n):
    dim, _ = tile
    for causal in (False, True):
        plain.agree(*tensors(2, 3, 3, n, n, dim), causal=causal)


def test_forms(tile):
    """Grouped heads, cross attention, padded and unequal head dimensions, scales, strides."""
    dim, _ = tile
    plain.agree(*tensors(2, 6, 2, 300, 300, dim))
    plain.agree(*tensors(1, 4, 4, 70, 900, dim))
    plain.agree(*tensors(1, 4, 4, 900, 70, dim))
    plain.agree(*tensors(1, 2, 2, 300, 300, dim - 4))
    plain.agree(*tensors(1, 2, 2, 300, 300, dim, dim // 2))
    plain.agree(*tensors(1, 2, 2, 300, 300, dim // 2, dim))
    for scale in (0.0, -0.3, 1.0, 1e-30):
        plain.agree(*tensors(1, 2, 2, 300, 300, dim), scale=scale)
    packed = torch.randn(2, 300, 3, 4, dim, device="cuda").permute(2, 0, 3, 1, 4)
    plain.agree(*packed.unbind(0))


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_partitions(tile, parts):
    dim, count = tile
    count.append(parts)
    for causal in (False, True):
        plain.agree(*tensors(1, 2, 2, 700, 700, dim), causal=causal)


@pytest.mark.parametrize("row", [0, 63, 64, 200, 299])
@pytest.mark.parametrize("operand", range(3))
def test_what_fails_the_guard_is_folded_again(tile, row, operand):
    """Rows far apart in size: float16 halves cannot hold both."""
    dim, count = tile
    for parts, causal in product((1, 2), (False, True)):
        count[:] = [parts]
        given = [t.clone() for t in tensors(2, 2, 2, 300, 300, dim)]
        given[operand][1, 1, row] *= 1e-12
        plain.agree(*given, causal=causal)


def test_nan_and_infinity_stay_in_their_rows(tile):
    plain.stays_in_its_rows(*tensors(1, 2, 2, 300, 300, tile[0]))


def test_nan_among_hidden_values_stays_hidden(tile):
    """Rows before a partition fold one tile of it, all of it hidden."""
    dim, count = tile
    count.append(2)
    q, k, v = tensors(1, 2, 2, 700, 700, dim)
    v[0, 0, 690, 3] = math.nan
    out = plain.attention(q, k, v, causal=True)[0]
    assert out[0, 0, :384].isfinite().all() and out[0, 1].isfinite().all()
    assert out[0, 0, 690:, 3].isnan().all()


def test_repeats_are_equal_bit_by_bit(tile):
    """A race between the warpgroups would show as a difference."""
    dim, count = tile
    for shape, parts in product(((4, 12, 12, 1025, 1025), (1, 8, 8, 4096, 4096)), (1, 2)):
        count[:] = [parts]
        plain.repeats(*tensors(*shape, dim), times=50)


def test_in_a_graph(tile):
    plain.replays(*tensors(2, 4, 4, 577, 577, tile[0]))


def test_the_table_serves_it():
    """The shipped table hands long and full calls to it, and `explain` says so."""
    import elsa_core

    q, k, v = tensors(8, 12, 12, 1025, 1025, 64)
    assert "warps of their own" in str(elsa_core.explain(q, k, v))
