"""Gradients of one computation: of its floating inputs and of every parameter that wants one.

The loss is the sum of the outputs times random numbers, the same for original, patched and float64:
whatever reaches an output reaches the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core.proof.compare import Judgement, floating_outputs, settle
from elsa_core.proof.samples import jittered
from elsa_core.proof.sides import Given, PatchedError, Run, Sides, finding

MODEL = "model"
"""Where a site has its path, the whole model's gradients have this."""


def judge(
    judgement: Judgement, sides: Sides, given: Given, dtype: torch.dtype, samples: int
) -> Judgement:
    """Judges the gradients of one case, by the name of the input or parameter: for its input, and
    for `samples` nearby ones and other losses where that one condemns the patched code. `dtype` is
    the model's, in which the loss's random numbers are representable."""

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
        settle([judgement], samples, lambda seed: add(jittered(given, seed), seed))
    except PatchedError as error:
        judgement.error = str(error)
    return judgement


def _gradients(
    run: Run, module: nn.Module, given: Given, dtype: torch.dtype, seed: int,
    wide: torch.dtype | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """By name: "input[0]", "input['key']" and the parameters' own, where they have influence."""
    with torch.enable_grad():
        leaves, arguments = _leaves(given, wide)
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


def _leaves(given: Given, wide: torch.dtype | None) -> tuple[dict[str, Tensor], Given]:
    """The floating inputs as leaves, by name, and the arguments made of them.

    One tensor given twice stays one tensor: attention modules ask whether keys are queries.
    """
    flat, spec = pytree.tree_flatten_with_path(given)
    leaves: dict[str, Tensor] = {}
    made: dict[int, Any] = {}
    for path, value in flat:
        if id(value) in made:
            continue
        made[id(value)] = value
        if isinstance(value, Tensor) and value.is_floating_point():
            leaf = value.detach().to(wide or value.dtype, copy=True).requires_grad_()
            leaves[f"input{pytree.keystr(path[1:])}"] = leaf
            # An alias with a history: a module may write to its input, and not to a leaf.
            made[id(value)] = leaf.clone()
    arguments: Given = pytree.tree_unflatten([made[id(value)] for _, value in flat], spec)
    return leaves, arguments
