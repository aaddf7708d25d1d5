"""The oracle is attention in float64; the paper's reference and Table 9 follow from it."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elsa_core import reference
from elsa_core.errors import ArgumentError
from elsa_core.monoid import finalize, lift, tree
from elsa_core.reference import algorithm2, attention, drift

INF = float("inf")
LENGTHS = {"regular": 197, "long": 2048, "stress": 577}  # tokens of the scenarios of Table 9


def probabilities(
    q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -INF)
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1).nan_to_num()


def scenario(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value; "stress": sharp logits, an outlier channel, one dominant key, rows that
    attend to all keys, values of very different size."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, LENGTHS[name], 64)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    if name == "stress":
        q *= 4.0
        q[..., 0] *= 8.0
        k[..., 0] *= 2.0
        q[..., 3::17, :] = 0.0
        k[..., shape[2] // 3, :] = 3.0 * q[..., 0, :] / q[..., 0, :].norm(dim=-1, keepdim=True)
        v *= torch.logspace(-1, 1, 64, dtype=torch.float64)
    return [t.to(dtype) for t in (q, k, v)]


def inputs(b: int = 2, h: int = 4, nq: int = 7, nk: int = 9, d: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((b, h, nq, d), (b, h, nk, d), (b, h, nk, d + 3))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def masks(kind: str, nq: int, nk: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    if kind == "bool":
        mask = torch.rand(2, 1, nq, nk, generator=generator) > 0.3
        mask[..., 0] = True
        return mask
    if kind == "additive":
        return torch.randn(1, 4, 1, nk, generator=generator)
    return None


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("scale", [None, 0.0, 0.7])
def test_oracle_is_sdpa_in_float64(kind: str, scale: float | None) -> None:
    q, k, v = inputs()
    mask = masks(kind, 7, 9)
    out, lse = attention(q, k, v, mask, scale=scale)
    sdpa_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    expected = F.scaled_dot_product_attention(q, k, v, sdpa_mask, scale=scale)
    torch.testing.assert_close(out, expected)
    assert out.dtype == lse.dtype == torch.float64
    p = probabilities(q, k, mask, scale=scale)
    torch.testing.assert_close(p @ v, expected)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))


@pytest.mark.parametrize(("nq", "nk"), [(7, 9), (9, 7), (1, 5)])
def test_causal_is_aligned_to_the_top_left(nq: int, nk: int) -> None:
    q, k, v = inputs(nq=nq, nk=nk)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, is_causal=True)[0], expected)


def test_mask_and_causal_together() -> None:
    q, k, v = inputs()
    mask = masks("bool", 7, 9)
    assert mask is not None
    both = mask & torch.ones(7, 9, dtype=torch.bool).tril()
    assert torch.equal(attention(q, k, v, mask, is_causal=True)[0], attention(q, k, v, both)[0])


def test_grouped_queries_share_key_heads() -> None:
    q, k, v = inputs()
    k, v = k[:, :2], v[:, :2]
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v)[0], expected)
    with pytest.raises(ArgumentError, match="4 heads cannot share 3"):
        attention(q, torch.cat([k, k[:, :1]], 1), torch.cat([v, v[:, :1]], 1))


def test_rows_without_a_key_give_zeros() -> None:
    q, k, v = inputs()
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[3] = False
    for given in (mask, torch.zeros(7, 9).masked_fill(~mask, -INF)):
        out, lse = attention(q, k, v, given)
        assert bool((out[..., 3, :] == 0).all()) and bool((lse[..., 3] == -INF).all())
        assert bool(lse[..., 4].isfinite().all())
        assert bool((probabilities(q, k, given)[..., 3, :] == 0).all())
    out, lse = attention(q, k[..., :0, :], v[..., :0, :])
    assert out.shape == (2, 4, 7, 11) and bool((out == 0).all()) and bool((lse == -INF).all())
    out, lse = attention(q[:, :, :0], k, v)
    assert out.shape == (2, 4, 0, 11) and lse.shape == (2, 4, 0)


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    mask = masks("bool", 7, 9)
    whole = attention(q, k, v, mask, is_causal=True)
    monkeypatch.setattr(reference, "_CHUNK_SCORES", 2 * 4 * 9 * 3)
    for got, want in zip(attention(q, k, v, mask, is_causal=True), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-15)


def test_oracle_is_differentiable() -> None:
    q, k, v = (t[:1, :1].requires_grad_() for t in inputs())
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[2] = False
    mask[3, 4:] = False
    assert torch.autograd.gradcheck(lambda *t: attention(*t, mask)[0], (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_algorithm_2_follows_the_oracle(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in inputs())
    p, y = algorithm2(q, k, v)
    assert p.dtype == y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 16 * torch.finfo(p.dtype).eps
    torch.testing.assert_close(p.double(), probabilities(q, k), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(y.double(), attention(q, k, v)[0], rtol=tolerance, atol=tolerance)


def test_drift_of_known_differences() -> None:
    p_ref = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.5, 0.3]])
    y_ref = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    y = torch.tensor([[3.0, 4.5], [0.0, 0.0]])
    found = drift(p, p_ref, y, y_ref)
    assert found.p_max_abs is not None and found.p_jensen_shannon is not None
    assert found.p_max_abs.value == pytest.approx(0.2) and found.p_max_abs.median == 0
    assert found.p_argmax_rate is not None and found.p_argmax_rate.value == 0.5
    assert found.y_max_abs.value == 0.5
    assert found.y_relative_l2.value == pytest.approx(0.1) == found.y_relative_l2.p99
    entropy = 0.5 * (0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)) * 2
    assert found.p_jensen_shannon.value == pytest.approx(entropy / 2, rel=1e-6)


def test_drift_of_extremes() -> None:
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    apart = drift(a, b, a, b)
    assert apart.p_jensen_shannon is not None
    assert apart.p_jensen_shannon.value == pytest.approx(math.log(2))
    tie = drift(torch.tensor([[0.4, 0.6]]), torch.tensor([[0.5, 0.5]]), a, a)
    assert tie.p_argmax_rate is not None and tie.p_argmax_rate.value == 0
    lost = drift(None, None, a * math.nan, a)
    assert lost.p_max_abs is None
    document = json.loads(json.dumps(lost.to_dict(), allow_nan=False))
    assert document["y_max_abs"]["value"] is None and document["p_max_abs"] is None
    with pytest.raises(ArgumentError, match="differs from the reference"):
        drift(None, None, a, a[:, :1])
    with pytest.raises(ArgumentError, match="both p and p_ref"):
        drift(a, None, a, a)


def by_blocks(q: Tensor, k: Tensor, v: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """P and Y from the monoid: blocks of 128 keys, merged by a tree (the paper's Figure 7)."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    pairs = zip(scores.split(block, -1), v.unsqueeze(-3).split(block, -2), strict=True)
    state = tree([lift(s, values) for s, values in pairs])
    p = torch.exp(scores - state.m.unsqueeze(-1)) / state.S.unsqueeze(-1)
    return p, finalize(state)[0]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("regular", torch.float64), ("stress", torch.float64), *((n, torch.float32) for n in LENGTHS)],
)
def test_table_9(name: str, dtype: torch.dtype) -> None:
    """Argmax disagreement 0 in all scenarios; in float64 everything is at the level of 1e-15."""
    limit = 1e-14 if dtype == torch.float64 else 8e-6
    q, k, v = scenario(name, dtype)
    p, y = by_blocks(q, k, v)
    found = drift(p, probabilities(q, k), y, attention(q, k, v)[0])
    assert found.p_argmax_rate is not None and found.p_argmax_rate.value == 0
    for spread in (found.p_relative_l2, found.y_relative_l2, found.p_max_abs):
        assert spread is not None and spread.median <= spread.p95 <= spread.p99 <= limit
    assert found.p_jensen_shannon is not None and found.p_jensen_shannon.p95 <= 1e-11
    assert found.y_max_abs.p95 <= 10 * limit
