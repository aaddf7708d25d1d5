"""The linear kernel on a real GPU, alone and in patched models, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

HALF_ULP = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def computed(*given):
    from elsa_core.backends.triton.linear import gemm, planner

    return (planner if given[0].dtype == torch.float32 else gemm).linear(*given)


def kernel(*given):
    out = computed(*given)
    assert out is not None
    return out


def operands(rows, depth, columns, dtype=torch.float32, bias=True, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(rows, depth, device="cuda", dtype=dtype)
    w = torch.randn(columns, depth, device="cuda", dtype=dtype) * depth**-0.5
    return x, w, torch.randn(columns, device="cuda", dtype=dtype) if bias else None


def exact(x, w, b):
    return functional.linear(x.double(), w.double(), None if b is None else b.double())


def distance(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()


def agree(*given):
    # what was freed is what the next allocation of the size finds
    torch.full((given[0].numel() // given[0].shape[-1], given[1].shape[0]), float("nan")).cuda()
    out, reference = kernel(*given), exact(*given)
    assert out.shape == reference.shape and out.dtype == given[0].dtype and out.is_contiguous()
    assert torch.isfinite(out).all()
    peer = distance(functional.linear(*given), reference)
    ours = distance(out, reference)
    assert ours <= 2 * peer + HALF_ULP[out.dtype] / 4, f"{ours:.2e} against {peer:.2e}"


SHAPES = [
    (25088, 96, 288), (25088, 96, 96), (6272, 192, 576), (1568, 384, 384), (1576, 768, 2304),
    (197, 768, 768), (64, 64, 64), (65, 72, 36), (127, 104, 132), (1000, 776, 1004), (3001, 64, 4),
    (200, 3072, 768), (197, 768, 3072), (1576, 3072, 768), (25088, 384, 96), (70, 6144, 64),
]  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, bias):
    agree(*operands(*shape, bias=bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(25088, 96, 288), (3001, 96, 96), (70, 40, 24), (64, 96, 8)])
def test_half(shape, dtype):
    agree(*operands(*shape, dtype=dtype))


@pytest.mark.parametrize(
    "shape", [(3, 768, 768), (65, 68, 64), (65, 64, 33), (0, 64, 64), (65, 32, 64)]
)
def test_what_does_not_fit_is_pytorchs(shape):
    given = operands(*shape)
    assert computed(*given) is None
    assert torch.equal(torch.ops.elsa.linear.default(*given), functional.linear(*given))


def test_strides():
    x, w, b = operands(600, 128, 256)
    wide = torch.randn(256, 200, device="cuda")
    wide[:, :128] = w
    assert torch.equal(kernel(x, wide[:, :128], b), kernel(x, w, b))
    assert torch.equal(kernel(x.view(2, 3, 100, 128), w, b).view(600, 256), kernel(x, w, b))
    turned = x.t().contiguous().t()
    out = torch.ops.elsa.linear.default(turned, w, b)
    assert torch.equal(out, functional.linear(turned, w, b))


@pytest.mark.parametrize("times", [1e30, 1e37, 1e-30, 1e-36, 1e-40])
def test_magnitudes(times):
    x, w, _ = operands(300, 96, 288)
    agree(x.clamp(-3, 3) * times, w, None)
    mixed = torch.cat((x[:1] * times, x[1:]))
    out, reference = kernel(mixed, w, None), exact(mixed, w, None)
    peer = distance(functional.linear(mixed, w)[:1], reference[:1])
    assert distance(out[:1], reference[:1]) <= 2 * peer + 2**-26


@pytest.mark.parametrize("factor", [1e3, 1e5, 1e7])
def test_channels_of_other_magnitude(factor):
    x, w, b = operands(300, 96, 288)
    x[:, 3] *= factor
    w[:, 3] /= factor
    agree(x, w, b)


@pytest.mark.parametrize("entry", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("of", ["input", "weight"])
def test_what_is_not_finite(entry, of):
    x, w, b = operands(300, 96, 288)
    (x if of == "input" else w)[70, 5] = entry
    out, peer = kernel(x, w, b), functional.linear(x, w, b)
    assert torch.equal(torch.isnan(out), torch.isnan(peer))
    assert torch.equal(out[torch.isinf(peer)], peer[torch.isinf(peer)])
    assert torch.isfinite(out).any()


def test_the_largest_numbers():
    x = torch.full((128, 96), torch.finfo(torch.float32).max, device="cuda")
    agree(x, torch.randn(96, 96, device="cuda") * 1e-4, None)


def test_whole_numbers_are_exact():
    x, w, _ = operands(600, 96, 288)
    x, w = (x * 4).round(), (w * 40).round()
    assert torch.equal(kernel(x, w, None).double(), exact(x, w, None))


def test_repeats_are_equal():
    given = operands(1576, 768, 2304)
    first = kernel(*given)
    assert all(torch.equal(first, kernel(*given)) for _ in range(50))


def test_rows_beyond_32_bits():
    x, w, b = operands(64, 96, 96)
    x = x.repeat(500_000, 1)  # 3.07e9 numbers
    out = kernel(x, w, b)
    assert torch.equal(out[-64:], out[:64])


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "quick_gelu", "silu", "relu"])
def test_epilogues(activation):
    from elsa_core.ops.linear.record import plain

    x, w, b = operands(1576, 768, 768)
    scale, residual = torch.rand(768, device="cuda") + 0.5, torch.randn(1576, 768, device="cuda")
    for terms in ((None, None), (residual, scale), (residual, None), (None, scale)):
        wide = [None if t is None else t.double() for t in (x, w, b, *terms)]
        reference = plain(*wide[:3], activation, *wide[3:])
        peer = distance(plain(x, w, b, activation, *terms), reference)
        assert distance(kernel(x, w, b, activation, *terms), reference) <= 2 * peer + 2**-26


def test_frozen_halves_are_the_same_call():
    x, w, b = operands(1576, 768, 768)
    halves = torch.ops.elsa.split_weight(w)
    assert torch.equal(kernel(x, w, b), kernel(x, w, b, "none", None, None, "strict", *halves))


def test_turbo():
    x, w, b = operands(1576, 768, 768)
    error = distance(kernel(x, w, b, "none", None, None, "turbo"), exact(x, w, b))
    assert 1e-5 < error < 5e-4


def gradients(x, w, grad, wanted=(True, True, True)):
    from elsa_core.backends.triton.linear import planner

    # what was freed is what the next allocation of the size finds
    [torch.full_like(t, float("nan")) for t in (x, w, grad)]
    found = planner.backward(grad, x, w, wanted)
    assert found is not None
    return found


GRADIENTS = [
    (1576, 768, 768), (3152, 768, 2304), (3153, 768, 3072), (8200, 3072, 768), (4099, 384, 1152),
    (70, 1024, 1024), (20001, 384, 768),
]  # fmt: skip


@pytest.mark.parametrize("shape", GRADIENTS)
def test_gradients(shape):
    from elsa_core.ops.linear.record import plain_backward

    x, w, _ = operands(*shape)
    grad = torch.randn(shape[0], shape[2], device="cuda") * 1e-6
    grad[3] = 0.0
    wanted = (True, True, True)
    found = gradients(x, w, grad)
    peers = plain_backward(grad, x, w, "strict", wanted)
    wide = plain_backward(grad.double(), x.double(), w.double(), "strict", wanted)
    for ours, peer, reference in zip(found, peers, wide, strict=True):
        assert distance(ours, reference) <= 2 * distance(peer, reference)
    again = gradients(x, w, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    only = gradients(x, w, grad, (False, True, False))
    assert torch.equal(only[1], found[1]) and only[0].numel() == 0


@pytest.mark.parametrize("entry", [float("inf"), float("nan"), 1e30])
def test_gradients_of_other_magnitude(entry):
    from elsa_core.ops.linear.record import plain_backward

    x, w, _ = operands(1576, 768, 768)
    grad = torch.randn(1576, 768, device="cuda")
    grad[100, 5] = entry
    found = gradients(x, w, grad)
    peers = plain_backward(grad, x, w, "strict", (True, True, True))
    for ours, peer in zip(found, peers, strict=True):
        assert torch.equal(torch.isnan(ours), torch.isnan(peer))
        finite = torch.isfinite(peer)
        torch.testing.assert_close(ours[finite], peer[finite], rtol=1e-3, atol=1e-3)


def test_operator_and_derivatives():
    given = operands(1576, 768, 768)
    torch.library.opcheck(torch.ops.elsa.linear.default, given)
    leaves = [t.clone().requires_grad_() for t in given]
    torch.ops.elsa.linear.default(*leaves).square().sum().backward()
    wide = [t.double().requires_grad_() for t in given]
    functional.linear(*wide).square().sum().backward()
    for ours, theirs in zip(leaves, wide, strict=True):
        assert distance(ours.grad, theirs.grad) < 1e-6


@pytest.fixture
def launches(monkeypatch):
    """Counts the products, whoever asks for them."""
    from elsa_core.backends.triton.linear import gate

    counts, original = [0], gate._computed

    def counted(*given):
        out = original(*given)
        counts[0] += out is not None
        return out

    monkeypatch.setattr(gate, "_computed", counted)
    monkeypatch.setattr(gate, "_eager", counted)
    monkeypatch.setattr(gate, "LEAST_TRAINED", 0)
    monkeypatch.setattr("elsa_core.dispatch.eager_least", lambda *given: 0)
    return counts


MODELS = [
    ("vit_tiny_patch16_224", {}, 24),
    ("swin_tiny_patch4_window7_224", {}, 24),
    ("swinv2_tiny_window8_256", {}, 24),
    ("vit_small_patch14_reg4_dinov2", {"img_size": 98}, 24),
]


@pytest.mark.parametrize(("name", "options", "projections"), MODELS)
def test_models(name, options, projections, launches):
    import timm

    import elsa_core as elsa

    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval().cuda()
    size = model.pretrained_cfg["input_size"][-1] if not options else options["img_size"]
    image = torch.randn(2, 3, size, size, device="cuda")
    with torch.inference_mode():
        before = model(image)
        elsa.patch(model, scope="attention")
        after = model(image)
        assert launches == [projections]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(image)
        # a layout that the CUDA library has seen does not pass here again
        before_cast = launches[0]
        assert projections < before_cast <= 2 * projections
        with torch.autocast("cuda", dtype=torch.float16):
            model(image)
        assert launches == [before_cast]
    assert elsa.check(model, image).ok
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled, before, rtol=1e-4, atol=1e-4)


def test_pytorchs_own_setting_is_kept(launches):
    import timm

    import elsa_core as elsa

    model = timm.create_model("vit_tiny_patch16_224").eval().cuda()
    image = torch.randn(8, 3, 224, 224, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        elsa.patch(model)
        with torch.inference_mode():
            model(image)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert launches == [0]
    elsa.unpatch(model)
    elsa.patch(model, precision="ieee")
    with torch.inference_mode():
        model(image)
    assert launches == [0]


def test_a_graph_records_the_kernel_of_a_small_layer():
    """Also where nothing was called before: kernels are loaded while a graph is captured."""
    from elsa_core.ops.linear.api import linear

    x, w, b = operands(197, 192, 576)
    with torch.inference_mode():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = linear(x, w, b)
        graph.replay()
        assert torch.equal(out, kernel(x, w, b)) and torch.equal(out, linear(x, w, b))


def test_a_patched_block_trains(launches):
    import timm

    import elsa_core as elsa

    torch.manual_seed(0)
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5).cuda()
    wide = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5).double().cuda()
    wide.load_state_dict(model.state_dict())
    model.eval(), wide.eval()
    elsa.patch(model, backend="triton")  # by itself it trains as the original
    image = torch.randn(1, 3, 224, 224, device="cuda")
    model(image).square().sum().backward()
    assert launches[0] > 0
    wide(image.double()).square().sum().backward()
    ours, theirs = (m.layers[0].blocks[0].attn.qkv.weight.grad for m in (model, wide))
    assert distance(ours, theirs) < 1e-4


@pytest.fixture
def never_small(monkeypatch):
    """Eager calls take the kernels whatever their size."""
    from elsa_core import dispatch
    from elsa_core.dispatch import measured

    for module in (dispatch, measured):
        monkeypatch.setattr(module, "eager_least", lambda *_: 0)


@pytest.mark.parametrize(
    "name", ["eva02_tiny_patch14_224", "beit_base_patch16_224", "cait_xxs24_224", "hiera_tiny_224"]
)
def test_families_that_fold_their_residuals(name, never_small):
    timm = pytest.importorskip("timm")
    import elsa_core as elsa

    torch.manual_seed(0)
    model = timm.create_model(name).eval().cuda()
    for layer in (module for module in model.modules() if isinstance(module, torch.nn.Linear)):
        torch.nn.init.normal_(layer.weight, std=0.02)  # some heads start as zeros
    x = torch.randn(4, 3, 224, 224, device="cuda")
    with torch.inference_mode():
        peer = model(x)
        wanted = model.double()(x.double())
        model.float()
        elsa.patch(model, scope="model")
        out = model(x)
    assert distance(out, wanted) <= 2 * distance(peer, wanted) + 2**-22


def test_products_are_measured_for_a_table(monkeypatch):
    from elsa_core.profiling.bench.tune import linear

    monkeypatch.setattr(linear, "SHAPES", ((197, 768, 768), (1576, 768, 2304)))
    found = linear.run(torch.device("cuda"), rounds=3, budget_seconds=0.5)
    assert all(p.gain is not None and p.error is not None for p in found), found
    assert linear.least_work(found) is None or linear.least_work(found) > 0
