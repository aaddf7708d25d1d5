"""What each fusion around linear layers gives alone, for whole models.

    python -m elsa_core.bench.fusions [MODEL ...] --batch 8 --device cuda -o fusions.json

Each model runs as its original, with elsa's attention alone, and as a whole with one fusion after
the other: the products alone, then the activation, the residual with LayerScale, both, frozen
weights, and the forms that no table names yet (`elsa_core.routing.unmeasured`): the layer norm
within the split of the input, patch embeddings of padded depth. One table a model on stdout, in the
order of the columns of `Row`; all figures as JSON with -o. On a GPU times are of CUDA graphs, all
variants in turns; on a CPU, which keeps PyTorch's products, they are of eager calls.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elsa_core import calls, reference, routing
from elsa_core.errors import ArgumentError, UnavailableError
from elsa_core.files import write_json
from elsa_core.measuring import environment, timing
from elsa_core.measuring.intervals import digits, percentile
from elsa_core.measuring.timing import Contender
from elsa_core.patching import ACTIVATION, RESIDUAL, freeze, left_out, patch, shared_copy

MODELS = (
    ("vit_base_patch16_224", 8), ("vit_base_patch16_224", 1),
    ("swin_tiny_patch4_window7_224", 8), ("vit_tiny_patch16_224", 8),
)  # fmt: skip
ORIGINAL, PRODUCTS = "original", "products alone"
_FOLDS = (ACTIVATION, RESIDUAL)


class Variant(NamedTuple):
    """A way to run a model.

    Attributes:
        name: how the table calls it.
        scope: of `patch`; empty for the original.
        without: folds that are left out.
        forms: forms of linear layers that were not measured before.
        frozen: whether the halves of weights are kept.
    """

    name: str
    scope: str = "model"
    without: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    frozen: bool = False


VARIANTS = (
    Variant(ORIGINAL, ""),
    Variant("attention", "attention"),
    Variant(PRODUCTS, without=_FOLDS),
    Variant("activation", without=(RESIDUAL,)),
    Variant("residual", without=(ACTIVATION,)),
    Variant("both"),
    Variant("both, frozen", frozen=True),
    Variant("both, norm", forms=(routing.NORM,)),
    Variant("both, padded", forms=(routing.PADDED,)),
    Variant("all", forms=(routing.NORM, routing.PADDED), frozen=True),
)


@dataclass(frozen=True)
class Row:
    """One variant of one model.

    Attributes:
        variant: its name.
        milliseconds: median of a forward.
        gain: the original's time over it.
        alone: the time of the products alone over it.
        error: relative L2 distance of its output from float64; `original_error` is the original's.
    """

    variant: str
    milliseconds: float
    gain: float
    alone: float
    error: float
    original_error: float


def measure(
    model: nn.Module, x: Tensor, *, rounds: int = 15, budget_seconds: float = 60.0
) -> tuple[Row, ...]:
    """Time every variant of a model that is not patched.

    Args:
        model: in eval mode, on the device and in the dtype that are measured; not changed.
        x: what it is called with.
        rounds: samples of each variant, fewer where all would take longer than budget_seconds.

    Raises:
        ArgumentError: the model is in training mode.
    """
    if model.training:
        raise ArgumentError("fusions: the model is in training mode: call model.eval() first")
    contenders = [Contender(v.name, _runner(model, x, v)) for v in VARIANTS]
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(x.double())
        outputs = {c.name: c.call() for c in contenders}
    errors = {}
    for name, out in outputs.items():
        assert isinstance(out, Tensor)
        errors[name] = reference.relative_l2(out, exact)
    if x.is_cuda:
        samples, _ = timing.time_cuda(contenders, rounds=rounds, budget_seconds=budget_seconds)
    else:
        with torch.inference_mode():
            samples = timing.time_cpu(contenders, rounds=rounds, budget_seconds=budget_seconds)
    seconds = {name: percentile(taken, 0.5) for name, taken in samples.items()}
    return tuple(
        Row(
            v.name, digits(seconds[v.name] * 1e3), digits(seconds[ORIGINAL] / seconds[v.name]),
            digits(seconds[PRODUCTS] / seconds[v.name]), errors[v.name], errors[ORIGINAL],
        )
        for v in VARIANTS
    )  # fmt: skip


def _runner(model: nn.Module, x: Tensor, variant: Variant) -> Callable[[], object]:
    """A call of a copy of the model, with the same weights, patched as the variant says."""
    own = shared_copy(model)
    if variant.scope:
        patch(own, scope=variant.scope)
    if variant.frozen:
        freeze(own)

    def call() -> object:
        if x.is_cuda and not torch.cuda.is_current_stream_capturing():
            calls.forget_kinds()  # the warm-up of a graph loads this variant's kernels
        with ExitStack() as stack:
            stack.enter_context(left_out(*variant.without))
            stack.enter_context(routing.unmeasured(*variant.forms))
            return own(x)

    return call


def table(name: str, batch: int, rows: Sequence[Row]) -> str:
    """The rows of one model as Markdown."""
    lines = [
        f"{name}, batch {batch}", "",
        "| variant | ms | original / it | products alone / it | error, it / original |",
        "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines += [
        f"| {r.variant} | {r.milliseconds:.4g} | {r.gain:.2f} | {r.alone:.2f} "
        f"| {r.error:.1e} / {r.original_error:.1e} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure the models named, or those of `MODELS`.

    Raises:
        ArgumentError: the output exists.
        UnavailableError: there is no such device, or timm is not installed.
    """
    parser = argparse.ArgumentParser(prog="python -m elsa_core.bench.fusions")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of timm")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    if given.output is not None and given.output.exists():
        raise ArgumentError(f"{given.output} exists")
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError("fusions: torch sees no CUDA GPU")
    try:
        import timm
    except ImportError as error:
        raise UnavailableError("fusions: timm is needed: pip install timm") from error
    found: list[dict[str, Any]] = []
    for name, batch in [(m, given.batch) for m in given.models] or MODELS:
        sys.stderr.write(f"{name}, batch {batch}\n")
        torch.manual_seed(0)
        model = timm.create_model(name, img_size=given.size).eval().to(device)
        x = torch.randn(batch, 3, given.size, given.size, device=device)
        rows = measure(model, x, rounds=given.rounds, budget_seconds=given.budget)
        sys.stdout.write(table(name, batch, rows) + "\n")
        row = {"model": name, "batch": batch, "size": given.size}
        found.append(row | {"variants": [asdict(each) for each in rows]})
    if given.output is not None:
        described = environment.describe(device)
        write_json(given.output, json.loads(json.dumps({"environment": described, "rows": found})))


if __name__ == "__main__":
    main(sys.argv[1:])
