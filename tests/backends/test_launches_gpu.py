"""Calls past PyTorch's dispatcher on a GPU have the bits of the operator's, and its gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_checks import Seeing

import elsa_core as elsa
from elsa_core.backends import cuda
from elsa_core.backends.cuda import library
from elsa_core.dispatch import launches

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "fp16": {"dtype": torch.float16},
    "bf16 odd": {"dtype": torch.bfloat16, "shape": (3, 5, 131, 40)},
    "causal": {"dtype": torch.float32, "is_causal": True},
    "bool": {"dtype": torch.float16, "mask": torch.bool},
    "additive": {"dtype": torch.float32, "mask": torch.float32, "scale": 0.3},
    "ieee": {"dtype": torch.float32, "precision": "ieee"},
    "decode": {"dtype": torch.float16, "shape": (2, 3, 1, 64), "keys": 5000},
}


@pytest.fixture(autouse=True)
def _served() -> Iterator[None]:
    """There is such a way, and nothing was admitted before a test."""
    if not cuda.ready():
        pytest.skip(cuda.status().reason)
    if library.load().short("attention") is None:
        pytest.skip("this PyTorch has no such way")
    cuda.forget()
    yield


def operands(dtype: torch.dtype, shape: Any = (1, 4, 197, 64), keys: int = 0, mask: Any = None,
             **terms: Any) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    batch, heads, queries, dim = shape
    keys = keys or queries

    def made(tokens: int) -> torch.Tensor:
        drawn = torch.randn(batch, tokens, heads, dim, generator=generator, device="cuda")
        return drawn.to(dtype).transpose(1, 2)

    given: list[Any] = [made(queries), made(keys), made(keys)]
    if mask is not None:
        drawn = torch.randn(1, 1, 1, keys, generator=generator, device="cuda")
        given.append(drawn > 0 if mask == torch.bool else drawn.to(mask))
    return given, terms


def took(call: Any) -> tuple[Any, int]:
    """What a call gives, and how many calls the library served."""
    before = library.load().counts()[1]
    result = call()
    return result, library.load().counts()[1] - before


def repeats(
    short: Any, call: Any, monkeypatch: pytest.MonkeyPatch, recorded: Any = None
) -> tuple[list[torch.Tensor], list[Any]]:
    """A second call, one on another stream, and one in a graph (`recorded` if it is given), and
    what `short` found for each."""
    serve = short.find
    assert serve is not None
    found: list[Any] = []
    monkeypatch.setattr(short, "find", lambda *a: (found.append(serve(*a)), found[-1])[1])
    second = call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        third = call()
    stream.synchronize()
    if recorded is not None:
        recorded()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = (recorded or call)()
    graph.replay()
    return [second, third, last], found


@pytest.mark.parametrize("name", CASES)
def test_the_second_call_of_a_layout_has_the_bits_of_the_first(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, terms = operands(**CASES[name])
    with torch.no_grad():
        first = elsa.attention(*given, **terms)
        assert isinstance(first, torch.Tensor)
        fresh = [t.clone() if isinstance(t, torch.Tensor) else t for t in given]
        others, found = repeats(
            launches.ATTENTION, lambda: elsa.attention(*given, **terms), monkeypatch,
            lambda: elsa.attention(*fresh, **terms),
        )  # fmt: skip
    # clones of strided tensors keep their strides: all but the first call of a layout
    assert [each is not None for each in found] == [True] * 4
    for other in others:
        assert torch.equal(first, other) and first.stride() == other.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shift", [0, 3])
def test_windows(dtype: torch.dtype, shift: int) -> None:
    qkv = torch.randn(2, 14, 14, 3 * 96, device="cuda").to(dtype)
    bias, pad = torch.randn(3, 49, 49, device="cuda"), torch.randn(3 * 96, device="cuda")
    named: dict[str, Any] = {"num_heads": 3, "window_size": (7, 7), "shift_size": (shift, shift)}
    with torch.no_grad():
        first = elsa.window_attention(qkv, bias, pad_qkv=pad.to(dtype), **named)
        again, served = took(
            lambda: elsa.window_attention(qkv, bias, pad_qkv=pad.to(dtype), **named)
        )
    assert served == 1 and torch.equal(first, again) and first.stride() == again.stride()
    assert launches.WINDOW_ATTENTION.find is not None
    terms = (3, (7, 7), (shift, shift), None, -100.0, "qkv", False, "strict")
    given = (qkv, bias, None, pad.to(dtype), None)
    found = launches.WINDOW_ATTENTION.find(*given, *terms)
    assert found is not None and torch.equal(found, first)


def test_parameters_take_it() -> None:
    qkv = torch.randn(1, 14, 14, 3 * 96, device="cuda")
    pad = torch.nn.Parameter(torch.randn(3 * 96, device="cuda"))
    named: dict[str, Any] = {"num_heads": 3, "window_size": (7, 7), "pad_qkv": pad}
    with torch.no_grad():
        first = elsa.window_attention(qkv, **named)
        serve = launches.WINDOW_ATTENTION.find
        assert serve is not None
        terms = (3, (7, 7), (0, 0), None, -100.0, "qkv", False, "strict")
        found = serve(qkv, None, None, pad, None, *terms)
    assert found is not None and type(found) is torch.Tensor and torch.equal(found, first)


PRODUCTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "turbo": {"precision": "turbo"},
    "gelu": {"activation": "gelu"},
    "residual": {"residual": True, "scale": True},
}


def layer_and_rows(**terms: Any) -> tuple[torch.nn.Linear, torch.Tensor, dict[str, Any]]:
    """A float32 layer that kernels serve outside CUDA graphs too."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(768, 3072, device="cuda")
    x = torch.randn(16, 197, 768, device="cuda")
    shapes = {"residual": (16, 197, 3072), "scale": (3072,)}
    named = {k: torch.randn(shapes[k], device="cuda") if v is True else v for k, v in terms.items()}
    return layer, x, named


@pytest.mark.parametrize("name", PRODUCTS)
def test_linear_layers_have_the_bits_of_the_first_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, named = layer_and_rows(**PRODUCTS[name])
    with torch.no_grad():
        first = elsa.linear(x, layer.weight, layer.bias, **named)
        others, found = repeats(
            launches.LINEAR, lambda: elsa.linear(x, layer.weight, layer.bias, **named), monkeypatch
        )
    assert [each is not None for each in found] == [True] * 3
    for other in others:
        assert torch.equal(first, other) and first.stride() == other.stride()


def test_products_follow_weights_and_settings() -> None:
    layer, x, _ = layer_and_rows()
    serve, served = launches.LINEAR, lambda: elsa.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        before = served()
        assert took(served)[1] == 1
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        assert torch.equal(took(served)[0], 2 * before)
        layer.weight.data = layer.weight.data.clone().mul_(2)
        layer.bias.data.mul_(2)
        assert torch.equal(served(), 4 * before)
        layer.weight = torch.nn.Parameter(layer.weight / 4)
        layer.bias = torch.nn.Parameter(layer.bias / 4)
        out, count = took(served)
        assert count == 1 and torch.equal(out, before)
        matmul = torch.backends.cuda.matmul
        precision, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        try:
            assert took(served)[1] == 0
        finally:
            matmul.fp32_precision = precision
        with torch.autocast("cuda", torch.float16):
            out, count = took(served)
            assert count == 0 and out.dtype == torch.float16
        assert serve.find is not None and took(served)[1] == 1
    out = served()
    assert out.requires_grad
    out.sum().backward()
    assert layer.weight.grad is not None


def test_patched_layers_take_it() -> None:
    layer, x, _ = layer_and_rows()
    model = torch.nn.Sequential(layer).eval()
    with torch.inference_mode():
        exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        own = model(x)
        elsa.patch(model, scope="model")
        first = model(x)
        given = [x, layer.weight, layer.bias, "none", None, None, "strict"]
        assert launches.LINEAR.find is not None
        found = launches.LINEAR.find(*given)
        again, served = took(lambda: model(x))
    assert served == 1 and found is not None
    assert torch.equal(first, found) and torch.equal(first, again)
    assert (again - exact).norm() <= 2 * (own - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_windows_of_a_patched_swin(dtype: torch.dtype) -> None:
    """A warm call launches from the cache, and reads what the modules hold."""
    swin = pytest.importorskip("timm.models.swin_transformer")
    torch.manual_seed(0)
    block = swin.SwinTransformerBlock(96, (56, 56), 3, window_size=7, shift_size=3)
    block = block.to("cuda", dtype).eval()
    x = torch.randn(1, 56, 56, 96, device="cuda", dtype=dtype)
    holder = torch.nn.Sequential(block)
    with torch.inference_mode():
        own, exact = block._attn(x), block.double()._attn(x.double())
        block.to(dtype)
        elsa.patch(holder)
        first = block._attn(x)
        for _ in range(3):
            block._attn(x)
        out, served = took(lambda: block._attn(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = block._attn(x)
        graph.replay()
    count = 3 if dtype == torch.float32 else 1  # of few channels PyTorch computes the layers
    assert served == count
    for each in (first, out, recorded):  # a graph's products are elsa's
        assert (each - exact).norm() <= 2 * (own - exact).norm() + 1e-6 * exact.norm()
    with torch.no_grad():
        block.attn.proj.weight.zero_()
        block.attn.proj.bias.fill_(0.5)
        out, served = took(lambda: block._attn(x))
    assert served == count and (out == 0.5).all()


def test_results_are_freed_and_the_gradient_is_seen() -> None:
    given, _ = operands(torch.float32)
    with torch.inference_mode():
        elsa.attention(*given)
        assert elsa.attention(*given).is_inference()  # type: ignore[union-attr]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(200):
            elsa.attention(*given)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    given[0].requires_grad_()
    out = elsa.attention(*given)
    assert isinstance(out, torch.Tensor) and out.requires_grad
    out.sum().backward()
    assert given[0].grad is not None


def test_modes_and_profilers_see_the_operator() -> None:
    given, _ = operands(torch.float32)
    with torch.no_grad():
        for _ in range(2):
            elsa.attention(*given)
        with Seeing() as mode:
            elsa.attention(*given)
        assert any("elsa.attention" in each for each in mode.names)
        with torch.profiler.profile() as profile:
            elsa.attention(*given)
        assert any(each.key == "elsa::attention" for each in profile.key_averages())


def test_who_is_served_by_pytorch_stays_so() -> None:
    """A named backend's plan admits nothing, and a changed route forgets what was admitted."""
    given, _ = operands(torch.float16, mask=torch.float16, shape=(8, 12, 577, 64))
    given[3] = given[3].expand(1, 1, 577, 577).contiguous()
    with torch.no_grad():
        elsa.attention(*given, backend="triton")
        routed, served = took(lambda: elsa.attention(*given))
        again, served_again = took(lambda: elsa.attention(*given))
    assert served == served_again and torch.equal(routed, again)
    given, _ = operands(torch.float32)
    with torch.no_grad():
        for _ in range(2):
            elsa.attention(*given)
        serve, terms = launches.ATTENTION.find, (None, False, None, "strict")
        assert serve is not None and serve(*given[:3], *terms) is not None
        cuda.forget()
        assert serve(*given[:3], *terms) is None
