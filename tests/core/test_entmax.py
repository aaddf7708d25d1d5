"""`elsa.entmax_attention` on the CPU: against float64, and as an operator of PyTorch."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import elsa_core as elsa
from elsa_core import operators
from elsa_core.backends import eager_entmax
from elsa_core.errors import ArgumentError, UnavailableError

F32, F64 = torch.float32, torch.float64
ALPHAS = (1.001, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)


def make(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bisected(scores: Tensor, alpha: Tensor | float) -> Tensor:
    """alpha-entmax of float64 scores by 200 halvings; differentiable by its definition alone."""
    a = alpha - 1
    with torch.no_grad():
        top = scores.amax(-1, keepdim=True)
        dead = top == -math.inf
        x = a * (scores - top.masked_fill(dead, 0.0))
        low = torch.full_like(top, -1.0)
        high = torch.zeros_like(top)
        for _ in range(200):
            tau = (low + high) / 2
            more = ((x - tau).clamp_min(0) ** (1 / a)).sum(-1, keepdim=True) >= 1
            low, high = torch.where(more, tau, low), torch.where(more, high, tau)
        alive = (x - low) > 0
        tau = low + a * top.masked_fill(dead, 0.0)
    # one step of Newton's method gives tau the derivative that its condition implies
    base = torch.where(alive, a * scores.masked_fill(~alive, 0.0) - tau, 1.0)
    p = torch.where(alive, base ** (1 / a), 0.0)
    slope = torch.where(alive, base ** (1 / a - 1) / a, 0.0).sum(-1, keepdim=True).detach()
    step = (p.sum(-1, keepdim=True) - 1) / slope.masked_fill(slope == 0, 1.0)
    step = step - step.detach()
    p = torch.where(alive, (base - step * alive) ** (1 / a), 0.0)
    return p.masked_fill(dead, 0.0)


def oracle(q, k, v, mask, alpha: Tensor | float, causal: bool = False, scale=None) -> Tensor:
    """alpha-entmax attention in the dtype of q, all scores at once."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    return bisected(s, alpha) @ v


def relative(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def everything(call, leaves: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
    """out and the gradients of the leaves that are floating."""
    out = call(**leaves)
    wanted = [t for t in leaves.values() if t is not None and t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))]


def leaves_of(tensors: dict[str, Tensor | None], dtype: torch.dtype | None) -> dict:
    found = {}
    for name, t in tensors.items():
        if t is None or not t.is_floating_point():
            found[name] = t
        else:
            found[name] = t.detach().to(dtype or t.dtype).requires_grad_()
    return found


def agrees(q, k, v, mask=None, *, alpha: Tensor | float, causal=False, scale=None) -> None:
    """Out and all gradients: the error against float64 at most twice that of the definition in
    float32; 1e-9 for float64 inputs."""
    tensors = {"q": q, "k": k, "v": v, "mask": mask}
    if isinstance(alpha, Tensor):
        tensors["alpha"] = alpha

    def ours(q, k, v, mask, alpha=alpha):
        return elsa.entmax_attention(
            q, k, v, mask, alpha=alpha, is_causal=causal, scale=scale, enable_gqa=True
        )

    def of(function):
        def call(q, k, v, mask, alpha=alpha):
            return function(q, k, v, mask, alpha, causal, scale)

        return call

    grad = make(*q.shape[:3], v.shape[-1], dtype=q.dtype, seed=9)
    expected = everything(of(oracle), leaves_of(tensors, F64), grad)
    found = everything(ours, leaves_of(tensors, None), grad)
    wide = torch.promote_types(q.dtype, F32)
    theirs = everything(of(oracle), leaves_of(tensors, wide), grad)
    band = 2 * torch.finfo(q.dtype).eps
    for x, y, reference in zip(found, theirs, expected, strict=True):
        assert x.shape == reference.shape and torch.isfinite(x).all()
        limit = 1e-9 if q.dtype == F64 else 2 * relative(y, reference) + band
        assert relative(x, reference) <= limit


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_agrees_with_float64(alpha: float, dtype: torch.dtype) -> None:
    if alpha == 4 and dtype == F32:
        pytest.skip("a weight is the cube root of a difference: float32 scores do not decide it")
    q, k, v = (make(2, 3, 101, 16, dtype=dtype, seed=i) for i in range(3))
    agrees(q, k, v, make(3, 101, 101, dtype=dtype, seed=3), alpha=alpha)


def test_agrees_with_the_entmax_package() -> None:
    entmax = pytest.importorskip("entmax")
    q, k, v = (make(2, 2, 33, 8, dtype=F64, seed=i) for i in range(3))
    for alpha in (1.25, 1.5, 1.75, 2.0, 3.0):
        a = torch.tensor(alpha, dtype=F64).requires_grad_()
        b = torch.tensor(alpha, dtype=F64).requires_grad_()
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        y = [t.clone().requires_grad_() for t in (q, k, v)]
        ours = elsa.entmax_attention(*x, alpha=a)
        s = y[0] @ y[1].mT * 8**-0.5
        theirs = entmax.entmax_bisect(s, b.expand(2, 2, 33, 1), n_iter=100) @ y[2]
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        grad = make(2, 2, 33, 8, dtype=F64, seed=4)
        for g, h in zip(
            torch.autograd.grad(ours, [*x, a], grad), torch.autograd.grad(theirs, [*y, b], grad),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(g, h, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["bool", "additive", "keys", "causal"])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_masks(kind: str, alpha: float) -> None:
    q, k, v = make(2, 4, 70, 8), make(2, 2, 90, 8, seed=1), make(2, 2, 90, 5, seed=2)
    mask = {
        "bool": make(4, 70, 90, seed=3) > 0.5,
        "additive": make(2, 1, 70, 90, seed=3) * 3,
        "keys": make(2, 1, 1, 90, seed=3) > 0,
        "causal": None,
    }[kind]
    agrees(q, k, v, mask, alpha=alpha, causal=kind == "causal")


@pytest.mark.parametrize("shape", [(), (3, 1, 1), (2, 1, 1, 1), (2, 3, 1, 1)])
def test_alpha_of_heads_and_its_gradient(shape: tuple[int, ...]) -> None:
    q, k, v = (make(2, 3, 50, 16, seed=i) for i in range(3))
    alpha = 1.2 + 0.7 * torch.rand(shape, generator=torch.Generator().manual_seed(5))
    agrees(q, k, v, alpha=alpha)


def test_the_derivative_by_alpha_holds_at_one() -> None:
    """By differences of softmax's neighbours, where the entmax package divides by zero."""
    q, k, v = (make(1, 2, 20, 8, dtype=F64, seed=i) for i in range(3))
    alpha = torch.ones((), dtype=F64).requires_grad_()
    grad = make(1, 2, 20, 8, dtype=F64, seed=4)
    out = elsa.entmax_attention(q, k, v, alpha=alpha)
    torch.testing.assert_close(out, elsa.attention(q, k, v), rtol=1e-12, atol=1e-12)
    (found,) = torch.autograd.grad(out, alpha, grad)
    sums = [(elsa.entmax_attention(q, k, v, alpha=1 + step) * grad).sum() for step in (1e-4, 2e-4)]
    zero = (out * grad).sum()
    slope = (4 * (sums[0] - zero) - (sums[1] - zero)) / 2e-4
    torch.testing.assert_close(found, slope.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_extreme_scores_ties_and_hidden_rows(alpha: float) -> None:
    q, k, v = make(1, 2, 40, 8), make(1, 2, 65, 8, seed=1), make(1, 2, 65, 8, seed=2)
    q, k = (q * 2).round(), (k * 2).round()
    q[:, 0, :5] *= 4096  # one key has all the weight
    k[:, :, 10:20] = k[:, :, :1]  # ties
    q[:, 1, 3] = 0.0  # a whole row of ties
    mask = torch.zeros(40, 65)
    mask[7] = -math.inf
    mask[8, 1:] = -math.inf
    agrees(q, k, v, mask, alpha=alpha, scale=1.0)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = elsa.entmax_attention(*leaves, mask, alpha=alpha, scale=1.0)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert (out[:, :, 7] == 0).all() and torch.equal(out[:, :, 8], v[:, :, 0])
    assert all(torch.isfinite(g).all() for g in grads) and (grads[0][:, :, 7] == 0).all()
    torch.testing.assert_close(out[:, 1, 3], v[:, 1].mean(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (make(2, 2, 130, 16, dtype=dtype, seed=i).requires_grad_() for i in range(3))
    out = elsa.entmax_attention(q, k, v, alpha=1.5)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = oracle(*wide, None, 1.5)
    references = [expected, *torch.autograd.grad(expected, wide, torch.ones_like(expected))]
    for x, reference in zip((out, *grads), references, strict=True):
        assert x.dtype == dtype
        # float32 inside: what is left is the rounding of the result
        assert relative(x, reference) <= torch.finfo(dtype).eps


def test_zeros_are_exact_and_weights_sum_to_one() -> None:
    q, k = make(1, 2, 50, 16), make(1, 2, 200, 16, seed=1)
    weights = elsa.entmax_attention(q, k, torch.eye(200).expand(1, 2, 200, 200), alpha=1.5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 50), rtol=0, atol=1e-6)
    share = (weights == 0).float().mean()
    assert 0.5 < share < 1


def test_tiles_are_those_with_weights() -> None:
    q, k = make(1, 2, 150, 8) * 4, make(1, 1, 140, 8, seed=1)
    eye = torch.eye(140).expand(1, 1, 140, 140)
    call = (q, k, eye, None, None, 1.5, True, 0.5, "strict")
    out, rows, tiles = torch.ops.elsa.entmax_attention_eager(*call)
    assert tiles.shape == (1, 2, 3, 3) and rows.shape == (3, 1, 2, 150)
    for i in range(3):
        for j in range(3):
            weights = out[:, :, 64 * i : 64 * i + 64, 64 * j : 64 * j + 64]
            assert torch.equal(tiles[:, :, i, j].bool(), (weights > 0).any(-1).any(-1))
    assert not tiles[..., 0, 1:].any()


def test_blocks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(3, 4, 150, 8), make(3, 2, 70, 8, seed=1), make(3, 2, 70, 8, seed=2)
    mask, alpha = make(3, 1, 150, 70, seed=3), 1 + torch.rand(4, 1, 1)
    grad = make(3, 4, 150, 8, seed=4)

    def call(q, k, v, mask, alpha):
        return elsa.entmax_attention(q, k, v, mask, alpha=alpha, enable_gqa=True)

    leaves = {"q": q, "k": k, "v": v, "mask": mask, "alpha": alpha}
    whole = everything(call, leaves_of(leaves, None), grad)
    for alive in (1, 30000):
        monkeypatch.setattr(eager_entmax, "_SCORES_ALIVE", alive)
        for x, y in zip(everything(call, leaves_of(leaves, None), grad), whole, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_memory_is_bounded() -> None:
    """No tensor of all scores: the largest made is some rows' share."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    q = make(1, 2, 2500, 4)
    call = (q, q, q, None, None, 1.5, False, 0.5, "strict")
    with Watch():
        out, rows, tiles = eager_entmax.attention(*call)
        eager_entmax.backward(out, *call[:5], out, rows, tiles, *call[5:], [True] * 3 + [False] * 2)
    assert 2 * 64 * 2500 <= largest < 2500 * 2500


def test_strides_layout_and_batch_dims() -> None:
    packed = make(2, 50, 3, 4, 8)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    out = elsa.entmax_attention(q, k, v)
    assert torch.equal(out, elsa.entmax_attention(*(t.contiguous() for t in (q, k, v))))
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(elsa.entmax_attention(q[0], k[0], v[0]), out[0])
    torch.testing.assert_close(elsa.entmax_attention(q[0, 0], k[0, 0], v[0, 0]), out[0, 0])


@pytest.mark.parametrize("sizes", [(0, 2, 3, 3), (2, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)])
def test_empty(sizes: tuple[int, int, int, int]) -> None:
    b, h, n, m = sizes
    q, k = make(b, h, n, 4).requires_grad_(), make(b, h, m, 4).requires_grad_()
    out = elsa.entmax_attention(q, k, k)
    assert out.shape == (b, h, n, 4) and (out == 0).all()
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k))] == [q.shape, k.shape]


def test_equal_bits_from_run_to_run() -> None:
    q, k, v = (make(2, 3, 200, 16, seed=i).requires_grad_() for i in range(3))
    runs = []
    for _ in range(2):
        out = elsa.entmax_attention(q, k, v, alpha=1.3)
        runs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_nan_is_not_hidden() -> None:
    q, k, v = (make(1, 1, 5, 4, seed=i) for i in range(3))
    q[0, 0, 2, 1] = math.nan
    out = elsa.entmax_attention(q, k, v)
    assert out[0, 0, 2].isnan().all() and torch.isfinite(out[0, 0, :2]).all()


def test_alpha_one_is_softmax() -> None:
    q, k, v = (make(1, 2, 30, 8, seed=i) for i in range(3))
    assert torch.equal(elsa.entmax_attention(q, k, v, alpha=1), elsa.attention(q, k, v))
    route = elsa.explain_entmax_attention(q, k, v, alpha=1.0)
    assert route == elsa.explain(q, k, v)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alpha": 0.9}, r"alpha=0.9 must be in \[1, 4\]"),
        ({"alpha": math.nan}, "alpha=nan must be"),
        ({"alpha": torch.tensor([1.0, 4.5]).reshape(2, 1, 1)}, "entries from 1.0 to 4.5"),
        ({"alpha": torch.ones(3, 1, 1)}, r"alpha of shape \[3, 1, 1\] does not broadcast"),
        ({"alpha": torch.ones(2, 1)}, r"alpha of shape \[2, 1\] does not broadcast"),
        ({"alpha": torch.ones((), dtype=torch.int64)}, "alpha must be floating"),
        ({"scale": torch.ones(())}, "scale must be a number"),
        ({"attn_mask": torch.ones(5, 7)}, "attn_mask of shape"),
        ({"backend": "mine"}, "backend='mine' is unknown"),
    ],
)
def test_wrong_arguments_are_named(given: dict, words: str) -> None:
    q = make(1, 2, 5, 4)
    with pytest.raises(ArgumentError, match=words):
        elsa.entmax_attention(q, q, q, **given)


def test_wrong_types_and_unavailable_calls() -> None:
    q = make(1, 2, 5, 4)
    with pytest.raises(TypeError, match="alpha must be a number or"):
        elsa.entmax_attention(q, q, q, alpha="1.5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"key must be a torch\.Tensor"):
        elsa.entmax_attention(q, [1], q)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="backend='sdpa' has no entmax_attention"):
        elsa.entmax_attention(q, q, q, backend="sdpa")
    with pytest.raises(UnavailableError, match="no turbo precision"):
        elsa.entmax_attention(q, q, q, precision="turbo", backend="eager")


def test_explain() -> None:
    q = make(1, 2, 5, 4, dtype=F64).requires_grad_()
    route = elsa.explain_entmax_attention(q, q, q)
    assert route.backend == "eager" and "gradients" in route.reasons[-1]


def test_outside_alpha_gives_nan_where_values_are_not_looked_at() -> None:
    q = make(1, 2, 5, 4)
    alpha = torch.tensor([1.5, 0.5]).reshape(1, 2, 1, 1)
    out = torch.ops.elsa.entmax_attention(q, q, q, None, alpha, 0.0, False, 0.5, "strict")[0]
    assert torch.isfinite(out[:, 0]).all() and out[:, 1].isnan().all()


@pytest.mark.parametrize("name", ["entmax_attention", "entmax_attention_eager"])
def test_opcheck(name: str) -> None:
    q, k, v = (make(2, h, 9, 4, seed=h).requires_grad_() for h in (4, 2, 2))
    mask, alpha = make(1, 4, 9, 9).requires_grad_(), torch.full((1, 4, 1, 1), 1.4)
    overload = getattr(torch.ops.elsa, name)
    torch.library.opcheck(overload, (q, k, v, None, None, 1.5, True, 0.5, "strict"))
    torch.library.opcheck(
        overload, (q, k, v, mask, alpha.requires_grad_(), 0.0, False, 0.5, "strict")
    )


def test_gradcheck() -> None:
    q, k, v = (make(1, 2, 4, 2, dtype=F64, seed=i).requires_grad_() for i in range(3))
    mask = make(1, 1, 4, 4, dtype=F64, seed=4).requires_grad_()
    alpha = torch.tensor([1.3, 1.6], dtype=F64).reshape(1, 2, 1, 1).requires_grad_()

    def call(q, k, v, mask, alpha):
        return elsa.entmax_attention(q, k, v, mask, alpha=alpha)

    assert torch.autograd.gradcheck(call, (q, k, v, mask, alpha))
    with pytest.raises(RuntimeError, match=r"differentiable once by torch\.autograd"):
        torch.autograd.gradgradcheck(call, (q, k, v, mask, alpha))


def test_forward_mode_without_keys() -> None:
    """The maximum over no keys was an error."""
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    for terms in ({}, {"attn_mask": torch.ones(3, 0, dtype=torch.bool)}, {"is_causal": True}):
        out, tangent = torch.func.jvp(
            lambda x, terms=terms: elsa.entmax_attention(x, k, k, **terms), (q,), (q,)
        )
        assert torch.equal(out, torch.zeros_like(q)) and torch.equal(tangent, out)
    grad = torch.func.grad(lambda a: elsa.entmax_attention(q, k, k, alpha=a).sum())
    assert grad(torch.tensor(1.5)) == 0


def test_derivatives_of_torch_func_and_forward_mode() -> None:
    q, k, v = (make(1, 1, 5, 3, dtype=F64, seed=i) for i in range(3))

    def loss(q: Tensor) -> Tensor:
        return elsa.entmax_attention(q, k, v, alpha=1.4).sin().sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)
    direction = make(1, 1, 5, 3, dtype=F64, seed=7)
    _, tangent = torch.func.jvp(loss, (q,), (direction,))
    torch.testing.assert_close(tangent, (expected * direction).sum())
    hessian = torch.func.hessian(loss)(q).reshape(15, 15)
    step = 1e-5 * direction
    ahead, behind = torch.func.grad(loss)(q + step), torch.func.grad(loss)(q - step)
    torch.testing.assert_close(
        hessian @ direction.flatten(), ((ahead - behind) / 2e-5).flatten(), rtol=1e-5, atol=1e-6
    )


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([1.3, 1.7]).reshape(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return elsa.entmax_attention(x, x, x, alpha=self.alpha)


def test_compiles_whole_and_survives_copies() -> None:
    x = make(1, 2, 20, 8).requires_grad_()
    layer = Layer()
    expected = layer(x)
    grads = torch.autograd.grad(expected.sum(), [x, layer.alpha])
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(each(x), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    torch.testing.assert_close(out, expected)
    for g, h in zip(torch.autograd.grad(out.sum(), [x, layer.alpha]), grads, strict=True):
        torch.testing.assert_close(g, h)


def test_autocast_casts_as_attention_does() -> None:
    q, k, v = (make(1, 2, 30, 8, seed=i) for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = elsa.entmax_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, elsa.entmax_attention(*(t.bfloat16() for t in (q, k, v))))


def test_the_portable_form_agrees_and_is_written_to_onnx(tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    portable = operators.ENTMAX_ATTENTION.exported
    q, k, v = make(2, 4, 33, 8), make(2, 2, 40, 8, seed=1), make(2, 2, 40, 8, seed=2)
    mask = make(33, 40, seed=3)[None, None]
    for alpha in (1.3, 2.0, 3.0):
        call = (*(t.double() for t in (q, k, v, mask)), None, alpha, False, 0.4)
        torch.testing.assert_close(
            portable(*call)[0], eager_entmax.attention(*call)[0], rtol=1e-8, atol=1e-9
        )

    class Fixed(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return elsa.entmax_attention(q, k, v, alpha=1.5, enable_gqa=True)

    program = torch.onnx.export(Fixed().eval(), (q, k, v), dynamo=True, verbose=False)
    program.save(tmp_path / "entmax.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "entmax.onnx")
    feeds = dict(
        zip((i.name for i in session.get_inputs()), map(Tensor.numpy, (q, k, v)), strict=True)
    )
    (found,) = session.run(None, feeds)
    expected = elsa.entmax_attention(q, k, v, alpha=1.5, enable_gqa=True)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)
