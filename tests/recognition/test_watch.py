"""What a watched forward leaves as it is: values that are kept, changed or hooked, and everything
that it is run within."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from processes import at_once
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from elsa_core.patching.recognition import Watch

from .test_ways import Seen, gradients, judged, model


def operands() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, 3, 9, 8) for _ in range(3)]


def watched(function: Callable[..., Any], *given: Any) -> Any:
    """What a function gives when it is watched."""
    watch = Watch("strict", "eager")
    with watch:
        out = function(*given)
    return watch.close(out)


class Doubled(torch.autograd.Function):
    """Reads its argument in C++ and Python alike, asking no torch function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def plain(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def operand_changed(q, k, v):
    scores = q @ k.mT
    q.mul_(2)
    return scores.softmax(-1) @ v


def operand_changed_after_a_step(q, k, v):
    """It was read for the scores alone, not for what was made of them."""
    scores = (q @ k.mT).clone() * 0.5
    q.mul_(2)
    return scores.softmax(-1) @ v


def operand_changed_after_a_look(q, k, v):
    first = q @ k.mT
    scores = first + 1
    top = first.max()
    k.mul_(-1)
    return scores.softmax(-1) @ v * top


def operand_changed_by_its_view(q, k, v):
    scores = q @ k.mT
    k[:, 0, 1:3] = 7.0
    return scores.softmax(-1) @ v


def bias_changed(q, k, v):
    bias = torch.ones(9, 9)
    scores = q @ k.mT + bias
    torch.nn.functional.relu(bias.sub_(2), inplace=True)
    return scores.softmax(-1) @ v


def bias_written_by_out(q, k, v):
    bias = torch.ones(9)
    scores = q @ k.mT + bias
    torch.add(bias, torch.arange(9.0), out=bias)
    return scores.softmax(-1) @ v


def scores_changed_after_use(q, k, v):
    scores = q @ k.mT
    weights = scores.softmax(-1)
    scores.mul_(3)
    return weights @ v + scores.sum()


def scores_changed_through_a_view(q, k, v):
    scores = q @ k.mT
    scores.view(6, 9, 9).add_(torch.randn(9, 9).sign())
    return scores.softmax(-1) @ v


def scores_changed_through_a_view_of_a_view(q, k, v):
    """What else is made of the scores read them after the change."""
    scores = q @ k.mT
    kept = scores * 1
    part = scores.unsqueeze(1).squeeze(1)
    part *= 0.25
    return scores.softmax(-1) @ v + kept.sum()


def a_row_hidden_by_two_values(q, k, v):
    """All its keys weighed alike; those of the larger value alone do."""
    first = torch.arange(9) < 5
    scores = (q @ k.mT).masked_fill(first, -1e9) / 2
    return scores.masked_fill(~first, -1e9).softmax(-1) @ v


def a_row_hidden_before_its_maximum(q, k, v):
    """Its scores are 0 then, beside those that are hidden afterwards."""
    rows = (torch.arange(9)[:, None] < 3).expand(9, 9)
    scores = (q @ k.mT).masked_fill(rows, -1e9)
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.masked_fill(torch.arange(9) < 5, -1e9).softmax(-1) @ v


def weights_used_twice(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights @ v.flip(2)


def weights_compared(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v if bool(weights.max() > 2) else v * weights.sum(-1, keepdim=True)


def a_function_of_autograd(q, k, v):
    return Doubled.apply(q @ k.mT).softmax(-1) @ v


def a_hook_on_scores(q, k, v):
    scores = q @ k.mT
    if scores.requires_grad:
        scores.register_hook(lambda grad: grad * 3)
    return scores.softmax(-1) @ v


def no_gradient_for_weights(q, k, v):
    with torch.no_grad():
        weights = (q @ k.mT).softmax(-1)
    return weights @ v


def detached_scores(q, k, v):
    return (q @ k.mT).detach().softmax(-1) @ v


def viewed_result(q, k, v):
    return ((q @ k.mT).softmax(-1) @ v).view(6, 9, 8)


def result_changed(q, k, v):
    """A backward of attention reads its result, which one of the product does not."""
    return ((q @ k.mT).softmax(-1) @ v).mul_(2).add_(q)


def dtype_of_another(q, k, v):
    return (q @ k.mT).softmax(-1, dtype=torch.float64) @ v.double()


def values_as_the_weights_are(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v.type_as(weights) + weights @ v.to(weights)


def another_softmax_into_scores(q, k, v):
    scores = q @ k.mT
    if not scores.requires_grad:
        torch.softmax(k @ q.mT, -1, out=scores)
    return scores.softmax(-1) @ v


def heads_and_queries_exchanged(q, k, v):
    scores = (q @ k.mT).transpose(1, dim1=2)
    assert scores.shape == (2, 9, 3, 9)
    return scores.softmax(-1).transpose(1, 2) @ v


def copies_that_are_the_scores_computed_early(q, k, v):
    scores = (q @ k.mT).contiguous()
    largest = scores.mean()
    return (scores * 0.5 - largest).softmax(-1) @ v


KEPT = [value for value in list(globals().values()) if callable(value) and (
    getattr(value, "__code__", None) is not None
    and value.__code__.co_varnames[:3] == ("q", "k", "v")
)]  # fmt: skip
NO_BACKWARD = (  # the original's raises
    operand_changed, operand_changed_after_a_step, operand_changed_after_a_look,
    operand_changed_by_its_view,
)  # fmt: skip


@pytest.mark.parametrize("function", KEPT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
def test_values_are_the_originals(function: Callable[..., Tensor], grad: bool) -> None:
    def run(watch: bool, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(5)
        leaves = [t.to(dtype).requires_grad_(grad) for t in operands()]
        given = [leaf * 1.0 for leaf in leaves]
        out = watched(function, *given) if watch else function(*given)
        found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) if grad else ()
        return [out.detach(), *(g for g in found if g is not None)]

    if grad and function in NO_BACKWARD:
        return
    with torch.set_grad_enabled(grad):
        results = run(True, torch.float32), run(False, torch.float32)
        exact = run(False, torch.float64)
    for got, plain, oracle in zip(*results, exact, strict=True):
        judged(got, plain, oracle.double(), function.__name__)


@pytest.mark.parametrize("how", ["kept", "returned", "hooked", "replaced"])
def test_weights_that_are_seen_are_the_originals(how: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.1)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            weights = self.drop((q @ k.mT).softmax(-1))
            if how == "kept":
                self.weights = weights
            out = weights @ v
            return (out, weights) if how == "returned" else out

    module, seen = Attention().eval(), []
    if how == "hooked":
        module.drop.register_forward_hook(lambda m, args, out: (seen.append(out), out * 0.5)[1])
    if how == "replaced":
        module.drop = nn.Threshold(0.1, 0.0)  # type: ignore[assignment]
    q, k, v = operands()
    own = module(q, k, v)
    expected = {"kept": getattr(module, "weights", None), "hooked": seen and seen[0]}.get(how)
    out = watched(module, q, k, v)
    if how == "returned":
        (own, expected), (out, got) = own, out
    else:
        got = {"kept": getattr(module, "weights", None), "hooked": seen and seen[-1]}.get(how)
    if expected is not None and how != "replaced":
        assert type(got) is Tensor and torch.equal(got, expected)
        assert torch.equal(pickle.loads(pickle.dumps(got)), expected)
    assert torch.allclose(out, own, atol=1e-5)


def test_an_error_leaves_no_mode_and_the_values_that_were_kept() -> None:
    kept: list[Tensor] = []

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(q @ k.mT)
        return kept[0] @ v[:, :, :2]

    q, k, v = operands()
    watch = Watch("strict", "eager")
    with pytest.raises(RuntimeError, match="size"):
        try:
            with watch:
                forward(q, k, v)
        finally:
            watch.abandon()
    assert type(kept[0]) is Tensor and torch.equal(kept[0], q @ k.mT)
    assert type(q @ k.mT) is Tensor


class Held(NamedTuple):
    x: Tensor


def test_a_product_and_its_input_have_autocasts_dtype() -> None:
    """They were said to be float32, and were bfloat16 when they were computed."""
    q, k, _ = (t.flatten(0, 1) for t in operands())
    watch = Watch("strict", "eager")
    with torch.autocast("cpu", torch.bfloat16), watch:
        scores = torch.baddbmm(torch.ones(9), q, k.mT)
        said = scores.dtype
    assert said == watch.close(scores).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1, 1)])
def test_a_value_that_hides_may_have_dimensions(shape: tuple[int, ...]) -> None:
    """The scores were said to have their own dtype and dimensions in any case."""
    q, k, _ = (t.bfloat16() for t in operands())
    seen, value = torch.eye(9, dtype=torch.bool), torch.full(shape, -1e9)
    plain = torch.where(seen, q @ k.mT, value)
    watch = Watch("strict", "eager")
    with watch:
        scores = torch.where(seen, q @ k.mT, value)
        said = scores.dtype, scores.shape
    assert said == (plain.dtype, plain.shape) and torch.equal(watch.close(scores), plain)


def test_no_gradient_of_what_was_changed_since() -> None:
    q, k, v = (t.requires_grad_() for t in operands())
    out = watched(plain, q, k, v)
    out += 1  # by the caller, and then what the product needs
    with torch.no_grad():
        k *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("held", [lambda x: x, lambda x: [x], lambda x: {"x": x}, Held])
def test_results_are_laid_out_as_the_originals(held: Callable[[Tensor], Any]) -> None:
    """In a dict and a named tuple they lay as attention leaves them, of which there is no view."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in operands())
    out = watched(lambda: held(plain(q, k, v)))
    (found,) = tree_leaves(out)
    assert found.is_contiguous() and type(out) is type(held(found))


@pytest.mark.parametrize(
    "view",
    [
        lambda scores: scores.unsqueeze(9),
        lambda scores: scores.flatten(0, 9),
        lambda scores: scores.unflatten(9, (1, -1)),
        lambda scores: scores.permute(0, 1, 3, 6),
    ],
)
def test_a_dimension_that_is_not_there_is_refused(view: Callable[[Tensor], Tensor]) -> None:
    """It was counted from the front again, and another view taken."""
    q, k, _ = operands()
    with pytest.raises(IndexError, match="out of range"), Watch("strict", "eager"):
        view(q @ k.mT)


def test_a_refused_view_changes_no_later_product() -> None:
    """It cut what the layouts of equal products share, into parts of negative length."""
    q, k, v = operands()
    for shape in ((-1, -1, 9), (6, -9, -9)):
        with pytest.raises(RuntimeError), Watch("strict", "eager"):
            (q @ k.mT).view(shape)
    assert torch.allclose(watched(plain, q, k, v), plain(q, k, v), atol=1e-5)


@pytest.mark.parametrize("view", [(0, 9, 9), (0, 3, 3, 3, 9)], ids=str)
def test_an_empty_batch_is_viewed_as_any(view: tuple[int, ...]) -> None:
    empty = torch.empty(0, 3, 9, 8)
    out = watched(lambda: (empty @ empty.mT).view(view).softmax(-1))
    assert out.shape == view


def test_watched_forwards_nest_recompute_and_run_in_threads() -> None:
    site, twin, x = model("relative_bias", "lean")
    oracle = copy.deepcopy(site).double()

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    triples = [
        gradients(Checkpointed(m), t) for m, t in ((twin, x), (site, x), (oracle, x.double()))
    ]
    for got, plain, exact in zip(*triples, strict=True):
        judged(got, plain, exact, "checkpoint")
    outer, seen = None, Seen()
    outer = Watch("lean", "auto", seen)
    with torch.no_grad(), outer:
        nested = outer.close(twin(x))
    assert seen.count == 1
    judged(nested.detach(), site(x).detach(), oracle(x.double()).detach(), "nested")
    results = at_once(lambda _: twin(x).detach(), range(3))
    assert all(torch.equal(r, twin(x).detach()) for r in results)


def test_transforms_and_second_derivatives_are_the_originals() -> None:
    site, twin, x = model("scaled_after", "lean")

    def loss(m: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda t: m(t).square().sum()

    for transform in (torch.func.grad, torch.func.hessian):
        given = x[:1, :4] if transform is torch.func.hessian else x
        assert torch.allclose(transform(loss(twin))(given), transform(loss(site))(given), atol=1e-4)
    batch = torch.stack((x, x * 2))
    assert torch.allclose(torch.func.vmap(twin)(batch), torch.func.vmap(site)(batch), atol=1e-5)
    second = []
    for m in (twin, site):
        t = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(m)(t), t, create_graph=True)
        second.append(torch.autograd.grad(grad.square().sum(), t)[0])
    assert torch.allclose(*second, rtol=1e-3, atol=1e-4)


def test_only_what_is_alive_is_kept() -> None:
    """Scores that were computed are not held until the forward ends."""
    q, k, v = operands()
    watch = Watch("strict", "eager")
    with watch:
        for _ in range(50):
            (q @ k.mT).sigmoid() @ v
        assert len(watch._alive) < 4
