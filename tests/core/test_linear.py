"""Who computes a linear layer: what the table gives PyTorch, and oneDNN where MKL lags."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from elsa_core import dispatch
from elsa_core.backends import onednn as onednn_backend
from elsa_core.backends import processor
from elsa_core.backends.triton.linear import gate as module
from elsa_core.dispatch import measured
from elsa_core.ops.linear.api import explain_linear, linear, served

ROOT = Path(__file__).parents[2]
OPERATOR = torch.ops.elsa.linear.default


def operands(bias=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    x, w = torch.randn(2, 5, 8, dtype=dtype, **options), torch.randn(12, 8, dtype=dtype, **options)
    return x, w, torch.randn(12, dtype=dtype, **options) if bias else None


@pytest.fixture
def hopper(monkeypatch):
    """The shipped rows of sm_90, whatever device asks."""
    monkeypatch.setattr(measured, "_capability", lambda device: (9, 0))
    measured._by_pytorch.cache_clear()
    gpu, shipped = torch.device("cuda"), measured.linear_by_pytorch
    monkeypatch.setattr(measured, "linear_by_pytorch", lambda device, dtype: shipped(gpu, dtype))
    yield shipped(gpu, torch.float32)
    measured._by_pytorch.cache_clear()


def measured_products():
    """The kernels' speed over PyTorch's by (rows, channels, columns), of published products."""
    times: dict[tuple[int, ...], dict[str, float]] = {}
    found: dict[tuple[int, ...], float] = {}
    for name in ("layers_h200", "linear_forms_h200"):
        for row in csv.DictReader((ROOT / "results" / f"{name}.csv").open(encoding="utf-8")):
            kind, _, sizes = row["case"].partition("/")
            if kind not in ("products", "centred"):
                continue
            shape = tuple(int(size) for size in sizes.split("x"))
            if kind == "products":
                times.setdefault(shape, {})[row["contender"]] = float(row["median"])
            elif row["contender"] == "elsa":
                found[shape] = float(row["ratio"])
    for shape, taken in times.items():
        gain = taken["pytorch"] / max(taken["elsa"], taken["elsa, frozen"])
        found[shape] = min(gain, found.get(shape, gain))
    return found


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_product_that_was_measured_to_lose_is_pytorchs(kernel, hopper, monkeypatch, mode, frozen):
    """Every published product, and no other one is kept from the kernels."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: mode == "graph")
    if mode == "eager":
        monkeypatch.setattr(dispatch, "eager_least", lambda operator, dtype: 0)
    products = measured_products()
    assert products[50176, 96, 288] < 1 < products[25088, 96, 288]
    for (rows, channels, columns), gain in products.items():
        x, w = (torch.empty(n, channels, device="meta") for n in (rows, columns))
        kept = (w.half(), w[:, 0]) if frozen else (None, None)
        x, w = x.as_subclass(OnGpu), w.as_subclass(OnGpu)
        kernel[0] = 0
        served(x, w, None, halves=kept[0], powers=kept[1])
        assert kernel == [int(gain >= 1)], (rows, channels, columns, gain)
        kernel[0] = 0
        served(x, w, None, "gelu", halves=kept[0], powers=kept[1])  # passes of PyTorch's beside it
        served(x, w, None, precision="turbo", halves=kept[0], powers=kept[1])
        assert kernel == [2]


def test_rows_of_products_rest_on_measurements(hopper):
    products = measured_products()
    for row in hopper:
        held = [
            gain
            for (rows, channels, columns), gain in products.items()
            if row.holds(rows * channels, channels, columns)
        ]
        assert held and max(held) < 1
        assert row.ratio == (round(min(held), 2), round(max(held), 2))


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_product_that_loses_is_explained_so(hopper, monkeypatch, backend):
    monkeypatch.setattr(module, "_least_served", lambda device: 0)
    with FakeTensorMode():
        w = torch.empty(288, 96, device="cuda")
        for rows, terms, plain in (
            (50176, {}, True), (25088, {}, False), (50176, {"activation": "gelu"}, False),
            (50176, {"precision": "turbo"}, False),
        ):  # fmt: skip
            x = torch.empty(rows, 96, device="cuda")
            route = explain_linear(x, w, backend=backend, **terms)
            assert route.backend == ("eager" if plain else "triton")
            assert any("0.95 to 0.95 of PyTorch's speed" in r for r in route.reasons) is plain


def test_a_compiled_product_that_loses_is_pytorchs(hopper):
    """Where its lengths are those of this graph alone; others are not asked for."""
    x, w = torch.ones(50176, 96), torch.ones(288, 96)
    for dynamic, wanted in ((False, 2.0), (True, 1.0)):
        torch._dynamo.reset()
        counter = CompileCounter()
        asked = torch.compile(
            lambda x, w: x[:1, :1] + int(measured.product_by_pytorch(x, w)),
            dynamic=dynamic,
            backend=counter,
        )
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        assert asked(x, w).item() == wanted and asked(x[:64], w).item() == 1.0
        assert counter.frame_count == (1 if dynamic else 2)

    class Asked(torch.nn.Module):
        def forward(self, x):
            return x[:1, :1] + int(measured.product_by_pytorch(x, w))

    assert torch.export.export(Asked(), (x,)).module()(x).item() == 1.0


class OnGpu(torch.Tensor):
    """What says that it lies on a GPU."""

    is_cuda = True


@pytest.fixture
def kernel(monkeypatch):
    """The gates as on an H200, and a kernel that counts its calls."""
    counts = [0]

    def computed(input, weight, bias, *terms):
        counts[0] += 1
        return functional.linear(input, weight, bias)

    monkeypatch.setattr(module, "_computed", computed)
    monkeypatch.setattr(module, "_eager", computed)
    monkeypatch.setattr(module, "_least_served", lambda device: 0)
    monkeypatch.setattr(module, "Tensor", OnGpu)  # plain, as the gates see it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return counts


def on_gpu(dtype=torch.float32):
    x, w, b = operands(dtype=dtype)
    return x.as_subclass(OnGpu), w.as_subclass(OnGpu), b


def maker(out):
    """The name of the node that made a tensor, behind the alias of its class."""
    return out.grad_fn.next_functions[0][0].name()


def test_a_large_call_takes_the_kernel(kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "eager_least", lambda operator, dtype: 0)
    given = on_gpu()
    assert torch.equal(linear(*given), functional.linear(*given))
    assert kernel == [1]
    linear(*given, precision="ieee")
    linear(*given, backend="eager")
    assert kernel == [1]


def test_a_small_eager_call_is_pytorchs(kernel, monkeypatch):
    """A CUDA graph, which saves the host's time, records the kernel."""
    given = on_gpu()
    for _ in range(3):
        assert torch.equal(linear(*given), functional.linear(*given))
    assert kernel == [0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    linear(*given)
    assert kernel == [1]


def test_a_gradient_takes_the_kernel_in_fewer_steps(kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "eager_least", lambda operator, dtype: 0)
    monkeypatch.setattr(module, "LEAST_TRAINED", 0)
    x, w, b = on_gpu()
    w = w.requires_grad_()
    out = linear(x, w, b)
    assert "Eager" in out.grad_fn.name()
    out.sum().backward()
    assert kernel == [1]
    assert torch.allclose(w.grad, x.flatten(0, -2).sum(0).expand_as(w))


def test_a_small_call_with_a_gradient_is_pytorchs(kernel):
    x, w, b = on_gpu()
    w = w.requires_grad_()
    out = linear(x, w, b)
    assert "elsa_linear" not in maker(out)
    out.sum().backward()
    assert kernel == [0] and w.grad is not None


def test_autocast_leaves_the_operator_alone():
    given = operands(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert OPERATOR(*given).dtype == torch.float32


@pytest.fixture
def onednn(monkeypatch):
    """A processor for which MKL lags, where PyTorch has oneDNN."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch has no oneDNN here")
    monkeypatch.setattr(onednn_backend, "_mkl_lags", lambda: True)


def large(**options):
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 128, 192), torch.randn(192, 192, **options), torch.randn(192)
    assert x.numel() * w.shape[0] >= onednn_backend.LEAST_ONEDNN
    return x, w, b


@pytest.mark.parametrize("depth", [192, 200, 384, 768, 1152])
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_computes_the_same(onednn, bias, depth):
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 128, depth), torch.randn(256, depth), torch.randn(256)
    b = b if bias else None
    assert onednn_backend._suits_onednn(x, w, b)
    exact = functional.linear(x.double(), w.double(), None if b is None else b.double())
    ours, theirs = ((f(x, w, b) - exact).norm() for f in (linear, functional.linear))
    assert ours <= 1.1 * theirs
    if bias:
        spread = b.repeat_interleave(2)[::2]
        assert torch.equal(linear(x, w, spread), functional.linear(x, w, spread))
        assert torch.equal(linear(x, w, b, precision="ieee"), functional.linear(x, w, b))
    x[1, 5, 7], w[3, 4] = float("inf"), float("nan")
    out, peer = linear(x, w, b), functional.linear(x, w, b)
    assert torch.equal(out.isnan(), peer.isnan()) and torch.equal(out.isinf(), peer.isinf())


def test_whom_onednn_serves(onednn):
    x, w, b = large()
    suits = onednn_backend._suits_onednn
    assert not suits(x[:, :10], w, b)  # small, and not dense
    assert not suits(x.double(), w.double(), b.double())
    assert not suits(x, w.double(), b)
    assert not suits(x, w, b[:1])
    assert not suits(x, w, torch.zeros(384)[::2])
    assert not suits(x, w, torch.zeros(1).expand(192))
    assert not suits(x, w, b.to("meta"))
    assert not suits(x, w.to_mkldnn(), b)
    assert not suits(x, w[0], b)
    wide = torch.randn(1024, 768)
    assert suits(torch.randn(128, 768), wide, None)
    assert not suits(torch.randn(127, 768), wide, None)  # its parts would have to be copied
    assert not suits(x, w[:, :100], b)
    assert not suits(x, w.t(), b)
    assert suits(x, w.clone().requires_grad_(), b)
    assert suits(x, torch.nn.Parameter(w, requires_grad=False), b)
    with torch.no_grad():
        assert suits(x, torch.nn.Parameter(w), b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not suits(x, w, b)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not suits(x, w, b)
    torch.set_float32_matmul_precision("medium")
    try:
        assert not suits(x, w, b)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert suits(x, w, b)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,), (2,)])
@pytest.mark.parametrize(("depth", "columns"), [(192, 200), (384, 576), (768, 192)])
def test_gradients_by_onednn(onednn, depth, columns, wanted):
    """As exact as those of PyTorch's MKL."""
    torch.manual_seed(0)
    given = torch.randn(2, 130, depth), torch.randn(columns, depth), torch.randn(columns)
    # as a product with what follows in other order hands it on
    slope = torch.randn(130, 2, columns).transpose(0, 1)

    def gradients(call, dtype=torch.float32):
        leaves = [t.to(dtype).requires_grad_(i in wanted) for i, t in enumerate(given)]
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, [leaves[i] for i in wanted], slope.to(dtype))]

    exact = gradients(functional.linear, torch.float64)
    found = gradients(linear)
    assert type(found[0].grad_fn).__name__ == "_TrainedBackward"
    for mine, peer, reference in zip(found, gradients(functional.linear), exact, strict=True):
        assert mine.shape == peer.shape
        assert (mine - reference).norm() <= 1.1 * (peer - reference).norm() + 1e-12


def test_second_derivatives_and_batches_of_gradients_of_onednn(onednn):
    x, w, b = (t.requires_grad_() for t in large())

    def twice(call):
        first = torch.autograd.grad(call(x, w, b).square().sum(), (x, w, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first) * 1e-6, (x, w, b))

    for mine, peer in zip(twice(linear), twice(functional.linear), strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-4, atol=1e-4 * peer.abs().max().item())
    slopes = torch.randn(3, 2, 128, 192)
    for each in zip(
        *(torch.autograd.grad(f(x, w, b), (x, w), slopes, is_grads_batched=True)
          for f in (linear, functional.linear)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(*each, rtol=1e-4, atol=1e-3)
    tangent = torch.func.jvp(lambda t: linear(t, w.detach(), b.detach()), (x.detach(),), (x,))[1]
    torch.testing.assert_close(tangent, x @ w.t(), rtol=1e-4, atol=1e-3)


def test_a_recorded_program_is_not_onednns(onednn):
    x, w, b = large()

    class Layer(torch.nn.Module):
        def forward(self, x):
            return linear(x, w.detach(), b)

    program = torch.export.export(Layer(), (x,))
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets and not any("mkldnn" in target for target in targets)


@pytest.mark.parametrize(
    ("vendor", "capability", "lags"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
    ],
)
def test_where_mkl_lags(monkeypatch, tmp_path, vendor, capability, lags):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(processor, "CPUINFO", file)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert onednn_backend._mkl_lags.__wrapped__() is lags
    file.unlink()
    assert not onednn_backend._mkl_lags.__wrapped__()


def test_a_proof_judges_what_users_run(onednn):
    """A site is measured under a dispatch mode, and computes there what it does without."""
    from elsa_core.proof.capture import OperatorCapture

    x, w, b = large()
    plain = linear(x, w, b)
    with OperatorCapture():
        assert onednn_backend._suits_onednn(x, w, b)
        assert torch.equal(linear(x, w, b), plain)
        with FlopCounterMode(display=False) as counter:  # another mode: it sees PyTorch's own
            linear(x, w, b)
        assert counter.get_total_flops() == 2 * x.numel() * w.shape[0]
    with FlopCounterMode(display=False) as counter:
        linear(x, w, b)
    assert counter.get_total_flops() == 2 * x.numel() * w.shape[0]
