"""The gradients, fakes and second derivatives of an operator, as its schema tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_core.base import calls
from elsa_core.ops.factory import Backward, Grads, Operator, register


class Formulas:
    """The gradients of an operator by `elsa::<name>_backward`, all of which its schema tells.

    That operator takes the gradients of the results, the tensors that the call begins with, the
    results that are saved, the other arguments, and `needs`: which of `terms` want a gradient. The
    others are not computed and come back as an empty tensor [0]. Tensors among the other arguments
    have no gradient.

    Args:
        schema, terms: as `Operator` has them.
        reference: the gradients in plain PyTorch.
        saved: the results that are saved; of "lse" there is a gradient, of others behind the first
            there is none.
        like: how many of the terms have gradients laid out as `torch.empty_like`; the others' are
            contiguous.
        again: the gradients in operations that autograd records, for second derivatives; without it
            they are refused.
    """

    def __init__(
        self, name: str, schema: str, terms: tuple[str, ...], reference: Callable[..., Any], *,
        saved: tuple[str, ...], like: int, again: Callable[..., Sequence[Tensor]] | None = None,
    ):  # fmt: skip
        given = schema[1 : schema.index(") ->")].split(", ")
        names = [one.split()[-1] for one in given]
        self.name, self.terms, self.again, self.like = name, terms, again, like
        self.leading = next(i for i, one in enumerate(given) if not one.startswith("Tensor"))
        rest = given[self.leading :]
        self.others = [i for i, one in enumerate(rest) if one.startswith("Tensor")]
        self.places, self.count = [names.index(term) for term in terms], len(given)
        self.saved, self.with_lse = len(saved), "lse" in saved
        slopes = ("grad_out", "grad_lse") if self.with_lse else ("grad_out",)
        self.slopes = len(slopes)
        self.operands = self.slopes + self.leading + self.saved
        arguments = (
            *(f"Tensor {one}" for one in slopes), *given[: self.leading],
            *(f"Tensor {one}" for one in saved), *rest, "bool[] needs",
        )  # fmt: skip
        results, split = ", ".join("Tensor" for _ in terms), self.operands
        self.backward = Backward(
            f"({', '.join(arguments)}) -> ({results})", self.fake, reference, self.twice,
            None if again is None
            else lambda ctx, inputs, output: keep(
                ctx, inputs[:split], inputs[split:], self.others
            ),
            tuple(one.split()[-1] for one in arguments),
        )  # fmt: skip

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        if self.with_lse:
            ctx.set_materialize_grads(False)  # None then means no gradient of lse, not zeros
        elif len(results) > 1:
            ctx.mark_non_differentiable(*results[1:])
        saved = (*inputs[: self.leading], *results[: self.saved])
        keep(ctx, saved, inputs[self.leading :], self.others)

    def _kept(self, ctx: Any, count: int) -> tuple[Sequence[Any], Sequence[Any]]:
        tensors = ctx.saved_tensors  # once: a checkpoint that is not reentrant gives them one time
        if not self.others:
            return tensors, ctx.terms
        terms = list(ctx.terms)
        for i, tensor in zip(self.others, tensors[count:], strict=True):
            terms[i] = tensor
        return tensors[:count], terms

    def formula(self, operator: Any, ctx: Any, *grads: Tensor | None, first: int = 0) -> Grads:
        """The gradients of a call, whose arguments are those of the context from `first` on."""
        wanted = ctx.needs_input_grad[first:]
        saved, terms = self._kept(ctx, self.leading + self.saved)
        slopes: Sequence[Tensor | None] = grads[:1]
        if self.with_lse:
            slopes = slopes_of(grads[0], grads[1], *saved[self.leading :])
        needs = [wanted[i] for i in self.places]
        found: list[Tensor | None] = [None] * self.count
        results = operator(*slopes, *saved, *terms, needs)
        for i, grad, needed in zip(self.places, results, needs, strict=True):
            found[i] = grad if needed else None
        return tuple(found)

    def fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        """What the operator of the gradients returns, on fake tensors."""
        first = arguments[self.slopes]
        grads = []
        for number, (place, needed) in enumerate(zip(self.places, arguments[-1], strict=True)):
            term = arguments[self.slopes + place]
            layout = torch.preserve_format if number < self.like else torch.contiguous_format
            absent = term is None or not needed
            grads.append(
                first.new_empty(0) if absent else torch.empty_like(term, memory_format=layout)
            )
        return tuple(grads)

    def twice(self, ctx: Any, *grads: Tensor) -> Grads:
        """Second derivatives: the backward once more, recorded, with all its weights alive."""
        again = self.again
        if again is None:
            raise RuntimeError(
                f"elsa.{self.name} is differentiable once by torch.autograd; second derivatives "
                "come from torch.func (torch.func.hessian, or torch.func.grad of torch.func.grad)"
            )
        given, terms = self._kept(ctx, self.operands)
        return second(again, given, terms, ctx.needs_input_grad, grads)

    def recorded(self) -> Any:
        """A function of autograd for eager calls: by its first argument, its gradients by the
        second, which take what the two operators take. See `dispatch.gradients.recorded`."""
        formulas = self

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, kernel: Any, backward: Any, *inputs: Any) -> Any:
                out = kernel(*inputs)
                formulas.setup(ctx, inputs, out)
                ctx.compute = backward
                return out

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> Grads:
                compute = ctx.compute
                if calls.by_operator(*grads):
                    # of a second derivative, which the operator has a formula for
                    compute = getattr(torch.ops.elsa, f"{formulas.name}_backward").default
                return None, None, *formulas.formula(compute, ctx, *grads, first=2)

        return Eager


def differentiable(
    name: str, schema: str, terms: tuple[str, ...], reference: Callable[..., Any],
    fake: Callable[..., Any], gradients: Callable[..., Any], *, saved: tuple[str, ...], like: int,
    again: Callable[..., Sequence[Tensor]] | None = None, **more: Any,
) -> tuple[Operator, Formulas]:  # fmt: skip
    """Register an operator whose gradients are those of `Formulas`, which takes `gradients` as its
    reference; more: other fields of the record."""
    formulas = Formulas(name, schema, terms, gradients, saved=saved, like=like, again=again)
    record = Operator(
        name, schema, reference, fake=fake, setup_context=formulas.setup, formula=formulas.formula,
        backward=formulas.backward, terms=terms, twin=True, **more,
    )  # fmt: skip
    return register(record), formulas


def keep(ctx: Any, tensors: Sequence[Any], rest: Sequence[Any], others: Sequence[int] = ()) -> None:
    """Save what a formula reads: the tensors, and the rest as terms but for `others` of it, which
    are tensors too."""
    ctx.save_for_backward(*tensors, *(rest[i] for i in others))
    ctx.terms = rest
    if others:
        ctx.terms = [None if i in others else term for i, term in enumerate(rest)]


def second(
    again: Callable[..., Sequence[Tensor]], given: Sequence[Tensor | None], terms: Sequence[Any],
    needs: Sequence[bool], grads: Sequence[Tensor],
) -> Grads:  # fmt: skip
    """The gradients of what `again` computes of tensors and terms, which is recorded: second
    derivatives, or those of a call that saved its operands alone. None where `needs` wants none.
    """
    wanted = [i for i, needed in enumerate(needs[: len(given)]) if needed]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, so that what is differentiated ends here and yet hangs on the caller's graph.
        operands = [
            t if t is None or i not in wanted
            else t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
            for i, t in enumerate(given)
        ]  # fmt: skip
        results = again(*operands, *terms)
    ends = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    found: list[Tensor | None] = [None] * len(needs)
    slopes = torch.autograd.grad(
        [r for r, _ in ends], [t for i in wanted if (t := operands[i]) is not None],
        [g for _, g in ends], create_graph=create_graph, allow_unused=True,
    )  # fmt: skip
    for i, grad in zip(wanted, slopes, strict=True):
        found[i] = grad
    return tuple(found)


def slopes_of(
    grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of out and lse as the operators of gradients take them."""
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is None:
        packed = lse.dim() == 2  # [H, T]
        grad_lse = lse.new_zeros(0) if packed or lse.is_cuda else torch.zeros_like(lse)
    return grad_out, grad_lse
