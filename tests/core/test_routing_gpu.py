"""PyTorch's own kernels as a backend, on a GPU: gradients of our forward, and whole calls."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elsa_core as elsa
from elsa_core.graphs import capture

pytestmark = pytest.mark.gpu


def make(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def relative(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def by_formulas(grad, q, k, v, out, lse, is_causal):
    """Gradients of rows whose `out` and `lse` are of more keys than these, in the inputs' dtype."""
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ wide_k.mT / 8
    if is_causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.exp(scores - lse[..., None])
    slopes = weights * (grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True)) / 8
    of_key, of_value = slopes.mT @ q, weights.mT @ grad
    shape = (*k.shape[:2], groups)
    return slopes @ wide_k, *(t.unflatten(1, shape[1:]).sum(2) for t in (of_key, of_value))


def leave_plans_of_others(q, k, v, grad, is_causal):
    """Have cuDNN's plans of this thread made for outputs in layouts other than those of shards."""
    aten = torch.ops.aten
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    inside = [t.contiguous() for t in (q, k, v, grad)]
    outside = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, grad)]
    for given, others in ((inside, outside), (outside, inside)):
        scale = {"scale": 1 / 8}
        found = aten._scaled_dot_product_cudnn_attention(
            *given[:3], None, True, 0.0, is_causal, **scale
        )
        out = torch.empty_like(others[0]).copy_(found[0])
        aten._scaled_dot_product_cudnn_attention_backward(
            others[3], *given[:3], out, found[1], *found[6:8], None, None, None, q.shape[2],
            k.shape[2], 0.0, is_causal, **scale,
        )  # fmt: skip


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["plain", "causal", "causal, more keys", "grouped", "expanded",
                                  "aslant", "dim 40", "dim 128", "dim 160", "short"])  # fmt: skip
def test_gradients_of_a_shard_in_half_precision(
    case: str, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each of PyTorch's kernels, from the out and lse of twice as many keys, against float64:
    no worse than twice the memory-efficient one where PyTorch has it add in one order.
    """
    from elsa_core.backends import sdpa

    dim = int(case.rpartition(" ")[2]) if case.startswith("dim") else 64
    queries, keys = (40, 50) if case == "short" else (777, 777 if case == "causal" else 801)
    q, grad = (make(2, 4, queries, dim, dtype=dtype, seed=s) for s in (0, 5))
    k, v = (make(2, 2 if case == "grouped" else 4, keys, dim, dtype=dtype, seed=s) for s in (1, 2))
    if case == "expanded":
        grad = grad[:1, :1, :1, :1].expand(q.shape)
    if case == "aslant":
        q, k, v, grad = (F.pad(t, (1, 0))[..., 1:] for t in (q, k, v, grad))
    q = q * (8 / dim**0.5)
    is_causal = case.startswith("causal")
    wide = [t.double() for t in (q, k, v)]
    out, lse = elsa.attention(
        *wide, is_causal=is_causal, scale=1 / 8, enable_gqa=True, return_lse=True
    )
    out, lse = out * 0.7 + 0.3, lse + math.log(2)
    exact = by_formulas(grad.double(), *wide, out, lse, is_causal)
    served = []

    def watched(name, run):
        def tried(*given, **terms):
            found = run(*given, **terms) if name.endswith(kernel) else None
            served.extend([kernel] if found is not None else [])
            return found

        monkeypatch.setattr(sdpa, name, tried)

    for name in ("_by_cudnn", "_by_flash"):
        watched(name, getattr(sdpa, name))
    monkeypatch.setattr(sdpa, "_LONG", 0)
    takes = kernel != "efficient" and case != "causal, more keys"
    if kernel == "cudnn":
        hopper = torch.cuda.get_device_capability()[0] >= 9
        takes = takes and hopper and case not in ("dim 40", "dim 160")
        if takes:
            leave_plans_of_others(q, k, v, grad, is_causal)

    def gradients():
        return sdpa.backward(
            grad, q.new_zeros(0), q, k, v, None, out.to(dtype), lse.float(), is_causal, 1 / 8,
            "strict", [True, True, True, False],
        )[:3]  # fmt: skip

    found = gradients()
    assert served == [kernel] * takes
    for each, t in zip(found, (q, k, v), strict=True):
        assert each.shape == t.shape and each.isfinite().all()
    torch.use_deterministic_algorithms(True)
    try:
        ordered, again = gradients(), gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(served) < 2 and all(map(torch.equal, ordered, again))
    for mine, theirs, wanted in zip(found, ordered, exact, strict=True):
        assert relative(mine, wanted) <= 2 * relative(theirs, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gradient_of_the_mask_alone(dtype: torch.dtype) -> None:
    """PyTorch's memory-efficient kernel keeps no lse then, and its backward fails."""
    q, k, v = (make(2, 4, 70, 64, dtype=dtype, seed=s) for s in range(3))
    mask = make(1, 4, 70, 70, dtype=dtype, seed=3).requires_grad_()
    (found,) = torch.autograd.grad(elsa.attention(q, k, v, mask).square().sum(), mask)
    wide = mask.detach().double().requires_grad_()
    out = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide)
    (wanted,) = torch.autograd.grad(out.square().sum(), wide)
    assert relative(found, wanted) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_who_trains() -> None:
    q = make(1, 2, 40, 64, dtype=torch.float16, seed=0).requires_grad_()
    assert elsa.explain(q, q, q).backend == "sdpa"
    wide = make(8, 12, 300, 64, dtype=torch.float32, seed=0).requires_grad_()
    route = elsa.explain(wide, wide, wide)
    assert route.backend == "triton"
    assert any(reason.startswith("gradients: by") for reason in route.reasons)


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the table has rows of sm_90 alone",
)


@HOPPER
@pytest.mark.parametrize("packed", [False, True])
def test_a_small_step_in_a_graph_is_ours(packed: bool) -> None:
    """Where the host's time does not count, small calls train by the faster kernels."""
    shape = (4, 3, 197, 64)
    leaves = [make(*shape, dtype=torch.float32, seed=s) for s in (0, 1, 2)]
    if packed:  # as a projection leaves them
        leaves = [t.transpose(1, 2) for t in torch.stack(leaves, 2).transpose(1, 3).unbind(2)]
    leaves = [t.requires_grad_() for t in leaves]
    weight = make(*shape, dtype=torch.float32, seed=3)
    asked: list[str] = []

    def gradients(call, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        given = [t.detach().to(dtype).requires_grad_() for t in leaves]
        if call is elsa.attention and dtype == torch.float32:
            asked.append(elsa.explain(*given).backend)
        out = call(*given)
        return [out.detach(), *torch.autograd.grad(out, given, weight.to(dtype))]

    found: list[Tensor] = []

    def step() -> None:
        found[:] = gradients(elsa.attention)

    replay = capture.captured(step)
    assert asked == ["sdpa", "triton"]  # the warm-up, the graph
    for each in found:
        each.fill_(math.nan)
    replay()
    exact = gradients(elsa.attention, torch.float64)
    peer = gradients(F.scaled_dot_product_attention)
    for mine, theirs, reference in zip(found, peer, exact, strict=True):
        assert relative(mine, reference) <= relative(theirs, reference)


def test_a_sum_of_a_small_call_is_recorded() -> None:
    """Its gradient has no strides, which takes other kernels than that of a model's layers."""
    leaves = [make(2, 3, 197, 64, dtype=torch.float32, seed=s).requires_grad_() for s in (0, 1, 2)]
    found: list[Tensor] = []

    def step() -> None:
        found[:] = torch.autograd.grad(elsa.attention(*leaves).sum(), leaves)

    replay = capture.captured(step)
    for each in found:
        each.fill_(math.nan)
    replay()
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*wide).sum(), wide)
    for mine, reference in zip(found[2:], exact[2:], strict=True):  # the others are zeros
        assert relative(mine, reference) < 1e-5


@HOPPER
def test_a_model_whose_step_is_recorded() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=2).cuda()
    original = copy.deepcopy(model)
    elsa.patch(model, scope="attention")
    x = make(2, 3, 224, 224, dtype=torch.float32, seed=0)

    def gradients(of: torch.nn.Module) -> list[Tensor]:
        out = of(x)
        return list(torch.autograd.grad(out.square().sum(), list(of.parameters())))

    found: list[Tensor] = []
    replay = capture.captured(lambda: found.__setitem__(slice(None), gradients(model)))
    for each in found:
        each.fill_(math.nan)
    replay()
    wide = copy.deepcopy(original).double()
    out = wide(x.double())
    exact = torch.autograd.grad(out.square().sum(), list(wide.parameters()))
    for mine, theirs, reference in zip(found, gradients(original), exact, strict=True):
        assert relative(mine, reference) <= 2 * relative(theirs, reference) + 1e-6


def test_a_long_row_of_half_precision_is_cudnns_where_it_was_measured() -> None:
    q = make(1, 8, 4096, 128, dtype=torch.float16, seed=0)
    with torch.inference_mode():
        out = elsa.attention(q, q, q)
        exact = F.scaled_dot_product_attention(*[q.double()] * 3)
        peer = F.scaled_dot_product_attention(q, q, q)
    assert relative(out, exact) <= 2 * relative(peer, exact)
    measured = any(mark in torch.cuda.get_device_name() for mark in ("H200", "H100 80GB HBM3"))
    assert (elsa.explain(q, q, q).backend == "sdpa") is measured


def test_a_compiled_long_row_is_cudnns_too() -> None:
    """As exact as PyTorch's own; the second length leaves it to the kernels of every length."""
    targets: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        targets.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph.forward

    def attend(x: Tensor) -> Tensor:
        return elsa.attention(x, x, x)

    q = make(1, 8, 4096, 128, dtype=torch.float16, seed=0)
    exact = F.scaled_dot_product_attention(*[q.double()] * 3)
    peer = F.scaled_dot_product_attention(q, q, q)
    with torch.inference_mode():
        torch._dynamo.reset()
        out = torch.compile(attend, fullgraph=True)(q)
        torch._dynamo.reset()
        seen = torch.compile(attend, fullgraph=True, backend=look)
        seen(q), seen(q[:, :, :4095])
    torch._dynamo.reset()
    assert relative(out, exact) <= 2 * relative(peer, exact)
    measured = elsa.explain(q, q, q).backend == "sdpa"
    assert ["cudnn" in each for each in targets] == [measured, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "broadcast"),
    [
        ((2, 6, 200, 64), (1, 6)),
        ((1, 6, 577, 32), (1, 1)),
        ((2, 6, 300, 80), (2, 1)),
        ((1, 8, 1024, 96), (1, 8)),
        ((1, 6, 1030, 128), (1, 6)),
    ],
)
@pytest.mark.parametrize("expanded", [False, True])
def test_a_mask_of_half_precision_is_cudnns_where_it_was_measured(
    shape, broadcast, dtype, expanded
) -> None:
    """Rows that see no key give zeros; eagerly, in a CUDA graph and compiled."""
    q, k, v = (make(*shape, dtype=dtype, seed=s) for s in (0, 1, 2))
    tokens = shape[2]
    mask = make(*broadcast, tokens, tokens, dtype=dtype, seed=3)
    mask[:, :, 3], mask[0, 0, 5, : tokens - 1] = -math.inf, -math.inf
    mask = mask.expand(-1, shape[1], -1, -1) if expanded else mask
    exact = elsa.attention(*(t.double() for t in (q, k, v, mask)))
    measured = any(mark in torch.cuda.get_device_name() for mark in ("H200", "H100 80GB HBM3"))
    torch._dynamo.reset()
    with torch.inference_mode():
        assert (elsa.explain(q, k, v, mask).backend == "sdpa") is measured
        peer = F.scaled_dot_product_attention(q, k, v, mask)
        found = [elsa.attention(q, k, v, mask)]
        found.append(torch.compile(elsa.attention, fullgraph=True)(q, k, v, mask))
        held: list[Tensor] = []
        replay = capture.captured(lambda: held.append(elsa.attention(q, k, v, mask)))
        held[-1].fill_(math.nan)
        replay()
    for out in (*found, held[-1]):
        assert not out[:, :, 3].any()
        assert relative(out, exact) <= 2 * relative(peer.nan_to_num(0.0), exact)
    if measured:
        assert torch.equal(found[0], held[-1])
