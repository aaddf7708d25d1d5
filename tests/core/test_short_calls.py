"""Which calls of attention ask the CUDA library ahead of PyTorch's dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import elsa_core as elsa
from elsa_core import dense_inference, routing, short_calls
from elsa_core.errors import ArgumentError
from elsa_core.linear import served
from elsa_core.patching.adapters.common import attend_small
from elsa_core.routing import table
from elsa_core.routing.choose import Chosen
from elsa_core.routing.measured import Row


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of calls that took the short way, each of which gives ones."""
    found: list[Any] = []

    def serve(*arguments: Any) -> torch.Tensor:
        found.append(arguments)
        return torch.ones_like(arguments[0])

    monkeypatch.setattr(short_calls.ATTENTION, "serve", serve)
    yield found


def operands(**given: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 9, 8, generator=generator).requires_grad_(**given) for _ in range(3)]


def test_plain_calls_take_it(asked: list[Any]) -> None:
    q, k, v = operands(requires_grad=False)
    mask = torch.zeros(1, 1, 9, 9)
    assert torch.equal(elsa.attention(q, k, v), torch.ones_like(q))
    elsa.attention(q, k, v, mask, scale=0.5, precision="ieee")
    elsa.attention(q, k, v, is_causal=True)
    terms = [each[3:] for each in asked]
    assert terms[0] == (None, False, None, "strict") and terms[2] == (None, True, None, "strict")
    assert terms[1][0] is mask and terms[1][1:] == (False, 0.5, "ieee")


def test_tensors_that_need_a_gradient_take_it_where_none_is_recorded(asked: list[Any]) -> None:
    given = operands(requires_grad=True)
    out = elsa.attention(*given)
    assert not asked and isinstance(out, torch.Tensor) and out.requires_grad
    with torch.no_grad():
        elsa.attention(*given)
    with torch.inference_mode():
        elsa.attention(*given)
    assert len(asked) == 2


OTHERS: dict[str, tuple[dict[str, Any], Any]] = {
    "lse": ({"return_lse": True}, nullcontext),
    "dropout": ({"dropout_p": 0.5}, nullcontext),
    "backend": ({"backend": "eager"}, nullcontext),
    "sparsity": ({"sparsity": "exact"}, nullcontext),
    "function mode": ({}, Functions),
    "device": ({}, lambda: torch.device("cpu")),
    "dispatch mode": ({}, Dispatches),
    "autocast": ({}, lambda: torch.autocast("cpu", torch.bfloat16)),
    "profiler": ({}, torch.profiler.profile),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_do_not(name: str, asked: list[Any]) -> None:
    named, context = OTHERS[name]
    made: AbstractContextManager[Any] = context()
    q, k, v = operands(requires_grad=False)
    with made:
        elsa.attention(q, k, v, **named)
    assert not asked


PRODUCTS: dict[str, tuple[dict[str, Any], Any]] = {
    "backend": ({"backend": "eager"}, nullcontext),
    "function mode": ({}, Functions),
    "dispatch mode": ({}, Dispatches),
    "autocast": ({}, lambda: torch.autocast("cpu", torch.bfloat16)),
    "profiler": ({}, torch.profiler.profile),
    "gradient": ({}, torch.enable_grad),
    "tf32": ({}, lambda: allowed("tf32")),
}


@contextmanager
def allowed(precision: str) -> Iterator[None]:
    """PyTorch's setting of float32 products."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As `asked`, of linear layers."""
    found: list[Any] = []

    def serve(*arguments: Any) -> torch.Tensor:
        found.append(arguments)
        return torch.ones(1)

    monkeypatch.setattr(short_calls.LINEAR, "serve", serve)
    monkeypatch.setattr(short_calls.LINEAR, "admits", True)
    monkeypatch.setattr(routing, "eager_least", lambda *_: 2 * 9 * 8 * 8)
    return found


def test_linear_layers_take_it_with_all_their_terms(products: list[Any]) -> None:
    x, layer, residual = torch.randn(2, 9, 8), torch.nn.Linear(8, 8), torch.randn(2, 9, 8)
    with torch.no_grad():
        elsa.linear(x, layer.weight, layer.bias)
        elsa.linear(x, layer.weight, activation="gelu", residual=residual, precision="turbo")
        halves = torch.ones(2), torch.ones(1)
        served(x, layer.weight, None, "none", None, None, "strict", "auto", *halves)
    elsa.linear(x, layer.weight.detach())
    assert products[0] == (x, layer.weight, layer.bias, "none", None, None, "strict", None, None)
    assert products[1] == (x, layer.weight, None, "gelu", residual, None, "turbo", None, None)
    assert products[2][7:] == halves and len(products) == 4


@pytest.mark.parametrize("name", PRODUCTS)
def test_other_products_do_not(name: str, products: list[Any]) -> None:
    named, context = PRODUCTS[name]
    x, layer = torch.randn(2, 9, 8), torch.nn.Linear(8, 8)
    with torch.no_grad(), context():
        elsa.linear(x, layer.weight, layer.bias, **named)
    assert not products


def test_other_dtypes_and_transforms_of_products_do_not(products: list[Any]) -> None:
    x, w = torch.randn(2, 9, 8), torch.randn(8, 8)
    elsa.linear(x[:1], w)  # small: PyTorch's, but in CUDA graphs
    with pytest.raises(ArgumentError, match="must be"):
        elsa.linear(x, w[0, 0])
    elsa.linear(x.double(), w.double())
    elsa.linear(x.half(), w.half())
    torch.func.vmap(lambda a: elsa.linear(a, w))(x)
    torch.jit.trace(lambda a: elsa.linear(a, w), (x,), check_trace=False)
    torch.compile(lambda a: elsa.linear(a, w), fullgraph=True, backend="eager")(x)
    assert not products


@contextmanager
def of_open_lengths(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor whose first length no program may ask for."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True):
        rows = env.create_unbacked_symint()
        torch._check(rows >= 1)
        yield torch.empty(rows, *x.shape[1:])


def test_products_of_open_lengths_are_not_compared(products: list[Any]) -> None:
    """A tracer of symbolic lengths raised, or guarded on them, once a call had been admitted."""
    x, w = torch.randn(2, 9, 8), torch.randn(8, 8)
    with of_open_lengths(x) as symbolic:
        assert elsa.linear(symbolic, w).dim() == 3
    assert not products


def test_which_products_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the first backend serves, whether a CUDA graph is recorded or not."""
    admitted: list[Any] = []
    monkeypatch.setattr(short_calls.Short, "admit", lambda *given: admitted.append(given))
    monkeypatch.setattr(short_calls.LINEAR, "admits", True)
    monkeypatch.setattr(routing, "eager_least", lambda *_: 2 * 9 * 8 * 8)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    x, w = torch.randn(2, 9, 8), torch.randn(8, 8)

    def serve(*given: Any) -> torch.Tensor:
        return torch.ones(1)

    for name, backends, given, count in (
        ("auto", (serve,), x, 1), ("auto", (lambda *_: None, serve), x, 0),
        ("auto", (serve,), x[:1], 0), ("auto", (serve,), x.half(), 0), ("triton", (serve,), x, 0),
    ):  # fmt: skip
        monkeypatch.setitem(routing.SERVING, ("linear", "cuda", name), backends)
        elsa.linear(given, w.to(given.dtype), backend=name)
        assert len(admitted) == count, (name, backends, given.shape)
        admitted.clear()
    monkeypatch.setitem(routing.SERVING, ("linear", "cuda", "auto"), (serve,))
    elsa.linear(x.clone().requires_grad_(), w)  # its like comes here each time
    elsa.linear(x, w.clone().requires_grad_())
    with of_open_lengths(x) as symbolic:
        elsa.linear(symbolic, w)
    terms = x, w, None, "none", None, None, "strict", None, None
    torch.func.vmap(lambda a: short_calls.admit_product((a, *terms[1:])) or a)(x)  # type: ignore[func-returns-value]
    assert not admitted


def test_a_compiled_call_does_not_ask_whether_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that guarded on it would be made once more after the first call on a GPU."""
    made = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    q, k, v = operands(requires_grad=False)
    image = torch.randn(1, 4, 4, 24)
    windows = torch.compile(
        lambda x: elsa.window_attention(x, num_heads=2, window_size=(2, 2)), backend=backend
    )
    attention = torch.compile(lambda x: elsa.attention(x, k, v), backend=backend)
    linear = torch.compile(lambda x: elsa.linear(x, v[0, 0]), backend=backend)
    for _ in range(2):
        windows(image)
        attention(q)
        linear(q)
        for each in (short_calls.ATTENTION, short_calls.WINDOW_ATTENTION, short_calls.LINEAR):
            monkeypatch.setattr(each, "serve", lambda *given: None)
    assert len(made) == 3


def test_a_compiled_call_does_not_ask_for_the_function_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above, of the function that the first eager call of a linear layer on a GPU finds."""
    found: list[Any] = []
    monkeypatch.setattr(table, "_LINEAR", found)
    x, w = torch.randn(2, 9, 8), torch.randn(8, 8)
    made = CompileCounter()
    call = torch.compile(lambda a: (table._linear_by_triton(a, w, None), a + 1)[1], backend=made)
    for _ in range(2):
        call(x)
        table._linear_by_triton(x, w, None)
    assert made.frame_count == 1 and len(found) == 1


def test_a_row_that_declined_once_keeps_its_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call may be its backend's again."""
    admitted: list[Any] = []
    monkeypatch.setattr(short_calls.Short, "admit", lambda *given: admitted.append(given))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    q, k, v = operands(requires_grad=False)
    row = Row("sdpa", 8, (1, 9), (1, 99), 1, (0.5, 1.0))
    both = (q, q)
    for rows, found in (((), 1), (((row, lambda *given: None),), 1)):
        choice = Chosen("triton", None, lambda *given: both, rows)
        arguments = (q, k, v, None, False, 0.5, "strict")
        dense_inference.inferred(choice, arguments, (None, None))
        assert len(admitted) == found


def test_transforms_and_compilers_do_not(asked: list[Any]) -> None:
    q, k, v = operands(requires_grad=False)
    torch.func.vmap(lambda a: elsa.attention(a, k, v))(q[None])
    torch.jit.trace(lambda a: elsa.attention(a, k, v), (q,), check_trace=False)
    torch.compile(lambda a: elsa.attention(a, k, v), fullgraph=True, backend="eager")(q)
    assert not asked


@pytest.mark.parametrize("dims", [4, 5])
def test_windows_take_it_as_they_are_called(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        short_calls.WINDOW_ATTENTION, "serve", lambda *given: (found.append(given), given[0])[1]
    )
    image = torch.randn(1, *(4,) * (dims - 2), 24)
    size = (2,) * (dims - 2)
    named: dict[str, Any] = {"num_heads": 2, "window_size": size}
    assert elsa.window_attention(image, **named) is image
    assert found[0] == (
        image, None, None, None, None, 2, size, (0, 0), None, -100.0, "qkv", False, "strict",
    )  # fmt: skip
    bias = torch.zeros(2, 2 ** (dims - 2), 2 ** (dims - 2), requires_grad=True)
    assert elsa.window_attention(image, bias, **named).requires_grad
    elsa.window_attention(image, backend="eager", **named)
    torch.func.vmap(lambda one: elsa.window_attention(one, **named))(image[None])
    assert len(found) == 1


def test_small_calls_of_patched_sites_take_it(asked: list[Any]) -> None:
    q, k, v = (t.bfloat16() for t in operands(requires_grad=False))
    out = attend_small(q, k, v)
    assert out is not None and torch.equal(out, torch.ones_like(q))
    assert asked[0][3:] == (None, False, None, "strict")
    with torch.autocast("cpu", torch.bfloat16):
        assert attend_small(q, k, v) is None
    found: list[Any] = []
    torch.func.vmap(lambda a: found.append(attend_small(a, k, v)) or a)(q[None])  # type: ignore[func-returns-value]
    assert found == [None] and attend_small(q.double(), k.double(), v.double()) is None
    short_calls.ATTENTION.serve = None
    assert attend_small(q, k, v) is None and len(asked) == 1


def test_a_call_that_is_not_admitted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(requires_grad=False)
    expected = elsa.attention(q, k, v)
    monkeypatch.setattr(short_calls.ATTENTION, "serve", lambda *arguments: None)
    assert torch.equal(elsa.attention(q, k, v), expected)  # type: ignore[arg-type]


def test_cpu_calls_are_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_calls.Short, "admit", lambda *arguments: pytest.fail("it was"))
    elsa.attention(*operands(requires_grad=False))
