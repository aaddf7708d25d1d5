"""`elsa.varlen_attention`: every backend against float64, sequence by sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core import packing, routing, varlen
from elsa_core.backends import eager_varlen, native, sdpa_varlen
from elsa_core.backends.support import Request
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.routing.gradients import padded_backward

LENGTHS = {
    "mixed": ([5, 0, 1, 130, 33], [5, 0, 1, 130, 33]),
    "crossed": ([7, 3, 0, 1, 50, 0], [1, 0, 4, 33, 65, 0]),
    "several key blocks": ([700, 1], [1300, 3]),
    "one": ([63], [63]),
    "no key at all": ([3, 2], [0, 0]),
    "no query at all": ([0, 0], [3, 2]),
}


@pytest.fixture(params=["eager", "native", "padded"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What serves; "padded" is what CUDA devices take, here on the CPU."""
    if request.param == "native":
        answer = native.load()
        assert answer.ok, answer.reason  # a machine that tests elsa has a compiler
    if request.param == "padded":
        monkeypatch.setattr(varlen, "_pads", lambda *of: True)
        return "auto"
    return request.param


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(
    case: str, *, heads: int = 4, kv_heads: int = 4, dims: tuple[int, int] = (24, 40),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    queries, keys = LENGTHS[case]
    return (
        make(sum(queries), heads, dims[0], dtype=dtype, seed=1),
        make(sum(keys), kv_heads, dims[0], dtype=dtype, seed=2),
        make(sum(keys), kv_heads, dims[1], dtype=dtype, seed=3),
        bounds(queries),
        bounds(keys, torch.int64),
    )


def each_by_sdpa(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, others: Tensor, **kw) -> Tensor:
    """PyTorch's own operator, one sequence after another."""
    outs = [q.new_empty(0, q.shape[1], v.shape[2])]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(others.tolist()), strict=True):
        alone = [t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d])]
        if d > c:
            outs.append(F.scaled_dot_product_attention(*alone, **kw)[0].transpose(0, 1))
        else:
            outs.append(q[a:b].sum(-1, keepdim=True).expand(-1, -1, v.shape[2]) * 0)
    return torch.cat(outs)


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def assert_as_exact(out: Tensor, peer: Tensor, exact: Tensor) -> None:
    assert out.shape == exact.shape
    assert out.isfinite().all()
    assert relative(out, exact) <= 2 * relative(peer, exact) + 4 * torch.finfo(out.dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_agrees_with_float64(case: str, is_causal: bool, dtype: torch.dtype, backend: str) -> None:
    q, k, v, starts, others = operands(case, kv_heads=2, dtype=dtype)
    out, lse = elsa.varlen_attention(
        q, k, v, starts, others, is_causal=is_causal, enable_gqa=True, backend=backend,
        return_lse=True,
    )  # fmt: skip
    assert out.dtype == dtype
    assert lse.shape == (4, q.shape[0])
    wide = [t.double() for t in (q, k, v)]
    exact = each_by_sdpa(*wide, starts, others, is_causal=is_causal)
    assert_as_exact(out, each_by_sdpa(q, k, v, starts, others, is_causal=is_causal), exact)
    _, exact_lse = torch.ops.elsa.varlen_attention_eager(
        *wide, starts, others, is_causal, 24**-0.5, "strict"
    )
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    dead = exact_lse.isneginf()
    assert not out.transpose(0, 1)[dead].any()
    spread = q.double().norm(dim=-1).amax() if q.numel() else torch.ones(())
    assert torch.allclose(lse[~dead].double(), exact_lse[~dead], rtol=0, atol=2e-6 * spread.item())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_gradients(case: str, is_causal: bool, backend: str) -> None:
    given = operands(case, kv_heads=2)
    lengths = given[3:]
    weight = make(given[0].shape[0], 4, 40, seed=7)
    slope = make(4, given[0].shape[0], seed=8)

    def grads(fn: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (t.to(dtype).requires_grad_() for t in given[:3])
        out, lse = fn(q, k, v)
        total = (out * weight.to(dtype)).sum()
        total = total + (lse * slope.to(dtype)).masked_fill(lse.isinf(), 0).sum()
        return list(torch.autograd.grad(total, (q, k, v), materialize_grads=True))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return elsa.varlen_attention(
            q, k, v, *lengths, is_causal=is_causal, enable_gqa=True, backend=backend,
            return_lse=True,
        )  # fmt: skip

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = each_by_sdpa(q, k, v, *lengths, is_causal=is_causal)
        lses = [q.new_empty(4, 0)]
        groups = q.shape[1] // k.shape[1]
        for (a, b), (c, d) in zip(*(pairwise(t.tolist()) for t in lengths), strict=True):
            keys = k[c:d].repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * 24**-0.5
            if is_causal:
                later = torch.ones(b - a, d - c, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, -torch.inf)
            lses.append(scores.logsumexp(-1))
        return out, torch.cat(lses, 1)

    exact, peer = grads(plain, torch.float64), grads(plain, torch.float32)
    found = grads(ours, torch.float32)
    for one, other, reference in zip(found, peer, exact, strict=True):
        assert_as_exact(one, other, reference)
    assert all(map(torch.equal, found, grads(ours, torch.float32)))  # bit by bit


@pytest.mark.parametrize("size", [30.0, 3e4])
def test_extreme_logits(size: float, backend: str) -> None:
    q, k, v, starts, others = operands("crossed")
    q = q * size
    out = elsa.varlen_attention(q, k, v, starts, others, backend=backend)
    exact = each_by_sdpa(q.double(), k.double(), v.double(), starts, others)
    assert_as_exact(out, each_by_sdpa(q, k, v, starts, others), exact)


def test_views_of_a_packed_projection(backend: str) -> None:
    """Nothing is copied, and gradients come back in the projection's layout."""
    lengths = [9, 0, 40, 1]
    qkv = make(50, 3, 4, 16, seed=4).requires_grad_()
    q, k, v = qkv.unbind(1)
    out = elsa.varlen_attention(q, k, v, bounds(lengths), backend=backend)
    dense = [t.contiguous() for t in (q, k, v)]
    assert torch.equal(out, elsa.varlen_attention(*dense, bounds(lengths), backend=backend))
    odd = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    again = elsa.varlen_attention(*odd, bounds(lengths), backend=backend)
    assert relative(again, out.detach().double()) <= 1e-6
    out.square().sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()


def test_neighbours_do_not_leak(backend: str) -> None:
    """A sequence of NaN and infinity stays with itself."""
    q, k, v, starts, others = operands("mixed")
    clean = elsa.varlen_attention(q, k, v, starts, others, backend=backend)
    k, v = k.clone(), v.clone()
    counts = (starts if others is None else others).diff()
    longest = int(counts.argmax())  # with others before or behind it
    own = slice(int(starts[longest]), int(starts[longest + 1]))
    bounds = starts if others is None else others
    keys = slice(int(bounds[longest]), int(bounds[longest + 1]))
    k[keys], v[keys] = torch.nan, torch.inf
    spoilt = elsa.varlen_attention(q, k, v, starts, others, backend=backend)
    rest = torch.ones(q.shape[0], dtype=torch.bool)
    rest[own] = False
    assert rest.any() and torch.equal(spoilt[rest], clean[rest])


def test_every_element_is_written(backend: str) -> None:
    """Memory comes filled with NaN here."""
    given = operands("crossed")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        q, k, v = (t.requires_grad_() for t in given[:3])
        out, lse = elsa.varlen_attention(q, k, v, *given[3:], backend=backend, return_lse=True)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    finally:
        torch.use_deterministic_algorithms(before)
    assert not any(t.isnan().any() for t in (out, lse, *grads))


def test_float64_is_served_in_float64() -> None:
    given = operands("crossed", dtype=torch.float64)
    out, lse = elsa.varlen_attention(*given, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    assert relative(out, each_by_sdpa(*given)) < 1e-14


def test_gradcheck() -> None:
    q, k, v, starts, others = operands("crossed", heads=2, kv_heads=1, dims=(3, 2))
    q, k, v = (t.double()[:n].requires_grad_() for t, n in ((q, 11), (k, 38), (v, 38)))
    starts, others = bounds([7, 3, 0, 1]), bounds([1, 0, 4, 33])

    def call(*of: Tensor) -> Tensor:
        return elsa.varlen_attention(*of, starts, others, enable_gqa=True)  # type: ignore[return-value]

    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("name", ["varlen_attention", "varlen_attention_eager"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(name: str, requires_grad: bool) -> None:
    assert native.load().ok
    given = operands("crossed", kv_heads=2)
    for t in given[:3]:
        t.requires_grad_(requires_grad)
    op = getattr(torch.ops.elsa, name).default
    torch.library.opcheck(op, (*given, False, 0.25, "strict"))


@pytest.mark.parametrize("needs", [[True] * 3, [False, True, False], [False] * 3])
@pytest.mark.parametrize("name", ["varlen_attention_backward", "varlen_attention_eager_backward"])
def test_opcheck_of_the_backward(name: str, needs: list[bool]) -> None:
    q, k, v, *lengths = operands("crossed", kv_heads=2)
    out, lse = torch.ops.elsa.varlen_attention_eager(q, k, v, *lengths, False, 0.25, "strict")
    terms = (torch.ones_like(out), lse.new_zeros(0), q, k, v, *lengths, out, lse)
    op = getattr(torch.ops.elsa, name).default
    torch.library.opcheck(op, (*terms, False, 0.25, "strict", needs))
    every = op(*terms, False, 0.25, "strict", [True] * 3)
    for grad, full, needed in zip(op(*terms, False, 0.25, "strict", needs), every, needs, strict=1):
        assert torch.equal(grad, full) if needed else grad.shape == (0,)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("needs", [[True] * 3, [True, False, True]])
@pytest.mark.parametrize("case", ["crossed", "no key at all", "no query at all"])
def test_gradients_by_padding(case: str, needs: list[bool], is_causal: bool) -> None:
    """What CUDA devices compute for the kernels of packed sequences."""
    q, k, v, *lengths = operands(case, kv_heads=2)
    out, lse = torch.ops.elsa.varlen_attention_eager(q, k, v, *lengths, is_causal, 0.2, "strict")
    grad_out, grad_lse = make(*out.shape, seed=5), make(*lse.shape, seed=6)
    grad_lse = grad_lse.masked_fill(lse.isinf(), 0.0)
    given = (grad_out, grad_lse, q, k, v, *lengths, out, lse, is_causal, 0.2, "strict", needs)
    found, expected = padded_backward(*given), eager_varlen.backward(*given)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert relative(one, other.double()) < 1e-6


@pytest.mark.usefixtures("inductor")
def test_new_lengths_recompile_nothing() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return elsa.varlen_attention(q * 2, k, v, starts, is_causal=True)  # type: ignore[return-value]

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for number, lengths in enumerate(([5, 0, 9], [1, 30, 2, 2], [64, 0])):
        q, k, v = (make(sum(lengths), 2, 8, seed=s).requires_grad_() for s in (1, 2, 3))
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            out = compiled(q, k, v, bounds(lengths))
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        plain = step(q, k, v, bounds(lengths))
        assert torch.equal(out, plain)
        expected = torch.autograd.grad(plain.square().sum(), (q, k, v))
        for a, b in zip(grads, expected, strict=True):
            assert relative(a, b.double()) < 1e-6
    torch.compiler.reset()


def test_torch_func_and_forward_mode() -> None:
    q, k, v, starts, others = operands("mixed", dims=(8, 8))

    def loss(q: Tensor) -> Tensor:
        return elsa.varlen_attention(q, k, v, starts, others).square().sum()

    asked = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(asked), asked)
    assert relative(torch.func.grad(loss)(q), grad.double()) < 1e-5
    _, along = torch.func.jvp(loss, (q,), (q,))
    assert torch.isclose(along, (grad * q).sum(), rtol=1e-4)


def test_autocast() -> None:
    q, k, v, starts, others = operands("mixed")
    with torch.autocast("cpu", torch.bfloat16):
        out = elsa.varlen_attention(q, k, v, starts, others)
    assert out.dtype == torch.bfloat16


def test_export_keeps_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
            return elsa.varlen_attention(q, k, v, starts)  # type: ignore[return-value]

    given = (make(12, 2, 8), make(12, 2, 8, seed=1), make(12, 2, 8, seed=2), bounds([4, 8]))
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    count = torch.export.Dim("count", min=2, max=64)
    program = torch.export.export(
        Model(), given, dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}, {0: count})
    )
    others = [make(30, 2, 8, seed=s) for s in (4, 5, 6)]
    lengths = bounds([1, 9, 0, 20])
    assert torch.equal(program.module()(*others, lengths), Model()(*others, lengths))


CU = bounds([2, 3])
WRONG = {
    "must be [tokens, heads, dim]": {"query": make(1, 5, 2, 8)},
    "share one floating dtype": {"key": make(5, 2, 8, dtype=torch.float16)},
    "key has head_dim 4": {"key": make(5, 2, 4)},
    "key has [5, 2] tokens and heads, value [4, 2]": {"value": make(4, 2, 8)},
    "key has 1 heads, query 2": {"key": make(5, 1, 8), "value": make(5, 1, 8)},
    "cu_seqlens_q must be int32 or int64": {"cu_seqlens_q": CU.float()},
    "cu_seqlens_q must be [sequences + 1]": {"cu_seqlens_q": CU[None]},
    "cu_seqlens_q must start with 0, not decrease": {"cu_seqlens_q": torch.tensor([0, 6, 5])},
    "cu_seqlens_k must start with 0": {"cu_seqlens_k": torch.tensor([1, 2, 5])},
    "end with 5 tokens": {"cu_seqlens_q": torch.tensor([0, 2, 4])},
    "cu_seqlens_q is of 2 sequences, cu_seqlens_k of 1": {"cu_seqlens_k": bounds([5])},
    "max_seqlen_q=2, but a sequence has 3": {"max_seqlen_q": 2},
    "scale must be a number": {"scale": torch.ones(())},
    "backend='fast' is unknown": {"backend": "fast"},
    "'low' is unknown": {"precision": "low"},
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_named(words: str) -> None:
    given = {"query": make(5, 2, 8), "key": make(5, 2, 8), "value": make(5, 2, 8)}
    with pytest.raises(ArgumentError) as error:
        elsa.varlen_attention(**{**given, "cu_seqlens_q": CU, **WRONG[words]})  # type: ignore[arg-type]
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_cannot_serve_says_why() -> None:
    q = make(5, 2, 8)
    with pytest.raises(UnavailableError, match="triton"):
        elsa.varlen_attention(q, q, q, CU, backend="triton")
    with pytest.raises(TypeError, match="cu_seqlens_q must be a torch"):
        elsa.varlen_attention(q, q, q, [0, 2, 5])  # type: ignore[arg-type]


@pytest.mark.parametrize("starts", [[0, 9, 5], [1, 2, 5], [0, 2, 4], [0, -1, 5]])
def test_the_kernels_check_what_they_read(starts: list[int]) -> None:
    """Also where the operator is called past the checks of the function."""
    assert native.load().ok
    q = make(5, 2, 8)
    for name in ("varlen_attention", "varlen_attention_eager"):
        op = getattr(torch.ops.elsa, name)
        with pytest.raises((RuntimeError, ArgumentError), match="must start with 0"):
            op(q, q, q, torch.tensor(starts), CU, False, 1.0, "strict")
        with pytest.raises((RuntimeError, ArgumentError), match="must start with 0"):
            op(q, q, q, CU, torch.tensor(starts), False, 1.0, "strict")


def test_explain() -> None:
    assert native.load().ok
    q, k, v, starts, others = operands("mixed")
    route = elsa.explain_varlen_attention(q.requires_grad_(), k, v, starts, others)
    assert route.backend == "native"
    assert "each sequence by itself" in route.schedule
    assert any("gradients: by native" in reason for reason in route.reasons)
    wide = elsa.explain_varlen_attention(q.double(), k.double(), v.double(), starts, others)
    assert wide.backend == "eager"
    assert "one sequence after another" in wide.schedule


def test_only_gpus_without_a_kernel_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = (torch.float32, 64, 64, "strict")
    for serves, pads in (("eager", True), ("triton", False)):
        monkeypatch.setattr(routing, "name_of", lambda *_, serves=serves: serves)
        assert varlen._pads(("cuda:0", *kind), "auto") is pads
        assert not varlen._pads(("cuda:0", *kind), "eager")
        assert not varlen._pads(("cpu", *kind), "auto")


CUDA = ("cuda:0", torch.float32, 24, 24, "strict")
# why: (kind, is_causal, backend, lengths of their own, max_seqlen_q and max_seqlen_k), pads ahead
TOLD = {
    "float32": (CUDA, False, "auto", False, (130, None), True),
    "nothing told": (CUDA, False, "auto", False, (None, None), False),
    "one of two told": (CUDA, False, "auto", True, (130, None), False),
    "both told": (CUDA, False, "auto", True, (130, 130), True),
    "by name": (CUDA, False, "triton", False, (130, None), False),
    "a CPU": (("cpu", *CUDA[1:]), False, "auto", False, (130, None), False),
    "half": ((CUDA[0], torch.float16, *CUDA[2:]), True, "auto", False, (130, None), False),
    "crossed": ((CUDA[0], torch.float16, *CUDA[2:]), True, "auto", True, (130, 130), True),
    "widths": ((CUDA[0], torch.float16, 24, 40, "strict"), False, "auto", False, (130, 130), True),
}


@pytest.mark.parametrize("why", TOLD)
def test_gradients_that_pad_have_a_padded_forward(why: str) -> None:
    """Where the caller told the longest lengths: a backward that asks the device for them waits,
    and no CUDA graph can be recorded of it."""
    kind, is_causal, backend, own, told, pads = TOLD[why]
    q, k, v, starts, others = operands("mixed", dims=kind[2:4])
    given = varlen.Packed(q, k, v, starts, others if own else starts)
    assert not varlen._spares_waiting(kind, given, is_causal, backend, told)
    q.requires_grad_()
    assert varlen._spares_waiting(kind, given, is_causal, backend, told) == pads
    with torch.no_grad():
        assert not varlen._spares_waiting(kind, given, is_causal, backend, told)


def test_lengths_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the host waits for a GPU."""
    read: list[str] = []
    checked = packing.checked_bounds
    monkeypatch.setattr(
        packing, "checked_bounds", lambda name, *of: read.append(name) or checked(name, *of)
    )
    q, k, v, starts, others = operands("mixed")
    elsa.varlen_attention(q, k, v, starts)
    assert read == ["cu_seqlens_q"]
    elsa.varlen_attention(q, k, v, starts, others)
    assert read[1:] == ["cu_seqlens_q", "cu_seqlens_k"]
    with pytest.raises(ArgumentError, match="cu_seqlens_k must"):
        elsa.varlen_attention(q, k[1:], v[1:], starts)


def test_what_pads_ahead_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_spares_waiting", lambda *of: True)
    q, k, v, *lengths = operands("mixed")
    q.requires_grad_()
    route = elsa.explain_varlen_attention(q, k, v, *lengths)
    assert "padded to 130" in route.schedule and any("would wait" in r for r in route.reasons)
    monkeypatch.setattr(varlen, "_by_padding", lambda given, *of: (given.query, given.query))
    assert elsa.varlen_attention(q, k, v, *lengths) is q


def test_explain_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_pads", lambda *of: True)
    q, k, v, *lengths = operands("mixed")
    empty = elsa.explain_varlen_attention(q[:0], k, v, bounds([0] * 5), lengths[1])
    assert empty.backend == "eager"
    route = elsa.explain_varlen_attention(q.requires_grad_(), k, v, *lengths)
    assert any(reason.startswith("gradients:") for reason in route.reasons)
    assert "padded to 130 queries and 130 keys" in route.schedule


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_explain_of_gradients(same: bool, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal limits between sequences of two lengths are not flash's: explain said they were."""
    asked: list[Request] = []
    monkeypatch.setattr(routing, "route", lambda request, *of, **terms: asked.append(request))
    q, k, v, starts, others = operands("mixed", dims=(16, 16), dtype=torch.float16)
    given = (q.requires_grad_(), k, v, starts, *(() if same else (others,)))
    elsa.explain_varlen_attention(*given, is_causal=is_causal)
    request = asked[0]._replace(device_type="cuda")
    name, reasons = routing.gradient_name(request)
    assert (name == "sdpa") == (same or not is_causal)
    assert name == "sdpa" or "bottom right" in reasons[-1]


def test_gradients_by_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch's kernel is given, and what comes of it; `test_triton_varlen_gpu` runs it."""
    q, k, v, starts, _ = operands("mixed")
    out, lse = elsa.varlen_attention(q, k, v, starts, return_lse=True, enable_gqa=True)
    grad, none, every = torch.randn_like(out), lse.new_zeros(0), [True, True, True]
    lse[:, 3] = -math.inf
    seen: list[Any] = []

    def flash(*given: Any, scale: float) -> tuple[Tensor, ...]:
        seen.extend((given, scale))
        return tuple(t + 1 for t in given[1:4])

    packet = SimpleNamespace(default=flash)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", packet, raising=False)
    terms = (q, k, v, starts, starts, out, lse, True, 0.5, "strict")
    grads = sdpa_varlen.backward(grad, none, *terms, [True, False, True])
    assert grads is not None and torch.equal(grads[0], q + 1) and torch.equal(grads[2], v + 1)
    assert not grads[1].numel()
    given, scale = seen
    assert scale == 0.5 and given[5][0, 3] == math.inf  # a query without keys has no weights
    assert given[6].dtype == torch.int32 and given[8:12] == (q.shape[0], k.shape[0], 0.0, True)
    crossed = (*terms[:4], starts.clone(), *terms[5:])
    assert sdpa_varlen.backward(grad, none, *crossed, every) is None  # another causal limit
    apart = torch.cat((starts, starts))  # two views that begin in one place
    crossed = (*terms[:3], apart[: len(starts)], apart[::2][: len(starts)], *terms[5:])
    assert sdpa_varlen.backward(grad, none, *crossed, every) is None
    seen.clear()
    spread = torch.stack((starts, starts), 1)[:, 0]
    aslant = (*terms[:3], spread, spread, out, lse.t().contiguous().t(), *terms[7:])
    assert sdpa_varlen.backward(grad, none, *aslant, every) is not None
    assert all(t.is_contiguous() for t in seen[0][5:8])  # the kernel reads or wants them so
    assert sdpa_varlen.backward(grad, lse, *terms, every) is None  # no gradient of lse
    assert sdpa_varlen.backward(grad, none, q[:0], *terms[1:], every) is None
    many = starts.new_zeros(1 << 16)
    many[-1] = q.shape[0]
    for places, serves in ((many, True), (F.pad(many, (1, 0)), False)):
        terms = (*terms[:3], places, places, *terms[5:])
        assert (sdpa_varlen.backward(grad, none, *terms, every) is not None) is serves
    half = ("cuda", torch.float16, 64, 64)
    served = {half: True, ("cuda", torch.float32, 64, 64): False, ("cpu", *half[1:]): False,
              (*half[:2], 60, 60): False, (*half[:2], 64, 32): False}  # fmt: skip
    built, here = (SimpleNamespace(is_built=lambda: True, flash_sdp_enabled=lambda: True,
                                   is_flash_attention_available=lambda there=there: there)
                   for there in (False, True))  # fmt: skip
    monkeypatch.setattr(torch.backends, "cuda", here)
    for request, ok in served.items():
        assert sdpa_varlen.gradient(Request(*request, "strict")).ok == ok
    monkeypatch.setattr(torch.backends, "cuda", built)
    assert "without flash" in sdpa_varlen.gradient(Request(*half, "strict")).reason


def test_shapes_alone_on_the_meta_device() -> None:
    given = [t.to("meta") for t in operands("mixed")]
    out, lse = elsa.varlen_attention(*given, return_lse=True)
    assert out.shape == (169, 4, 40)
    assert lse.shape == (4, 169)


def test_names() -> None:
    assert "native" in routing.names("varlen_attention")


def test_packing_and_padding_are_inverse() -> None:
    lengths = [3, 0, 1, 5]
    tokens = make(9, 2, 4)
    apart = packing.padded(tokens, bounds(lengths), 5)
    assert apart.shape == (4, 5, 2, 4)
    assert not apart[1].any()
    assert torch.equal(apart[3], tokens[4:])
    assert torch.equal(packing.packed(apart, bounds(lengths), 9), tokens)
