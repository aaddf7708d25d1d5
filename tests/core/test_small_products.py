"""Linear layers of eager calls that wait for the host: which ones a stand-in of the kernel gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import elsa_core as elsa
from elsa_core import calls, routing, short_calls
from elsa_core.errors import ArgumentError
from elsa_core.operators.linear import plain
from elsa_core.patching.adapters import flat

timm = pytest.importorskip("timm")
from timm.models.vision_transformer import Block  # noqa: E402

MOST = 1000
TABLE = {torch.float32: MOST, torch.float16: MOST}


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return func(*args, **(kwargs or {}))


class Library:
    """The library's short way, whose kernel is plain PyTorch: what it was given, and admitted."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.admitted: set[Any] = set()

    def serve(self, *given: Any) -> torch.Tensor | None:
        if self.layout(given) not in self.admitted:
            return None
        self.asked.append(given)
        return plain(*given[:6])

    def admit(self, arguments: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        assert arguments == given
        self.admitted.add(self.layout(given))

    @staticmethod
    def layout(given: tuple[Any, ...]) -> Any:
        return tuple((t.shape, t.dtype) if isinstance(t, torch.Tensor) else t for t in given)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """CPU tensors that say they are on a GPU which the table knows."""
    found = Library()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(routing, "eager_products", lambda device, dtype: TABLE.get(dtype, 0))
    monkeypatch.setattr(short_calls.LINEAR, "admits", True)
    monkeypatch.setattr(short_calls.LINEAR, "_asked", True)
    monkeypatch.setattr(short_calls.LINEAR, "serve", found.serve)
    monkeypatch.setattr(short_calls.Short, "admit", lambda self, *given: found.admit(*given))
    monkeypatch.setattr(short_calls, "_TRIED", {})
    calls.forget_kinds()
    yield found
    calls.forget_kinds()


SEEN: dict[str, tuple[Any, AbstractContextManager[Any]]] = {
    "gradients": (torch.float32, torch.enable_grad()),
    "float64": (torch.float64, nullcontext()),
    "a function mode": (torch.float32, Functions()),
    "autocast": (torch.float32, torch.autocast("cpu", torch.bfloat16)),
    "a profiler": (torch.float32, torch.profiler.profile()),
}


@pytest.mark.parametrize("case", SEEN)
def test_who_would_see_it_gets_pytorchs(case: str, library: Library) -> None:
    dtype, context = SEEN[case]
    with torch.no_grad():
        assert short_calls.small_way(torch.ones(2, 8)) is not None
        with context:
            assert short_calls.small_way(torch.ones(2, 8, dtype=dtype)) is None


def test_recorded_calls_and_tf32_get_pytorchs(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, 8)
    found: list[Any] = []
    with torch.no_grad():
        torch.func.vmap(lambda a: found.append(short_calls.small_way(a)) or a)(x)  # type: ignore[func-returns-value]
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            found.append(short_calls.small_way(x))
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            found.append(short_calls.small_way(x))
            assert short_calls.small_way(x.half()) is not None
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
    assert found == [None] * 3


def test_the_first_call_of_a_kind_loads_and_admits(library: Library) -> None:
    x, layer, residual = torch.randn(3, 8), nn.Linear(8, 4), torch.randn(3, 4)
    with torch.no_grad():
        for count in range(3):
            out = elsa.linear(x, layer.weight, layer.bias, activation="gelu", residual=residual)
            torch.testing.assert_close(out, residual + F.gelu(layer(x)))
            assert len(library.asked) == count and len(library.admitted) == 1
        short_calls.LINEAR.serve = lambda *given: None  # its plan was dropped
        found = [
            short_calls.small_product(x, layer.weight, layer.bias, "gelu", residual)
            for _ in range(3)
        ]
    assert [out is None for out in found] == [False, False, True], "tried three times in all"


@pytest.mark.parametrize(
    "given",
    [
        (torch.randn(3, 8), torch.randn(4, 8).half(), None),
        (torch.randn(3, 8), torch.randn(4, 7), None),
        (torch.randn(3, 8), torch.randn(8), None),
        (torch.randn(3, 8), torch.randn(4, 8), torch.randn(4).double()),
        (torch.randn(3, 8), torch.randn(4, 8), None, "none", torch.randn(4)),
        (torch.randn(3, 8), torch.randn(4, 8), None, "none", None, torch.randn(3, 4)),
        (torch.randn(0, 8), torch.randn(4, 8), None),
        (torch.randn(3, 8), torch.randn(4, 8), None, "no such activation"),
        (torch.nested.nested_tensor([torch.randn(2, 8)]), torch.randn(4, 8), None),
        (torch.randn(3, 8), torch.randn(4, 8).to_sparse_csr(), None),
        (torch.randn(3, 8), torch.randn(4, 8).to_sparse(), None),
    ],
)
def test_what_does_not_fit_is_pytorchs(given: tuple[Any, ...], library: Library) -> None:
    short_calls.LINEAR.serve = None  # as before the first call
    with torch.no_grad():
        assert short_calls.small_product(*given) is None
    assert not library.admitted


def test_large_layers_and_those_of_few_rows_are_pytorchs(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "eager_rows", lambda device, dtype: 3)
    x, weight = torch.randn(40, 8), torch.randn(4, 8)
    with torch.no_grad():
        way = short_calls.small_way(x)
        assert way is not None and way(x, weight, None) is None and way(x[:2], weight, None) is None
        assert not short_calls._TRIED and way(x[:30], weight, None) is not None
    assert len(library.admitted) == 1


@pytest.fixture
def cublas(library: Library, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a stand-in of cuBLASLt was given."""
    asked: list[Any] = []

    def multiply(*given: Any) -> torch.Tensor:
        asked.append(given)
        return plain(*given[:3], "none", given[3])

    monkeypatch.setattr(short_calls, "_multiply", lambda: multiply)
    return asked


def test_large_layers_in_half_precision_are_cublas(cublas: list[Any], library: Library) -> None:
    """A residual is added to the product; what else follows is PyTorch's."""
    x, layer = torch.randn(40, 8).half(), nn.Linear(8, 4).half()
    residual, scale = torch.randn(40, 4).half(), torch.randn(4).half()
    with torch.inference_mode():
        way = short_calls.small_way(x)
        assert way is not None
        for activation, added, factors in (
            ("none", None, None), ("none", residual, None), ("gelu", residual, None),
            ("none", residual, scale), ("none", None, scale),
        ):  # fmt: skip
            out = way(x, layer.weight, layer.bias, activation, added, factors, "strict", None, None)
            whole = activation == "none" and factors is None
            given = (x, layer.weight, layer.bias, added if whole else None)
            assert all(a is b for a, b in zip(cublas.pop(), given, strict=True))
            expected = plain(x, layer.weight, layer.bias, activation, added, factors)
            torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
        assert way(x[:3], layer.weight, None) is not None and not cublas, "a small one"
        library.admitted.clear()
        short_calls.LINEAR.admits = False  # the small ones have no plans
        assert way(x[:3], layer.weight, None) is not None and len(cublas) == 1


def test_linear_in_half_precision(cublas: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size, where nothing of PyTorch would see it."""
    monkeypatch.setattr(short_calls, "HALF_DEPTH", 7)
    x, layer = torch.randn(3, 8).half(), nn.Linear(8, 4).half().requires_grad_(False)
    wide = x.bfloat16(), layer.weight.bfloat16(), None
    with torch.no_grad():
        for given in ((x, layer.weight, layer.bias), wide):
            torch.testing.assert_close(elsa.linear(*given), F.linear(*given), atol=1e-2, rtol=1e-2)
        assert len(cublas) == 2
        assert elsa.linear(x, layer.weight, activation="gelu").shape == (3, 4) and len(cublas) == 3
        for context in (torch.enable_grad(), Functions(), torch.autocast("cpu", torch.bfloat16)):
            with context:
                elsa.linear(x, layer.weight, layer.bias)
        elsa.linear(x, layer.weight, layer.bias, backend="sdpa")
        for wrong in ({"activation": "tanh"}, {"activation": "gelu", "scale": torch.ones(1).half()},
                      {"activation": "gelu", "residual": x[0, :4]}):  # fmt: skip
            with pytest.raises(ArgumentError):
                elsa.linear(x, layer.weight, **wrong)  # type: ignore[arg-type]
        for asked in ("_in_half", "_tuned"):
            with monkeypatch.context() as patched:
                patched.setattr(short_calls, asked, lambda: True)
                elsa.linear(x, layer.weight, layer.bias)
        elsa.linear(x[:, :7], layer.weight[:, :7], layer.bias)  # a kernel may be here
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        elsa.linear(x, layer.weight, layer.bias)
    assert len(cublas) == 3


def test_products_that_the_table_gives_to_pytorch(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bare ones: what follows a product makes another call of it."""
    row = routing.measured.Products(8, 4, (2, 9), (0.9, 0.9))
    monkeypatch.setattr(routing.measured, "linear_by_pytorch", lambda *_: (row,))
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    with torch.no_grad():
        assert short_calls.small_product(x, weight, None) is None
        assert short_calls.small_product(x[:1], weight, None) is not None
        assert short_calls.small_product(x, weight, None, "gelu") is not None


def vit_block(dtype: torch.dtype = torch.float16) -> nn.Module:
    torch.manual_seed(0)
    made = Block(8, 2, mlp_ratio=2.0, qkv_bias=True, init_values=0.5).eval()
    return nn.Sequential(made).to(dtype)


@pytest.mark.parametrize("scope", ["auto", "attention", "model"])
def test_layers_of_a_block(scope: str, library: Library) -> None:
    """All where the scope is ours to choose; where it is not, those that are patched."""
    model, x = vit_block(), torch.randn(1, 3, 8).half()
    with torch.inference_mode():
        expected = model(x)
        elsa.patch(model, scope=scope)
        block = model[0]
        read = flat.any_block if block.elsa_scope == "auto" else flat.block
        for _ in range(2):
            library.asked.clear()
            out = flat.served(block, read, x)
            assert out is not None
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=1e-2)
    count = 0 if scope == "attention" else 4
    assert [given[3] for given in library.asked] == ["none", "none", "gelu", "none"][:count]
    assert [given[4] is not None for given in library.asked] == [False, True, False, True][:count]
    assert [given[5] is not None for given in library.asked] == [False, True, False, True][:count]


def test_the_layers_follow_their_weights(library: Library) -> None:
    model, x = vit_block(torch.float32), torch.randn(1, 3, 8)
    elsa.patch(model, scope="model")
    with torch.inference_mode():
        for _ in range(2):
            flat.served(model[0], flat.block, x)
    other = vit_block(torch.float32)
    for each in (model, other):
        each[0].mlp.fc1.weight.data.mul_(2)
        each[0].mlp.act = nn.GELU(approximate="tanh")
    with torch.inference_mode():
        wanted = other(x)
        for _ in range(2):
            torch.testing.assert_close(flat.served(model[0], flat.block, x), wanted)
    assert library.asked[-2][3] == "gelu_tanh"


def test_scopes() -> None:
    """ "auto" is noted where nobody said what may be computed, and no layer is patched."""
    model = vit_block(torch.float32)
    elsa.patch(model)  # on a CPU attention alone
    assert model[0].elsa_scope == "auto"
    elsa.patch(model, scope="attention")
    assert model[0].elsa_scope == "attention"
    elsa.unpatch(model)
    elsa.patch(model, include="*.attn")
    assert model[0].elsa_scope == "attention"
    elsa.patch(model, scope="model")
    assert model[0].elsa_scope == "model"
    assert "elsa_scope" not in vars(model[0]) or elsa.unpatch(model)
    assert "elsa_scope" not in vars(model[0])
