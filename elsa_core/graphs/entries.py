"""A captured call: one CUDA graph in inference, two where gradients are wanted, of its forward and
its backward.

In training autograd sees one function of the arguments and the parameters. The backward's graph
writes the gradients into the graphs' pool, where `AccumulateGrad` makes them a parameter's `grad`
if there is none yet. Other graphs of the pool use that memory too, this one's forward among them.
So before any of them is replayed, a `grad` that still lies there moves out (it is accumulated to),
and where somebody else holds such a gradient the call is the model's own.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from elsa_core.base.messages import first_line
from elsa_core.graphs import capture
from elsa_core.graphs.checks import (
    OTHER_LEAF,
    Given,
    Guards,
    RefusedError,
    as_it_was,
    check_state,
    flat_results,
    is_plain,
    storage_of,
    watched,
)

WARM_UPS: Final = 2  # besides the one that is watched and the one of the capture
_NOT_ALONE: Final = "its backward cannot be run by itself"
_VERSION = attrgetter("_version")
_HOOKED = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def _refusing(reason: str) -> Iterator[None]:
    """Say why no graph holds a call whose runs raise within."""
    try:
        yield
    except RefusedError:
        raise
    except RuntimeError as error:
        raise RefusedError(f"{reason}: {first_line(error)}") from error


class Inference:
    """A captured call: its arguments' memory, its replay, its results, the model as it was."""

    backward = False

    def __init__(self, model: nn.Module, given: Given, device: torch.device, pool: Any) -> None:
        self.given, self.replays = given.copied(), 0
        self._device, self._targets = device, self.given.tensors
        args, kwargs = given.arguments(self.given.leaves)
        run = partial(model, *args, **kwargs)
        result: deque[Any] = deque(maxlen=1)  # of the capture
        with as_it_was(model, device):
            for _ in range(WARM_UPS):
                run()
            self.guards = Guards(model)  # before other runs: they show what a forward changes
            reads = watched(run, device)
            check_state(self.guards, self._targets)
            with _refusing("a graph cannot hold it"):
                (self.replay,) = capture.BACKEND.captured(
                    [lambda: result.append(run())], pool, device
                )
        # also what only the capture changes: its memory is the graph's
        check_state(self.guards, self._targets, reads)
        self._results, self._tree = flat_results(result[0], device)
        if any(isinstance(each, Tensor) and each.requires_grad for each in self._results):
            raise RefusedError(OTHER_LEAF)

    def run(self, given: Given, copy_outputs: bool) -> Any:
        """The results for other arguments of the same kind."""
        self.replays += 1
        capture.BACKEND.order(self._device)
        for target, leaf in zip(self._targets, given.tensors, strict=True):
            target.copy_(leaf)
        self.replay()
        found = self._results
        if copy_outputs:
            found = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in found]
        return pytree.tree_unflatten(list(found), self._tree)


@dataclass(eq=False)
class Ticket:
    """One forward that a backward may follow. `done`: other graphs may use its memory again."""

    versions: list[int]
    begun: bool = False
    done: bool = False


class GradientMemory:
    """The memory that a backward's graph writes the gradients of parameters to; `stream`: of the
    last backward."""

    def __init__(self, rows: list[tuple[nn.Parameter, Tensor]]) -> None:
        self._params = [param for param, _ in rows]
        self.grads = [grad for _, grad in rows]  # keeps the memory
        self._addresses = [grad.data_ptr() for grad in self.grads]
        self._storages = [storage_of(grad) for grad in self.grads]
        self._counts = [*map(torch._C._storage_Use_Count, self._storages)]
        self.stream: Any = None

    def free(self) -> bool:
        """Give each `grad` that lies there memory of its own; False, and nothing moves, where
        somebody else holds some of it: a view of a `grad` has to stay one."""
        counts = [*map(torch._C._storage_Use_Count, self._storages)]
        if counts == self._counts:
            return True
        rows = zip(self._params, self._addresses, strict=True)
        inside = [p.grad is not None and p.grad.data_ptr() == at for p, at in rows]
        if counts != [*map(operator.add, self._counts, inside)]:
            return False
        held = [param.grad for param in compress(self._params, inside) if param.grad is not None]
        with capture.BACKEND.on(self.stream):
            fresh = [torch.empty_like(each) for each in held]
            torch._foreach_copy_(fresh, held)
        for old, new in zip(held, fresh, strict=True):
            old.data = new
        return True


class Training:
    """A captured call and its backward, with the memory of the gradients of parameters and the
    ticket of the last forward. In the runs that are captured, parameters, and arguments that want
    gradients, are fresh aliases: autograd keeps a node for every leaf, which remembers the stream
    that it was made on, and an earlier loss may still hold that of the real one."""

    backward = True

    def __init__(self, model: nn.Module, given: Given, device: torch.device, pool: Any) -> None:
        self.given, self.replays = given.copied(), 0
        self.ticket: weakref.ref[Ticket] | None = None
        self._model, self.device = model, device
        self.targets = self.given.tensors
        self.params = [each for each in model.parameters() if each.requires_grad]
        self.leaves = list(dict.fromkeys(each for each in self.targets if each.requires_grad))
        self.outputs: list[Any] = []
        self.slopes: list[Tensor] = []  # gradients of the outputs, as they are given
        self.grads: list[Tensor | None] = []  # of the leaves, then of the parameters
        # Of the last run of the forward: its results, those that have gradients, its leaves.
        self._result: Any = None
        self._learning: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self.reaches: list[set[int]] = []  # of each such output, the parameters it is made of
        with as_it_was(model, device):
            self._capture(pool)
        pairs = zip(self.params, self.grads[len(self.leaves) :], strict=True)
        self.memory = GradientMemory([(p, g) for p, g in pairs if g is not None and g.numel()])

    def _capture(self, pool: Any) -> None:
        device = self.device
        for _ in range(WARM_UPS):
            self._run_forward()
            self.slopes = [torch.zeros_like(each.detach()) for each in self._learning]
            if not self.slopes:
                raise RefusedError("none of its results has a gradient")
            with _refusing(_NOT_ALONE):
                self._run_backward()
        self.guards = Guards(self._model, backward=True)
        saved: set[int] = set()
        own = {storage_of(each) for each in self.params}

        def pack(tensor: Tensor) -> Tensor:
            saved.update({storage_of(tensor)} & own)
            return tensor

        def both() -> None:
            self._run_forward()
            known = {id(each): i for i, each in enumerate(self._inputs, -len(self.leaves))}
            of_results = [[*map(id, _leaves_of(each))] for each in self._learning]
            if any(leaf not in known for leaves in of_results for leaf in leaves):
                raise RefusedError(OTHER_LEAF)
            self.reaches = [{known[leaf] for leaf in leaves} for leaves in of_results]
            with _refusing(_NOT_ALONE):
                self._run_backward()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            reads = watched(both, device, self._model.buffers(), draws=True)
        check_state(self.guards, self.targets)
        self._result, self._learning, self._inputs, self.grads = None, [], [], []
        with _refusing("a graph cannot hold it"):
            self.replay, self.replay_backward = capture.BACKEND.captured(
                [self._run_forward, self._run_backward], pool, device
            )
        check_state(self.guards, self.targets, reads, self.slopes)
        self.saved = [each for each in self.params if storage_of(each) in saved]
        leaves, self._tree = flat_results(self._result, device)
        self.learns = [each.requires_grad for each in leaves if isinstance(each, Tensor)]
        self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._result, self._learning, self._inputs = None, [], []

    def _run_forward(self) -> None:
        self._result, self._learning, self._inputs, self.grads = None, [], [], []
        fresh = {id(each): each.detach().requires_grad_() for each in self.leaves}
        leaves = [fresh.get(id(each), each) for each in self.given.leaves]
        args, kwargs = self.given.arguments(leaves)
        aliases = {id(each): nn.Parameter(each.detach()) for each in self.params}
        self._inputs = [*fresh.values(), *aliases.values()]
        places = [
            (module._parameters, name, own)
            for module in self._model.modules()
            for name, own in module._parameters.items()
            if own is not None and id(own) in aliases
        ]
        try:
            for held, name, own in places:
                held[name] = aliases[id(own)]
            with torch.enable_grad():
                self._result = self._model(*args, **kwargs)
        finally:
            for held, name, own in places:
                held[name] = own
        results = [x for x in pytree.tree_leaves(self._result) if isinstance(x, Tensor)]
        self._learning = [each for each in results if each.requires_grad]

    def _run_backward(self) -> None:
        inputs = self._inputs
        with torch.autocast(self.device.type, enabled=False):
            found = torch.autograd.grad(self._learning, inputs, self.slopes, allow_unused=True)
        taken = {storage_of(each) for each in (*inputs, *self.slopes)}
        grads: list[Tensor | None] = []
        for grad, leaf in zip(found, inputs, strict=True):
            own = grad
            if grad is not None:
                if not is_plain(grad):
                    raise RefusedError(f"a gradient is a {type(grad).__qualname__} of its own kind")
                if storage_of(grad) in taken or grad.stride() != leaf.stride():
                    own = torch.empty_like(leaf).copy_(grad)
                taken.add(storage_of(own))  # type: ignore[arg-type]
            grads.append(own)
        self.grads = grads

    def run(self, given: Given, copy_outputs: bool) -> Any:
        """The results for other arguments of the same kind."""
        self.replays += 1
        ticket = Ticket([*map(_VERSION, self.saved)])
        self.ticket = weakref.ref(ticket)
        made = _Replay.apply(self, ticket, copy_outputs, *given.tensors, *self.params)
        found = iter(made)
        leaves = [next(found) if isinstance(x, Tensor) else x for x in self.outputs]
        return pytree.tree_unflatten(leaves, self._tree)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: Training, ticket: Ticket, copy_outputs: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.ticket = step, ticket
        ctx.set_materialize_grads(False)
        capture.BACKEND.order(step.device)
        for target, leaf in zip(step.targets, tensors, strict=False):
            target.detach().copy_(leaf)
        step.replay()
        outputs = [leaf for leaf in step.outputs if isinstance(leaf, Tensor)]
        made = tuple(leaf.clone() if copy_outputs else leaf.detach() for leaf in outputs)
        rows = zip(made, step.learns, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, learns in rows if not learns))
        return made

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call]
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        """Gradients of every tensor of the arguments, then of the parameters."""
        step, ticket = ctx.step, ctx.ticket
        if ticket.begun:
            raise RuntimeError(
                "graphed: the backward of a graphed forward runs once; for retain_graph=True call "
                "the model itself (`.model`)"
            )
        ticket.begun = True
        if [*map(_VERSION, step.saved)] != ticket.versions or not step.guards.alive():
            ticket.done = True
            raise RuntimeError(
                "graphed: a parameter that the backward reads was modified in place or given other "
                "memory after the forward, by an optimizer's step say"
            )
        step.memory.stream = capture.BACKEND.order(step.device)
        learnt = [slope for slope, ok in zip(slopes, step.learns, strict=True) if ok]
        reached: set[int] = set()
        for target, slope, parameters in zip(step.slopes, learnt, step.reaches, strict=True):
            if slope is None:  # a result that the loss is not made of
                target.zero_()
            else:
                target.copy_(slope)
                reached |= parameters
        step.replay_backward()
        count = len(step.leaves)
        rows = zip(step.leaves, step.grads[:count], strict=True)
        own = {leaf: grad for leaf, grad in rows if grad is not None}
        # an argument given twice has its gradient once
        of_arguments = [g if (g := own.pop(each, None)) is None else g.clone()
                        for each in step.targets]  # fmt: skip
        # None where eager autograd has none: an optimizer leaves such a parameter alone. But hooks,
        # which it would not call, are not called with None.
        of_parameters = [
            g.detach() if g is not None and (i in reached or any(_HOOKED(param))) else None
            for i, (param, g) in enumerate(zip(step.params, step.grads[count:], strict=True))
        ]
        ticket.done = True  # not before: another thread's forward would use the memory
        return (None, None, None, *of_arguments, *of_parameters)


def _leaves_of(output: Tensor) -> Iterator[Tensor]:
    nodes: list[Any] = [] if output.grad_fn is None else [output.grad_fn]
    if not nodes:
        yield output
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                nodes.append(other)
