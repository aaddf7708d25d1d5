"""The CPU kernels against the float64 oracle.

`test_instruction_sets` runs the file again on the other kernels.

The criterion is relative: at most twice the error of PyTorch's own operator, plus rounding.
"""

from __future__ import annotations

import math
import statistics
import sys

import pytest
import torch
import torch.nn.functional as F
from native_kernels import ULPS, call_apart, guarded, make, once, relative, run
from torch import Tensor

import elsa_core  # noqa: F401  (defines the operator)
from elsa_core import reference
from elsa_core.backends import native


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    answer = native.load()
    assert answer.ok, answer.reason  # a machine that tests elsa has a compiler


def operands(
    queries: int, keys: int, dim: int, value_dim: int, dtype: torch.dtype = torch.float32, **heads
) -> tuple[Tensor, Tensor, Tensor]:
    batch, h, kv = heads.get("batch", 2), heads.get("heads", 3), heads.get("kv_heads")
    kv = kv or h
    q = make(batch, h, queries, dim, dtype=dtype, seed=queries)
    k = make(batch, kv, keys, dim, dtype=dtype, seed=keys + 1)
    return q, k, make(batch, kv, keys, value_dim, dtype=dtype, seed=dim + 2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.elsa.attention(q, k, v, mask, causal, scale, "strict")


def peer(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """PyTorch's operator in the same dtype, with zeros where a row sees no key."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if causal and mask is not None:
        triangle = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        additive = mask if mask.dtype != torch.bool else torch.zeros(()).where(mask, -torch.inf)
        mask, causal = additive.to(q.dtype).masked_fill(~triangle, -torch.inf), False
    elif mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return out.nan_to_num(0.0)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    exact, exact_lse = reference.attention(q, k, v, mask, causal, scale)
    out, lse = attention(q, k, v, mask, causal, scale)
    assert out.shape == exact.shape
    assert out.dtype == q.dtype
    assert out.transpose(1, 2).is_contiguous()
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    rounding = ULPS * torch.finfo(q.dtype).eps
    error, peers = relative(out, exact), relative(peer(q, k, v, mask, causal, scale), exact)
    assert error <= 2 * peers + rounding, (error, peers)
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    empty = exact_lse.isneginf()
    assert not out[empty].any()
    finite = lse[~empty].double() - exact_lse[~empty]
    # The dot products of the scores carry the operands' rounding, in proportion to their length.
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    spread = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max() * abs(scale)
    assert finite.abs().max() <= torch.finfo(torch.float32).eps * (ULPS + 4 * spread)
    return out, lse


LENGTHS = [1, 7, 16, 49, 63, 64, 100, 197, 577]
DIMS = [1, 3, 16, 32, 64, 72, 80, 88, 96, 128, 256]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dim", DIMS)
def test_lengths_and_head_dims(length: int, dim: int) -> None:
    check(*operands(length, length, dim, dim, batch=1, heads=2))


@pytest.mark.parametrize("queries", [1, 5, 13, 50, 197])
@pytest.mark.parametrize("keys", [1, 3, 17, 65, 200, 641, 1300])
def test_queries_and_keys_of_different_length(queries: int, keys: int) -> None:
    check(*operands(queries, keys, 24, 40))
    check(*operands(queries, keys, 64, 5), causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (7, 5), (80, 33), (3, 256)])
def test_dtypes_and_value_dims(dtype: torch.dtype, dim: int, value_dim: int) -> None:
    check(*operands(53, 77, dim, value_dim, dtype))
    check(*operands(5, 1291, dim, value_dim, dtype))


def test_grouped_heads() -> None:
    check(*operands(50, 70, 32, 32, heads=6, kv_heads=2))
    check(*operands(197, 197, 32, 16, heads=4, kv_heads=1), causal=True)


def masks(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    full = make(batch, heads, rows, keys, seed=9)
    padding = torch.rand(batch, 1, 1, keys, generator=torch.Generator().manual_seed(3)) > 0.3
    padding[..., 0] = True
    hole = (full > 0.3).clone()
    hole[0, 0, rows // 2] = False  # a row that sees nothing
    return {
        "additive": full,
        "per head": full[:1],
        "per batch": full[:, :1],
        "per row": full[..., :1],
        "per key": full[:, :, :1],
        "one": full[:1, :1, :1, :1],
        "boolean": hole,
        "padding": padding,
        "query's dtype": full.to(q.dtype),
        "minus infinity": torch.zeros_like(full).masked_fill(~hole, -torch.inf),
        "transposed": make(batch, heads, keys, rows, seed=9).transpose(2, 3),
        "expanded": full[:1, :1].expand(batch, heads, rows, keys),
        "sliced": make(batch, heads, rows + 3, keys + 5, seed=9)[:, :, 2:-1, 4:-1],
        "strided boolean": (make(batch, heads, rows, 2 * keys, seed=9) > 0)[..., ::2],
    }


@pytest.mark.parametrize("length", [2100, 32768])
def test_causal_rows_before_a_short_last_block(length: int) -> None:
    """Row blocks were cut otherwise in a shorter last block of keys, so that rows before its first
    key were never written: 24 of 32768 with AVX-512."""
    q, k, v = (make(1, 1, length, 4, seed=seed) for seed in range(3))
    torch.empty(length * 4).fill_(math.nan)  # what out may be
    out, lse = attention(q, k, v, causal=True)
    cut = native.cut(q, k, v, None, is_causal=True)
    first = (cut.key_blocks - 1) * cut.key_block  # of the last block
    rows = torch.arange(first - 64, min(length, first + 64))
    scores = q[:, :, rows].double() @ k.double().mT / 2
    scores = scores.masked_fill(torch.arange(length) > rows[:, None], -math.inf)
    exact = scores.softmax(-1) @ v.double()
    assert relative(out[:, :, rows], exact) <= 1e-6
    assert (lse[:, :, rows].double() - scores.logsumexp(-1)).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", list(masks(torch.zeros(2, 2, 4, 1), torch.zeros(2, 2, 4, 1))))
@pytest.mark.parametrize("causal", [False, True])
def test_masks(kind: str, causal: bool) -> None:
    for dtype, rows, keys in ((torch.float32, 61, 49), (torch.bfloat16, 20, 700)):
        q, k, v = operands(rows, keys, 16, 24, dtype)
        check(q, k, v, masks(q, k)[kind], causal)


@once
@pytest.mark.parametrize(
    ("queries", "keys", "dim"),
    [(1, 50, 64), (1, 50, 256), (1, 197, 64), (1, 197, 128), (1, 197, 256), (2, 197, 256),
     (4, 50, 128), (4, 197, 256), (8, 197, 256), (197, 197, 64), (197, 197, 200), (197, 197, 256),
     (49, 49, 256)],
)  # fmt: skip
def test_strict_rounds_as_little_as_pytorch(queries: int, keys: int, dim: int) -> None:
    """One chain of sums over a long head_dim had 2.6 times the error; the median counts.

    PyTorch's products of few rows have short chains of their own, and so must these.
    """
    ratios = []
    for seed in range(7):
        draw = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 4, n, dim, generator=draw) for n in (queries, keys, keys))
        exact, _ = reference.attention(q, k, v)
        peers = relative(F.scaled_dot_product_attention(q, k, v), exact)
        ratios.append(relative(attention(q, k, v)[0], exact) / peers)
    assert statistics.median(ratios) <= 1.25, ratios


@pytest.mark.parametrize("keys", [18, 49, 197, 700])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_key_that_a_boolean_mask_hides_may_hold_anything(
    keys: int, bad: float, dtype: torch.dtype
) -> None:
    """Minus infinity added to NaN is NaN: the mask must replace the score."""
    q, k, v = operands(20, keys, 16, 16, dtype)
    for at in (0, 3, keys - 1):  # the last one lies in a narrow panel
        mask = torch.ones(1, 1, 20, keys, dtype=torch.bool)
        mask[..., at] = False
        out, lse = attention(q, k, v, mask)
        spoilt = k.clone()
        spoilt[..., at, :] = bad
        again, lse_again = attention(q, spoilt, v, mask)
        assert torch.equal(again, out)
        assert torch.equal(lse_again, lse)


def test_a_row_that_sees_nothing_is_zero_whatever_the_values_hold() -> None:
    q, k, v = operands(20, 30, 16, 16)
    v[..., 3, :] = torch.inf
    mask = torch.ones(1, 1, 20, 30, dtype=torch.bool)
    mask[..., 3] = False
    mask[:, :, 7] = False
    out, lse = attention(q, k, v, mask)
    assert not out[:, :, 7].any()
    assert lse[:, :, 7].isneginf().all()
    assert lse[:, :, 8].isfinite().all()
    out, lse = attention(q, k, v, torch.zeros_like(mask))  # and where no row sees one
    assert not out.any() and lse.isneginf().all()


LAYOUTS = {
    "packed qkv": lambda t: torch.stack([t, t, t], 3).permute(3, 0, 1, 2, 4)[1],
    "tokens first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda t: torch.stack([t, t * torch.nan], -1).flatten(-2)[..., ::2],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_strides(layout: str, dtype: torch.dtype) -> None:
    for length, dim in ((49, 64), (197, 36), (700, 16)):
        q, k, v = operands(length, length, dim, dim, dtype)
        dense = attention(q, k, v)
        strided = attention(*(LAYOUTS[layout](t) for t in (q, k, v)))
        assert torch.equal(strided[0], dense[0])
        assert torch.equal(strided[1], dense[1])


def test_strides_of_zero() -> None:
    q, k, v = operands(50, 60, 32, 32, batch=1, heads=1)
    wide = [t.expand(3, 4, *t.shape[2:]) for t in (q, k, v)]
    out, _ = attention(*wide)
    assert torch.equal(out, attention(q, k, v)[0].expand_as(out))
    one_key = k[:, :, :1].expand_as(k)
    check(q, one_key, v)
    check(q, make(1, 1, 60, 1).expand_as(k), v)


def test_empty() -> None:
    q, k, v = operands(5, 0, 16, 8)
    out, lse = attention(q, k, v)
    assert out.shape == (2, 3, 5, 8)
    assert not out.any()
    assert lse.isneginf().all()
    for shape in ((0, 3, 5, 16), (2, 0, 5, 16), (2, 3, 0, 16)):
        t = torch.empty(shape)
        assert attention(t, t, t)[0].shape == shape


@pytest.mark.parametrize("size", [1.0, 1e4, 1e15, 1e30])
@pytest.mark.parametrize("length", [49, 1300])
def test_extreme_logits(size: float, length: int) -> None:
    """With one key far above the rest, its value is the output: no overflow, no rounding."""
    q = torch.full((1, 2, length, 4), 2.0)
    k = make(1, 2, length, 4, seed=5) * 1e-3 - size
    k[:, :, length // 3] = size
    v = make(1, 2, length, 32, seed=6)
    out, lse = attention(q, k, v, scale=1.0)
    if size > 1.0:
        assert torch.equal(out, v[:, :, length // 3 : length // 3 + 1].expand_as(out))
    assert torch.allclose(lse, torch.full_like(lse, 8 * size), rtol=1e-6, atol=1e-2)
    same, _ = attention(q, k[:, :, :1].expand_as(k), v, scale=1.0)
    assert torch.allclose(same, v.mean(2, keepdim=True).expand_as(same), atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale(scale: float) -> None:
    for length in (63, 700):
        check(*operands(length, length, 32, 32, batch=1), scale=scale)
        check(*operands(length, length, 32, 32, batch=1), scale=scale, causal=True)


@pytest.mark.parametrize("length", [49, 197, 700])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, -0x3FFFFF])
def test_nan_goes_where_sdpa_lets_it_go(length: int, bits: int) -> None:
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert nan.isnan()
    for operand, at in ((0, (0, 1, 3, 2)), (1, (0, 1, length - 1, 2)), (2, (0, 1, 5, 2))):
        tensors = list(operands(length, length, 32, 32, batch=1))
        tensors[operand][at] = nan
        out, lse = attention(*tensors)
        expected = F.scaled_dot_product_attention(*(t.double() for t in tensors))
        assert torch.equal(out.isnan(), expected.isnan())
        assert bool(lse.isnan().any()) is (operand < 2)


def test_infinite_score_is_nan_and_minus_infinity_masks() -> None:
    q, k, v = operands(33, 40, 16, 16)
    mask = torch.zeros(1, 1, 33, 40)
    mask[..., 4, 7] = torch.inf
    mask[..., 5, 7] = -torch.inf
    out, _ = attention(q, k, v, mask)
    assert out[:, :, 4].isnan().all()
    assert out[:, :, torch.arange(33) != 4].isfinite().all()


def test_nothing_stays_from_an_earlier_call() -> None:
    tensors = operands(197, 197, 64, 64)
    clean = attention(*tensors)
    large = [torch.full((2, 3, 700, 256), torch.nan) for _ in range(3)]
    for causal in (False, True):
        attention(*large, causal=causal)
        again = attention(*tensors)
        assert torch.equal(again[0], clean[0])
        assert torch.equal(again[1], clean[1])


@pytest.mark.parametrize("causal", [False, True])
def test_bits_depend_neither_on_threads_nor_on_the_run(causal: bool) -> None:
    before = torch.get_num_threads()
    try:
        for length in (16, 197, 1500):
            tensors = operands(length, length, 40, 40, batch=1)
            results = []
            for threads in (1, 2, 2, 3):
                torch.set_num_threads(threads)
                results.append(attention(*tensors, causal=causal))
            for out, lse in results[1:]:
                assert torch.equal(out, results[0][0])
                assert torch.equal(lse, results[0][1])
    finally:
        torch.set_num_threads(before)


def read_up_to_the_guard() -> None:
    for length, dim in ((1, 1), (7, 3), (17, 16), (49, 64), (50, 72), (197, 80), (661, 20)):
        for dtype in (torch.float32, torch.float16):
            tensors = operands(length, length, dim, dim, dtype, batch=1)
            for mask in (None, make(1, 3, length, length), make(1, 1, 1, length) > 0):
                plain = attention(*tensors, mask)
                mask_copy = None if mask is None else guarded(mask)
                fenced = attention(*(guarded(t) for t in tensors), mask_copy)
                assert torch.equal(plain[0], fenced[0])


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX")
def test_reads_no_byte_beyond_its_operands() -> None:
    call_apart(read_up_to_the_guard)


@once
def test_memory_is_linear_at_32768_tokens() -> None:
    """The score matrix would take 4 GiB; torch and the operands are in memory before."""
    program = """
import resource, torch
import test_native
test_native.native.load()
q = torch.randn(1, 1, 32768, 8)
test_native.attention(q[:, :, :64], q[:, :, :64], q[:, :, :64])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
out, lse = test_native.attention(q, q, q)
print((peak() - before) / 1024)
assert out.isfinite().all()
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 32  # MiB: the output is 1, two workspaces of a few


@once
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[0], k, v), "query must have 4 dimensions, has 3"),
        (lambda q, k, v: (q, k[:1], v), "batch sizes differ"),
        (lambda q, k, v: (q, k[:, :2], v), "key has 2 heads and value 3"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "no multiple"),
        (lambda q, k, v: (q, k[:, :, :3], v), "3 keys and 5 values"),
        (lambda q, k, v: (q, k[..., :3], v), "head_dim of query is 16 and of key 3"),
        (lambda q, k, v: (q.half(), k, v), "one dtype"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "float32, float16 or bfloat16"),
        (lambda q, k, v: (q, k, v, torch.zeros(1, 1, 5, 4)), "attn_mask has size 4 in dimension 3"),
        (lambda q, k, v: (q, k, v, torch.zeros(1, 1, 5, 5).half()), "attn_mask must be bool"),
    ],
)
def test_bad_arguments_are_named(change, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        attention(*change(*operands(5, 5, 16, 16)))
