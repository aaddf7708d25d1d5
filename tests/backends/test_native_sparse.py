"""The CPU kernels of `elsa::sparse_attention`: tiles left out, and how maxima of rows are found."""

from __future__ import annotations

import math

import pytest
import torch
from native_kernels import call_apart, guarded, make, relative
from torch import Tensor

from elsa_core import reference
from elsa_core.backends import native
from elsa_core.skipping import exact_threshold

NONE, EXACT = -math.inf, 0.0
SUMMARIES, ORDER, FROZEN = 1, 2, 4
SEEN, LEFT_OUT, MAXIMA, RESCALED, AGAIN = range(5)


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    answer = native.load()
    assert answer.ok, answer.reason


def sparse(q, k, v, mask=None, *, causal=False, scale=None, threshold=EXACT, relief=0):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    terms = (q, k, v, mask, causal, scale, "strict", threshold, relief)
    torch.empty(q[..., :1].numel() * v.shape[-1], dtype=q.dtype).fill_(math.nan)  # what out may be
    out, lse, counts = torch.ops.elsa.sparse_attention(*terms)
    again = torch.ops.elsa.sparse_attention(*terms)
    assert all(torch.equal(x, y) for x, y in zip((out, lse, counts), again, strict=True))
    return out, lse, counts.sum((0, 1)).tolist()


def agrees(q, k, v, mask=None, *, causal=False, scale=None, threshold=EXACT, relief=0) -> list[int]:
    """The counts, where out and lse are as exact as those of the ordinary kernels."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, counts = sparse(
        q, k, v, mask, causal=causal, scale=scale, threshold=threshold, relief=relief
    )
    exact, logs = reference.attention(q, k, v, mask, is_causal=causal, scale=scale)
    theirs, their_lse = torch.ops.elsa.attention(q, k, v, mask, causal, scale, "strict")
    band = 2 * torch.finfo(q.dtype).eps
    assert torch.isfinite(out).all()
    assert relative(out, exact) <= 2 * relative(theirs, exact) + band
    seen = logs.isfinite()
    assert torch.equal(lse.isfinite(), seen) and (out[~seen] == 0).all()
    error, peer = ((x.double() - logs)[seen].abs().max() for x in (lse, their_lse))
    assert error <= 2 * peer + 2**-23 * (1 + logs[seen].abs().max())
    return counts


def heads(
    queries: int, keys: int, d: int = 32, dv: int = 40, sharp: float = 1.0, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = make(2, 4, queries, d), make(2, 2, keys, d, seed=1)
    return (q * sharp).to(dtype), k.to(dtype), make(2, 2, keys, dv, seed=2).to(dtype)


def clustered(keys: int, groups: int = 16, d: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of `groups` runs of neighbours, each about a direction of its own."""
    centres = 12 * torch.nn.functional.normalize(make(1, 1, groups, d), dim=-1)
    of = torch.arange(keys) * groups // keys
    q, k = (centres[:, :, of] + 0.1 * make(1, 1, keys, d, seed=s) for s in (1, 2))
    return q, k, make(1, 1, keys, d, seed=3)


@pytest.mark.parametrize("relief", range(8))
@pytest.mark.parametrize("lengths", [(1, 1), (7, 70), (197, 197), (150, 1411), (65, 2001)], ids=str)
def test_agrees_with_float64(lengths: tuple[int, int], relief: int) -> None:
    for sharp, threshold in ((1.0, NONE), (8.0, EXACT)):
        agrees(*heads(*lengths, sharp=sharp), threshold=threshold, relief=relief)
        if lengths[0] == lengths[1]:
            agrees(*heads(*lengths, sharp=sharp), causal=True, threshold=threshold, relief=relief)


@pytest.mark.parametrize("relief", [0, ORDER | FROZEN, 7])
def test_causal_rows_of_several_blocks(relief: int) -> None:
    q, k, v = (t[:1, :2] for t in heads(2100, 2100, sharp=2.0))
    for threshold in (NONE, EXACT):
        agrees(q, k, v, causal=True, threshold=threshold, relief=relief)


@pytest.mark.parametrize("relief", [0, 7])
@pytest.mark.parametrize("kind", ["bool", "rows without keys", "first keys hidden", "additive"])
def test_masks(kind: str, relief: int) -> None:
    q, k, v = heads(70, 1400, sharp=6.0)
    mask = make(2, 1, 70, 1400, seed=5) > -0.5
    if kind == "rows without keys":
        mask[:, :, 3:40] = False
    if kind == "first keys hidden":
        mask[..., :1300] = False
    if kind == "additive":
        mask = make(2, 1, 70, 1400, seed=5) * 4
    counts = agrees(q, k, v, mask, relief=relief)
    if kind == "first keys hidden":  # a tile that no row sees is left out
        assert counts[LEFT_OUT] >= counts[SEEN] // 2
        # and a maximum that was frozen before any key was seen is given up
        assert (counts[AGAIN] > 0) == (relief == 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relief", [0, 7])
def test_half_precision(dtype: torch.dtype, relief: int) -> None:
    q, k, v = (t.to(dtype) for t in clustered(1500))
    assert agrees(q, k, v, scale=0.5, relief=relief)[LEFT_OUT] > 0


@pytest.mark.parametrize("scale", [-0.4, 0.0, 1e-30, 3.0])
def test_scales(scale: float) -> None:
    for relief in (0, 7):
        agrees(*heads(40, 1400), scale=scale, relief=relief)


@pytest.mark.parametrize("relief", range(8))
def test_the_largest_scores_come_last(relief: int) -> None:
    """A frozen maximum is passed by hundreds of powers of two: those rows are folded again."""
    q, k, v = heads(100, 2000, sharp=20.0)
    k[:, :, -3:] *= 20
    counts = agrees(q, k, v, threshold=NONE, relief=relief)
    # the key of the largest norm is in the summary: then no row passes its maximum
    frozen = bool(relief & FROZEN) and not relief & (SUMMARIES | ORDER)
    if frozen:
        assert counts[AGAIN] > 0
    if not relief & FROZEN:
        assert counts[AGAIN] == 0


def test_equal_scores() -> None:
    """Of ties nothing is left out, and where all keys are alike the output is the mean."""
    q, k = torch.ones(1, 1, 33, 16), torch.ones(1, 1, 1500, 16)
    v = make(1, 1, 1500, 16)
    for relief in range(8):
        assert agrees(q, k, v, threshold=math.log2(0.5), relief=relief)[LEFT_OUT] == 0


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_left_out_is_beyond_rounding(causal: bool) -> None:
    """Runs of alike tokens: most tiles are left out, and no output moves by more than u / 4 of the
    largest value from what it is without that, beside the rounding of sums."""
    q, k, v = clustered(2048)
    dense, _, none = sparse(q, k, v, causal=causal, scale=1.0, threshold=NONE)
    out, _, counts = sparse(q, k, v, causal=causal, scale=1.0)
    assert counts[LEFT_OUT] > 0.4 * counts[SEEN] and none[LEFT_OUT] == 0
    # a maximum that is found early leaves more out
    _, _, early = sparse(q, k, v, causal=causal, scale=1.0, relief=SUMMARIES)
    _, _, local = sparse(q, k, v, causal=causal, scale=1.0, relief=ORDER)
    assert min(early[LEFT_OUT], local[LEFT_OUT]) > 1.1 * counts[LEFT_OUT]
    exact, _ = reference.attention(q, k, v, is_causal=causal, scale=1.0)
    rounding = (dense.double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= rounding + 2**-26 * v.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("above", [0, 1])
def test_the_exact_threshold(dtype: torch.dtype, above: int) -> None:
    """The hardest rows: every key but the first weighs what may just be left out, or twice that."""
    keys = 4096
    limit = exact_threshold(dtype, keys)
    q, k = torch.zeros(1, 1, 20, 16), torch.zeros(1, 1, keys, 16)
    q[..., 0], k[..., 64:, 0] = 1.0, limit + above
    v = torch.zeros(1, 1, keys, 16)
    v[..., 64:, :] = 1.0
    k[..., 1:64, 0] = -1000.0
    out, _, counts = sparse(q.to(dtype), k.to(dtype), v.to(dtype), scale=math.log(2.0) * 1.0000001)
    skipped = counts[LEFT_OUT] / counts[SEEN]
    assert skipped > 0.98 if above == 0 else skipped == 0.0
    true = (keys - 64) * 2.0 ** (limit + above)
    if above == 0:
        assert (out == 0).all() and true <= torch.finfo(dtype).eps / 8  # u / 4
    else:
        assert ((out.double() - true).abs() <= 0.02 * true).all()


def test_a_number_bounds_the_error() -> None:
    """What is left out weighs at most lambda each: the error is below 2 n lambda max |v|."""
    q, k, v = clustered(1500)
    q = 0.5 * q
    for number in (1e-5, 1e-3, 1e-2):
        out, lse, counts = sparse(q, k, v, threshold=math.log2(number))
        exact, logs = reference.attention(q, k, v)
        bound = 2 * 1500 * number * v.abs().max() + 1e-5
        assert (out.double() - exact).abs().max() <= bound
        assert ((logs - lse) >= -1e-5).all() and ((logs - lse) <= 1500 * number + 1e-5).all()
    assert counts[LEFT_OUT] > 0


@pytest.mark.parametrize("relief", range(8))
@pytest.mark.parametrize("kind", ["finfo.min", "-1e9", "ties at 2**33", "about 9e9"])
def test_scores_that_a_threshold_does_not_move(kind: str, relief: int) -> None:
    """reference + limit is the reference there: the tile of the maximum was left out."""
    q, k, v = make(1, 2, 150, 32), make(1, 2, 1400, 32, seed=1), make(1, 2, 1400, 40, seed=2)
    mask = None
    if kind == "ties at 2**33":
        q, k = torch.full_like(q, 2.0**14), torch.full_like(k, 2.0**14)
    elif kind == "about 9e9":
        q, k = 4e4 * q, 4e4 * k
    else:
        q[:, :, :70] = 0.0  # scores that are the mask alone
        mask = torch.zeros(1, 1, 150, 1400)
        mask[:, :, :70] = torch.finfo(torch.float32).min if kind == "finfo.min" else -1e9
    agrees(q, k, v, mask, scale=1.0, relief=relief)


def test_what_each_part_of_relief_removes() -> None:
    q, k, v = (t[:1, :2] for t in heads(640, 2560))
    plain, frozen, whole = (sparse(q, k, v, threshold=NONE, relief=r)[2] for r in (0, FROZEN, 7))
    assert plain[MAXIMA] == plain[SEEN] and plain[RESCALED] > 0
    assert frozen[MAXIMA] * 4 == frozen[SEEN] and frozen[RESCALED] == 0
    assert whole[MAXIMA] * 2 == whole[SEEN] and 0 < whole[RESCALED] < plain[RESCALED]
    assert plain[AGAIN] == frozen[AGAIN] == whole[AGAIN] == 0


def beside_the_fence() -> None:
    q, k, v = heads(30, 1400, sharp=6.0)
    for relief in (0, 7):
        agrees(*(guarded(t) for t in (q, k, v)), relief=relief)
        agrees(*(t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)))


def test_strides_and_the_last_byte() -> None:
    call_apart(beside_the_fence)


def test_wrong_terms_are_refused() -> None:
    q, k, v = heads(3, 5)
    with pytest.raises(RuntimeError, match="threshold must not be positive"):
        sparse(q, k, v, threshold=0.5)
    with pytest.raises(RuntimeError, match="relief 0 to 7"):
        sparse(q, k, v, relief=8)
