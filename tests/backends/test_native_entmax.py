"""The CPU kernels of alpha-entmax attention: against float64, with plain PyTorch as the peer.

`test_instruction_sets` runs the file again on the other kernels. Against other definitions of
alpha-entmax and the `entmax` package: `tests/core/test_entmax.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from native_kernels import ULPS, call_apart, guarded, make, once, relative, run
from torch import Tensor

import elsa_core as elsa
from elsa_core.backends import native
from elsa_core.operators.entmax import ENTMAX_ATTENTION
from elsa_core.operators.record import Operator

EPS = torch.finfo(torch.float32).eps
ALPHAS = (1.0, 1.001, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
Terms = tuple[Tensor | None, Tensor | None, float, bool, float]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    answer = native.load()
    assert answer.ok, answer.reason  # a machine that tests elsa has a compiler


def operands(
    heads: int, kv_heads: int, queries: int, keys: int, dim: int, value_dim: int, batch: int = 2
) -> list[Tensor]:
    shapes = (
        (batch, heads, queries, dim), (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, value_dim), (batch, heads, queries, value_dim),
    )  # fmt: skip
    return [make(*shape, seed=i) for i, shape in enumerate(shapes)]


def wide(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.dtype == torch.bool else t.double()


def results(tensors: Sequence[Tensor], terms: Terms, *, kernels: bool) -> dict[str, Tensor]:
    """out and the gradients of all that is floating, by the kernels or by plain PyTorch."""
    q, k, v, slope = tensors
    mask, head_alpha, alpha, causal, scale = terms
    operator = torch.ops.elsa.entmax_attention if kernels else torch.ops.elsa.entmax_attention_eager
    leaves = [
        t.detach().requires_grad_() if t is not None and t.is_floating_point() else t
        for t in (q, k, v, mask, head_alpha)
    ]
    out = operator(*leaves, alpha, causal, scale, "strict")[0]
    names = [
        name
        for name, t in zip("qkvma", leaves, strict=True)
        if t is not None and t.is_floating_point()
    ]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return {"out": out, **dict(zip(names, torch.autograd.grad(out, wanted, slope), strict=True))}


def check(tensors: Sequence[Tensor], *given: object) -> dict[str, Tensor]:
    """Each error is at most twice that of plain PyTorch in float32; what the kernels give."""
    mask, head_alpha, alpha, causal, scale = given
    terms = (mask, head_alpha, alpha, causal, scale)
    exact = results(
        [t.double() for t in tensors], (wide(mask), wide(head_alpha), alpha, causal, scale),
        kernels=False,
    )  # fmt: skip
    found = results(tensors, terms, kernels=True)
    peer = results(tensors, terms, kernels=False)
    for name, e in exact.items():
        assert found[name].shape == e.shape and torch.isfinite(found[name]).all()
        size = e.norm().clamp_min(1e-30)
        if name == "a":  # a sum over a head, which may cancel: as exact as what it is made of
            size = e.abs().max() + exact["out"].norm()
        error, of_peer = ((x[name].double() - e).norm() / size for x in (found, peer))
        assert error <= 2 * of_peer + ULPS * EPS, (name, error.item(), of_peer.item())
    return found


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alphas(alpha: float) -> None:
    check(operands(3, 3, 101, 133, 16, 16), None, None, alpha, False, 0.25)


@pytest.mark.parametrize("keys", [1, 2, 15, 17, 63, 100, 111, 197])
@pytest.mark.parametrize("queries", [1, 5, 65])
def test_lengths(queries: int, keys: int) -> None:
    check(operands(2, 2, queries, keys, 20, 36), None, None, 1.5, False, 0.3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_key_blocks_and_grouped_heads(alpha: float, causal: bool) -> None:
    tensors = operands(4, 2, 90, 1300, 24, 40, batch=1)
    if causal:
        tensors = operands(2, 1, 700, 700, 24, 40, batch=1)
    check(tensors, None, None, alpha, causal, 0.4)


def test_sums_over_many_queries() -> None:
    check(operands(2, 1, 1100, 70, 16, 16, batch=1), None, None, 1.2, False, 0.3)


@pytest.mark.parametrize("dims", [(1, 1), (64, 64), (72, 130), (256, 8)])
def test_head_dims(dims: tuple[int, int]) -> None:
    check(operands(1, 1, 50, 70, *dims), None, None, 1.5, False, dims[0] ** -0.5)


MASKS = {
    "bool": lambda: make(2, 4, 70, 90, seed=5) > 0,
    "bool of keys": lambda: make(2, 1, 1, 90, seed=5) > 0,
    "additive": lambda: make(1, 4, 70, 90, seed=5) * 3,
    "additive of keys": lambda: make(2, 1, 1, 90, seed=5),
    "transposed": lambda: make(2, 4, 90, 70, seed=5).mT,
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("alpha", [1.4, 1.5])
def test_masks(kind: str, alpha: float) -> None:
    check(operands(4, 2, 70, 90, 8, 8), MASKS[kind](), None, alpha, False, 0.5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_alpha_of_heads(shape: tuple[int, int]) -> None:
    alpha = 1.05 + torch.rand(*shape, 1, 1, generator=torch.Generator().manual_seed(5))
    alpha[0, 0] = 1.5
    check(operands(3, 3, 80, 150, 16, 16), None, alpha, 0.0, False, 0.25)


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
def test_extreme_scores_ties_and_rows_that_see_nothing(alpha: float) -> None:
    q, k, v, slope = operands(2, 2, 40, 700, 8, 8, batch=1)
    q, k = (q * 2).round(), (k * 2).round()
    q[:, 0, :5] *= 4096  # one key has all the weight
    k[:, :, 10:20] = k[:, :, :1]  # ties
    q[:, 1, 3] = 0.0  # a whole row of ties
    mask = torch.zeros(1, 1, 40, 700)
    mask[..., 7, :] = -math.inf
    mask[..., 8, 1:] = -math.inf
    found = check((q, k, v, slope), mask, None, alpha, False, 1.0)
    assert (found["out"][:, :, 7] == 0).all() and (found["q"][:, :, 7] == 0).all()
    assert torch.equal(found["out"][:, :, 8], v[:, :, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", [1.3, 1.5])
def test_half_precision(alpha: float, dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in operands(4, 2, 100, 130, 24, 40)]
    mask = make(2, 1, 100, 130, dtype=dtype, seed=6)
    terms = (mask, None, alpha, False, 0.3)
    found = results(tensors, terms, kernels=True)
    exact = results(
        [t.double() for t in tensors], (mask.double(), *terms[1:]), kernels=False
    )  # fmt: skip
    for name, e in exact.items():  # float32 inside: what is left is the rounding of the result
        assert found[name].dtype == dtype
        assert relative(found[name], e) <= torch.finfo(dtype).eps


def test_weights_sum_to_one_and_tiles_are_those_that_hold_one() -> None:
    q, k, *_ = operands(2, 1, 150, 140, 8, 8, batch=1)
    eye = torch.eye(140)[None, None]
    for alpha in (1.25, 1.5, 2.0):
        weights, rows, tiles = torch.ops.elsa.entmax_attention(
            q * 4, k, eye, None, None, alpha, True, 0.5, "strict"
        )
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 150), rtol=0, atol=1e-6)
        assert tiles.shape == (1, 2, 3, 3) and rows.shape == (3, 1, 2, 150)
        for i, j in product(range(3), range(3)):
            part = weights[:, :, 64 * i : 64 * i + 64, 64 * j : 64 * j + 64]
            assert torch.equal(tiles[:, :, i, j].bool(), (part > 0).any(-1).any(-1))
        assert not tiles[..., 0, 1:].any()


def gradients_with(tiles: Tensor, needs: list[bool], alpha: Tensor | None = None) -> list[Tensor]:
    q, k, v, slope = operands(2, 2, 130, 200, 8, 8)
    call = (q, k, v, None, alpha)
    terms = (1.5, False, 0.5, "strict")
    out, rows, _ = torch.ops.elsa.entmax_attention(*call, *terms)
    backward = torch.ops.elsa.entmax_attention_backward
    return list(backward(slope, *call, out, rows, tiles, *terms, needs))


def test_tiles_without_a_weight_are_skipped() -> None:
    tiles = torch.ones(2, 2, 3, 4, dtype=torch.uint8)
    whole = gradients_with(tiles, [True] * 3 + [False] * 2)
    tiles[:, :, :, 1] = 0
    part = gradients_with(tiles, [True] * 3 + [False] * 2)
    assert all((g[:, :, 64:128] == 0).all() for g in part[1:3])
    assert not (whole[1][:, :, 64:128] == 0).all()
    # what values get does not depend on other keys
    assert torch.equal(part[2][:, :, :64], whole[2][:, :, :64])


@pytest.mark.parametrize("wanted", range(5))
def test_only_what_is_needed_is_computed(wanted: int) -> None:
    tiles = torch.ones(2, 2, 3, 4, dtype=torch.uint8)
    alpha = torch.full((1, 2, 1, 1), 1.5)
    whole = gradients_with(tiles, [True, True, True, False, True], alpha)
    needs = [i == wanted for i in range(5)]
    found = gradients_with(tiles, needs, alpha)
    for i in range(5):
        expected = whole[i] if i == wanted else torch.empty(0)
        assert torch.equal(found[i], expected)


def test_strides() -> None:
    packed = make(2, 50, 3, 4, 8)
    slope = make(2, 50, 4, 8, seed=1).transpose(1, 2)
    backwards = [t.flip(-1).mT.contiguous().mT for t in packed.permute(2, 0, 3, 1, 4)]
    for tensors in (packed.permute(2, 0, 3, 1, 4), backwards):
        dense = [t.contiguous() for t in tensors]
        terms = (None, None, 1.5, False, 0.3)
        found = results([*tensors, slope], terms, kernels=True)
        expected = results([*dense, slope.contiguous()], terms, kernels=True)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert found["out"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("sizes", [(0, 2, 3, 3), (2, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)])
def test_empty(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, queries, keys = sizes
    tensors = operands(heads, heads, queries, keys, 4, 4, batch)
    found = results(tensors, (None, torch.full((1, 1, 1, 1), 1.5), 0.0, False, 0.5), kernels=True)
    assert found["out"].shape == (batch, heads, queries, 4)
    assert all((t == 0).all() for t in found.values())
    rows = torch.ops.elsa.entmax_attention(
        *tensors[:3], None, None, 1.5, False, 0.5, "strict"
    )[1]  # fmt: skip
    assert (rows[0] == -math.inf).all()


def test_memory_that_holds_nan_stays_out() -> None:
    """Outputs and gradients are made in memory full of NaN."""
    tensors, terms = operands(2, 1, 70, 90, 20, 24), (None, None, 1.5, True, 0.3)
    expected = results(tensors, terms, kernels=True)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert torch.empty(3).isnan().all()
        found = results(tensors, terms, kernels=True)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nan_is_not_hidden() -> None:
    q, k, v, _ = operands(1, 1, 20, 30, 4, 4, batch=1)
    q[0, 0, 2, 1] = math.nan
    for alpha in (1.3, 1.5, 2.0):
        out = torch.ops.elsa.entmax_attention(q, k, v, None, None, alpha, False, 0.5, "strict")[0]
        assert out[0, 0, 2].isnan().all() and torch.isfinite(out[0, 0, 3:]).all()
    alpha = torch.full((1, 1, 1, 1), 4.5)
    out = torch.ops.elsa.entmax_attention(q, k, v, None, alpha, 0.0, True, 0.5, "strict")[0]
    assert out.isnan().all()


@pytest.mark.parametrize("alpha", [1.3, 1.5])
def test_bits_depend_neither_on_threads_nor_on_the_run(alpha: float) -> None:
    tensors = operands(4, 2, 300, 700, 16, 16)
    head_alpha = torch.full((1, 1, 1, 1), alpha)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            terms = (None, head_alpha, 0.0, False, 0.3)
            runs.append(results(tensors, terms, kernels=True))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(other[name], runs[0][name]) for name in other)


def read_up_to_the_guard() -> None:
    for length, dim in ((1, 1), (17, 16), (50, 72), (300, 20)):
        q, k, v, slope = operands(2, 2, length, length, dim, dim, batch=1)
        for mask in (None, make(1, 2, length, length), make(1, 1, 1, length) > 0):
            call = (mask, None, 1.5, False, 0.2, "strict")
            out, rows, tiles = torch.ops.elsa.entmax_attention(q, k, v, *call)
            fenced = None if mask is None else guarded(mask)
            inside = [guarded(t) for t in (q, k, v)]
            again = torch.ops.elsa.entmax_attention(*inside, fenced, *call[1:])
            assert all(map(torch.equal, again, (out, rows, tiles)))
            needs = [True] * 3 + [False] * 2
            backward = torch.ops.elsa.entmax_attention_backward
            plain = backward(slope, q, k, v, *call[:2], out, rows, tiles, *call[2:], needs)
            found = backward(
                guarded(slope), *inside, fenced, None, out, guarded(rows), guarded(tiles),
                *call[2:], needs,
            )  # fmt: skip
            assert all(map(torch.equal, found, plain))


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX")
def test_reads_no_byte_beyond_its_operands() -> None:
    call_apart(read_up_to_the_guard)


@once
def test_memory_is_linear_at_16384_tokens() -> None:
    """The score matrix would take 1 GiB; the lists of some rows, at most, 16 MiB a thread."""
    program = """
import resource, torch
import elsa_core as elsa
def train(n):
    q, k, v = (torch.randn(1, 1, n, 8).requires_grad_() for _ in range(3))
    elsa.entmax_attention(q, k, v, alpha=1.5, backend="native").sum().backward()
train(64)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
train(16384)
print((peak() - before) / 1024)
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 64  # MiB


@once
def test_auto_takes_the_kernels_and_says_so() -> None:
    q = make(1, 2, 9, 4).requires_grad_()
    route = elsa.explain_entmax_attention(q, q, q)
    assert route.backend == "native" and "listed keys" in route.schedule
    assert route.reasons[-1] == "gradients: by native"
    assert elsa.explain_entmax_attention(q.double(), q.double(), q.double()).backend == "eager"
    leaf, other = (q.detach().clone().requires_grad_() for _ in range(2))
    by_kernels = elsa.entmax_attention(leaf, q, q, backend="native")
    by_auto = elsa.entmax_attention(other, q, q)
    assert torch.equal(by_kernels, by_auto)
    grads = [torch.autograd.grad(o.sum(), x) for o, x in ((by_kernels, leaf), (by_auto, other))]
    assert torch.equal(grads[0][0], grads[1][0])


@once
def test_a_mask_that_learns_takes_plain_pytorch_for_itself(monkeypatch) -> None:
    needs: list[object] = []
    formula = Operator.recomputed
    monkeypatch.setattr(
        Operator, "recomputed", lambda *given: needs.append(given[-1]) or formula(*given)
    )
    check(operands(4, 2, 70, 90, 8, 8), make(1, 4, 70, 90), None, 1.5, False, 0.5)
    assert [False, False, False, True, False] in needs


@once
def test_opcheck_and_compile() -> None:
    q, k, v, _ = (t.requires_grad_() for t in operands(4, 2, 9, 9, 4, 4))
    mask, alpha = make(1, 4, 9, 9).requires_grad_(), torch.full((1, 4, 1, 1), 1.4)
    overload = ENTMAX_ATTENTION.overload
    torch.library.opcheck(
        overload, (q, k, v, mask, alpha.requires_grad_(), 0.0, False, 0.5, "strict")
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return elsa.entmax_attention(q, k, v, enable_gqa=True, backend="native")

    expected = call(q, k, v)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(compiled, expected)
    for x, y in zip(
        torch.autograd.grad(compiled.sum(), (q, k, v)),
        torch.autograd.grad(expected.sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_alpha": torch.ones(3, 1, 1, 1)}, "head_alpha must be"),
        ({"head_alpha": torch.ones(1, 1, 1, 1, dtype=torch.int64)}, "head_alpha must be floating"),
        ({"key": make(1, 2, 5, 3)}, "head_dim of query is 4"),
        ({"query": make(1, 2, 5, 4, dtype=torch.float64)}, "float32, float16 or bfloat16"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Tensor], words: str) -> None:
    q = make(1, 2, 5, 4)
    given = {"query": q, "key": q, "value": q, "attn_mask": None, "head_alpha": None} | change
    with pytest.raises(RuntimeError, match=words):
        torch.ops.elsa.entmax_attention(*given.values(), 1.5, False, 0.5, "strict")
