"""A patched module against itself: float64 decides, at twice the unpatched module's error."""

import copy
from typing import Any

import torch
from seen import Calls
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from elsa_core.patching.rewrite import patch


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The same values, tensors of floating point in `dtype`."""

    def each(value: Any) -> Any:
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    return tree_map(each, values)


def randomised(module: nn.Module, std: float = 0.3) -> nn.Module:
    """In eval mode; no parameter or running mean at its initial value, where a mistake would not
    show."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.1)
    module.eval()  # LeViT's returns nothing
    return module


def error(out: Tensor, exact: Tensor) -> float:
    return ((out.double() - exact).norm() / exact.norm()).item()


def assert_agree(out: Any, peer: Any, exact: Any, band: float = 1e-6) -> None:
    """A tensor, or every tensor of a dictionary, errs at most twice as much as the peer's."""
    named = exact if isinstance(exact, dict) else {"": exact}
    for name in (name for name, value in named.items() if isinstance(value, Tensor)):
        found, own = (each[name] if name else each for each in (out, peer))
        assert error(found, named[name]) <= 2 * error(own, named[name]) + band, name


def outputs(model: nn.Module, given: dict[str, Any]) -> Any:
    """Of NaFlexViT and SigLIP 2, which take batches as a dictionary and as keywords."""
    if "patches" in given:
        return {"logits": model(given)}
    found = model(**given)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def assert_as_exact(
    original: nn.Module, patched: nn.Module, given: dict[str, Any], band: float = 1e-6
) -> None:
    exact = outputs(copy.deepcopy(original).double(), cast(given, torch.float64))
    assert_agree(outputs(patched, given), outputs(original, given), exact, band)


def assert_same_gradients(plain: nn.Module, patched: nn.Module) -> None:
    for (name, a), b in zip(plain.named_parameters(), patched.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, msg=name)


def assert_same(
    module: nn.Module, dtype: torch.dtype, *inputs: Any, run: Any = nn.Module.__call__, **more: Any
) -> Calls:
    """Patched, a copy of the module is as close to the module in float64 as the module itself.

    `run(module, *inputs, **more)` calls it. Returns the operators that the patched copy ran.
    """

    def called(subject: nn.Module, kind: torch.dtype) -> tuple[Any, ...]:
        out = run(subject, *cast(inputs, kind), **cast(more, kind))
        return out if isinstance(out, tuple) else (out,)

    exact, *_ = called(copy.deepcopy(module).double(), torch.float64)
    plain = copy.deepcopy(module).to(dtype)
    own, *rest = called(plain, dtype)
    patched = copy.deepcopy(plain)
    patch(patched)
    with Calls() as calls:
        out, *others = called(patched, dtype)
    assert calls.elsa and not calls.others("attention", "transformer")
    assert out.dtype == dtype and out.shape == own.shape
    assert [list(each) for each in others] == [list(each) for each in rest]
    assert_agree(out, own, exact, 4 * torch.finfo(dtype).eps)
    return calls


def assert_recorded(way: str, model: nn.Module, *batches: Tensor) -> list[str]:
    """Compiled in one graph ("compile"), or exported from the first batch with a dynamic batch, the
    model computes what it does eagerly on every batch; the operators that the program calls."""
    torch._dynamo.reset()
    called: list[str] = []
    if way == "compile":
        recorded = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        dims = ({0: torch.export.Dim("batch", min=1, max=64)},)
        program = torch.export.export(model, (batches[0],), dynamic_shapes=dims)
        called = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        recorded = program.module()
    for x in batches:
        torch.testing.assert_close(recorded(x), model(x), rtol=1e-4, atol=1e-5)
    return called
