"""What a rounded model costs: errors of its outputs against float64 of the float32 model.

float16 weights and INT8 layers compute another function than the model they come from. A bundle
that holds them says by how much: mean and largest error, and how often the class changes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elsa_core.base.inputs import ModelInput
from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ExportError
from elsa_core.exporting.reference import BATCH_SIZES, flat
from elsa_core.measuring.documents import finite
from elsa_core.patching import original
from elsa_core.proof import map_floating

# Errors of a first output against float64: "mean_error" and "max_error" of the absolute values, inf
# where one is not finite, and "class_changed", the inputs whose largest output is another one.
Cost = dict[str, Any]


@dataclass(frozen=True)
class Exact:
    """Inputs, and what the float32 model makes of them in float64.

    Attributes:
        inputs: the model's arguments, float32 or token ids, [rows, ...] each.
        output: float64 [rows, ...], the first output.
        own: what float32 itself costs.
        source: the names of the inputs with their counts.
    """

    inputs: tuple[Tensor, ...]
    output: Tensor
    own: Cost
    source: str

    def cost(self, output: np.ndarray[Any, Any]) -> Cost:
        """What a model costs whose first output this is. Raises ExportError: of another shape."""
        if tuple(output.shape) != tuple(self.output.shape):
            raise ExportError(
                f"accuracy: outputs of shape {list(output.shape)}, not {list(self.output.shape)}"
            )
        return _cost(torch.from_numpy(np.asarray(output, dtype=np.float64)), self.output)

    def why_useless(self, output: np.ndarray[Any, Any]) -> str:
        """Why a rounded model with this first output is of no use; empty if it may be of some.

        One constant, the mean of the exact outputs, errs by no more than their deviation.
        """
        mean, deviation = self.cost(output)["mean_error"], float(self.output.std(unbiased=False))
        if mean <= deviation:
            return ""
        return f"its mean error is {mean:.1e}, the outputs' standard deviation {deviation:.1e}"

    def to_dict(self, costs: Mapping[str, Cost], classes: bool) -> dict[str, Any]:
        """The manifest's entry; `classes`: the outputs are logits, and a largest one is a class."""
        return {
            "against": "float64 of the float32 weights",
            "inputs": self.source,
            "rows": len(self.output),
            "output_std": float(self.output.std(unbiased=False)),
            "costs": {
                name: finite(cost) | ({} if classes else {"class_changed": None})
                for name, cost in {"float32": self.own, **costs}.items()
            },
        }


def exact_outputs(model: nn.Module, cases: Mapping[str, ModelInput]) -> Exact:
    """Run the original of a float32 model in float64 and in float32, on inputs by name: a tensor or
    the tuple of the model's arguments, batch first. Raises ExportError where it fails on them."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases.values()]
    device = next(model.parameters()).device
    inputs = tuple(
        torch.cat([torch.as_tensor(each) for each in column]).to(device)
        for column in zip(*tuples, strict=True)
    )
    inputs = map_floating(inputs, torch.float32)
    source = ", ".join(f"{name} {len(case[0])}" for name, case in zip(cases, tuples, strict=True))

    def run(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """The first output, float64 on the CPU, a few rows at a time."""
        batches = zip(*(each.split(max(BATCH_SIZES)) for each in inputs), strict=True)
        return torch.cat([flat(model(*batch))[0] for batch in batches]).double().cpu()

    try:
        with torch.no_grad(), quiet(), original(model):
            own = run(model, inputs)
            output = run(copy.deepcopy(model).double(), map_floating(inputs, torch.float64))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ExportError(f"the model fails in float64: {first_line(error)}") from error
    return Exact(inputs, output, _cost(own, output), source)


def _cost(output: Tensor, exact: Tensor) -> Cost:
    errors = (output - exact).abs()
    known = bool(errors.isfinite().all())
    changed = int((output.flatten(1).argmax(1) != exact.flatten(1).argmax(1)).sum())
    mean, most = (float(errors.mean()), float(errors.max())) if known else (math.inf, math.inf)
    return {"mean_error": mean, "max_error": most, "class_changed": changed}


def rows(accuracy: Mapping[str, Any]) -> list[list[str]]:
    """A table of the manifest's entry: model, mean error, largest error, classes that changed."""
    count, table = accuracy["rows"], []
    for name, cost in accuracy["costs"].items():
        errors = (cost[key] for key in ("mean_error", "max_error"))
        texts = ("not finite" if value is None else f"{value:.1e}" for value in errors)
        changed = cost["class_changed"]
        share = "" if changed is None else f"{changed} of {count} ({changed / count:.0%})"
        table.append([name, *texts, share])
    return table
