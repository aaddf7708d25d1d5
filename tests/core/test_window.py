"""`elsa.window_attention` in plain PyTorch against a reference spelt out step by step."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core import calls, operators
from elsa_core.backends import eager_window
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.reference import relative_l2

HEADS, HEAD_DIM = 3, 8
CHANNELS = HEADS * HEAD_DIM
CASES = (
    # image, window, shift, grid
    ((1, 14, 14), (1, 7, 7), (0, 0, 0), False),
    ((1, 14, 14), (1, 7, 7), (0, 3, 3), False),
    ((1, 9, 17), (1, 4, 6), (0, 2, 3), False),
    ((1, 5, 3), (1, 7, 7), (0, 3, 0), False),
    ((4, 5, 6), (2, 3, 4), (1, 1, 2), False),
    ((1, 12, 8), (1, 4, 4), (0, 0, 0), True),
)


def reference(
    qkv: Tensor,
    bias: Tensor,
    pad: Tensor,
    window: Any,
    shift: Any,
    grid: bool,
    cosine: Tensor | None,
) -> Tensor:
    """One token at a time: which window and region each padded, rolled token lies in."""
    batch, *size, _ = qkv.shape
    counts = [-(-n // w) for n, w in zip(size, window, strict=True)]
    padded = [c * w for c, w in zip(counts, window, strict=True)]
    out = torch.zeros(batch, *size, CHANNELS, dtype=qkv.dtype)
    members: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in product(*(range(p) for p in padded)):
        key = tuple(
            p % c if grid else p // w for p, c, w in zip(place, counts, window, strict=True)
        )
        members.setdefault(key, []).append(place)
    for image, places in product(range(batch), members.values()):
        sources = [
            tuple((p + s) % n for p, s, n in zip(place, shift, size, strict=True))
            if all(p < n for p, n in zip(place, size, strict=True))
            else None
            for place in places
        ]
        rows = torch.stack([pad if s is None else qkv[(image, *s)] for s in sources])
        q, k, v = rows.view(len(places), 3, HEADS, HEAD_DIM).permute(1, 2, 0, 3)
        if cosine is None:
            scores = q @ k.mT / math.sqrt(HEAD_DIM)
        else:
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * cosine.view(-1, 1, 1)
        regions = [
            tuple(
                (p >= n - w) + (p >= n - s) if s else 0
                for p, n, w, s in zip(place, padded, window, shift, strict=True)
            )
            for place in places
        ]
        apart = torch.tensor([[a != b for b in regions] for a in regions])
        scores = scores + bias + torch.where(apart, -100.0, 0.0)
        answer = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        for source, row in zip(sources, answer, strict=True):
            if source is not None:
                out[(image, *source)] = row
    return out


def inputs(size: Any, window: Any, dtype: torch.dtype = torch.float64, batch: int = 2) -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens = math.prod(window)
    return draw(batch, *size, 3 * CHANNELS), draw(HEADS, tokens, tokens), draw(3 * CHANNELS)


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize(("size", "window", "shift", "grid"), CASES)
def test_against_the_definition(
    size: Any, window: Any, shift: Any, grid: bool, cosine: bool
) -> None:
    qkv, bias, pad = inputs(size, window)
    logit_scale = torch.tensor([3.0, 10.0, 30.0], dtype=torch.float64) if cosine else None
    out = elsa.window_attention(
        qkv, bias, num_heads=HEADS, window_size=window, shift_size=shift, pad_qkv=pad,
        logit_scale=logit_scale, grid=grid, backend="eager",
    )  # fmt: skip
    wanted = reference(qkv, bias, pad, window, shift, grid, logit_scale)
    assert (out - wanted).abs().max() < 1e-13


def test_layouts_tables_and_flat_images_say_the_same() -> None:
    qkv, bias, pad = inputs((1, 10, 9), (1, 4, 4))
    call = {"num_heads": HEADS, "window_size": (4, 4), "shift_size": (1, 2), "backend": "eager"}
    wanted = elsa.window_attention(qkv[:, 0], bias, pad_qkv=pad, **call)
    order = torch.arange(3 * CHANNELS).view(3, HEADS, HEAD_DIM).transpose(0, 1).flatten()
    swapped = elsa.window_attention(
        qkv[:, 0, ..., order], bias, pad_qkv=pad[order], layout="head", **call
    )
    index = torch.arange(16 * 16).view(16, 16)
    table = bias.permute(1, 2, 0).reshape(-1, HEADS)
    read = elsa.window_attention(qkv[:, 0], table, bias_index=index, pad_qkv=pad, **call)
    strided = torch.cat([qkv, qkv], -1)[:, 0, ..., : 3 * CHANNELS]
    torch.testing.assert_close(swapped, wanted, rtol=0, atol=1e-14)
    assert torch.equal(read, wanted)
    assert torch.equal(elsa.window_attention(strided, bias, pad_qkv=pad, **call), wanted)


def test_windows_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, bias, pad = inputs((1, 14, 14), (1, 4, 4))
    call = {"num_heads": HEADS, "window_size": (1, 4, 4), "shift_size": (0, 2, 2)}
    whole = elsa.window_attention(qkv, bias, pad_qkv=pad, backend="eager", **call)
    monkeypatch.setattr(eager_window, "_SCORES_ALIVE", 5 * HEADS * 16 * 16)
    parts = elsa.window_attention(qkv, bias, pad_qkv=pad, backend="eager", **call)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-14)


def operands(dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    qkv, bias, pad = inputs((1, 5, 6), (1, 3, 3), dtype, batch=1)
    scale = torch.tensor([2.0, 3.0, 4.0], dtype=dtype)
    tensors = [t.requires_grad_() for t in (qkv, bias, pad, scale)]
    qkv, bias, pad, scale = tensors
    window, shift = [1, 3, 3], [0, 1, 2]
    return qkv, bias, None, pad, scale, HEADS, window, shift, 0.3, -100.0, "qkv", False, "strict"


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.elsa.window_attention_eager.default, operands(torch.float32))


def test_gradients() -> None:
    index = torch.randint(7, (9, 9), generator=torch.Generator().manual_seed(0))

    def run(qkv: Tensor, table: Tensor, pad: Tensor, scale: Tensor) -> Tensor:
        return elsa.window_attention(
            qkv, table, bias_index=index, num_heads=HEADS, window_size=(1, 3, 3),
            shift_size=(0, 1, 2), pad_qkv=pad, logit_scale=scale,
        )  # fmt: skip

    qkv, _, _, pad, scale, *_ = operands()
    table = torch.randn(7, HEADS, dtype=torch.float64, requires_grad=True)
    inputs = (qkv, table, pad, scale)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, check_forward_ad=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_call_without_gradients_passes_below_autograd(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    below = calls.below_autograd

    def record(operator: Any, *arguments: Any) -> Any:
        taken.append(operator.name())
        return below(operator, *arguments)

    monkeypatch.setattr(calls, "below_autograd", record)
    qkv, bias = torch.randn(1, 8, 8, 3 * CHANNELS), torch.randn(HEADS, 16, 16)
    call: Any = {"num_heads": HEADS, "window_size": (4, 4), "shift_size": (1, 2)}
    with mode():
        out = elsa.window_attention(qkv, bias, **call)
    assert len(taken) == 1
    for leaves in ((qkv.clone().requires_grad_(), bias), (qkv, bias.clone().requires_grad_())):
        long = elsa.window_attention(*leaves, **call)
        assert torch.equal(out, long)
        assert long.requires_grad
    traced = torch.jit.trace(
        lambda x: elsa.window_attention(x, bias, **call), (qkv,), check_trace=False
    )
    assert "elsa::window_attention" in str(traced.graph)
    assert not out.requires_grad
    assert len(taken) == 1


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_tangents_follow_pytorch_in_float32(backend: str) -> None:
    """They came out as zeros, without a word, where no operand required a gradient."""
    window, shift = (1, 3, 4), (0, 1, 2)
    primals = inputs((1, 7, 6), window, batch=1)
    tangents = tuple(t.flip(-1) for t in primals)

    def ours(qkv: Tensor, bias: Tensor, pad: Tensor) -> Tensor:
        return elsa.window_attention(
            qkv, bias, num_heads=HEADS, window_size=window, shift_size=shift, pad_qkv=pad,
            backend=backend,
        )  # fmt: skip

    def tangent(call: Any, dtype: torch.dtype) -> Tensor:
        groups = [tuple(t.to(dtype) for t in group) for group in (primals, tangents)]
        return torch.func.jvp(call, *groups)[1].double()

    def spelt_out(*terms: Tensor) -> Tensor:
        return reference(*terms, window, shift, False, None)

    exact = tangent(spelt_out, torch.float64)
    error, peers = (
        (tangent(call, torch.float32) - exact).norm() / exact.norm() for call in (ours, spelt_out)
    )
    assert error <= 2 * peers + 2e-7


def test_a_backend_without_forward_mode_says_so() -> None:
    qkv, _, _ = inputs((1, 4, 4), (1, 4, 4), torch.float32)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(UnavailableError, match="native' has no forward-mode AD"),
    ):
        elsa.window_attention(qkv, num_heads=HEADS, window_size=(1, 4, 4), backend="native")


def module() -> torch.nn.Module:
    class Windows(torch.nn.Module):
        def forward(self, qkv: Tensor, bias: Tensor) -> Tensor:
            out: Tensor = elsa.window_attention(
                qkv, bias, num_heads=HEADS, window_size=(4, 4), shift_size=(2, 2)
            )
            return out

    return Windows()


def test_compiles_whole_and_exports_with_a_dynamic_batch() -> None:
    qkv, bias, _ = inputs((1, 10, 9), (1, 4, 4), torch.float32, batch=3)
    qkv = qkv[:, 0]
    wanted = module()(qkv, bias)
    compiled = torch.compile(module(), fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(qkv, bias), wanted)
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(module(), (qkv, bias), dynamic_shapes=({0: batch}, None))
    assert torch.equal(program.module()(qkv[:2], bias), wanted[:2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window_size": (4, 4, 4)}, "expected"),
        ({"window_size": (0, 4)}, "must be positive"),
        ({"window_size": (4.7, 4)}, "window_size must be whole numbers"),
        ({"window_size": 4}, "window_size must be whole numbers"),
        ({"shift_size": (2, 2.5)}, "shift_size must be whole numbers"),
        ({"scale": torch.tensor(0.3)}, "scale must be a number"),
        ({"shift_size": (4, 0)}, "smaller than"),
        ({"shift_size": (-1, 0)}, "at least 0"),
        ({"num_heads": 5}, "does not divide"),
        ({"num_heads": 0}, "does not divide"),
        ({"layout": "kqv"}, "layout='kqv' is unknown"),
        ({"grid": True, "shift_size": (0, 0)}, "grid=True needs"),
        ({"mask_value": math.nan}, "mask_value"),
        ({"precision": "exact"}, "precision"),
        ({"backend": "fast"}, "backend='fast' is unknown"),
        ({"bias": torch.zeros(HEADS, 16, 15)}, "bias of shape"),
        ({"bias": torch.zeros(HEADS, 16, 16).double()}, "bias must be half precision, float32"),
        ({"bias_index": torch.zeros(16, 16, dtype=torch.int32)}, "bias_index must be int64"),
        ({"bias": None, "bias_index": torch.zeros(16, 16, dtype=torch.int64)}, "needs bias"),
        ({"pad_qkv": torch.zeros(7)}, "pad_qkv of shape"),
        ({"logit_scale": torch.zeros(2)}, "logit_scale of shape"),
        ({"qkv": torch.zeros(1, 10, 9, 72, dtype=torch.int64)}, "must be floating"),
        ({"qkv": torch.zeros(10, 9, 72)}, "expected"),
        ({"qkv": torch.zeros(1, 10, 9, 0)}, "does not divide"),
    ],
)
def test_bad_arguments(change: dict[str, Any], words: str) -> None:
    call: dict[str, Any] = {
        "qkv": torch.zeros(1, 10, 9, 72), "bias": torch.zeros(HEADS, 16, 16), "num_heads": HEADS,
        "window_size": (4, 4), "shift_size": (2, 2),
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=words):
        elsa.window_attention(**(call | change))


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_terms_in_another_half_precision_are_read_as_they_are(
    dtype: torch.dtype, backend: str
) -> None:
    """A model in float16 under autocast to bfloat16: exact in float32, gradients in their dtype."""
    qkv, bias, pad = inputs((1, 5, 6), (1, 3, 3), dtype, batch=1)
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    terms = {"bias": bias, "pad_qkv": pad, "logit_scale": torch.tensor([2.0, 3.0, 4.0])}
    terms = {name: t.to(other).requires_grad_() for name, t in terms.items()}
    wide = {name: t.detach().float().requires_grad_() for name, t in terms.items()}
    call = {"num_heads": HEADS, "window_size": (1, 3, 3), "backend": backend}
    out, same = (elsa.window_attention(qkv, **call, **given) for given in (terms, wide))
    assert torch.equal(out, same)
    grads, wanted = (
        torch.autograd.grad(o.float().sum(), list(given.values()))
        for o, given in ((out, terms), (same, wide))
    )
    assert all(torch.equal(g, w.to(other)) for g, w in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("size", [(0, 10, 9), (2, 0, 9)])
def test_an_empty_batch_and_an_empty_image(size: tuple[int, int, int]) -> None:
    out = elsa.window_attention(
        torch.zeros(*size, 3 * CHANNELS), num_heads=HEADS, window_size=(4, 4), backend="eager"
    )
    assert out.shape == (*size, CHANNELS)


def test_a_bias_index_beyond_its_table_is_an_error_not_memory() -> None:
    qkv, _, _ = inputs((1, 4, 4), (1, 4, 4), torch.float32)
    with pytest.raises(ArgumentError, match="bias_index"):
        elsa.window_attention(
            qkv, torch.zeros(5, HEADS), bias_index=torch.full((16, 16), 5), num_heads=HEADS,
            window_size=(1, 4, 4),
        )  # fmt: skip


@pytest.mark.parametrize("outside", [-1, -7, 7])
def test_an_unseen_entry_beyond_the_table_makes_its_scores_nan(outside: int) -> None:
    """A negative one read the table from its end wherever the index is not looked at."""
    generator = torch.Generator().manual_seed(0)
    qkv, _, _ = inputs((1, 8, 4), (1, 4, 4))
    table = torch.randn(7, HEADS, dtype=torch.float64, generator=generator)
    index = torch.randint(1, 6, (16, 16), generator=generator)  # rows 0 and 6 are not read
    index[5, 3] = outside

    def run(table: Tensor) -> Tensor:
        return elsa.window_attention(
            qkv, table, bias_index=index, num_heads=HEADS, window_size=(1, 4, 4), backend="eager"
        )

    out, pull = torch.func.vjp(run, table)
    bad = torch.zeros(out.shape, dtype=torch.bool)
    bad[:, :, 1::4, 1] = True  # token 5 of each window
    assert torch.equal(out.isnan(), bad)
    (grad,) = pull(torch.where(bad, 0.0, torch.ones_like(out)))
    assert torch.equal(grad[[0, 6]], torch.zeros(2, HEADS, dtype=torch.float64))


def test_a_table_on_a_device_that_is_not_waited_for() -> None:
    index = torch.full((16, 16), -1)
    dense = eager_window.dense_bias(torch.zeros(7, HEADS).to("meta"), index.to("meta"))
    assert dense.shape == (HEADS, 16, 16) and dense.is_meta
    with pytest.raises(ArgumentError, match="bias_index"):
        eager_window.dense_bias(torch.zeros(7, HEADS), index)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)])
@pytest.mark.parametrize("with_terms", [False, True])
def test_opcheck_of_the_backward_of_a_padded_image(order: Any, with_terms: bool) -> None:
    """The real gradient was a view of the padded image, the fake one dense."""
    qkv, bias, _, pad, scale, *rest = operands(torch.float32)
    qkv, bias, pad, scale = (t.detach() for t in (qkv, bias, pad, scale))
    qkv = qkv[:, :, :4, :5].permute(order).contiguous().permute(order)  # dense, maybe permuted
    terms = (bias.mT.contiguous().mT, None, pad, scale) if with_terms else (None,) * 4
    rest[2] = [0, 0, 0]
    grad_out = torch.ones(*qkv.shape[:-1], CHANNELS)
    for needs in ([True, with_terms, with_terms, with_terms], [False, with_terms, False, False]):
        torch.library.opcheck(
            torch.ops.elsa.window_attention_backward.default,
            (grad_out, qkv, *terms, *rest, needs),
        )


@pytest.mark.usefixtures("inductor")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_compiled_training_of_a_padded_image(order: Any) -> None:
    def loss(x: Tensor) -> Tensor:
        out = elsa.window_attention(x, num_heads=HEADS, window_size=(4, 4))
        return out.square().sum()

    x = inputs((10, 9), (4, 4), torch.float32)[0].permute(order).contiguous().permute(order)
    x.requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x), x)
    compiled = torch.compile(loss, fullgraph=True)  # inductor checks the strides of the fake
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], wanted)


def test_a_second_derivative_is_right() -> None:
    """By autograd it was wrong once, with no more than a warning."""
    x = inputs((1, 3, 4), (1, 2, 3), batch=1)[0].requires_grad_()

    def energy(x: Tensor) -> Tensor:
        out = elsa.window_attention(x, num_heads=HEADS, window_size=(1, 2, 3))
        return (out**3).sum()

    (plain,) = torch.autograd.grad(energy(x), x)
    (first,) = torch.autograd.grad(energy(x), x, create_graph=True)
    assert torch.equal(first, plain)
    (by_autograd,) = torch.autograd.grad(first.square().sum(), x)

    def steepness(x: Tensor) -> Tensor:
        return torch.func.grad(energy)(x).square().sum()

    along = torch.ones_like(x) * 1e-5
    x = x.detach()
    step = (steepness(x + along) - steepness(x - along)) / 2
    for second in (torch.func.grad(steepness)(x), by_autograd):
        torch.testing.assert_close((second * along).sum(), step, rtol=1e-6, atol=0)


@pytest.mark.parametrize("terms", ["bias", "pad", "cosine", "table", "index alone"])
def test_second_derivatives_of_every_term(terms: str) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1, 3, 3, 12, dtype=torch.float64, requires_grad=True)
    call: Any = {"num_heads": 2, "window_size": (2, 2), "shift_size": (1, 1)}
    free: dict[str, Tensor] = {}
    if terms == "pad":
        free["pad_qkv"] = torch.randn(12, dtype=torch.float64)
    elif terms == "cosine":
        free["logit_scale"] = torch.rand(2, dtype=torch.float64)
    if terms in ("table", "index alone"):
        call["bias_index"] = torch.randint(9, (4, 4))
        (call if terms == "index alone" else free)["bias"] = torch.randn(9, 2, dtype=torch.float64)
    else:
        free["bias"] = torch.randn(2, 4, 4, dtype=torch.float64)

    def compute(qkv: Tensor, *given: Tensor) -> Tensor:
        out: Tensor = elsa.window_attention(qkv, **dict(zip(free, given, strict=True)), **call)
        return out

    leaves = (qkv, *(t.requires_grad_() for t in free.values()))
    assert torch.autograd.gradgradcheck(compute, leaves)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("shift", [0, 2])
def test_rows_that_see_nothing_give_zeros_and_no_gradient(backend: str, shift: int) -> None:
    """They gave NaN in eager, and in the backward of every backend."""
    qkv, bias, pad = inputs((1, 6, 8), (1, 4, 4), torch.float32)
    bias[:, 5] = -math.inf
    leaves = [t.requires_grad_() for t in (qkv, bias, pad)]
    call: Any = {"num_heads": HEADS, "window_size": (1, 4, 4), "shift_size": (0, shift, shift)}
    out = elsa.window_attention(qkv, bias, pad_qkv=pad, backend=backend, **call)
    dead = (1 - shift) % 6, (1 - shift) % 8  # token 5 lies in row 1 and column 1 of its window
    grads = torch.autograd.grad((out**3).sum(), leaves)
    assert out.isfinite().all()
    assert shift or not out[:, 0, dead[0], dead[1]].any()
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][:, 5].any()
    assert not grads[0].equal(torch.zeros_like(qkv))


def test_vmap_of_derivatives() -> None:
    images = inputs((1, 5, 7), (1, 3, 3), batch=6)[0].unflatten(0, (3, 2))

    def run(x: Tensor) -> Tensor:
        out: Tensor = elsa.window_attention(
            x, num_heads=HEADS, window_size=(1, 3, 3), shift_size=(0, 1, 2)
        )
        return out

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (run(x) ** 3).sum())(x)

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(run, (x,), (x.flip(-1),))[1]

    for derivative in (gradient, tangent):
        wanted = torch.stack([derivative(x) for x in images])
        torch.testing.assert_close(torch.func.vmap(derivative)(images), wanted)
        last = torch.func.vmap(derivative, in_dims=-2)(images.movedim(0, -2))
        torch.testing.assert_close(last, wanted)


@pytest.mark.parametrize("second", [False, True])
def test_recorded_in_fewer_steps(monkeypatch: pytest.MonkeyPatch, second: bool) -> None:
    """The same bits as by the operator, frozen terms without a gradient, and no second one."""
    from elsa_core.routing import choose, gradients

    record = operators.WINDOW_ATTENTION
    monkeypatch.setitem(choose.DIRECT, ("window_attention", "eager"), record.reference)
    call = gradients.recorded("window_attention", "eager")
    assert call is not None and gradients.recorded("window_attention", "sdpa") is None
    double = torch.float64  # whose gradients plain PyTorch computes
    qkv = torch.randn(2, 1, 6, 5, 24, dtype=double, requires_grad=True)
    bias = torch.randn(9, 2, dtype=double, requires_grad=True)
    index, pad = torch.randint(9, (16, 16)), torch.randn(24, dtype=double)
    given = (
        qkv, bias, index, pad, None, 2, (1, 4, 4), (0, 2, 1), 0.5, -100.0, "qkv", False, "strict"
    )  # fmt: skip
    expected, found = record.eager(*given), call(*given)
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    leaves = (qkv, bias)
    if second:
        ours = torch.autograd.grad(found, leaves, grad, create_graph=True)
        theirs = torch.autograd.grad(expected, leaves, grad, create_graph=True)
        again = [torch.autograd.grad(g[0].square().sum(), leaves) for g in (ours, theirs)]
        assert all(torch.equal(a, b) for a, b in zip(*again, strict=True))
        return
    theirs = torch.autograd.grad(expected, leaves, grad)
    ours = torch.autograd.grad(found, leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 4.0])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_gradients_of_half_precision_with_a_bias(
    dtype: torch.dtype, scale: float | None, backend: str
) -> None:
    """At most twice the error of PyTorch's own attention in the same dtype."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 14, 14, 96, generator=generator).to(dtype)
    bias = torch.randn(2, 49, 49, generator=generator).to(dtype)
    weight = torch.randn(2, 14, 14, 32, generator=generator).to(dtype)

    def ours(x: Tensor, bias: Tensor) -> Tensor:
        return elsa.window_attention(
            x, bias, num_heads=2, window_size=(7, 7), scale=scale, backend=backend
        )

    def peer(x: Tensor, bias: Tensor) -> Tensor:
        parts = x.view(2, 2, 7, 2, 7, 3, 2, 16).permute(5, 0, 1, 3, 6, 2, 4, 7)
        q, k, v = parts.reshape(3, 8, 2, 49, 16)
        terms = bias.expand(8, -1, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, terms, scale=scale)
        return out.view(2, 2, 2, 2, 7, 7, 16).permute(0, 1, 4, 2, 5, 3, 6).reshape(2, 14, 14, 32)

    def gradients(function: Any, wide: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(wide).requires_grad_() for t in (qkv, bias)]
        return torch.autograd.grad(function(*leaves), leaves, weight.to(wide))

    exact = gradients(peer, torch.float64)
    for mine, theirs, wanted in zip(
        gradients(ours, dtype), gradients(peer, dtype), exact, strict=True
    ):
        assert relative_l2(mine, wanted) <= 2 * relative_l2(theirs, wanted)
