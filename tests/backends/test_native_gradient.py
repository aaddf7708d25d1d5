"""The CPU's gradient kernels against autograd in float64.

`test_instruction_sets` runs the file again on the other kernels.

The criterion is relative: at most twice the error of PyTorch's own gradients, plus rounding.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from native_kernels import ULPS, call_apart, guarded, make, once, relative, run
from test_native_window import Terms, bias_of, image, reference, window_attention
from torch import Tensor

import elsa_core
from elsa_core import operators
from elsa_core.backends import native, native_backward, sdpa
from elsa_core.backends.support import Request

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    answer = native.load()
    assert answer.ok, answer.reason  # a machine that tests elsa has a compiler


@pytest.fixture
def no_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the formula in plain PyTorch nor PyTorch's kernel may serve."""

    def refuse(*_: object) -> None:
        raise AssertionError("the native kernel did not serve")

    monkeypatch.setattr(operators.Operator, "recomputed", refuse)
    monkeypatch.setattr(sdpa, "backward", refuse)


def gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    operands: tuple[Tensor, ...],
    slopes: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in operands]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    wanted = [s.to(o.dtype) for o, s in zip(outputs, slopes, strict=True)]
    return torch.autograd.grad(outputs, leaves, wanted)


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention step by step in the operands' dtype; a row that sees no key gives zeros."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(q.dtype)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    dead = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return weights @ v, scores.logsumexp(-1)


def operator(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.elsa.attention(q, k, v, mask, causal, scale, "strict")


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    slope_of_lse: bool = False,
) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    slopes = (make(*q.shape[:3], v.shape[3], seed=31), make(*q.shape[:3], seed=32))
    last = 2 if slope_of_lse else 1

    def of(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *qkv: function(*qkv, mask, causal, scale)[:last]

    exact = gradients(of(plain), tuple(t.double() for t in (q, k, v)), slopes[:last])
    peers = gradients(of(plain), (q, k, v), slopes[:last])
    found = gradients(of(operator), (q, k, v), slopes[:last])
    for name, x, peer, e in zip("qkv", found, peers, exact, strict=True):
        assert x.shape == e.shape
        error, allowed = relative(x, e), 2 * relative(peer, e) + ULPS * EPS
        assert error <= allowed, (name, error, allowed)
    return found


def operands(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q = make(batch, heads, queries, dim, seed=queries)
    k = make(batch, kv_heads, keys, dim, seed=keys + 1)
    return q, k, make(batch, kv_heads, keys, value_dim, seed=dim + 2)


@pytest.mark.parametrize("length", [1, 7, 17, 49, 64, 100, 197, 256, 257, 577])
@pytest.mark.parametrize("dim", [1, 20, 32, 64, 80, 128])
@pytest.mark.usefixtures("no_formula")
def test_lengths_and_head_dims(length: int, dim: int) -> None:
    check(*operands(1, 2, 2, length, length, dim, dim))


@pytest.mark.parametrize("queries", [1, 13, 50, 197])
@pytest.mark.parametrize("keys", [1, 3, 65, 200, 641])
@pytest.mark.usefixtures("no_formula")
def test_queries_and_keys_of_different_length(queries: int, keys: int) -> None:
    check(*operands(2, 3, 3, queries, keys, 24, 40))
    check(*operands(2, 3, 3, queries, keys, 64, 5), causal=True, slope_of_lse=queries <= keys)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("no_formula")
def test_grouped_heads(causal: bool) -> None:
    check(*operands(2, 6, 2, 50, 70, 32, 24), causal=causal)
    check(*operands(1, 4, 1, 130, 300, 32, 24), causal=causal)


@pytest.mark.parametrize("keys", [49, 700])
@pytest.mark.usefixtures("no_formula")
def test_a_gradient_of_lse(keys: int) -> None:
    check(*operands(2, 3, 3, 40, keys, 16, 24), slope_of_lse=True)


def masks(batch: int, heads: int, rows: int, keys: int) -> dict[str, Tensor]:
    full = make(batch, heads, rows, keys, seed=9)
    hole = full > -0.5
    hole[0, 0, rows // 2] = False  # a row that sees nothing
    return {
        "additive": full,
        "per head": full[:1],
        "per key": full[:, :, :1],
        "per row": full[..., :1],
        "boolean": hole,
        "padding": hole[:, :1, :1],
        "minus infinity": torch.zeros_like(full).masked_fill(~hole, -math.inf),
        "transposed": make(batch, heads, keys, rows, seed=9).mT,
        "half": full.half(),
    }


@pytest.mark.parametrize("kind", masks(2, 2, 4, 4))
@pytest.mark.parametrize("keys", [49, 600])
@pytest.mark.usefixtures("no_formula")
def test_masks(kind: str, keys: int) -> None:
    q, k, v = operands(2, 2, 2, 61, keys, 16, 24)
    mask = masks(2, 2, 61, keys)[kind]
    if kind == "half":  # of a half-precision query alone
        mask = mask.float()
    check(q, k, v, mask)


@pytest.mark.parametrize("keys", [49, 600])
@pytest.mark.parametrize("kind", ["boolean", "minus infinity"])
def test_a_row_that_sees_no_key_has_no_gradient(kind: str, keys: int) -> None:
    q, k, v = operands(2, 2, 2, 61, keys, 16, 24)
    grads = check(q, k, v, masks(2, 2, 61, keys)[kind])
    assert not grads[0][0, 0, 30].any()
    nothing = torch.zeros(1, 1, 61, keys, dtype=torch.bool)
    assert not any(g.any() for g in check(q, k, v, nothing))


@pytest.mark.parametrize("size", [1e3, 1e6])
@pytest.mark.parametrize("keys", [100, 700])
@pytest.mark.usefixtures("no_formula")
def test_scores_so_large_that_lse_has_lost_digits(size: float, keys: int) -> None:
    """Weights come from the maximum and the sum then, not from exp(score - lse)."""
    q, k, v = operands(1, 2, 2, 33, keys, 8, 16)
    mask = torch.zeros(1, 1, 33, keys) - size * 7.25
    mask += make(1, 1, 33, keys, seed=4).mul(8).round() / 8 if size < 1e5 else 0.0
    check(q, k, v, mask, scale=0.125)


LAYOUTS = {
    "packed qkv": lambda t: torch.stack([t, t, t], 3).permute(3, 0, 1, 2, 4)[1],
    "tokens first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda t: t.mT.contiguous().mT,
    "every second": lambda t: torch.stack([t, t * torch.nan], -1).flatten(-2)[..., ::2],
    "repeated": lambda t: t[:1, :1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("no_formula")
def test_strides(layout: str) -> None:
    for length, dim in ((49, 64), (300, 20)):
        tensors = operands(2, 3, 3, length, length, dim, dim)
        tensors = tuple(LAYOUTS[layout](t) for t in tensors)
        found, dense = check(*tensors), check(*(t.contiguous() for t in tensors))
        for x, y in zip(found, dense, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("grad_layout", ["tokens first", "repeated"])
def test_strides_of_the_slope(grad_layout: str) -> None:
    q, k, v = operands(2, 3, 3, 49, 49, 32, 32)
    slope = LAYOUTS[grad_layout](make(2, 3, 49, 32, seed=5))

    def attend(*qkv: Tensor) -> Tensor:
        return operator(*qkv, None, False, 0.2)[0]

    found = gradients(attend, (q, k, v), (slope,))
    dense = gradients(attend, (q, k, v), (slope.contiguous(),))
    assert all(torch.equal(x, y) for x, y in zip(found, dense, strict=True))


@pytest.mark.parametrize("wanted", range(3))
def test_only_what_is_needed_is_computed(wanted: int) -> None:
    q, k, v = operands(2, 3, 3, 49, 49, 32, 32)
    out, lse = operator(q, k, v, None, False, 0.2)
    slope = make(2, 3, 49, 32, seed=5)
    common = (slope, torch.zeros_like(lse), q, k, v, None, out, lse, False, 0.2, "strict")
    every = torch.ops.elsa.attention_backward(*common, [True, True, True, False])
    one = torch.ops.elsa.attention_backward(*common, [i == wanted for i in range(4)])
    for i in range(4):
        assert torch.equal(one[i], every[i]) if i == wanted else one[i].shape == (0,)


def test_empty() -> None:
    for shape, keys in (((0, 3, 5, 16), 4), ((2, 3, 0, 16), 4), ((2, 3, 5, 16), 0)):
        q, k = torch.zeros(shape), torch.zeros(*shape[:2], keys, shape[3])
        slope = torch.ones(shape)
        for grad in gradients(lambda *t: operator(*t, None, False, 1.0)[0], (q, k, k), (slope,)):
            assert not grad.any()


def test_nothing_stays_from_an_earlier_call() -> None:
    tensors = operands(1, 2, 2, 197, 197, 64, 64)
    clean = check(*tensors)
    poison = (torch.full((1, 2, 700, 128), torch.nan),) * 3
    gradients(lambda *t: operator(*t, None, False, 1.0)[0], poison, (torch.ones(1, 2, 700, 128),))
    for x, y in zip(check(*tensors), clean, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("length", [49, 700])
def test_bits_depend_neither_on_threads_nor_on_the_run(length: int) -> None:
    tensors = operands(2, 4, 2, length, length, 40, 40)
    t = Terms(num_heads=3, shift=(0, 3, 3))
    t = replace(t, bias=bias_of(t), pad_qkv=make(144, seed=3))
    qkv = image(2, (27, 28), 3, 16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            results.append((*check(*tensors), *window_gradients(qkv, t).values()))
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_go_to_the_formula(dtype: torch.dtype) -> None:
    tensors = tuple(t.to(dtype) for t in operands(1, 2, 2, 20, 20, 16, 16))
    asked = Request("cpu", dtype, 16, 16, "strict", "attention", gradient=("query",))
    assert "are float32" in native_backward.support(asked).reason
    masked = asked._replace(dtype=torch.float32, gradient=("query", "attn_mask"))
    assert "no gradient of a mask" in native_backward.support(masked).reason
    slope = make(1, 2, 20, 16, seed=5).to(dtype)
    backend = "eager" if dtype == torch.float64 else "native"

    def attend(*qkv: Tensor) -> Tensor:
        return elsa_core.attention(*qkv, backend=backend)

    exact = gradients(
        lambda *t: plain(*t, None, False, 0.25)[0], tuple(t.double() for t in tensors), (slope,)
    )
    for x, e in zip(gradients(attend, tensors, (slope,)), exact, strict=True):
        assert relative(x, e) <= 8 * torch.finfo(dtype).eps


def test_a_mask_that_learns_goes_to_the_formula() -> None:
    q, k, v = operands(1, 2, 2, 20, 30, 16, 16)
    mask, slope = make(1, 2, 20, 30, seed=7), make(1, 2, 20, 16, seed=8)
    exact = gradients(
        lambda q, k, v, m: plain(q, k, v, m, False, 0.25)[0],
        tuple(t.double() for t in (q, k, v, mask)), (slope,),
    )  # fmt: skip
    found = gradients(
        lambda q, k, v, m: operator(q, k, v, m, False, 0.25)[0], (q, k, v, mask), (slope,)
    )
    assert all(relative(x, e) <= 1e-6 for x, e in zip(found, exact, strict=True))


def read_up_to_the_guard() -> None:
    for length, dim in ((1, 1), (17, 16), (49, 64), (50, 72), (300, 20)):
        q, k, v = operands(1, 2, 2, length, length, dim, dim)
        slope = make(1, 2, length, dim, seed=5)
        for mask in (None, make(1, 2, length, length), make(1, 1, 1, length) > 0):
            out, lse = operator(q, k, v, mask, False, 0.2)
            terms = (False, 0.2, "strict", [True, True, True, False])
            tensors = (slope, lse * 0, q, k, v)
            native_grads = torch.ops.elsa.attention_backward(*tensors, mask, out, lse, *terms)
            fenced = torch.ops.elsa.attention_backward(
                *map(guarded, tensors), None if mask is None else guarded(mask),
                guarded(out.transpose(1, 2).contiguous()).transpose(1, 2), guarded(lse), *terms,
            )  # fmt: skip
            for x, y in zip(fenced, native_grads, strict=True):
                assert torch.equal(x, y)


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX")
def test_reads_no_byte_beyond_its_operands() -> None:
    call_apart(read_up_to_the_guard)


@once
def test_memory_is_linear_at_16384_tokens() -> None:
    """The score matrix would take 1 GiB; the gradients of one head are a few MiB."""
    program = """
import resource, torch
import test_native_gradient as t
t.native.load()
q, k, v = (torch.randn(1, 1, 16384, 8) for _ in range(3))
def train(n):
    x = [s[:, :, :n].detach().requires_grad_() for s in (q, k, v)]
    t.operator(*x, None, False, 0.3)[0].sum().backward()
train(64)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
train(16384)
print((peak() - before) / 1024)
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 48  # MiB


# Windows


LEARNT = ("bias", "pad_qkv", "logit_scale")


def window_gradients(
    qkv: Tensor, t: Terms, function: Callable[[Tensor, Terms], Tensor] = window_attention
) -> dict[str, Tensor]:
    """Gradients of qkv and of every term there is."""
    names = [name for name in LEARNT if getattr(t, name) is not None]
    slope = make(*qkv.shape[:-1], qkv.shape[-1] // 3, seed=41)
    found = gradients(
        lambda x, *terms: function(x, replace(t, **dict(zip(names, terms, strict=True)))),
        (qkv, *(getattr(t, name) for name in names)), (slope,),
    )  # fmt: skip
    return dict(zip(("qkv", *names), found, strict=True))


def check_window(qkv: Tensor, t: Terms) -> None:
    found = window_gradients(qkv, t)
    exact = window_gradients(qkv.double(), t.to(torch.float64), reference)
    peers = window_gradients(qkv, t, reference)
    for name, e in exact.items():
        assert found[name].shape == e.shape
        error, allowed = relative(found[name], e), 2 * relative(peers[name], e) + ULPS * EPS
        assert error <= allowed, (name, error, allowed)


@pytest.mark.parametrize(
    "window", [(1, 2, 2), (1, 3, 5), (1, 7, 7), (1, 8, 8), (1, 12, 12), (1, 24, 24), (2, 3, 4)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads_dim", [(1, 32), (3, 20)], ids=str)
@pytest.mark.usefixtures("no_formula")
def test_windows(window: tuple[int, int, int], heads_dim: tuple[int, int]) -> None:
    heads, dim = heads_dim
    size = tuple(w if w > 12 else 2 * w - (w > 2) for w in window)
    t = Terms(num_heads=heads, window=window)
    t = replace(t, bias=bias_of(t))
    qkv = image(1, size, heads, dim)
    check_window(qkv, t)
    shift = (window[0] // 2, window[1] // 2, window[2] // 3)
    check_window(qkv, replace(t, shift=shift, pad_qkv=make(3 * heads * dim, seed=4)))


@pytest.mark.parametrize("layout", ["qkv", "head"])
@pytest.mark.parametrize("mask_value", [-1.0, -100.0, -math.inf])
@pytest.mark.usefixtures("no_formula")
def test_shifts_masks_and_layouts(layout: str, mask_value: float) -> None:
    for size in ((7, 7), (13, 8), (15, 22)):
        t = Terms(shift=(0, 3, 2), layout=layout, mask_value=mask_value)
        check_window(image(2, size, 2, 16), replace(t, bias=bias_of(t)))
        check_window(image(2, size, 2, 16), replace(t, pad_qkv=make(96, seed=3)))


@pytest.mark.usefixtures("no_formula")
def test_a_grid() -> None:
    t = Terms(window=(1, 4, 3), grid=True)
    check_window(image(2, (8, 9), 2, 24), replace(t, bias=bias_of(t)))


@pytest.mark.usefixtures("no_formula")
def test_cosine_attention() -> None:
    """A row of several panels was normalised panel by panel: head_dim above a panel's columns."""
    for dim in (4, 20, 32, 40, 72):
        qkv = image(2, (8, 13), 2, dim)
        t = Terms(window=(1, 8, 8), shift=(0, 4, 4), logit_scale=torch.tensor([10.0, 3.0]))
        check_window(qkv, replace(t, bias=bias_of(t)))
        check_window(qkv, replace(t, bias=bias_of(t), pad_qkv=make(6 * dim, seed=3)))


@pytest.mark.usefixtures("no_formula")
def test_a_table_gathers_the_gradients_of_its_entries() -> None:
    t = Terms(num_heads=3, shift=(0, 3, 3))
    index = torch.randint(169, (49, 49), generator=torch.Generator().manual_seed(1))
    check_window(image(2, (14, 14), 3, 32), replace(t, bias=make(169, 3, seed=6), bias_index=index))


def test_a_row_that_sees_nothing_has_no_gradient() -> None:
    t = Terms(window=(1, 3, 3))
    bias = bias_of(t)
    bias[1, 4] = -math.inf
    qkv = image(2, (3, 3), 2, 16)
    grad_qkv, grad_bias = window_gradients(qkv, replace(t, bias=bias)).values()
    assert grad_qkv.isfinite().all()
    assert not grad_bias[1, 4].any()
    assert not grad_qkv.view(2, 9, 3, 2, 16)[:, 4, 0, 1].any()


def test_what_a_window_gives_back_only_where_it_is_needed() -> None:
    t = Terms(shift=(0, 3, 3))
    t = replace(t, bias=bias_of(t), pad_qkv=make(96, seed=3))
    qkv = image(2, (13, 13), 2, 16)
    common = (
        make(2, 1, 13, 13, 32, seed=5), qkv, t.bias, None, t.pad_qkv, None, 2, t.window, t.shift,
        t.scale, t.mask_value, t.layout, t.grid, "strict",
    )  # fmt: skip
    backward = torch.ops.elsa.window_attention_backward
    every = backward(*common, [True, True, True, False])
    for wanted in range(3):
        one = backward(*common, [i == wanted for i in range(4)])
        for i in range(4):
            assert torch.equal(one[i], every[i]) if i == wanted else one[i].shape == (0,)


def test_larger_windows_go_to_the_formula() -> None:
    t = Terms(num_heads=1, window=(1, 27, 25))
    assert math.prod(t.window) > native_backward.WINDOW_TOKENS_MAX
    check_window(image(1, (27, 25), 1, 8), replace(t, bias=bias_of(t)))
