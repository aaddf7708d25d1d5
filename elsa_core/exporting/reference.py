"""The reference of a bundle: inputs, what float64 makes of them, and the original's own error.

An artefact reproduces the model where, at each batch size, its error against float64 is no larger
than twice the original's own error plus two ulp: the criterion of `check`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from elsa_core.base.inputs import ModelInput
from elsa_core.base.messages import first_line, quiet
from elsa_core.errors import ExportError, ModelError
from elsa_core.measuring.documents import finite
from elsa_core.patching import original
from elsa_core.proof import TURBO_EPS, Comparison, Norms, exactly, map_floating, nudged

BATCH_SIZES = (1, 2, 3)  # that artefacts are verified at, where `export` is given no others
FACTOR = 2.0
# Further runs of the original on inputs nudged by less than an ulp: its error is a spread, and a
# single run of a model with few outputs says little about it.
EXTRA_RUNS = 2
LARGEST_NORM = 1e100
# For each batch size and output, an error as (Euclidean, maximum).
_AllNorms = dict[int, tuple[tuple[float, float], ...]]


@dataclass(frozen=True)
class Reference:
    """What every artefact is judged by."""

    inputs: tuple[Tensor, ...]  # as many rows each as the largest batch has, or more
    oracle: tuple[Tensor, ...]  # the float64 outputs of the original model, flat
    norms: _AllNorms  # the original's errors
    eps: float  # of the model's dtype (of TF32's significand for turbo)

    def to_dict(self) -> dict[str, Any]:
        """The manifest's entry."""
        return {
            "file": "reference.npz",
            "batch_sizes": list(self.norms),
            "factor": FACTOR,
            "eps": self.eps,
            "original_norms": {str(b): [list(n) for n in norms] for b, norms in self.norms.items()},
        }


@dataclass(frozen=True)
class Judgement:
    """One output at one batch size: errors relative to the oracle, and why it fails, if it does."""

    batch: int
    error: float
    allowed: float
    reason: str


def flat(output: Any) -> list[Tensor]:
    """The tensors of a model's output, in order; raises ExportError over a leaf that is none."""
    leaves = pytree.tree_leaves(output)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise ExportError(f"the model returns {kinds}; an export needs tensors alone")
    return list(leaves)


def make_reference(
    model: nn.Module, inputs: tuple[Tensor, ...], batches: Sequence[int] = BATCH_SIZES
) -> Reference:
    """Run the original model in float64 and in its own dtype, on max(batches) rows or more."""
    first = next(p for p in model.parameters() if p.is_floating_point())
    turbo = any(vars(m).get("elsa_precision") == "turbo" for m in model.modules())
    eps = TURBO_EPS if turbo and first.dtype == torch.float32 else torch.finfo(first.dtype).eps
    try:
        with torch.no_grad(), quiet(), original(model):
            double = copy.deepcopy(model).double()
            wide = map_floating(inputs, torch.float64)
            oracle = tuple(t.double() for t in flat(exactly(partial(double, *wide), model)))
            del double
            further = (nudged(inputs, index) for index in range(EXTRA_RUNS))
            runs = [flat(model(*given)) for given in (inputs, *further)]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ExportError(
            f"the original model fails on a batch of {len(inputs[0])}: {first_line(error)}"
        ) from error
    rows = len(inputs[0])
    if any(t.ndim == 0 or t.shape[0] != rows for t in oracle):
        raise ExportError("the model's outputs do not all have the batch as their first dimension")
    norms: _AllNorms = {}
    for batch in batches:
        for index, exact in enumerate(oracle):
            parts, finite = [Norms() for _ in runs], exact[:batch].isfinite()
            for part, run in zip(parts, runs, strict=True):
                # an infinity that the oracle has is no error
                part.add((run[index][:batch].double() - exact[:batch])[finite])
            worst = max(each.l2 for each in parts), max(each.maximum for each in parts)
            norms[batch] = (*norms.get(batch, ()), worst)
    return Reference(inputs, tuple(t.cpu() for t in oracle), norms, eps)


def write_arrays(path: Path, **groups: Sequence[Tensor]) -> None:
    """Write tensors as "input.0" and so on; bfloat16 as the float32 that holds it exactly."""
    arrays: dict[str, Any] = {}
    for name, tensors in groups.items():
        for index, tensor in enumerate(tensors):
            plain = tensor.detach().cpu()
            plain = plain.float() if plain.dtype == torch.bfloat16 else plain
            arrays[f"{name}.{index}"] = plain.numpy()
    with path.open("wb") as file:
        np.savez(file, **arrays)


def read_reference(path: Path, content: Mapping[str, Any]) -> Reference:
    """Read the reference.npz of a bundle that may be hostile; `content` is the manifest."""
    given = content["reference"]
    try:
        with np.load(path, allow_pickle=False) as stored:
            inputs, oracle = (
                tuple(torch.from_numpy(stored[f"{name}.{i}"]) for i in range(len(content[kind])))
                for name, kind in (("input", "inputs"), ("oracle", "outputs"))
            )
        norms = _norms_in(given["original_norms"], given["batch_sizes"], len(oracle))
        eps = float(given["eps"])
    # numpy and zipfile raise almost anything on a damaged file.
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(f"{path} does not hold the reference of the manifest: {why}") from None
    if norms is None or not 0 <= eps <= 0.01:
        raise ModelError(f"{path}: the original's errors in the manifest are no numbers")
    if any(t.ndim == 0 or t.shape[0] < max(norms) for t in (*inputs, *oracle)):
        raise ModelError(f"{path} has fewer rows than the largest batch size")
    return Reference(inputs, oracle, norms, eps)


def _norms_in(given: Any, batches: Iterable[int], outputs: int) -> _AllNorms | None:
    """What a manifest says, {"1": [[Euclidean, maximum], ...], ...}; None: no finite numbers."""
    found = {
        batch: tuple(
            (float(l2), float(most))
            for (l2, most), _ in zip(given[str(batch)], range(outputs), strict=True)
        )
        for batch in batches
    }
    # They are squared; what float32 holds stays far below the bound.
    good = all(0 <= x < LARGEST_NORM for of in found.values() for pair in of for x in pair)
    return found if good else None


def with_norms(reference: Reference, given: Any) -> Reference:
    """The reference with other errors to judge by, as `norms_of` gives them."""
    norms = None
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        norms = _norms_in(given, reference.norms, len(reference.oracle))
    if norms is None:
        raise ModelError("the manifest does not say the errors of model.int8.onnx")
    return dataclasses.replace(reference, norms=norms)


def norms_of(
    reference: Reference, run: Mapping[int, Sequence[np.ndarray[Any, Any]]]
) -> dict[str, list[list[float]]]:
    """The errors of a run, as `with_norms` takes them; of finite values alone."""
    found: dict[str, list[list[float]]] = {}
    for batch in reference.norms:
        for given, exact in zip(run[batch], reference.oracle, strict=True):
            values = torch.from_numpy(np.asarray(given, dtype=np.float64))
            norms = Norms()
            norms.add((values - exact[:batch])[values.isfinite()])
            found.setdefault(str(batch), []).append([norms.l2, norms.maximum])
    return found


def judge(
    reference: Reference, outputs: Mapping[int, Sequence[np.ndarray[Any, Any]]]
) -> list[Judgement]:
    """Judge an artefact's outputs at each batch size."""
    results = []
    for batch, norms in reference.norms.items():
        got = outputs.get(batch, ())
        if len(got) != len(reference.oracle):
            reason = f"{len(got)} outputs instead of {len(reference.oracle)}"
            results.append(Judgement(batch, math.inf, 0.0, reason))
            continue
        for index, whole in enumerate(reference.oracle):
            exact, (l2, maximum), given = whole[:batch], norms[index], got[index]
            if tuple(given.shape) != tuple(exact.shape):
                shape = f"{list(given.shape)}, expected {list(exact.shape)}"
                reason = f"output {index} has shape {shape}"
                results.append(Judgement(batch, math.inf, 0.0, reason))
                continue
            values = torch.from_numpy(np.asarray(given, dtype=np.float64))
            finite = exact.isfinite()
            usable = finite & values.isfinite()
            agrees = torch.where(finite, values.isfinite(), values == exact)
            found = Comparison(FACTOR, reference.eps, values=exact.numel())
            found.patched_bad = int((~agrees).sum())
            found.oracle.add(exact[usable].double())
            found.original = Norms(l2**2, maximum)
            found.patched.add((values - exact)[usable])
            results.append(Judgement(batch, found.patched_error, found.allowed, found.reason()))
    return results


# Errors of a first output against float64: "mean_error" and "max_error" of the absolute values, inf
# where one is not finite, and "class_changed", the inputs whose largest output is another one.
Cost = dict[str, Any]


@dataclass(frozen=True)
class Exact:
    """Inputs, and what the float32 model makes of them in float64."""

    inputs: tuple[Tensor, ...]  # the model's arguments, float32 or token ids, [rows, ...] each
    output: Tensor  # float64 [rows, ...], the first output
    own: Tensor  # what float32 makes of them
    spread: float  # the standard deviation of the output's finite values
    source: str  # the names of the inputs with their counts

    def cost(self, output: np.ndarray[Any, Any] | Tensor) -> Cost:
        """What a model costs whose first output this is. Raises ExportError: of another shape."""
        if tuple(output.shape) != tuple(self.output.shape):
            raise ExportError(
                f"accuracy: outputs of shape {list(output.shape)}, not {list(self.output.shape)}"
            )
        values, exact = torch.as_tensor(output, dtype=torch.float64), self.output
        # an infinity that both have is no error
        errors = (values - exact).abs().where(values != exact, 0.0)
        known = bool(errors.isfinite().all())
        mean, most = (float(errors.mean()), float(errors.max())) if known else (math.inf, math.inf)
        changed = int((values.flatten(1).argmax(1) != exact.flatten(1).argmax(1)).sum())
        return {"mean_error": mean, "max_error": most, "class_changed": changed}

    def to_dict(self, costs: Mapping[str, Cost], classes: bool) -> dict[str, Any]:
        """The manifest's entry; `classes`: the outputs are logits, and a largest one is a class."""
        return {
            "against": "float64 of the float32 weights",
            "inputs": self.source,
            "rows": len(self.output),
            "output_std": self.spread,
            "costs": {
                name: finite(cost) | ({} if classes else {"class_changed": None})
                for name, cost in {"float32": self.cost(self.own), **costs}.items()
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
    found = []  # the first output of each, float64 on the CPU
    try:
        with torch.no_grad(), quiet(), original(model):
            for dtype in (torch.float32, torch.float64):
                one = model if dtype == torch.float32 else copy.deepcopy(model).double()
                columns = (t.split(max(BATCH_SIZES)) for t in map_floating(inputs, dtype))
                firsts = [flat(one(*batch))[0] for batch in zip(*columns, strict=True)]
                found.append(torch.cat(firsts).double().cpu())
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ExportError(f"the model fails in float64: {first_line(error)}") from error
    own, output = found
    spread = float(output[output.isfinite()].std(correction=0))
    return Exact(inputs, output, own, spread, source)


def cost_rows(accuracy: Mapping[str, Any]) -> list[list[str]]:
    """A table of the manifest's entry: model, mean error, largest error, classes that changed."""
    count, table = accuracy["rows"], []
    for name, cost in accuracy["costs"].items():
        errors = (cost[key] for key in ("mean_error", "max_error"))
        texts = ("not finite" if value is None else f"{value:.1e}" for value in errors)
        changed = cost["class_changed"]
        share = "" if changed is None else f"{changed} of {count} ({changed / count:.0%})"
        table.append([name, *texts, share])
    return table
