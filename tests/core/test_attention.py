"""`elsa.attention` on the CPU: every backend against float64, and as an operator of PyTorch."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import elsa_core as elsa
from elsa_core import attention as elsa_attention
from elsa_core import calls, routing
from elsa_core.backends import eager, native, native_backward
from elsa_core.backends import support as backends_support
from elsa_core.errors import ArgumentError, UnavailableError

BACKENDS = ["eager", "native"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        answer = native.load()
        assert answer.ok, answer.reason  # a machine that tests elsa has a compiler
    return request.param


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def oracle(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **kw) -> Tensor:
    """PyTorch's own operator in float64, with zeros where a row sees no key."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    out = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=mask, **kw
    )
    return out.nan_to_num(0.0) if mask is not None else out


def relative(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def assert_as_exact_as_sdpa(out: Tensor, query, key, value, mask=None, **kw) -> None:
    reference = oracle(query, key, value, mask, **kw)
    peer = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **kw).nan_to_num(0.0)
    assert out.shape == reference.shape
    assert out.dtype == query.dtype
    assert torch.isfinite(out).all()
    # Twice the peer's error, plus two roundings of the output for cases where the peer is exact.
    allowed = 2 * relative(peer, reference) + 2 * torch.finfo(query.dtype).eps
    assert relative(out, reference) <= allowed


CASES = {
    "vit": ((2, 3, 197, 64), (2, 3, 197, 64), 64),
    "odd": ((1, 2, 49, 7), (1, 2, 63, 7), 5),
    "one query": ((2, 4, 1, 32), (2, 4, 300, 32), 32),
    "one key": ((2, 4, 5, 8), (2, 4, 1, 8), 8),
    "head_dim 1": ((1, 2, 17, 1), (1, 2, 19, 1), 1),
    "head_dim 256": ((1, 1, 33, 256), (1, 1, 65, 256), 256),
    "several key blocks": ((1, 1, 70, 16), (1, 1, 2500, 16), 24),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_float64(case: str, dtype: torch.dtype, backend: str) -> None:
    query_shape, key_shape, value_dim = CASES[case]
    q = make(*query_shape, dtype=dtype)
    k = make(*key_shape, dtype=dtype, seed=1)
    v = make(*key_shape[:-1], value_dim, dtype=dtype, seed=2)
    assert_as_exact_as_sdpa(elsa.attention(q, k, v, backend=backend), q, k, v)


@pytest.mark.parametrize("shape", [(1, 1, 1, 40), (2, 1, 1, 40), (1, 3, 33, 40), (33, 40), (40,)])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_broadcast(shape: tuple[int, ...], kind: str, backend: str) -> None:
    q, k, v = make(2, 3, 33, 16), make(2, 3, 40, 16, seed=1), make(2, 3, 40, 16, seed=2)
    mask = make(*shape, seed=3) * 3
    if kind == "bool":
        mask = mask > -2
    out = elsa.attention(q, k, v, mask, backend=backend)
    assert_as_exact_as_sdpa(out, q, k, v, mask.expand(2, 3, 33, 40))


def test_fully_masked_rows_give_zeros_and_minus_infinity(backend: str) -> None:
    q, k, v = make(1, 2, 6, 8), make(1, 2, 9, 8, seed=1), make(1, 2, 9, 8, seed=2)
    for mask in (torch.ones(6, 9, dtype=torch.bool), torch.zeros(6, 9)):
        mask[3] = False if mask.dtype == torch.bool else -math.inf
        out, lse = elsa.attention(q, k, v, mask, backend=backend, return_lse=True)
        assert (out[:, :, 3] == 0).all()
        assert lse[:, :, 3].isneginf().all()
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse[:, :, :3]).all()


@pytest.mark.parametrize("lengths", [(50, 50), (30, 70), (70, 30)])
def test_causal_is_aligned_top_left(lengths: tuple[int, int], backend: str) -> None:
    q = make(1, 2, lengths[0], 16)
    k, v = make(1, 2, lengths[1], 16, seed=1), make(1, 2, lengths[1], 16, seed=2)
    out = elsa.attention(q, k, v, is_causal=True, backend=backend)
    assert_as_exact_as_sdpa(out, q, k, v, is_causal=True)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_query_attention(kv_heads: int, backend: str) -> None:
    q, k, v = make(2, 4, 21, 8), make(2, kv_heads, 30, 8, seed=1), make(2, kv_heads, 30, 8, seed=2)
    out = elsa.attention(q, k, v, enable_gqa=True, backend=backend)
    assert_as_exact_as_sdpa(out, q, k, v, enable_gqa=True)


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
def test_a_scale_of_zero_is_a_scale(scale: float, backend: str) -> None:
    q, k, v = make(1, 2, 9, 8), make(1, 2, 11, 8, seed=1), make(1, 2, 11, 8, seed=2)
    out = elsa.attention(q, k, v, scale=scale, backend=backend)
    assert_as_exact_as_sdpa(out, q, k, v, scale=scale)


@pytest.mark.parametrize("shape", [(20, 8), (3, 20, 8), (2, 3, 4, 20, 8), (2, 1, 3, 2, 20, 8)])
def test_any_rank(shape: tuple[int, ...], backend: str) -> None:
    q, k, v = make(*shape), make(*shape, seed=1), make(*shape, seed=2)
    out, lse = elsa.attention(q, k, v, backend=backend, return_lse=True)
    assert_as_exact_as_sdpa(out, q, k, v)
    assert lse.shape == shape[:-1]
    if len(shape) > 3:
        mask = make(20, 20, seed=3)
        out = elsa.attention(q, k, v, mask, backend=backend)
        assert_as_exact_as_sdpa(out, q, k, v, mask)


@pytest.mark.parametrize(
    ("shape", "mask_shape"),
    [((3, 3, 3, 5, 8), (1, 1, 3, 1, 5)), ((2, 3, 4, 5, 8), (2, 1, 1, 5, 5)),
     ((2, 3, 4, 5, 8), (3, 1, 1, 5)), ((2, 1, 3, 2, 5, 8), (1, 1, 1, 1, 5, 1))],
)  # fmt: skip
def test_masks_of_any_rank(shape, mask_shape, backend: str) -> None:
    q, k, v, mask = (make(*s, seed=i) for i, s in enumerate((shape, shape, shape, mask_shape)))
    out = elsa.attention(q, k, v, mask, backend=backend)
    assert_as_exact_as_sdpa(out, q, k, v, mask)


@pytest.mark.parametrize("masked", [False, True])
def test_groups_without_a_batch(masked: bool, backend: str) -> None:
    q, k, v = make(4, 3, 8), make(2, 5, 8, seed=1), make(2, 5, 8, seed=2)
    mask = make(4, 3, 5, seed=3) if masked else None
    out, lse = elsa.attention(q, k, v, mask, enable_gqa=True, backend=backend, return_lse=True)
    assert lse.shape == (4, 3)
    assert_as_exact_as_sdpa(out, q, k, v, mask, enable_gqa=True)


def test_batch_dims_broadcast(backend: str) -> None:
    q, k, v = make(1, 4, 7, 8), make(3, 1, 20, 8, seed=1), make(3, 4, 20, 8, seed=2)
    out = elsa.attention(q, k, v, backend=backend)
    assert_as_exact_as_sdpa(out, q.expand(3, -1, -1, -1), k.expand(-1, 4, -1, -1), v)


def test_windows_inside_heads_are_merged_without_a_copy(backend: str) -> None:
    packed = make(2, 4, 16, 3, 2, 8)  # [B, windows, N, 3, H, D]
    q, k, v = packed.permute(3, 0, 4, 1, 2, 5).unbind(0)  # [B, H, windows, N, D]
    assert_as_exact_as_sdpa(elsa.attention(q, k, v, backend=backend), q, k, v)


def test_strides_are_read_as_they_are(backend: str) -> None:
    packed = make(2, 33, 3, 4, 16)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    assert_as_exact_as_sdpa(elsa.attention(q, k, v, backend=backend), q, k, v)
    wide = make(1, 1, 33, 16).expand(2, 4, 33, 16)
    assert_as_exact_as_sdpa(elsa.attention(q, wide, wide, backend=backend), q, wide, wide)
    columns = make(2, 4, 16, 33, seed=5).mT
    assert_as_exact_as_sdpa(elsa.attention(columns, k, v, backend=backend), columns, k, v)


def test_the_callers_transpose_is_a_view(backend: str) -> None:
    q = make(2, 3, 11, 8)
    out = elsa.attention(q, q, q, backend=backend)
    rows = out.transpose(1, 2).reshape(2, 11, 24)
    assert rows.data_ptr() == out.data_ptr()
    assert rows.is_contiguous()


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 2, 5, 8), (0, 2, 5, 8)),
        ((2, 2, 0, 8), (2, 2, 5, 8)),
        ((2, 2, 5, 8), (2, 2, 0, 8)),
        ((2, 0, 5, 8), (2, 0, 5, 8)),
    ],
)
def test_empty_inputs(shapes, backend: str) -> None:
    q, k = make(*shapes[0]), make(*shapes[1])
    out, lse = elsa.attention(q, k, k, backend=backend, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_lse_is_the_natural_log_of_the_normaliser(backend: str) -> None:
    q, k, v = make(2, 3, 40, 16), make(2, 3, 50, 16, seed=1), make(2, 3, 50, 16, seed=2)
    _, lse = elsa.attention(q, k, v, backend=backend, return_lse=True)
    expected = (q.double() @ k.double().mT / 4).logsumexp(-1)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("factor", [1e4, 1e15])
def test_extreme_logits(factor: float, backend: str) -> None:
    q, k, v = make(1, 2, 30, 16) * factor, make(1, 2, 40, 16, seed=1) * factor, make(1, 2, 40, 16)
    out = elsa.attention(q, k, v, backend=backend)
    assert_as_exact_as_sdpa(out, q, k, v)


def test_nan_comes_out_where_it_goes_in(backend: str) -> None:
    q, k, v = make(1, 1, 5, 8), make(1, 1, 9, 8, seed=1), make(1, 1, 9, 8, seed=2)
    q[0, 0, 2, 3] = math.nan
    out = elsa.attention(q, k, v, backend=backend)
    assert out[0, 0, 2].isnan().all()
    assert torch.isfinite(out[0, 0, [0, 1, 3, 4]]).all()


def test_float64_is_served_by_eager() -> None:
    q = make(1, 2, 9, 8, dtype=torch.float64)
    route = elsa.explain(q, q, q)
    assert route.backend == "eager"
    assert any(reason.startswith("native:") for reason in route.reasons)
    out = elsa.attention(q, q, q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))


# As an operator of PyTorch


OPERANDS = [
    pytest.param(lambda: (make(2, 4, 9, 8), make(2, 4, 9, 8, seed=1), None), id="plain"),
    pytest.param(lambda: (make(2, 4, 9, 8), make(2, 2, 12, 8, seed=1), None), id="grouped"),
    pytest.param(lambda: (make(2, 4, 9, 8), make(2, 4, 9, 8, seed=1), make(1, 4, 9, 9)), id="mask"),
]


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(operands, is_causal: bool, requires_grad: bool, backend: str) -> None:
    q, k, mask = operands()
    v = k.clone() * 2
    for t in (q, k, v):
        t.requires_grad_(requires_grad)
    name = "attention_eager" if backend == "eager" else "attention"
    op = getattr(torch.ops.elsa, name).default
    torch.library.opcheck(op, (q, k, v, mask, is_causal, 0.25, "strict"))


NEEDS = [[True] * 4, [False, True, False, False], [False, False, True, False], [False] * 4]


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("name", ["attention_backward", "attention_eager_backward"])
def test_opcheck_of_the_backward(operands, needs: list[bool], name: str) -> None:
    """What is not wanted comes back empty, and the rest is what it was."""
    q, k, mask = operands()
    v = k.clone() * 2
    out, lse = torch.ops.elsa.attention_eager(q, k, v, mask, False, 0.25, "strict")
    given = (torch.ones_like(out), lse * 0, q, k, v, mask, out, lse, False, 0.25, "strict")
    op = getattr(torch.ops.elsa, name).default
    torch.library.opcheck(op, (*given, needs))
    every = [True, True, True, needs[3]]  # a gradient of the mask may change who serves
    for grad, full, needed in zip(op(*given, needs), op(*given, every), needs, strict=True):
        assert torch.equal(grad, full) if needed else grad.shape == (0,)


@pytest.mark.parametrize("key_block", [1024, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 1.0, 4.0])
def test_gradients_of_half_precision_with_a_bias(
    scale: float | None, dtype: torch.dtype, key_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rowsum(grad_out * out) came from the rounded output: wrong by 0.78 on near one-hot rows."""
    monkeypatch.setattr(eager, "_KEY_BLOCK", key_block)
    inputs = [make(2, 4, 70, 32, seed=s).to(dtype) for s in range(3)]
    inputs.append(make(1, 4, 70, 70, seed=3).to(dtype))
    weight = make(2, 4, 70, 32, seed=9).to(dtype)

    def gradients(attention, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        return torch.autograd.grad(attention(*leaves, scale=scale), leaves, weight.to(dtype))

    exact = gradients(F.scaled_dot_product_attention, torch.float64)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        peer = gradients(F.scaled_dot_product_attention, dtype)
    ours = gradients(functools.partial(elsa.attention, backend="eager"), dtype)
    for mine, theirs, reference in zip(ours, peer, exact, strict=True):
        assert relative(mine, reference) <= 2 * relative(theirs, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 1.0, 4.0])
@pytest.mark.parametrize("kind", ["boolean", "bias", "learnt bias"])
def test_gradients_of_half_precision_by_auto(kind: str, scale: float | None, dtype) -> None:
    """By whichever backend serves: no worse than twice PyTorch's own call."""
    inputs = [make(2, 4, 70, 32, seed=s).to(dtype) for s in range(3)]
    term = make(1, 4, 70, 70, seed=3).to(dtype)
    mask = term > -0.5 if kind == "boolean" else term
    weight = make(2, 4, 70, 32, seed=9).to(dtype)

    def gradients(attention, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        given = mask if kind == "boolean" else mask.to(dtype)
        if kind == "learnt bias":
            given = given.detach().clone().requires_grad_()
            leaves.append(given)
        out = attention(*leaves[:3], given, scale=scale)
        return torch.autograd.grad(out, leaves, weight.to(dtype))

    exact = gradients(F.scaled_dot_product_attention, torch.float64)
    peer = gradients(F.scaled_dot_product_attention, dtype)
    ours = gradients(elsa.attention, dtype)
    for mine, theirs, reference in zip(ours, peer, exact, strict=True):
        assert relative(mine, reference) <= 2 * relative(theirs, reference)


@pytest.mark.parametrize("kind", ["boolean", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fixed_mask_costs_half_precision_no_digits(dtype: torch.dtype, kind: str) -> None:
    """PyTorch's kernel reads the rounded output: up to three times its math kernel's error."""
    q, k, v = (make(2, 4 if s == 0 else 2, 70, 32, seed=s).to(dtype) for s in range(3))
    q, k = 2 * q, 2 * k
    term = make(1, 4, 70, 70, seed=3).to(dtype)
    weight = make(2, 4, 70, 32, seed=9).to(dtype)

    def gradients(attention, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        mask = term > -0.5 if kind == "boolean" else term.to(dtype)
        out = attention(*leaves, mask, scale=1.0, enable_gqa=True)
        return torch.autograd.grad(out, leaves, weight.to(dtype))

    exact = gradients(F.scaled_dot_product_attention, torch.float64)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        peer = gradients(F.scaled_dot_product_attention, dtype)
    for backend in ("auto", "native"):
        ours = gradients(functools.partial(elsa.attention, backend=backend), dtype)
        for mine, theirs, reference in zip(ours, peer, exact, strict=True):
            assert relative(mine, reference) <= 1.25 * relative(theirs, reference)


def test_many_keys_in_half_precision_stay_with_pytorchs_kernel() -> None:
    """Where the processor multiplies bf16, its kernel takes less time there."""
    q, k = (make(1, 1, n, 16, seed=n).bfloat16() for n in (3, 513))
    mask = make(3, 513, seed=3).bfloat16()
    given = (q, q.new_empty(0), q, k, k, mask[None, None], q, q[..., 0].float(), False, 1.0, "")
    assert native_backward.attention_backward(*given, (True, True, True, False)) is None


GRADIENT_CASES = {
    "plain": ((1, 2, 4, 3), (1, 2, 5, 3), None, False),
    "causal": ((1, 2, 4, 3), (1, 2, 5, 3), None, True),
    "grouped": ((2, 4, 3, 2), (2, 2, 4, 2), None, False),
    "mask of every row": ((2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 3, 4), False),
    "mask that broadcasts": ((2, 2, 3, 2), (2, 2, 4, 2), (1, 2, 1, 4), False),
}


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradients_are_exact(case: str) -> None:
    query_shape, key_shape, mask_shape, is_causal = GRADIENT_CASES[case]
    shapes = [query_shape, key_shape, key_shape] + ([mask_shape] if mask_shape else [])
    inputs = [make(*s, seed=i).double().requires_grad_() for i, s in enumerate(shapes)]

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return elsa.attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True, return_lse=True)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)


def test_gradients_follow_pytorch_in_float32(backend: str) -> None:
    inputs = [make(2, 4, 70, 16, seed=s) for s in range(3)] + [make(4, 70, 70, seed=3)]
    weight = make(2, 4, 70, 16, seed=9)

    def gradients(attention, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        (attention(*leaves) * weight.to(dtype)).sum().backward()
        return [leaf.grad for leaf in leaves]

    exact = gradients(F.scaled_dot_product_attention, torch.float64)
    peer = gradients(F.scaled_dot_product_attention, torch.float32)
    ours = gradients(lambda *a: elsa.attention(*a, backend=backend), torch.float32)
    for mine, theirs, reference in zip(ours, peer, exact, strict=True):
        assert relative(mine, reference) <= 2 * relative(theirs, reference) + 2e-7


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of steps that PyTorch differentiates in every mode, as its own operator is not."""
    return ((query @ key.mT) * query.shape[-1] ** -0.5 + mask).softmax(-1) @ value


def dual_numbers(call, primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
        return forward_ad.unpack_dual(call(*duals)).tangent


def functional(call, primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    return torch.func.jvp(call, primals, tangents)[1]


def compiled(call, primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(functional, fullgraph=True, backend="aot_eager")(call, primals, tangents)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("forward", [dual_numbers, functional, compiled])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_tangents_follow_pytorch_in_float32(backend: str, forward) -> None:
    """They came out as zeros, without a word, where no operand required a gradient."""
    shapes = [(2, 4, 40, 16), (2, 4, 1100, 16), (2, 4, 1100, 16), (4, 40, 1100)]
    primals = tuple(make(*shape, seed=s) for s, shape in enumerate(shapes))
    tangents = tuple(make(*shape, seed=9 + s) for s, shape in enumerate(shapes))
    wide = [tuple(t.double() for t in group) for group in (primals, tangents)]
    exact = functional(written_out, *wide)
    peer = functional(written_out, primals, tangents)
    ours = forward(lambda *a: elsa.attention(*a, backend=backend), primals, tangents)
    assert relative(ours, exact) <= 2 * relative(peer, exact) + 2e-7


def test_tangents_of_rows_that_see_nothing_are_zero() -> None:
    q, mask = make(1, 2, 6, 8), torch.ones(6, 6, dtype=torch.bool)
    mask[3] = False
    tangent = functional(lambda x: elsa.attention(x, x, x, mask), (q,), (make(1, 2, 6, 8, seed=1),))
    assert (tangent[:, :, 3] == 0).all()
    assert torch.isfinite(tangent).all()
    assert tangent[:, :, 4].abs().max() > 0


DERIVATIVES = {
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).square().sum())(x),
    "jacobian": lambda f, x: torch.func.jacfwd(f)(x),
    "of each sample": lambda f, x: torch.func.vmap(torch.func.grad(lambda t: f(t).sum()))(x[None]),
    "nested": lambda f, x: functional(
        lambda t: functional(lambda y: y * f(t), (x,), (x,)), (x,), (x,)
    ),
    "hessian": lambda f, x: functional(torch.func.grad(lambda t: f(t).square().sum()), (x,), (x,)),
}


@pytest.mark.parametrize("what", DERIVATIVES)
def test_derivatives_of_torch_func(what: str) -> None:
    x, mask = make(1, 2, 5, 4).double(), make(5, 5, seed=1).double()
    ours = DERIVATIVES[what](lambda t: elsa.attention(t, t, t, mask), x)
    torch.testing.assert_close(ours, DERIVATIVES[what](lambda t: written_out(t, t, t, mask), x))


def test_a_backend_without_forward_mode_says_so() -> None:
    q = make(1, 2, 5, 8)
    with forward_ad.dual_level():
        with pytest.raises(UnavailableError, match="native' has no forward-mode AD"):
            elsa.attention(q, q, q, backend="native")
        route = elsa.explain(q, q, q)
    assert route.backend == "eager"
    assert "native: has no forward-mode AD or torch.func derivatives" in route.reasons


def test_dropout_keeps_the_normaliser_and_is_differentiable() -> None:
    q = make(1, 2, 64, 8).requires_grad_()
    ones = torch.ones(1, 2, 64, 1)
    torch.manual_seed(0)
    out = elsa.attention(q, q, ones, dropout_p=0.5)
    assert 0.8 < out.mean().item() < 1.2
    assert out.std().item() > 0.05
    out.sum().backward()
    assert torch.isfinite(q.grad).all()
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(ArgumentError, match="dropout_p"):
            elsa.attention(q, q, ones, dropout_p=wrong)


class Block(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return elsa.attention(q, k, v, backend=self.backend).transpose(1, 2).reshape(x.shape)


def test_compiles_as_one_graph_for_any_batch_and_length(backend: str) -> None:
    torch._dynamo.reset()
    block = Block(backend).eval()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for batch, length in [(2, 5), (3, 9), (5, 33), (2, 64), (7, 100)]:
            x = make(batch, length, 16)
            torch.testing.assert_close(compiled(x), block(x))


def test_compiled_training_step(backend: str) -> None:
    torch._dynamo.reset()
    block = Block(backend)
    twin = copy.deepcopy(block)
    x = make(2, 9, 16)
    torch.compile(block, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    twin(x).square().sum().backward()
    torch.testing.assert_close(block.qkv.weight.grad, twin.qkv.weight.grad)


def test_exports_with_dynamic_batch_and_length(backend: str) -> None:
    block = Block(backend).eval()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}
    program = torch.export.export(block, (make(2, 5, 16),), dynamic_shapes=(dims,))
    assert any("elsa.attention" in str(node.target) for node in program.graph.nodes)
    x = make(4, 37, 16)
    torch.testing.assert_close(program.module()(x), block(x))


def test_autocast_casts_as_pytorch_does(backend: str) -> None:
    q, k, v = make(1, 2, 9, 8), make(1, 2, 9, 8, seed=1).bfloat16(), make(1, 2, 9, 8, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert elsa.attention(q, k, v, backend=backend).dtype == torch.bfloat16
        assert elsa.attention(q.double(), q.double(), q.double()).dtype == torch.float64


def test_meta_tensors_of_any_rank() -> None:
    q = torch.empty(3, 5, 8, device="meta")
    assert elsa.attention(q, q, q).shape == (3, 5, 8)
    assert elsa.attention(q.requires_grad_(), q, q).requires_grad


# The short way of an ordinary call


@pytest.fixture
def shortcuts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that were called below autograd."""
    taken = []
    below = calls.below_autograd

    def record(operator, *arguments):
        taken.append(operator.name())
        return below(operator, *arguments)

    monkeypatch.setattr(calls, "below_autograd", record)
    return taken


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_ordinary_call_takes_the_short_way(mode, backend: str, shortcuts: list[str]) -> None:
    q, k, v = make(2, 3, 9, 8), make(2, 3, 12, 8, seed=1), make(2, 3, 12, 8, seed=2)
    mask = make(9, 12, seed=3)
    with mode():
        out, lse = elsa.attention(q, k, v, mask, backend=backend, return_lse=True)
    assert shortcuts == [f"elsa::attention{'' if backend == 'native' else '_eager'}"]
    leaf = q.clone().requires_grad_()
    long, long_lse = elsa.attention(leaf, k, v, mask, backend=backend, return_lse=True)
    assert len(shortcuts) == 1
    assert torch.equal(out, long)
    assert torch.equal(lse, long_lse)
    assert not out.requires_grad
    assert long.requires_grad


def test_whoever_watches_a_call_sees_it(shortcuts: list[str]) -> None:
    q = make(1, 2, 5, 8)
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        with Recorder():
            elsa.attention(q, q, q)
        assert "elsa::attention" in seen
        graph = torch.jit.trace(lambda x: elsa.attention(x, x, x), (q,), check_trace=False).graph
        assert "elsa::attention" in str(graph)
        graph = make_fx(lambda x: elsa.attention(x, x, x))(q).graph
        assert any("elsa.attention" in str(node.target) for node in graph.nodes)
        with FakeTensorMode() as fake:
            assert elsa.attention(*[fake.from_tensor(q)] * 3).shape == q.shape
        with torch.autocast("cpu", torch.bfloat16):
            assert elsa.attention(q, q, q).dtype == torch.bfloat16
        assert not shortcuts


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_gpu_kernel_is_called_past_the_dispatcher(monkeypatch, needs_grad: bool) -> None:
    """On the CPU, with the kernel and the choice of backend replaced."""
    from elsa_core.backends import eager, triton

    taken = []

    def kernel(*arguments):
        taken.append(arguments)
        return eager.attention(*arguments)

    monkeypatch.setattr(triton, "attention_forward", kernel)
    kernel_of_triton = routing.implementation("attention", "triton")
    chosen = routing.Chosen("triton", kernel_of_triton.run, kernel_of_triton.direct, ())
    monkeypatch.setattr(routing, "chosen", lambda *_: chosen)
    native.load()
    q = make(1, 2, 5, 8).requires_grad_(needs_grad)
    out = elsa.attention(q, q, q)
    assert len(taken) == (0 if needs_grad else 1)
    assert_as_exact_as_sdpa(out.detach(), q.detach(), q.detach(), q.detach())
    with torch.no_grad(), torch.autograd.profiler.profile():  # which has to find the operator
        elsa.attention(q, q, q)
    assert len(taken) == (0 if needs_grad else 1)


# What is refused, and in which words


Q = torch.zeros(1, 2, 4, 8)
REFUSED = {
    "an integer query": (lambda: elsa.attention(Q.int(), Q.int(), Q.int()), "query"),
    "mixed dtypes": (lambda: elsa.attention(Q, Q.half(), Q), "dtype"),
    "mixed devices": (lambda: elsa.attention(Q, Q.to("meta"), Q), "device"),
    "rank 1": (lambda: elsa.attention(Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]), "rank"),
    "head dims differ": (lambda: elsa.attention(Q, Q[..., :4], Q), "head_dim"),
    "token counts differ": (lambda: elsa.attention(Q, Q, Q[:, :, :3]), "tokens"),
    "batches differ": (
        lambda: elsa.attention(Q.expand(2, -1, -1, -1), Q.expand(3, -1, -1, -1), Q),
        "batch",
    ),
    "heads differ": (
        lambda: elsa.attention(Q.expand(1, 2, 4, 8).repeat(1, 2, 1, 1), Q, Q),
        "enable_gqa",
    ),
    "heads do not divide": (
        lambda: elsa.attention(Q.repeat(1, 2, 1, 1)[:, :3], Q, Q, enable_gqa=True),
        "heads",
    ),
    "a mask that does not broadcast": (
        lambda: elsa.attention(Q, Q, Q, torch.zeros(3, 4)),
        "attn_mask",
    ),
    "a mask of a rank too many": (
        lambda: elsa.attention(Q, Q, Q, torch.zeros(1, 1, 1, 1, 4), backend="eager"),
        "attn_mask",
    ),
    "a mask of other batch dims": (
        lambda: elsa.attention(Q[None], Q[None], Q[None], torch.zeros(3, 1, 1, 4, 4)),
        "attn_mask",
    ),
    "a scale to learn": (lambda: elsa.attention(Q, Q, Q, scale=torch.tensor(0.3)), "scale"),
    "an integer mask": (
        lambda: elsa.attention(Q, Q, Q, torch.zeros(4, 4, dtype=torch.int32)),
        "attn_mask",
    ),
    "a mask elsewhere": (
        lambda: elsa.attention(Q, Q, Q, torch.zeros(4, 4, device="meta")),
        "attn_mask",
    ),
    "mask and causal": (
        lambda: elsa.attention(Q, Q, Q, torch.zeros(4, 4), is_causal=True),
        "is_causal",
    ),
    "an unknown precision": (lambda: elsa.attention(Q, Q, Q, precision="exact"), "precision"),
    "a precision that does not fit": (
        lambda: elsa.attention(Q.half(), Q.half(), Q.half(), precision="turbo"),
        "precision",
    ),
    "an unknown backend": (lambda: elsa.attention(Q, Q, Q, backend="cuda"), "backend"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_arguments_name(what: str) -> None:
    call, word = REFUSED[what]
    with pytest.raises(ArgumentError, match=word) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_backend_that_cannot_serve_says_why() -> None:
    with pytest.raises(UnavailableError, match="triton"):
        elsa.attention(Q, Q, Q, backend="triton")
    wide = torch.zeros(1, 1, 4, 300)
    with pytest.raises(UnavailableError, match="head_dim"):
        elsa.attention(wide, wide, wide, backend="native")
    assert elsa.explain(wide, wide, wide).backend == "eager"


def test_explain_names_backend_schedule_and_gradient_path() -> None:
    small = make(1, 3, 64, 64).requires_grad_()
    assert elsa.explain(small, small, small).backend == "sdpa"  # small training calls
    assert elsa.explain(*(small.detach(),) * 3).backend == "native"
    q = make(1, 12, 600, 64).requires_grad_()
    route = elsa.explain(q, q, q)
    assert route.backend == "native"
    assert route.schedule
    assert any("gradients" in reason for reason in route.reasons)
    dropped = elsa.explain(q, q, q, dropout_p=0.1)
    assert dropped.backend == "native" and "gradients: by native" in dropped.reasons[-1]


def test_eager_forward_needs_memory_linear_in_tokens() -> None:
    length = 8192
    q = make(1, 1, length, 8)
    elsa_attention  # noqa: B018  (the public name is the function, not its module)
    with torch.profiler.profile(profile_memory=True) as profile:
        elsa.attention(q, q, q, backend="eager")
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < length * length * 4 / 3


@pytest.mark.parametrize("key_block", [1024, 4])
@pytest.mark.parametrize("depth", [torch.finfo(torch.float32).min, -1e9, -5e4, -math.inf])
def test_gradients_of_rows_far_below_zero(
    depth: float, key_block: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where lse is large it has lost log S: gradients came out as many times as there are keys."""
    monkeypatch.setattr(eager, "_KEY_BLOCK", key_block)
    leaves = [make(1, 2, n, 8, seed=n).requires_grad_() for n in (4, 6, 6)]
    mask = torch.zeros(4, 6)
    mask[1:3] = depth

    def gradients(call) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves, mask).pow(3).sum(), leaves)

    ours = gradients(lambda *args: elsa.attention(*args, backend=backend))
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        peers = gradients(F.scaled_dot_product_attention)
    for grad, peer in zip(ours, peers, strict=True):
        assert relative(grad, peer.double()) < 2e-6


@pytest.mark.filterwarnings("error:.*autograd kernel was not registered")
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("key_block", [1024, 3])
def test_second_derivatives(key_block: int, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were right, with a warning that they may not be."""
    monkeypatch.setattr(eager, "_KEY_BLOCK", key_block)
    if far:
        monkeypatch.setattr(backends_support, "WEIGHT_ERROR", 0.0)
    query, key, value = (make(1, 2, n, 4, dtype=torch.float64, seed=n) for n in (3, 5, 5))
    leaves = [t.requires_grad_() for t in (query, key, value, make(3, 5, dtype=torch.float64))]

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        return elsa.attention(*args, return_lse=True)

    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
