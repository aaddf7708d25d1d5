"""Sites found by running a model once on an example: whatever its attention is written in."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import elsa_core as elsa
from elsa_core.errors import ArgumentError, NothingPatchedError
from elsa_core.patching.probe import cast_to


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)

    def joined(self, x: Tensor) -> Tensor:
        return self.proj(x.transpose(1, 2).flatten(2))


class Processor:
    """No module, and of another object: nothing of it is in the code of the layer's class."""

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        return layer.joined(F.scaled_dot_product_attention(*layer.heads(x)))


class Processed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


class Scores(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class InParts(Base):
    """Its product, softmax and second product are in three modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.softmax = Scores(), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.joined(self.softmax(self.scores(q, k)) @ v)


class Returning(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        weights = (q @ k.mT).softmax(-1)
        return self.joined(weights @ v), weights.mean(dim=1)


class Discarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Returning()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


class Switched(Base):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.flash = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        if self.flash:
            return self.joined(F.scaled_dot_product_attention(q, k, v))
        return self.joined((q @ k.mT).softmax(-1) @ v)


class Named(Processed):
    def forward(self, *, tokens: Tensor, twice: bool = False) -> dict[str, Tensor]:  # type: ignore[override]
        return {"out": super().forward(tokens)}


X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
FOUND: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "processor": (lambda: nn.Sequential(Processed(), nn.LayerNorm(16)), X, ["0"]),
    "in parts": (lambda: nn.Sequential(InParts()), (X,), ["0"]),
    "weights discarded by the caller": (lambda: nn.Sequential(Discarding()), X, ["0"]),
    "weights of MultiheadAttention": (lambda: nn.Sequential(MultiHead()), X, ["0"]),
    "switched off": (lambda: nn.Sequential(Switched(False)), X, ["0"]),
    "switched on": (lambda: nn.Sequential(Switched(True)), X, ["0"]),
    "the model itself": (Named, {"tokens": X}, [""]),
}


class Count(TorchDispatchMode):
    """Counts elsa's operators. Within a mode no call is too small to be recognised."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func._schema.name.startswith("elsa::")
        return func(*args, **(kwargs or {}))


def operators(model: nn.Module, example: Any) -> tuple[int, Any]:
    """How often elsa's operators run, and what the model gives."""
    args, kwargs = cast_to(torch.empty(0), example)
    with torch.no_grad(), Count() as count:
        out = model(*args, **kwargs)
    return count.calls, out


def tensor(out: Any) -> Tensor:
    return out["out"] if isinstance(out, dict) else out


@pytest.mark.parametrize("name", FOUND)
def test_a_site_is_where_attention_happened(name: str) -> None:
    make, example, paths = FOUND[name]
    torch.manual_seed(1)
    model = make().eval()
    keys = list(model.state_dict())
    _, plain = operators(model, example)
    inspected = elsa.inspect(model, example)
    assert [site.path for site in inspected.sites if site.patchable] == paths
    report = elsa.patch(model, example)
    assert [site.path for site in report.patched] == paths and not report.kept
    ran, out = operators(model, example)
    assert ran == len(paths)
    torch.testing.assert_close(tensor(out), tensor(plain))
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        count, again = operators(twin, example)
        assert count == ran and torch.equal(tensor(again), tensor(out))
    assert [site.path for site in elsa.inspect(model, example).sites if site.patched] == paths
    assert elsa.unpatch(model) == len(paths)
    assert operators(model, example)[0] == 0


def test_weights_that_the_model_returns_stay_pytorchs() -> None:
    for model in (Returning(), nn.MultiheadAttention(16, 2, batch_first=True)):
        example = X if isinstance(model, Returning) else (X, X, X)
        with pytest.raises(NothingPatchedError, match="returns its attention weights"):
            elsa.patch(model.eval(), example)


def test_no_attention_in_the_run_is_said() -> None:
    class Off(Switched):
        def forward(self, x: Tensor) -> Tensor:
            return x if not self.flash else super().forward(x)

    with pytest.raises(NothingPatchedError, match="no attention here that elsa can take over"):
        elsa.patch(nn.Sequential(Off(False)), X)
    with pytest.raises(ArgumentError, match="does not run on it"):
        elsa.patch(nn.Sequential(Processed()), X[..., :3])
    with pytest.raises(TypeError, match="example must be"):
        elsa.patch(nn.Sequential(Processed()), 3)  # type: ignore[arg-type]
