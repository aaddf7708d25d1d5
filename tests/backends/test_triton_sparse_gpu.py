"""The kernel of `elsa::sparse_attention` on a real GPU: against float64."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from elsa_core import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# a rounding band of a few units in the last place
BAND = {torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NONE = -math.inf


def tensors(shape, dtype, *, runs=0, late=1.0, seed=0):
    b, h, hk, n, m, d, dv = shape
    g = torch.Generator("cuda").manual_seed(seed)
    sizes = ((b, h, n, d), (b, hk, m, d), (b, hk, m, dv))
    q, k, v = (torch.randn(size, device="cuda", generator=g) for size in sizes)
    if runs:  # of alike tokens: each sees little of the others
        centres = 24 * torch.eye(d, device="cuda")[:runs]
        of = [torch.arange(t.shape[2], device="cuda") * runs // t.shape[2] for t in (q, k)]
        q, k = (0.1 * t + centres[i] for t, i in zip((q, k), of, strict=True))
    k[:, :, -3:] *= late
    return [t.to(dtype) for t in (q, k, v)]


def agrees(q, k, v, mask=None, *, causal=False, scale=None, threshold=0.0, relief=0):
    """The counts, where the error is at most twice that of float32 products in PyTorch."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    terms = (q, k, v, mask, causal, scale, "strict", threshold, relief)
    # what the allocator hands out next is NaN: an element never written shows
    torch.full((1 << 24,), math.nan, device="cuda")
    found = torch.ops.elsa.sparse_attention(*terms)
    again = torch.ops.elsa.sparse_attention(*terms)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    out, lse, counts = found
    exact, logs = reference.attention(q, k, v, mask, is_causal=causal, scale=scale)
    near = [t.float() for t in (q, k, v)]
    peer = torch.ops.elsa.attention_eager(*near, mask, causal, scale, "strict")[0].to(q.dtype)
    error, limit = (((x.double() - exact).norm() / exact.norm()).item() for x in (out, peer))
    assert torch.isfinite(out).all()
    assert error <= 2 * limit + BAND[q.dtype], f"{error:.2e} against {limit:.2e}"
    seen = logs.isfinite()
    assert (out[~seen] == 0).all() and (lse[~seen] == -math.inf).all()
    assert ((lse.double() - logs)[seen].abs() <= 4e-6 * (1 + logs[seen].abs())).all()
    return counts.sum((0, 1)).tolist()


@pytest.mark.parametrize("relief", [1, 2, 4])
def test_each_part_of_relief(relief):
    agrees(*tensors((1, 2, 1, 333, 1025, 64, 64), torch.float32), threshold=NONE, relief=relief)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(BAND), ids=str)
def test_tiles_are_left_out(dtype, causal):
    given = tensors((1, 2, 2, 4096, 4096, 64, 64), dtype, runs=8)
    counts = agrees(*given, causal=causal, relief=7)
    # The maximum frozen after a causal row's few first keys is passed now and then: said, computed
    # again, and rare.
    assert counts[1] > 0.5 * counts[0] and counts[4] <= (0.01 * counts[0] if causal else 0)


@pytest.mark.parametrize("dtype", list(BAND), ids=str)
def test_a_frozen_maximum_that_is_passed(dtype):
    given = tensors((1, 2, 2, 300, 2000, 64, 64), dtype, late=60.0)
    assert agrees(*given, threshold=NONE, relief=4)[4] > 0
    agrees(*given, relief=7)
