"""One computation three times: of the original, patched, and in float64. A model, or a site of it.

A module that is no copy has the original's class while it is judged (`original`), and the patched
one for the length of a patched run. A site is called and hooked at its `entry`: `forward`, or the
method that an adapter names. A block that computes its attention itself (Swin) is judged on that
method alone, since the residual and the MLP around it would hide small errors and a norm before it
would undo the hard cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elsa_core.base.messages import first_line
from elsa_core.errors import ElsaError, ModelError
from elsa_core.measuring.memory_limit import is_out_of_memory
from elsa_core.patching import entry, original
from elsa_core.proof.compare import Judgement, floating_outputs, map_floating, settle

# Positional and named arguments of one call.
Given = tuple[tuple[Any, ...], dict[str, Any]]
Run = Callable[[Given], Any]
# Called with (module, args, kwargs, output); what it returns replaces the output, None keeps it.
Hook = Callable[[nn.Module, Any, dict[str, Any], Any], Any]

_WIDER = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_Result = TypeVar("_Result")


class PatchedError(Exception):
    """The patched code raised where the original did not."""


@contextmanager
def watched(module: nn.Module, entry: str, hook: Hook) -> Iterator[None]:
    """Call `hook` after every run of the site, for the length of a `with` block; copies that are
    made meanwhile stay watched."""
    if entry == "forward":
        handle = module.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        return
    before = vars(module).get(entry)  # of another hook

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(type(self), entry) if before is None else before.__func__
        output = inner(self, *args, **kwargs)
        changed = hook(self, args, kwargs, output)
        return output if changed is None else changed

    # An instance attribute goes before the method of whichever class the module has at the time,
    # and a copy of a bound method is bound to the copy.
    vars(module)[entry] = MethodType(run, module)
    try:
        yield
    finally:
        if before is None:
            del vars(module)[entry]
        else:
            vars(module)[entry] = before


def faulty(site: nn.Module, amount: float) -> AbstractContextManager[None]:
    """A deliberate error: the output of the patched site times 1 + amount, of its copies too."""
    patched, factor = type(site), 1.0 + amount
    return watched(
        site, entry(site),
        lambda module, args, kwargs, output: (
            pytree.tree_map_only(Tensor, lambda leaf: leaf * factor, output)
            if type(module) is patched
            else None
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class Sides:
    """The three runs of one computation, `what` (the path of a site, or "the model"). Each takes
    the arguments of a call. `weights` is the module whose parameters original and patched read,
    `oracle` the same in float64."""

    what: str
    weights: nn.Module
    oracle: nn.Module
    original: Run
    run_patched: Run
    run_exact: Run

    def patched(self, given: Given) -> Any:
        """What the patched code makes of the arguments; PatchedError where it raised."""
        with finding():
            return self.run_patched(given)

    def exact(self, given: Given) -> Any:
        """What the original makes of them in float64, its own casts included (`exactly`);
        ModelError where it does not run so."""
        try:
            args, kwargs = map_floating(given, torch.float64)
            return exactly(lambda: self.run_exact((args, kwargs)), self.weights)
        except (RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"{self.what} does not run in float64, which the oracle needs ({first_line(error)})"
            ) from error


def of_model(model: nn.Module, oracle: nn.Module) -> Sides:
    """The whole model, which is patched; every run gets tensors of its own to write to."""
    return Sides(
        "the model", model, oracle,
        lambda given: _run(model, "forward", own(given), original(model)),
        lambda given: _run(model, "forward", own(given)),
        lambda given: _run(oracle, "forward", own(given)),
    )  # fmt: skip


def of_site(
    path: str, module: nn.Module, patched: type[nn.Module], oracle: nn.Module, entry: str
) -> Sides:
    """One site, whose `module` has the original's class now. The patched run alone writes to the
    tensors it is given, where the site does."""

    def run_patched(given: Given) -> Any:
        before = type(module)
        module.__class__ = patched
        try:
            return _run(module, entry, given)
        finally:
            module.__class__ = before

    return Sides(
        path, module, oracle, lambda given: _run(module, entry, own(given)), run_patched,
        lambda given: _run(oracle, entry, own(given)),
    )  # fmt: skip


@contextmanager
def finding() -> Iterator[None]:
    """What patched code raises is a finding, except where elsa says what is missing, or where
    memory ran out."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ElsaError) or is_out_of_memory(error):
            raise
        raise PatchedError(
            f"the patched code raises {type(error).__name__}: {first_line(error)}"
        ) from error


def own(given: Given) -> Given:
    """Copies for one run: a model may write to its inputs (`x.sub_(mean)`). One tensor given twice
    stays one: attention modules ask whether keys are queries."""
    flat, spec = pytree.tree_flatten(given)
    made = {id(leaf): leaf.clone() for leaf in flat if isinstance(leaf, Tensor)}
    copies: Given = pytree.tree_unflatten([made.get(id(leaf), leaf) for leaf in flat], spec)
    return copies


def _run(
    module: nn.Module, entry: str, given: Given, within: AbstractContextManager[Any] | None = None
) -> Any:
    args, kwargs = given
    with within or nullcontext():
        return (module if entry == "forward" else getattr(module, entry))(*args, **kwargs)


def judge_gradients(
    judgement: Judgement, sides: Sides, given: Given, dtype: torch.dtype, samples: int
) -> Judgement:
    """Judges the gradients of one case, of its floating inputs and of every parameter that wants
    one, by name: for its input, and for `samples` nearby ones and other losses where that one
    condemns the patched code.

    The loss is the sum of the outputs times random numbers, the same for original, patched and
    float64: whatever reaches an output reaches the loss. `dtype` is the model's, in which these
    numbers are representable.
    """

    def add(given: Given, seed: int) -> None:
        ends = (given, dtype, seed)
        one = _gradients(sides.original, sides.weights, *ends)
        with finding():
            two = _gradients(sides.run_patched, sides.weights, *ends)
        exact = _gradients(sides.exact, sides.oracle, *ends, wide=torch.float64)
        wanted = {name: grad for name, grad in one.items() if name in exact}
        # A gradient that does not come is one of zeros: the judgement says how wrong that is.
        found = {name: two.get(name, torch.zeros_like(grad)) for name, grad in wanted.items()}
        judgement.add_tensors(exact, wanted, found)

    try:
        add(given, 0)
        settle([judgement], samples, given, add)
    except PatchedError as error:
        judgement.error = str(error)
    return judgement


def _gradients(
    run: Run, module: nn.Module, given: Given, dtype: torch.dtype, seed: int,
    wide: torch.dtype | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """By name: "input[0]", "input['key']" and the parameters' own, where they have influence."""
    flat, spec = pytree.tree_flatten_with_path(given)
    leaves: dict[str, Tensor] = {}
    # One tensor given twice stays one tensor: attention modules ask whether keys are queries.
    made: dict[int, Any] = {id(value): value for _, value in flat}
    with torch.enable_grad():
        for path, value in flat:
            if made[id(value)] is value and isinstance(value, Tensor) and value.is_floating_point():
                leaf = value.detach().to(wide or value.dtype, copy=True).requires_grad_()
                leaves[f"input{pytree.keystr(path[1:])}"] = leaf
                # An alias with a history: a module may write to its input, and not to a leaf.
                made[id(value)] = leaf.clone()
        arguments: Given = pytree.tree_unflatten([made[id(value)] for _, value in flat], spec)
        outputs = {
            name: out for name, out in floating_outputs(run(arguments)).items() if out.requires_grad
        }
        leaves |= {name: w for name, w in module.named_parameters() if w.requires_grad}
        if not outputs or not leaves:
            return {}
        # The loss's derivatives by the outputs: random, and exact in every dtype that takes part.
        losses = []
        for place, out in enumerate(outputs.values()):
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + place))
            losses.append(noise.to(dtype).to(device=out.device, dtype=out.dtype))
        grads = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), losses, allow_unused=True
        )
    return {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def exactly(run: Callable[[], _Result], model: nn.Module) -> _Result:
    """What `run` returns, with every value that is float64 kept so: a float64 copy of a model whose
    forward says `q.bfloat16()` or `x.float()` would compute the rest in that dtype.

    A cast to a dtype coarser than the weights of `model` rounds the values as it does there: they
    are the operands of what follows. Any other cast changes nothing. Where the code does not run
    so, its casts are made as they are.
    """
    used = [p.dtype for p in model.parameters() if p.is_floating_point()]
    eps = max((torch.finfo(dtype).eps for dtype in used), default=torch.finfo(torch.float32).eps)
    try:
        with _Float64(eps):
            return run()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        return run()


class _Float64(TorchDispatchMode):
    """Gives float64 where a dtype is asked for that is narrower than a float64 operand's.

    `eps`: of the model's dtype; casts to a coarser one round.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("dtype")
        wider = _WIDER.get(asked)
        leaves = pytree.tree_leaves(args) if wider is not None else ()
        if not any(isinstance(each, Tensor) and each.dtype == wider for each in leaves):
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "dtype": wider})
        if func is torch.ops.aten._to_copy.default and torch.finfo(asked).eps > self.eps:
            return result.to(asked).to(wider)
        return result
