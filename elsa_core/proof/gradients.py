"""Gradients of one computation: of its floating inputs and of every parameter that wants one.

The loss is the sum of the outputs times random numbers, the same for original, patched and float64:
whatever reaches an output reaches the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core.proof.compare import floating_outputs
from elsa_core.proof.judge import MODEL_SAMPLES, Judgement, settle
from elsa_core.proof.report import GradientCheck, GradientRecord
from elsa_core.proof.samples import jittered
from elsa_core.proof.sides import Given, PatchedError, Sides, finding

Gradients = dict[str, Tensor]

MODEL = "model"
"""Where a site has its path, the whole model's gradients have this."""


def judge(
    judgement: Judgement, sides: Sides, given: Given, dtype: torch.dtype, samples: int
) -> None:
    """Judges the gradients of one case, by the name of the input or parameter: for its input, and
    for `samples` nearby ones and other losses where that one condemns the patched code. `dtype` is
    the model's, in which the loss's random numbers are representable."""
    try:
        _add(judgement, sides, given, dtype, 0)
        settle([judgement], samples,
               lambda seed: _add(judgement, sides, jittered(given, seed), dtype, seed))  # fmt: skip
    except PatchedError as error:
        judgement.error = str(error)


def of_model(
    case: str, judgement: Judgement, sides: Sides, given: Given, dtype: torch.dtype,
    name: str = MODEL,
) -> GradientCheck:  # fmt: skip
    """The verdict on the gradients of a whole model, as `judge` finds them for one case."""
    judge(judgement, sides, given, dtype, MODEL_SAMPLES)
    record = GradientRecord()
    record.add(case, judgement)
    return record.result(name)


def _add(judgement: Judgement, sides: Sides, given: Given, dtype: torch.dtype, seed: int) -> None:
    ends = (dtype, seed)
    one = _gradients(sides.original, sides.weights, given, None, *ends)
    two = finding(lambda: _gradients(sides.patched, sides.weights, given, None, *ends))
    exact = _gradients(sides.exact, sides.oracle, given, torch.float64, *ends)
    wanted = {name: grad for name, grad in one.items() if name in exact}
    # A gradient that does not come is a gradient of zeros: the judgement says how wrong that is.
    found = {name: two.get(name, torch.zeros_like(grad)) for name, grad in wanted.items()}
    judgement.add_tensors(exact, wanted, found)


def _gradients(
    run: Callable[[Given], Any], module: nn.Module, given: Given, wide: torch.dtype | None,
    dtype: torch.dtype, seed: int,
) -> Gradients:  # fmt: skip
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
