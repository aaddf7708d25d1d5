"""Dropout of attention weights: what is kept, the operator and its gradients against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import elsa_core as elsa
from elsa_core.backends import eager, native, philox
from elsa_core.backends.philox import Dropout
from elsa_core.errors import ArgumentError, ExportError, UnavailableError
from elsa_core.exporting.operators import check, in_program

SEED = torch.tensor([-0x123456789ABCDEF, 0x1_8765_4321])
WORD = 0xFFFFFFFF


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper writes it, in Python's integers."""
    (a, b, c, d), (first, second) = counter, key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ first, y & WORD, (x >> 32) ^ d ^ second, x & WORD
        first, second = (first + 0x9E3779B9) & WORD, (second + 0xBB67AE85) & WORD
    return [a, b, c, d]


# The known answers of Random123: counter, key, words.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    seed = torch.tensor(key[0] | key[1] << 32, dtype=torch.uint64).view(torch.int64)
    a, b, c, d = (torch.tensor(x) for x in counter)
    assert [int(w) for w in philox.words((a, b, c, d), seed)] == expected
    assert words(counter, key) == expected


def every_factor(shape: tuple[int, int, int, int], p: float, seed: Tensor = SEED) -> Tensor:
    """keep / (1 - p) of [B, H, Nq, Nk], float64."""
    b, h, n, m = shape
    return philox.factors(Dropout(p, seed), b, h, slice(0, n), slice(0, m), torch.float64)


def test_a_weight_is_kept_by_its_position_alone() -> None:
    b, h, n, m, p = 2, 3, 5, 11, 0.3
    found = every_factor((b, h, n, m), p)
    seed, offset = SEED.tolist()
    for i in itertools.product(range(b), range(h), range(n), range(m)):
        counter = [i[3] // 4, i[2], i[0] * h + i[1], offset & WORD]
        word = words(counter, [seed & WORD, seed >> 32 & WORD])[i[3] % 4]
        assert found[i] == (1.0 / (1.0 - p) if word / 2**32 >= p else 0.0)
    for rows, columns in ((slice(1, 4), slice(3, 9)), (slice(4, 5), slice(8, 11))):
        block = philox.factors(Dropout(p, SEED), b, h, rows, columns, torch.float64)
        assert torch.equal(block, found[:, :, rows, columns])


def test_seed_and_offset_change_everything() -> None:
    shape, found = (1, 2, 64, 64), []
    for seed, offset in ((1, 2), (2, 2), (1, 3), (1 + (1 << 32), 2)):
        found.append(every_factor(shape, 0.5, torch.tensor([seed, offset])) > 0)
    for one, two in itertools.combinations(found, 2):
        assert 0.4 < (one == two).double().mean() < 0.6


def test_rate_and_independence() -> None:
    """Over seeds: the rate of each position, variance, and no correlation between neighbours."""
    p, seeds = 0.3, 400
    kept = torch.stack([
        every_factor((1, 2, 12, 16), p, torch.tensor([s * 7919, s])) > 0 for s in range(seeds)
    ]).double()  # fmt: skip
    count = kept[0].numel()
    spread = p * (1 - p)
    # a chi-square of as many degrees of freedom as positions, each a sum over seeds
    chi = ((kept.sum(0) - seeds * (1 - p)) ** 2 / (seeds * spread)).sum()
    assert abs(chi - count) < 5 * math.sqrt(2 * count)
    whole = kept.numel()
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(spread / whole)
    assert abs(kept.var() - spread) < 5 * math.sqrt(spread / whole)
    centred = kept - (1 - p)
    for dim in range(5):  # seed, batch, head, query, key
        if kept.shape[dim] > 1:
            last = kept.shape[dim] - 1
            one, two = centred.narrow(dim, 0, last), centred.narrow(dim, 1, last)
            assert abs((one * two).mean()) < 5 * spread / math.sqrt(one.numel()), dim


def test_the_factor_of_what_is_kept() -> None:
    for p in (1e-9, 0.1, 0.5, 1 - 2**-40):
        assert philox.kept_factor(p) == 1.0 / (1.0 - p)
        assert 0 <= philox.threshold(p) < 1 << 31
    assert philox.kept_factor(1.0) == 0.0
    assert bool((every_factor((1, 1, 8, 8), 1e-12) == 1.0 / (1.0 - 1e-12)).all())


# --- the operator --------------------------------------------------------------------------------


def written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """out and lse in the operands' dtype; rows without a visible key are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    dead = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    p = s.softmax(-1).masked_fill(dead, 0.0)
    lse = s.logsumexp(-1).masked_fill(dead[..., 0], -math.inf)
    return (p * factors.to(p.dtype)) @ v, lse


CASES = {
    "plain": ((2, 3, 3, 37, 53, 16, 24), {}),
    "groups": ((2, 4, 2, 9, 70, 8, 8), {}),
    "causal": ((1, 2, 2, 67, 67, 16, 16), {"causal": True}),
    "bool": ((2, 2, 1, 19, 45, 8, 8), {"mask": "bool"}),
    "bias": ((2, 2, 2, 13, 31, 8, 8), {"mask": "bias"}),
    "several blocks": ((1, 2, 2, 70, 1400, 8, 8), {"mask": "bool"}),
    "extreme": ((1, 2, 2, 20, 90, 16, 16), {"huge": True}),
    "one key": ((3, 2, 2, 5, 1, 8, 8), {}),
    "strides": ((2, 3, 3, 33, 33, 16, 16), {"packed": True}),
}  # fmt: skip


def operands(name: str) -> tuple[list[Tensor], Tensor | None, bool]:
    (b, hq, hk, n, m, d, dv), options = CASES[name]
    q, k, v = make(b, hq, n, d), make(b, hk, m, d, seed=1), make(b, hk, m, dv, seed=2)
    if options.get("packed"):
        q, k, v = make(b, n, 3, hq, d).permute(2, 0, 3, 1, 4)
    if options.get("huge"):
        q = q * 300
    mask = None
    if options.get("mask") == "bool":
        mask = make(1, hq, n, m, seed=3) > -0.5
        mask[:, :, 2] = False
    elif options.get("mask") == "bias":
        mask = make(1, hq, n, m, seed=3)
        mask[:, :, 2] = -math.inf
    return [q, k, v], mask, bool(options.get("causal"))


def gradients(
    results: tuple[Tensor, Tensor], leaves: list[Tensor], slopes: tuple[Tensor, Tensor]
) -> list[Tensor]:
    out, lse = results
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    return list(torch.autograd.grad((out, finite), leaves, [s.to(out.dtype) for s in slopes]))


def assert_as_exact(found: Tensor, peer: Tensor, exact: Tensor) -> None:
    error, limit = (((x.double() - exact).norm()).item() for x in (found, peer))
    assert error <= 2 * limit + 2.5e-7 * exact.norm().item(), (error, limit)


@pytest.fixture(params=["eager", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        answer = native.load()
        assert answer.ok, answer.reason
    return request.param


@pytest.mark.parametrize("name", list(CASES))
def test_against_float64(name: str, backend: str) -> None:
    tensors, mask, causal = operands(name)
    bias = mask is not None and mask.dtype != torch.bool

    def leaves_of(dtype: torch.dtype) -> list[Tensor]:
        given = [*tensors, mask] if bias else tensors
        return [t.detach().to(dtype).requires_grad_() for t in given]

    torch.manual_seed(5)
    seed = philox.draw(torch.device("cpu"))
    shape = (*tensors[0].shape[:3], tensors[1].shape[2])
    factors = every_factor(shape, 0.25, seed)
    found, slopes, results = {}, None, {}
    for kind in ("elsa", "again", torch.float32, torch.float64):
        leaves = leaves_of(kind if isinstance(kind, torch.dtype) else torch.float32)
        m = leaves[3] if bias else mask
        if isinstance(kind, torch.dtype):
            result = written_out(*leaves[:3], m, causal, factors)
        else:
            torch.manual_seed(5)
            result = elsa.attention(
                *leaves[:3], m, 0.25, causal, enable_gqa=True, backend=backend, return_lse=True
            )
        slopes = slopes or (make(*result[0].shape, seed=7), make(*result[1].shape, seed=8))
        results[kind] = result
        found[kind] = gradients(result, leaves, slopes)
    for one, two in zip(results["elsa"], results["again"], strict=True):
        assert torch.equal(one, two)
    assert all(torch.equal(a, b) for a, b in zip(found["elsa"], found["again"], strict=True))
    dead = results[torch.float64][1].isneginf()
    assert torch.equal(results["elsa"][1].isneginf(), dead)
    for kind in results:
        results[kind] = (results[kind][0], results[kind][1].masked_fill(dead, 0.0))
    for kinds in (results, found):
        for three in zip(*(kinds[k] for k in ("elsa", torch.float32, torch.float64)), strict=True):
            assert_as_exact(*three)


def test_every_backend_keeps_the_same_weights(backend: str) -> None:
    """Uniform weights times the identity are keep / (1 - p) / Nk, whatever the tiles.

    So are those of a position whose number is p itself: it is kept.
    """
    shape = (2, 2, 70, 150)
    b, h, n, m = shape
    torch.manual_seed(9)
    seed = philox.draw(torch.device("cpu"))
    counter = tuple(torch.tensor(i) for i in (5 // 4, 3, 1 * h + 1, int(seed[1]) & WORD))
    number = int(philox.words(counter, seed[0])[5 % 4]) >> 1  # of batch 1, head 1, (3, 5)
    q, k, v = torch.zeros(b, h, n, 4), torch.zeros(b, h, m, 4), torch.eye(m).expand(b, h, m, m)
    for p in (0.4, number / 2**31, (number + 1) / 2**31):
        torch.manual_seed(9)
        out = elsa.attention(q, k, v, dropout_p=p, backend=backend)
        assert torch.equal(out > 0, every_factor(shape, p, seed) > 0)
        assert p == 0.4 or bool(out[1, 1, 3, 5]) == (p == number / 2**31)


def test_equal_seeds_drop_alike_and_the_next_call_does_not(backend: str) -> None:
    x = make(1, 2, 33, 8)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found += [elsa.attention(x, x, x, dropout_p=0.5, backend=backend) for _ in range(2)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[4])


def test_lse_and_mean_are_those_without_dropout(backend: str) -> None:
    x = make(1, 2, 24, 8)
    exact, lse = elsa.attention(x, x, x, backend=backend, return_lse=True)
    torch.manual_seed(0)
    outs = []
    for _ in range(500):
        out, own = elsa.attention(x, x, x, dropout_p=0.3, backend=backend, return_lse=True)
        assert torch.equal(own, lse)
        outs.append(out)
    found = torch.stack(outs).double()
    # the variance of an output is p / (1 - p) sum_j (w_j v_j)^2
    weights = (x.double() @ x.double().mT * 8**-0.5).softmax(-1)
    variance = 0.3 / 0.7 * weights.square() @ x.double().square()
    z = (found.mean(0) - exact) / (variance / len(outs)).sqrt()
    assert 0.8 < z.square().mean() < 1.25
    assert 0.9 < (found.var(0) / variance).mean() < 1.1


def test_no_dropout_and_nothing_but_dropout(backend: str) -> None:
    x = make(1, 2, 9, 8).requires_grad_()
    out = elsa.attention(x, x, x, dropout_p=0.0, backend=backend)
    assert torch.equal(out, elsa.attention(x, x, x, backend=backend))
    state = torch.get_rng_state()
    elsa.attention(x, x, x, dropout_p=0, backend=backend)
    assert torch.equal(state, torch.get_rng_state())
    out = elsa.attention(x, x, x, dropout_p=1.0, backend=backend)
    out.sum().backward()
    assert not out.any() and x.grad is not None and not x.grad.any()


def test_wrong_probabilities_and_backends() -> None:
    x = make(1, 2, 5, 8)
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(ArgumentError, match="dropout_p"):
            elsa.attention(x, x, x, dropout_p=wrong)
    with pytest.raises(UnavailableError, match="triton"):
        elsa.attention(x, x, x, dropout_p=0.5, backend="triton")
    route = elsa.explain(x, x, x, dropout_p=0.5, backend="eager")
    assert route.backend == "eager"


def test_half_precision_has_gradients_by_the_kernel() -> None:
    """Also of rows of nearly one weight over several key blocks, with an additive mask."""
    assert native.load().ok
    q, k, v = (make(1, 2, n, 16, seed=n) for n in (20, 1400, 1401))
    q[:, 0, :5] *= 300
    tensors = [t.bfloat16() for t in (q, k, v[:, :, :1400])]
    mask = make(1, 1, 20, 1400).bfloat16()
    found, exact = [], []
    for operator, dtype, results in (
        (torch.ops.elsa.attention_dropout, torch.bfloat16, found),
        (torch.ops.elsa.attention_dropout_eager, torch.float64, exact),
    ):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        out, _ = operator(*call(*leaves, mask.to(dtype)))
        results.extend(torch.autograd.grad(out, leaves, make(*out.shape).bfloat16().to(dtype)))
    for ours, oracle in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        rounded = oracle.bfloat16().double() - oracle
        assert (ours.double() - oracle).norm() <= 2 * rounded.norm() + 1e-6 * oracle.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = make(1, 2, 21, 8).to(dtype).requires_grad_()
    torch.manual_seed(3)
    seed = philox.draw(torch.device("cpu"))
    torch.manual_seed(3)
    out = elsa.attention(x, x, x, dropout_p=0.25)
    y = x.detach().double().requires_grad_()
    exact, _ = written_out(y, y, y, None, False, every_factor((1, 2, 21, 21), 0.25, seed))
    band = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=band, atol=band)
    (grad,) = torch.autograd.grad(out.double().square().sum(), x)
    (expected,) = torch.autograd.grad(exact.square().sum(), y)
    torch.testing.assert_close(grad.double(), expected, rtol=8 * band, atol=8 * band)
    assert out.dtype == grad.dtype == dtype


def test_nothing_of_the_size_of_the_weights_is_saved(backend: str) -> None:
    saved = []
    x = make(1, 2, 300, 8).requires_grad_()

    def pack(t: Tensor) -> Tensor:
        saved.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        elsa.attention(x, x, x, dropout_p=0.5, backend=backend)
    assert saved and max(saved) == x.numel()


# --- as an operator of PyTorch -------------------------------------------------------------------


def call(*tensors: Tensor, p: float = 0.3) -> tuple:
    """The arguments of the operator."""
    q, k, v, *mask = tensors
    return q, k, v, mask[0] if mask else None, False, 0.5, "strict", p, SEED


@pytest.mark.parametrize("name", ["attention_dropout", "attention_dropout_eager"])
def test_opcheck(name: str) -> None:
    assert native.load().ok
    q, k, v = (make(1, 2, n, 4, seed=n).requires_grad_() for n in (5, 7, 7))
    bias = make(1, 1, 5, 7).requires_grad_()
    operator = getattr(torch.ops.elsa, name).default
    torch.library.opcheck(operator, call(q, k, v, bias))
    torch.library.opcheck(operator, call(q, k, v))


def test_gradcheck() -> None:
    """First and second derivatives of the reference, the mask's and lse's included."""
    q, k, v = (make(1, 2, n, 3, seed=n).double().requires_grad_() for n in (4, 5, 5))
    bias = make(1, 1, 4, 5).double().requires_grad_()
    operator = torch.ops.elsa.attention_dropout_eager

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return operator(*call(*tensors))

    assert torch.autograd.gradcheck(run, (q, k, v, bias))
    assert torch.autograd.gradgradcheck(run, (q, k, v, bias))


@pytest.fixture
def compiler() -> Iterator[CompileCounterWithBackend]:
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("named", ["auto", "eager"])
def test_compiled(named: str, compiler: CompileCounterWithBackend) -> None:
    """One graph, which draws anew in each call; its backward meets the forward's mask."""

    def run(x: Tensor, v: Tensor) -> Tensor:
        return elsa.attention(x, x, v, dropout_p=0.5, backend=named)

    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    x = torch.zeros(1, 2, 17, 8, requires_grad=True)
    v = torch.eye(17).expand(1, 2, 17, 17).clone().requires_grad_()
    outs = []
    for _ in range(2):
        out = compiled(x, v)
        (grad,) = torch.autograd.grad(out.sum(), v)
        # each value's gradient is the sum of the weights that it got
        torch.testing.assert_close(grad[..., 0], out.sum(-2))
        outs.append(out.detach())
    assert compiler.frame_count == 1
    assert not torch.equal(*outs)


@pytest.mark.usefixtures("inductor")
def test_inductor_draws_anew() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: elsa.attention(x, x, x, dropout_p=0.5), fullgraph=True)
    x = make(1, 2, 9, 8)
    torch.manual_seed(0)
    one, two = compiled(x), compiled(x)
    torch.manual_seed(0)
    assert torch.equal(compiled(x), one) and not torch.equal(one, two)
    torch._dynamo.reset()


def test_a_trace_draws_when_it_runs() -> None:
    graph = make_fx(lambda x: elsa.attention(x, x, x, dropout_p=0.5))(make(1, 2, 9, 8))
    names = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.elsa.attention_dropout.default in names
    x = make(1, 2, 9, 8)
    assert not torch.equal(graph(x), graph(x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("named", ["auto", "eager"])
def test_checkpointing_drops_the_same(named: str, reentrant: bool) -> None:
    x = make(1, 2, 19, 8).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return elsa.attention(x, x, x, dropout_p=0.5, backend=named)

    found = []
    for way in (run, lambda x: checkpoint(run, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        out = way(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x) if way is run else (None,)
        if grad is None:
            x.grad = None
            out.square().sum().backward()
            grad = x.grad
        found.append((out.detach(), grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_torch_func() -> None:
    """grad by the same mask; vmap as PyTorch's own dropout asks for it."""
    x = make(3, 2, 9, 8).double()

    def loss(x: Tensor) -> Tensor:
        return elsa.attention(x, x, x, dropout_p=0.5).square().sum()

    torch.manual_seed(0)
    found = torch.func.grad(loss)(x)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(torch.func.grad(loss))(x)
    alike = x[:1].expand(3, -1, -1, -1)
    each = torch.func.vmap(torch.func.grad(loss), randomness="different")(alike)
    same = torch.func.vmap(torch.func.grad(loss), randomness="same")(alike)
    assert not torch.equal(each[0], each[1]) and torch.equal(same[0], same[1])


def test_autocast_and_ranks() -> None:
    x = make(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = elsa.attention(x, x, x, dropout_p=0.5)
    assert out.dtype == torch.bfloat16 and out.shape == (9, 8)
    torch.manual_seed(0)
    out, lse = elsa.attention(x, x, x, dropout_p=0.5, return_lse=True)
    torch.manual_seed(0)
    assert torch.equal(
        out, elsa.attention(x[None, None], x[None, None], x[None, None], None, 0.5)[0, 0]
    )
    assert lse.shape == (9,)


def test_blocks_of_the_reference_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make(1, 2, 100, 8)
    one = torch.ops.elsa.attention_dropout_eager(*call(x, x, x))[0]
    monkeypatch.setattr(eager, "_KEY_BLOCK", 13)
    monkeypatch.setattr(eager, "_SCORES_ALIVE", 13 * 17)
    torch.testing.assert_close(torch.ops.elsa.attention_dropout_eager(*call(x, x, x))[0], one)


def test_pytorch_on_a_cpu_by_name() -> None:
    x = make(1, 2, 9, 8)
    torch.manual_seed(0)
    out = elsa.attention(x, x, x, dropout_p=0.5, backend="sdpa")
    torch.manual_seed(0)
    assert torch.equal(out, F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))


def test_a_bundle_holds_no_dropout() -> None:
    """A module that drops in eval mode too is refused by name."""

    class Drops(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return elsa.attention(x, x, x, dropout_p=0.5)

    program = torch.export.export(Drops().eval(), (make(1, 2, 9, 8),))
    names = in_program(program)
    assert names and all(name.startswith("attention_dropout") for name in names)
    with pytest.raises(ExportError, match="drops"):
        check(names, "cpu")
