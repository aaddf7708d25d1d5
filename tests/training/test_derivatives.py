"""Compiled steps and the transforms of torch.func on a patched model, beside the original's."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from sampling import some
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from .conftest import Gradients, Subject, assert_as_exact, loss_of, step, subject


@pytest.fixture
def compiler() -> Iterator[CompileCounterWithBackend]:
    """Counts the graphs that are compiled: with AOTAutograd, without code of its own."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_step(small: Subject, compiler: CompileCounterWithBackend) -> None:
    """One graph, no break, and the gradients of the criterion."""
    compiled = torch.compile(small.patched, fullgraph=True, backend=compiler)
    small.patched.zero_grad()
    loss_of(compiled, small.images, small.labels).backward()
    found = {name: parameter.grad for name, parameter in small.patched.named_parameters()}
    assert compiler.frame_count == 1
    oracle = step(small.exact(), small.images.double(), small.labels)
    assert_as_exact(found, step(small.plain, small.images, small.labels), oracle)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("backend", some(["auto", "native"]))
def test_steps_of_other_lengths_are_not_compiled_again(
    backend: str, compiler: CompileCounterWithBackend
) -> None:
    """A block of a ViT: what timm does around them for another image size is its own."""
    found = subject("vit", backend)
    patched, plain = found.patched.blocks[:1], found.plain.blocks[:1]
    compiled = torch.compile(patched, fullgraph=True, dynamic=True, backend=compiler)

    def slopes(run: Callable[[Tensor], Tensor], blocks: nn.Module, x: Tensor) -> Gradients:
        blocks.zero_grad()
        run(x).square().mean().backward()
        return {name: p.grad for name, p in blocks.named_parameters()}

    counts = []
    for length in (17, 9, 33, 100):
        x = torch.randn(2, length, 32)
        exact = copy.deepcopy(plain).double()
        assert_as_exact(
            slopes(compiled, patched, x), slopes(plain, plain, x), slopes(exact, exact, x.double())
        )
        counts.append(compiler.frame_count)
    assert len(set(counts)) == 1


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def loss_with(model: nn.Module, labels: Tensor) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def loss(given: dict[str, Tensor], images: Tensor) -> Tensor:
        logits = functional_call(model, given, (images,))
        return nn.functional.cross_entropy(logits, labels[: len(images)])

    return loss


@pytest.fixture(params=["vit", "swin"])
def free(request: pytest.FixtureRequest) -> Subject:
    """A named backend has no transforms of torch.func, and says so; `auto` has them."""
    return subject(request.param, "auto")


def in_all_ways(
    small: Subject, compute: Callable[[nn.Module, Tensor], Gradients]
) -> tuple[Gradients, Gradients, Gradients]:
    """What `assert_as_exact` takes: of the patched model, the original, and it in float64.

    The original by PyTorch's math kernel: its fused ones have no such derivatives.
    """
    found = compute(small.patched, small.images)
    with sdpa_kernel(SDPBackend.MATH):
        original = compute(small.plain, small.images)
        return found, original, compute(small.exact(), small.images.double())


def test_gradients_of_each_image(free: Subject) -> None:
    """vmap of grad."""

    def compute(model: nn.Module, images: Tensor) -> Gradients:
        def loss(given: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, given, (image.unsqueeze(0),))
            return nn.functional.cross_entropy(logits, label.unsqueeze(0))

        each = vmap(grad(loss), in_dims=(None, 0, 0))
        return dict(each(parameters(model), images, free.labels))

    assert_as_exact(*in_all_ways(free, compute))


def test_jvp(free: Subject) -> None:
    def compute(model: nn.Module, images: Tensor) -> Gradients:
        given = parameters(model)
        generator = torch.Generator().manual_seed(1)
        tangents = {
            name: torch.randn(value.shape, generator=generator).to(value.dtype)
            for name, value in given.items()
        }
        _, tangent = jvp(lambda p: functional_call(model, p, (images,)), (given,), (tangents,))
        return {"logits": tangent}

    assert_as_exact(*in_all_ways(free, compute))


def second(model: nn.Module, images: Tensor, labels: Tensor) -> Gradients:
    """Gradients of the squared norm of the images' gradient, as a penalty on it takes them."""
    images = images.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model, images, labels), images, create_graph=True)
    names = dict(model.named_parameters())
    found = torch.autograd.grad(slope.square().sum(), list(names.values()), allow_unused=True)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_a_second_backward(kind: str) -> None:
    found = subject(kind, "native")
    assert_as_exact(*in_all_ways(found, lambda model, x: second(model, x, found.labels)))


def test_a_second_backward_by_torch_func(free: Subject) -> None:
    def compute(model: nn.Module, images: Tensor) -> Gradients:
        loss = loss_with(model, free.labels)

        def penalty(given: dict[str, Tensor]) -> Tensor:
            slope: Tensor = grad(loss, argnums=1)(given, images)
            return slope.square().sum()

        return dict(grad(penalty)(parameters(model)))

    assert_as_exact(*in_all_ways(free, compute))
